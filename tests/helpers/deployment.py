"""Real federations for tests: SuperLink and SuperNodes on the loopback, bounded in time, with nothing left behind."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import psutil
import torch

from fednh.callbacks import Callback
from fednh.flower.deploy import launch, scaffold
from fednh.flower.deploy.processes import end_marked, marked
from fednh.flower.layout import note_text
from fednh.io.files import read_tree
from tests.helpers.process import Process
from tests.helpers.simulator import simulate

# Small and quick: what is tested is the way that messages take.
SMALL = {"train.epochs": 1, "train.batch_size": 64, "model.args": {"hidden": [16]}, "federation.timeout": 120.0}
FAST = {"creff": {"method.match_steps": 5, "method.retrain_epochs": 5}}


# The honest ClientApp, but site-2 does something BEFORE or AFTER it answers in round 2.
DISTURBED = """
import time
from pathlib import Path

import torch
from flwr.clientapp import ClientApp
from fednh.flower.protocol import to_arrays, to_tree
from fednh.flower.client_app import app as honest

app = ClientApp()


@app.query()
@app.evaluate()
def pass_on(message, context):
    return honest(message, context)


@app.train()
def disturbed(message, context):
    meant = context.node_config["site"] == "site-2" and message.content["order"]["round"] == 2
    if meant:
        BEFORE
    reply = honest(message, context)
    if meant:
        AFTER
    return reply
"""


class Trial:
    """One federation's folder and the `fednh federation up` that runs it."""

    def __init__(self, folder: Path):
        self.folder, self.run, self.io = folder / "fed", folder / "fed/run", folder / "io"

    def init(self, sites: int, method: str = "fednh", sources: list[str] | None = None, **more: Any) -> Trial:
        settings = {**SMALL, "method.name": method, **FAST.get(method, {}), **more}
        scaffold.write(self.folder, sites, sources or [], settings)
        return self

    def disturb(self, before: str = "pass", after: str = "pass") -> None:
        """Let site-2 run this code in round 2, before or after the honest answer."""
        code = DISTURBED
        for word, lines in (("BEFORE", before), ("AFTER", after)):
            code = code.replace(word, indent(dedent(lines).strip(), "        ").strip())
        (self.folder / "disturbed.py").write_text(code)
        project = self.folder / "pyproject.toml"
        project.write_text(project.read_text().replace("fednh.flower.client_app:app", "disturbed:app"))

    def up(self, *options: str) -> Process:
        return Process(["federation", "up", str(self.folder), "--local", *options], self.io)

    def go(self, seconds: float = 300) -> None:
        """The same without the command's own care for keys: as it is."""
        stop = threading.Event()
        timer = threading.Timer(seconds, stop.set)
        timer.start()
        try:
            config, sites = scaffold.read(self.folder)
            launch.LocalFederation(self.folder, config, sites, Callback(), stop).run()
        finally:
            timer.cancel()

    def said(self) -> str:
        return (self.io / "stdout.txt").read_text() + (self.io / "stderr.txt").read_text()

    def notes(self) -> str:
        file = self.run / "federation.log"
        lines = file.read_bytes().splitlines() if file.exists() else []
        return "\n".join(note_text(line) for line in lines)

    def lines(self) -> list[dict[str, Any]]:
        file = self.run / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run / "summary.json").read_text())
        return found

    def personal(self) -> list[Path]:
        return sorted(self.folder.glob("trial/*/state/*/*/personal.safetensors"))

    process: Process  # the `up` that runs, for tests that look for its children

    def wait_for(
        self, condition: Callable[[], Any], process: Process, seconds: float = 240, pause: float = 0.05
    ) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert not process.ended(), f"it ended before: {self.said()}"
            assert time.monotonic() < deadline, f"it did not happen in time: {self.said()}"
            time.sleep(pause)

    def supernode(self, site: str) -> psutil.Process:
        """The SuperNode of a site: of all that share one command line, the one that works in the site's folder."""
        nodes = marked(self.folder, "deploy.supernode")
        (found,) = [each for each in nodes if each.cwd() == str(self.folder / "sites" / site)]
        return found

    def kill(self, word: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to those of this federation's processes whose command line has the word."""
        found = marked(self.folder, word)
        assert found, f"no process with {word}"
        for process in found:
            process.send_signal(number)


@contextmanager
def trial(folder: Path) -> Iterator[Trial]:
    """A federation, of which no process is left at the end: that is asserted, and seen to."""
    made = Trial(folder)
    try:
        yield made
        deadline = time.monotonic() + 5
        while marked(made.folder) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert marked(made.folder) == [], "processes are left"
    finally:
        end_marked(made.folder)


def assert_same_as_simulated(made: Trial, path: Path) -> None:
    """Global and personal models within 1e-6, figures equal."""
    config, sites = scaffold.read(made.folder)
    simulate(config, path)
    pairs = [(made.run / "models/global.safetensors", path / "models/global.safetensors")]
    for client, model in enumerate(made.personal()):
        pairs.append((model, path / f"models/personal/client-{client:06d}.safetensors"))
    assert len(pairs) == 1 + len(sites)
    for one, other in pairs:
        left, right = read_tree(one), read_tree(other)
        assert left.keys() == right.keys()
        for name in left:
            torch.testing.assert_close(left[name], right[name], atol=1e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    theirs = json.loads((path / "summary.json").read_text())
    for key in ("gm", "pm_v", "pm_l", "pm_l_std", "rounds", "samples", "bytes_up", "bytes_down"):
        assert made.summary()[key] == theirs[key], key
