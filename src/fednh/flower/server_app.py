"""The ServerApp: `flwr run` starts it, with fednh's own settings as the app's run-config.

All of them are flat dotted keys, as `--set` takes them: `rounds`, `method.name`, `train.lr`, ... (see runconfig.py).
`federation.folder` is the run folder. A stopped federation continues when it is started again with the same settings.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fednh.errors import UserError
from fednh.flower.executor import Manner, rounds
from fednh.flower.identity import of_server
from fednh.flower.runconfig import read_config
from fednh.screen import metric_words
from fednh.storage.files import keep_private
from fednh.storage.run_folder import RunFolder

log = logging.getLogger("flwr")
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation that the run-config describes."""
    config = read_config(context.run_config)
    federation = config.federation
    assert federation.folder is not None
    folder = RunFolder(Path(federation.folder))
    manner = Manner(federation.timeout, federation.enough, least=federation.min_clients, wait=federation.wait)
    identity = of_server(config, context.run_id)
    with folder.opened(config, "flower", extend=True) as unfinished:
        if not unfinished:
            raise UserError(f"{folder.path} holds a finished run; move it away, or choose another federation.folder")
        keep_private(folder.path)
        rounds(config, grid, folder, LogWatcher(config.rounds), manner, identity=identity).run()
    log.info("run folder: %s", folder.path)


class LogWatcher:
    """Writes progress to Flower's log, which `flwr run --stream` shows."""

    def __init__(self, rounds: int):
        self.rounds = rounds

    def round_done(self, record: dict[str, Any]) -> None:
        log.info("%s", "  ".join([f"round {record['round']}/{self.rounds}", *metric_words(record)]))

    def training(self, done: int, total: int) -> None:
        pass

    def evaluating(self, done: int, total: int) -> None:
        pass

    def note(self, text: str) -> None:
        log.warning("%s", text)
