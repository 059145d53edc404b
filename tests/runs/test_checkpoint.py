from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fednh.errors import UserError
from fednh.runs.checkpoint import Checkpoints
from fednh.runs.client_states import Store
from fednh.tree import Tree
from tests.helpers.compare import identical

SERVER = {"w": torch.arange(4.0), "seed": torch.tensor(7)}


def fresh(folder: Path) -> Checkpoints:
    return Checkpoints(folder / "checkpoints", Store(folder / "clients", 10**6, lambda client: {}))


def client(value: float) -> Tree:
    return {"head": torch.full((3,), value)}


def three_checkpoints(folder: Path) -> None:
    """After rounds 1, 2 and 3; client k takes part in round k, client 0 in all."""
    checkpoints = fresh(folder)
    for round_ in (1, 2, 3):
        checkpoints.store.put(0, client(round_), round_)
        checkpoints.store.put(round_, client(10 * round_), round_)
        checkpoints.store.commit()
        log = [{"round": r} for r in range(1, round_ + 1)]
        checkpoints.save(round_, {**SERVER, "w": SERVER["w"] + round_}, {"samples": round_}, log)


def test_restores_everything(tmp_path: Path) -> None:
    three_checkpoints(tmp_path)
    again = fresh(tmp_path)
    saved = again.latest(pytest.fail)
    assert saved is not None
    assert (saved.round, saved.progress) == (3, {"samples": 3})
    assert saved.log == [{"round": 1}, {"round": 2}, {"round": 3}]
    identical(saved.server, {**SERVER, "w": SERVER["w"] + 3})
    assert again.store.members == [0, 1, 2, 3]
    identical(again.store.get(0), client(3))
    identical(again.store.get(1), client(10))


def test_keeps_the_last_two_and_nothing_else(tmp_path: Path) -> None:
    three_checkpoints(tmp_path)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == [
        "journal.jsonl",
        "round-000002.json",
        "round-000003.json",
        "server.round-000002.safetensors",
        "server.round-000003.safetensors",
    ]
    assert not (tmp_path / "clients" / "client-000000.round-000001.safetensors").exists()
    assert len(list((tmp_path / "clients").iterdir())) == 5


def test_nothing_saved_is_nothing_restored(tmp_path: Path) -> None:
    assert fresh(tmp_path).latest(pytest.fail) is None


def damage(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[:-3])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))


@pytest.mark.parametrize("how", ["missing", "truncated", "empty", "bit-flipped"])
@pytest.mark.parametrize(
    "file", ["checkpoints/server.round-000003.safetensors", "clients/client-000000.round-000003.safetensors"]
)
def test_a_damaged_file_is_noticed_and_the_checkpoint_before_it_used(tmp_path: Path, how: str, file: str) -> None:
    three_checkpoints(tmp_path)
    damage(tmp_path / file, how)
    told: list[str] = []
    again = fresh(tmp_path)
    saved = again.latest(told.append)
    assert saved is not None
    assert saved.round == 2
    identical(again.store.get(0), client(2))
    assert again.store.members == [0, 1, 2]
    assert saved.log == [{"round": 1}, {"round": 2}]
    assert len(told) == 1
    assert "round-000003.json is damaged" in told[0]


@pytest.mark.parametrize("how", ["truncated", "empty", "bit-flipped"])
def test_a_damaged_manifest_is_noticed(tmp_path: Path, how: str) -> None:
    three_checkpoints(tmp_path)
    damage(tmp_path / "checkpoints" / "round-000003.json", how)
    told: list[str] = []
    saved = fresh(tmp_path).latest(told.append)
    assert saved is not None
    assert saved.round == 2
    assert told


def test_a_manifest_cannot_be_edited_in_silence(tmp_path: Path) -> None:
    three_checkpoints(tmp_path)
    path = tmp_path / "checkpoints" / "round-000003.json"
    document = json.loads(path.read_text())
    document["body"]["progress"]["samples"] = 10**9
    path.write_text(json.dumps(document))
    told: list[str] = []
    fresh(tmp_path).latest(told.append)
    assert "checksum does not match" in told[0]


def test_if_none_is_whole_it_never_starts_from_zero_in_silence(tmp_path: Path) -> None:
    three_checkpoints(tmp_path)
    for path in (tmp_path / "checkpoints").glob("server*"):
        damage(path, "bit-flipped")
    with pytest.raises(UserError, match="none of the 2 checkpoints is whole"):
        fresh(tmp_path).latest(lambda text: None)


