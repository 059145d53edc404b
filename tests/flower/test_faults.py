"""What goes wrong in real federations, with real processes: each ends with a model and says what happened."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fednh.flower.deploy import certificates
from fednh.io.files import read_tree
from tests.helpers.counts import count
from tests.helpers.deployment import Trial, assert_same_as_simulated, trial

pytestmark = pytest.mark.soak
ALONE = {"federation.start": 2, "federation.min_clients": 1}  # two begin, and one may go on

# What site-2 uploads in round 2 is spoilt on its way.
SPOILT = """
    tree = to_tree(reply.content["upload"])
    reply.content["upload"] = to_arrays({name: SPOIL for name, value in tree.items()})
"""


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Trial]:
    with trial(tmp_path) as made:
        yield made
    count("faults injected")


def finished(fed: Trial, rounds: int) -> None:
    """It came to its end, with a global model that is finite."""
    assert fed.summary()["rounds"] == rounds
    model = read_tree(fed.run / "models/global.safetensors")
    assert all(bool(value.isfinite().all()) for value in model.values())


def test_a_supernode_is_killed_and_started_again(fed: Trial) -> None:
    process = fed.init(2, "fedper", rounds=12, **{"federation.timeout": 20.0, **ALONE}).up()
    fed.wait_for(lambda: len(fed.lines()) >= 1, process)
    fed.supernode("site-1").kill()
    assert process.wait(500).code == 0, fed.said()
    assert "the SuperNode of site-1 was killed by signal 9; starting it again" in fed.said()
    finished(fed, 12)
    assert len(fed.personal()) == 2
    assert fed.lines()[-1]["clients"] == [0, 1], "it is back in the last round"


def test_a_site_that_never_answers(fed: Trial) -> None:
    process = fed.init(2, rounds=3, **{"federation.timeout": 40.0, **ALONE}).up()
    fed.wait_for(lambda: len(fed.lines()) >= 1, process)
    fed.supernode("site-2").suspend()
    assert process.wait(400).code == 0, fed.said()
    assert re.search(r"site site-2 \(client 1\) did not answer in 40 s; going on without it", fed.said())
    finished(fed, 3)
    assert fed.lines()[-1]["clients"] == [0]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("value * torch.nan", "its signature does not match"),
        ("value[..., :-1] if value.ndim else value", "refused: "),
        ("value.double()", "refused: "),
        ("torch.zeros(50_000_000)", "bytes or more, where up to"),  # 200 MB that travel as 10
    ],
)
def test_a_site_that_sends_nonsense(spoil: str, words: str, fed: Trial) -> None:
    fed.init(3, "fedavg", rounds=3)
    fed.disturb(after=SPOILT.replace("SPOIL", spoil))
    assert fed.up().wait(400).code == 0, fed.said()
    assert "round 2: the answer of site site-2 (client 1) was refused" in fed.notes()
    assert words in fed.notes()
    assert [line["refused"] for line in fed.lines()] == [[], [1], []]
    assert [line["clients"] for line in fed.lines()] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    finished(fed, 3)


def test_a_key_that_is_not_registered_is_refused(fed: Trial, tmp_path: Path) -> None:
    fed.init(2, rounds=2, **{"federation.min_clients": 1})
    certificates.make(fed.folder, ["site-1", "site-2"])
    certificates.make(
        tmp_path / "other", ["site-2"]
    )  # a stranger's key in place of the one whose public half is registered
    (tmp_path / "other/sites/site-2/key").replace(fed.folder / "sites/site-2/key")
    assert fed.up().wait(400).code == 0, fed.said()
    assert (
        "the SuperNode of site-2 ended: Exit Code: 305 Failed to initialize the connection to the SuperLink"
        in fed.said()
    )
    finished(fed, 2)
    assert {tuple(line["clients"]) for line in fed.lines()} == {(0,)}


def test_a_site_that_trusts_another_authority_does_not_speak(fed: Trial, tmp_path: Path) -> None:
    """It is the site that refuses here: whoever answers at the server's address is not the server it knows."""
    fed.init(2, rounds=2, **{"federation.min_clients": 1})
    certificates.make(fed.folder, ["site-1", "site-2"])
    certificates.make(tmp_path / "other", [])
    wrong = fed.folder / "sites/site-2/ca.crt"
    wrong.write_bytes((tmp_path / "other/certs/ca.crt").read_bytes())
    ended = fed.up().wait(60)
    assert ended.code == 2
    assert "ca.crt is of another authority" in ended.stderr
    fed.go()
    assert "CERTIFICATE_VERIFY_FAILED" in (fed.folder / "logs/site-2.log").read_text()
    finished(fed, 2)
    assert {tuple(line["clients"]) for line in fed.lines()} == {(0,)}


def test_the_serverapp_is_killed_and_goes_on_from_its_checkpoint(fed: Trial, tmp_path: Path) -> None:
    process = fed.init(2, "ditto", rounds=4).up()
    fed.wait_for(lambda: len(fed.lines()) >= 2, process)
    fed.kill("flwr-serverapp")
    assert process.wait(400).code == 0, fed.said()
    assert "the ServerApp ended before its last round; starting it again" in fed.said()
    assert "going on after round" in fed.notes()
    assert_same_as_simulated(fed, tmp_path / "simulated")
