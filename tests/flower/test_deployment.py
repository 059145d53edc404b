"""Federations of real processes over TLS: the simulator's numbers, interruptions, and that nothing is left running."""

from __future__ import annotations

import re
import shutil
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from fednh.config.schema import PrivacyConfig
from fednh.federated.architectures import initial_state
from fednh.federated.setup import network
from fednh.flower.deploy import scaffold
from fednh.flower.deploy.processes import marked
from fednh.io.files import read_tree
from fednh.privacy.plan import make_plan
from fednh.runs.run_status import RunStates
from tests.helpers.deployment import Trial, assert_same_as_simulated, trial
from tests.helpers.process import Process
from tests.helpers.simulator import simulate


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Trial]:
    with trial(tmp_path) as made:
        yield made


def commands_seen(fed: Trial, process: Process, states: set[str] | None = None) -> set[str]:
    """The command lines of all processes of a federation while it runs, as `ps` shows them; and its `states`."""
    seen = set()
    while not process.ended():
        if states is not None:
            states |= watched(fed)
        for each in marked(fed.folder):
            with suppress(psutil.Error):
                seen.add(" ".join(each.cmdline()))
        time.sleep(1)
    return seen


def watched(fed: Trial) -> set[str]:
    """What `fednh watch` says about the federation's folder."""
    return {state.state for state in RunStates([fed.folder]).look()}


def readable_by_others(fed: Trial) -> list[Path]:
    """What is there of states, models, databases and logs that other users of the machine could read."""
    assert stat.S_IMODE(fed.folder.stat().st_mode) == 0o700
    kept = [fed.run, *(fed.folder / "trial").iterdir(), fed.folder / "logs", fed.folder / ".flwr/local"]
    paths = [path for each in kept for path in (each, *each.rglob("*"))]
    written = {"personal.safetensors", "superlink.db", "site-1.log", "global.safetensors"}
    assert written <= {path.name for path in paths}
    mine = ("config.toml", "site.toml", "approved")  # what `up` itself writes, in folders that are closed
    return [path for path in paths if path.stat().st_mode & 0o077 and path.name not in mine]


def test_from_nothing_to_personal_models_over_tls(fed: Trial, tmp_path: Path) -> None:
    process, states = fed.init(2, rounds=1).up(), set[str]()
    seen = commands_seen(fed, process, states)
    ended = process.wait(240)
    assert ended.code == 0, fed.said()
    assert "running" in states <= {"running", "finished"}
    assert watched(fed) == {"finished"}
    assert any("flwr-serverapp" in words for words in seen)
    assert not [words for words in seen if re.search(r"--token |[0-9a-f]{64}", words)], "every user can read these"
    assert readable_by_others(fed) == []
    assert "fednh at 2 sites round 1/1" in ended.stdout
    assert f"site-2: {fed.personal()[1]}" in ended.stdout
    assert ended.stdout.rstrip().endswith(str(fed.run))
    assert marked(fed.folder) == []
    assert stat.S_IMODE((fed.folder / "sites/site-1/key").stat().st_mode) == 0o600
    link = (fed.folder / "logs/superlink.log").read_text()
    assert "https://127.0.0.1:" in link
    assert "SuperNode authentication is disabled" not in link
    assert_same_as_simulated(fed, tmp_path / "simulated")
    again = fed.up("--quiet").wait(60)
    assert (again.code, again.stdout.strip()) == (0, str(fed.run))
    assert "is finished already" in again.stderr


