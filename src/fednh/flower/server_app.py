"""The ServerApp: `flwr run` starts it, with fednh's own settings as the app's run-config.

All of them are flat dotted keys, as `--set` takes them: `rounds`, `method.name`, `train.lr`, ...; lists are text with
commas. `federation.folder` is the run folder. Started again with the same settings, a stopped federation goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fednh.config import Config, load, parse_value
from fednh.errors import UserError
from fednh.flower.server import Manner, Server
from fednh.report.terminal import figures
from fednh.runs import RunFolder

log = logging.getLogger("flwr")
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation that the run-config describes."""
    config = read_config(context.run_config)
    federation = config.federation
    assert federation.folder is not None
    folder = RunFolder(Path(federation.folder))
    folder.check(config)
    if folder.finished:
        log.info("%s is finished already; remove it, or choose another federation.folder", folder.path)
        return
    manner = Manner(federation.timeout, federation.min_clients)
    with folder:
        Server(config, grid, folder, LogWatcher(config.rounds), manner).run()
    log.info("run folder: %s", folder.path)


def read_config(run_config: Mapping[str, Any]) -> Config:
    """The Config that flat settings describe."""
    config = load(None, {key: _value(key, value) for key, value in run_config.items()})
    if config.federation.folder is None or not Path(config.federation.folder).is_absolute():
        raise UserError("federation.folder must be the absolute path of the server's run folder")
    return config


def _value(key: str, value: Any) -> Any:
    """Lists that a flat setting holds as text: those of a model's arguments."""
    if not isinstance(value, str) or not key.startswith("model.args."):
        return value
    text = value if value.startswith("[") or "," not in value else f"[{value}]"
    return parse_value(text)


class LogWatcher:
    """Tells Flower's log, which `flwr run --stream` shows."""

    def __init__(self, rounds: int):
        self.rounds = rounds

    def round_done(self, record: dict[str, Any]) -> None:
        log.info("%s", "  ".join([f"round {record['round']}/{self.rounds}", *figures(record)]))

    def evaluating(self, done: int, total: int) -> None:
        pass

    def note(self, text: str) -> None:
        log.warning("%s", text)
