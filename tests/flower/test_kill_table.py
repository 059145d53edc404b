"""Every process of a federation, killed at three moments: it ends in time, with the same bits or a named loss."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fednh.flower.deploy.processes import marked
from fednh.io.files import read_tree
from tests.helpers.counts import count
from tests.helpers.deployment import Trial, trial

ROUNDS = 3
SETTINGS = {"federation.timeout": 30.0, "federation.start": 3, "federation.min_clients": 1, "train.epochs": 1}
BOUND = 150.0  # seconds in which `up` must end after the kill: a killed SuperNode may be refused for half a minute

# Site-2 says when it works in round 2, and does so for a while.
SLOW = """
    Path(MARK).touch()
    time.sleep(2)
"""


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Trial]:
    with trial(tmp_path) as made:
        made.init(3, "fedper", rounds=ROUNDS, **SETTINGS)
        made.disturb(before=SLOW.replace("MARK", repr(str(tmp_path / "working"))))
        yield made
    count("faults injected")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The global model's bits without a kill."""
    with trial(tmp_path_factory.mktemp("undisturbed")) as made:
        assert made.init(3, "fedper", rounds=ROUNDS, **SETTINGS).up().wait(240).code == 0, made.said()
        return bits(made)


def bits(fed: Trial) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in read_tree(fed.run / "models/global.safetensors").items()}


def superexec(fed: Trial, folder: Path) -> psutil.Process:
    """The fork that serves this folder: its parent is the executor, its working folder the site's or the server's."""
    (main,) = [each for each in marked(fed.folder, "deploy.forking") if each.ppid() == fed.process.pid]
    (found,) = [each for each in main.children() if each.cwd() == str(folder)]
    return found


class Victim:
    """One of the federation's processes, by the name in the table; `pid` is None while there is none."""

    def __init__(self, fed: Trial, name: str):
        self.fed, self.name, self.site = fed, name, fed.folder / "sites/site-2"
        self._superexec: psutil.Process | None = None

    @property
    def pid(self) -> int | None:
        try:
            return self._find().pid
        except (IndexError, ValueError, psutil.Error):
            return None

    def _find(self) -> psutil.Process:
        words = {"ServerApp": "flwr-serverapp", "SuperLink": "deploy.superlink"}
        if self.name == "SuperNode":
            return self.fed.supernode("site-2")
        if self.name in words:
            return marked(self.fed.folder, words[self.name])[0]
        if self._superexec is None:
            self._superexec = superexec(self.fed, self.fed.folder if "server" in self.name else self.site)
        if "SuperExec" in self.name:
            return self._superexec
        (app,) = self._superexec.children()
        return app if self.name == "ClientApp" else app.children()[0]


def until(condition: Callable[[], object], fed: Trial, pause: float = 0.01) -> None:
    fed.wait_for(condition, fed.process, 120, pause)


def log(fed: Trial) -> str:
    file = fed.folder / "logs/site-2.log"
    return file.read_text() if file.exists() else ""


MOMENTS = ("before round 1", "during work", "during sending")
VICTIMS = ("ServerApp", "SuperLink", "SuperNode", "server's SuperExec", "site's SuperExec", "ClientApp", "worker")


@pytest.mark.soak
@pytest.mark.parametrize(("name", "moment"), [("SuperLink", "while it starts"), *itertools.product(VICTIMS, MOMENTS)])
def test_a_killed_process(name: str, moment: str, fed: Trial, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    fed.process = fed.up()
    victim = Victim(fed, name)
    if moment != "while it starts":
        until(lambda: "SuperNode ID" in log(fed), fed)  # the site is connected
    until(lambda: Victim(fed, "site's SuperExec" if name in ("ClientApp", "worker") else name).pid, fed)
    if moment == "during work":
        until((tmp_path / "working").exists, fed)
    elif moment == "during sending" and name in ("ServerApp", "SuperLink", "server's SuperExec"):
        until(lambda: log(fed).count("Receiving: train") >= 2, fed, 0.002)  # an order is on its way to a site
    elif moment == "during sending" and name != "worker":
        until(lambda: log(fed).count("Sending: train") >= 2, fed, 0.002)
    elif moment == "during sending":  # it hands its reply to the ClientApp, which sends it
        until((tmp_path / "working").exists, fed)
        time.sleep(2.1)
    pids: list[int] = []
    until(lambda: pids.append(victim.pid) or pids[-1], fed, 0.002)  # type: ignore[func-returns-value, arg-type]
    os.kill(pids[-1], signal.SIGKILL)
    killed = time.monotonic()
    ended = fed.process.wait(BOUND)
    seconds = time.monotonic() - killed
    lost = [line for line in fed.lines() if line["clients"] != [0, 1, 2]]
    named = re.search(r"site-2 .*(did not answer|failed|was refused)|SuperNode of site-2|\d of \d sites", fed.said())
    print(f"{name}, {moment}: code {ended.code} after {seconds:.0f} s; rounds with a loss: {len(lost)}")
    assert ended.code == 0, fed.said()
    assert [line["round"] for line in fed.lines()] == list(range(1, ROUNDS + 1))
    assert (bits(fed) == undisturbed) == (not lost)
    assert not lost or named, fed.said()