@pytest.mark.soak
@pytest.mark.parametrize("method", ["fednh", "fedavg", "fedper", "ditto", "creff"])
def test_the_simulators_numbers(method: str, fed: Trial, tmp_path: Path) -> None:
    assert fed.init(3, method, rounds=3).up().wait(400).code == 0, fed.said()
    assert_same_as_simulated(fed, tmp_path / "simulated")


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("nginx", path="/usr/sbin:/usr/bin") is None, reason="nginx is not installed")
def test_behind_the_proxy(fed: Trial, tmp_path: Path) -> None:
    process = fed.init(2, rounds=2).up("--proxy")
    seen = commands_seen(fed, process)
    assert process.wait(400).code == 0, fed.said()
    (conf,) = (fed.folder / ".flwr/local/proxy").glob("fednh.conf")
    door, behind = (re.search(pattern, conf.read_text()) for pattern in (r"listen (\S+) ssl", r"https://(\S+?)/v1"))
    assert door is not None
    assert behind is not None
    assert door[1] in (fed.folder / "logs/site-1.log").read_text()
    assert any("deploy.superlink" in words and behind[1].split(":")[1] in words for words in seen)
    assert_same_as_simulated(fed, tmp_path / "simulated")


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_stops_everything_and_goes_on_later(number: int, fed: Trial, tmp_path: Path) -> None:
    process = fed.init(2, "ditto", rounds=4).up()
    fed.wait_for(lambda: len(fed.lines()) >= 1, process)
    process.kill(number)
    ended = process.wait(60)
    assert ended.code == 130, fed.said()
    assert f"go on with: fednh federation up {fed.folder} --local" in ended.stderr
    assert marked(fed.folder) == []
    assert not (fed.run / "summary.json").exists()
    assert watched(fed) == {"stopped"}
    assert fed.up().wait(400).code == 0, fed.said()
    assert "going on after round" in fed.notes()
    assert_same_as_simulated(fed, tmp_path / "simulated")


@pytest.mark.soak
def test_what_a_killed_up_left_running_is_ended_by_the_next(fed: Trial, tmp_path: Path) -> None:
    process = fed.init(2, "fedper", rounds=3).up()
    fed.wait_for(lambda: len(fed.lines()) >= 1, process)
    other = fed.up()
    assert other.wait(60).code == 2
    assert " is in use by process " in fed.said()
    left = set(marked(fed.folder))
    process.kill(signal.SIGKILL)
    process.wait()
    assert left
    assert fed.up().wait(400).code == 0, fed.said()
    assert not left & set(marked(fed.folder))
    assert_same_as_simulated(fed, tmp_path / "simulated")


@pytest.mark.soak
def test_sites_with_data_of_their_own(fed: Trial, tmp_path: Path) -> None:
    """Two npz files; the sites' numbers are their own, and no file name leaves a site."""
    rng, sources = np.random.default_rng(3), []
    for site in range(2):
        y = np.arange(60) % 3
        x = (rng.normal(size=(60, 4)) + 3 * y[:, None] + site).astype(np.float32)
        np.savez(tmp_path / f"secret-{site}.npz", x_train=x, y_train=y, x_test=x[:30], y_test=y[:30])
        sources.append(f"npz:{tmp_path}/secret-{site}.npz")
    assert fed.init(2, "fedper", sources, rounds=3, **{"model.name": "mlp"}).up().wait(400).code == 0, fed.said()
    assert len(fed.personal()) == 2
    assert [row["site"] for row in fed.summary()["sites"]] == ["site-1", "site-2"]
    written = b"".join(path.read_bytes() for path in fed.run.rglob("*") if path.is_file())
    assert b"secret-" not in written


@pytest.mark.soak
def test_a_run_that_cannot_start_says_why_and_leaves_nothing(fed: Trial) -> None:
    fed.init(2, rounds=1, **{"federation.test": "npz:/nowhere.npz"})
    ended = fed.up().wait(400)
    assert ended.code == 1, fed.said()
    assert "/nowhere.npz" in ended.stderr
    assert marked(fed.folder) == []