def test_after_going_back_old_strays_are_swept_away(tmp_path: Path) -> None:
    """Files of a round that was lost must not be mistaken for the round that replaces it."""
    three_checkpoints(tmp_path)
    damage(tmp_path / "checkpoints" / "round-000003.json", "empty")
    again = fresh(tmp_path)
    assert again.latest(lambda text: None) is not None
    again.store.put(0, client(33), 3)
    again.store.commit()
    again.save(3, SERVER, {}, [{"round": 1}, {"round": 2}, {"other": 3}])
    third = fresh(tmp_path)
    saved = third.latest(pytest.fail)
    assert saved is not None
    assert saved.log == [{"round": 1}, {"round": 2}, {"other": 3}]
    identical(third.store.get(0), client(33))


def test_lines_behind_the_last_mark_are_cut_off(tmp_path: Path) -> None:
    """A crash between the journal and the manifest: the lines are there, and nobody has named them."""
    three_checkpoints(tmp_path)
    journal = tmp_path / "checkpoints" / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"client": 0, "round": 4, "sha2')
    again = fresh(tmp_path)
    assert again.latest(pytest.fail) is not None
    again.save(4, SERVER, {}, [{"round": r} for r in (1, 2, 3, 4)])
    assert journal.read_bytes() == whole + b'{"log": {"round": 4}}\n'


@pytest.mark.parametrize("how", ["missing", "truncated", "empty", "bit-flipped"])
def test_a_damaged_journal_is_noticed(tmp_path: Path, how: str) -> None:
    three_checkpoints(tmp_path)
    damage(tmp_path / "checkpoints" / "journal.jsonl", how)
    told: list[str] = []
    again = fresh(tmp_path)
    if how == "truncated":  # the end is only the newest one's
        saved = again.latest(told.append)
        assert saved is not None
        assert saved.round == 2
        assert "journal.jsonl does not match its checksum" in told[0]
    else:
        with pytest.raises(UserError, match="none of the 2 checkpoints is whole"):
            again.latest(told.append)


def test_a_checkpoint_costs_what_has_changed(tmp_path: Path) -> None:
    """Three hundred clients took part; then each checkpoint of one more client is a line and a few files."""
    checkpoints = fresh(tmp_path)
    store, journal = checkpoints.store, tmp_path / "checkpoints" / "journal.jsonl"
    for k in range(300):
        store.put(k, client(k), 1)
    store.commit()
    checkpoints.save(1, SERVER, {})
    before = journal.stat().st_size
    for round_ in (2, 3, 4):
        store.put(7, client(round_), round_)
        store.commit()
        checkpoints.save(round_, SERVER, {})
    assert journal.stat().st_size - before < 3 * 120
    assert (tmp_path / "checkpoints" / "round-000004.json").stat().st_size < 1000
    names = sorted(p.name for p in (tmp_path / "clients").glob("client-000007.*"))
    assert names == ["client-000007.round-000003.safetensors", "client-000007.round-000004.safetensors"]
    again = fresh(tmp_path)
    assert again.latest(pytest.fail) is not None
    assert again.store.members == list(range(300))
    again.store.put(7, client(5), 5)
    again.store.commit()
    again.save(5, SERVER, {})
    names = sorted(p.name for p in (tmp_path / "clients").glob("client-000007.*"))
    assert names == ["client-000007.round-000004.safetensors", "client-000007.round-000005.safetensors"]


def test_saving_a_round_twice_keeps_the_one_before(tmp_path: Path) -> None:
    """A stop in the next round saves the same round again; the checkpoint before must stay whole."""
    three_checkpoints(tmp_path)
    again = fresh(tmp_path)
    assert again.latest(pytest.fail) is not None
    again.save(3, SERVER, {})
    damage(tmp_path / "checkpoints" / "round-000003.json", "empty")
    last = fresh(tmp_path)
    saved = last.latest(lambda text: None)
    assert saved is not None
    assert saved.round == 2
    identical(last.store.get(0), client(2))


def test_a_save_that_fails_loses_nothing(tmp_path: Path) -> None:
    checkpoints = fresh(tmp_path)
    checkpoints.store.put(0, client(1), 1)
    checkpoints.store.commit()
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(OSError, match=r"exists|directory"):
        checkpoints.save(1, SERVER, {})
    (tmp_path / "checkpoints").unlink()
    checkpoints.save(1, SERVER, {})
    again = fresh(tmp_path)
    assert again.latest(pytest.fail) is not None
    identical(again.store.get(0), client(1))