@pytest.mark.soak
def test_a_finished_federation_goes_on_with_more_rounds(fed: Trial, tmp_path: Path) -> None:
    """Raise `rounds` in the app's settings and the sites' rules: the sites go on from the states that they kept."""
    assert fed.init(2, "fedper", rounds=2).up().wait(240).code == 0, fed.said()
    for file in (fed.folder / "pyproject.toml", *fed.folder.glob("sites/*/site.toml")):
        file.write_text(re.sub(r"^rounds = 2\b", "rounds = 4", file.read_text(), flags=re.M))
    assert fed.up().wait(240).code == 0, fed.said()
    assert fed.summary()["rounds"] == 4
    assert_same_as_simulated(fed, tmp_path / "simulated")


PRIVATE = {  # little noise, and steps too small to move the body: then prototypes differ by their noise alone
    **{"federation.secure": True, "privacy.level": "sample", "privacy.epsilon": 90.0},
    **{"method.head_init": "means", "train.lr": 1e-9},
}


@pytest.mark.soak
def test_four_processes_sum_in_secret_under_privacy(fed: Trial, tmp_path: Path) -> None:
    """The plain federation's prototypes up to the noise; a site whose budget is spent is out, and the others go on."""
    config, sites = scaffold.read(fed.init(4, rounds=2, **PRIVATE).folder)
    net, method = network(config, (1, 8, 8), 10), config.build_method()
    plan = make_plan(config, method, net, initial_state(method, net, config.seed), config.rounds)
    assert plan is not None
    replace_in(sites[1].node_config, r"^epsilon = 90.0", f"epsilon = {plan.epsilon([1]) + 0.1}")
    assert fed.up().wait(600).code == 0, fed.said()
    assert [row["clients"] for row in fed.lines()] == [[0, 1, 2, 3], [0, 2, 3]]
    assert "site-2 (client 1) failed: refused: its privacy budget is spent" in fed.notes()
    simulate(config.model_copy(update={"privacy": PrivacyConfig()}), tmp_path / "simulated")
    ours, exact = (read_tree(run / "models/global.safetensors") for run in (fed.run, tmp_path / "simulated"))
    cosines = torch.nn.functional.cosine_similarity(ours["head.weight"], exact["head.weight"], dim=1)
    assert 0.99 < float(cosines.min()) < 1 - 1e-7
    spent = [row["epsilon"] for row in fed.summary()["sites"]]
    assert [spent[k] for k in (0, 2, 3)] == [pytest.approx(plan.epsilon([1, 2]))] * 3
    assert 0 < spent[1] < plan.epsilon([1])
    log = (fed.run / "audit.jsonl").read_text()
    assert '"record": "masked"' in log
    assert '"record": "upload"' not in log
    assert Process(["federation", "audit", str(fed.folder)], fed.io).wait(60).code == 0, fed.said()
    attack = ["attack", str(fed.folder), "--data", "digits", "--number", "1", "--minutes", "0.1", "--public", "60"]
    assert Process(attack, fed.io).wait(300).code == 0, fed.said()
    assert "no upload of one" in " ".join(fed.said().split())


def replace_in(file: Path, old: str, new: str) -> None:
    text, count = re.subn(old, new, file.read_text(), flags=re.M)
    assert count == 1, (file, old)
    file.write_text(text)


@pytest.mark.soak
def test_a_secure_federation_of_four_has_the_plain_ones_model(fed: Trial, tmp_path: Path) -> None:
    """`federation.secure` over TLS: the server's log has masked uploads and no other."""
    assert fed.init(4, rounds=3, **{"federation.secure": True}).up().wait(500).code == 0, fed.said()
    config, _ = scaffold.read(fed.folder)
    simulate(config, tmp_path / "simulated")
    left, right = (read_tree(run / "models/global.safetensors") for run in (fed.run, tmp_path / "simulated"))
    for name in right:
        torch.testing.assert_close(left[name], right[name], atol=1e-5, rtol=1e-5)
    assert [row["clients"] for row in fed.lines()] == [[0, 1, 2, 3]] * 3
    log = (fed.run / "audit.jsonl").read_text()
    assert '"record": "masked"' in log
    assert '"record": "upload"' not in log
    print("seconds a round:", [row["seconds"] for row in fed.lines()])
