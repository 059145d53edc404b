from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fednh.io.files import read_tree
from fednh.runs.client_states import Saved, Store
from fednh.tree import Tree, canonical
from tests.helpers.compare import identical

NEWCOMER = {"w": torch.zeros(25)}


def state(value: float) -> Tree:
    return canonical({"w": torch.full((25,), value), "conv": torch.full((2, 3, 2, 2), value)})  # 196 bytes


def test_a_client_that_never_took_part_is_a_newcomer(tmp_path: Path) -> None:
    store = Store(tmp_path / "s", 10**6, lambda client: NEWCOMER)
    assert store.get(3) is NEWCOMER
    assert store.members == []


def test_put_counts_from_the_commit(tmp_path: Path) -> None:
    store = Store(tmp_path / "s", 10**6, lambda client: NEWCOMER)
    store.put(1, state(1), 1)
    assert store.get(1) is NEWCOMER
    store.commit()
    identical(store.get(1), state(1))
    store.put(1, state(2), 2)
    store.rollback()
    identical(store.get(1), state(1))


@pytest.mark.parametrize("budget", [0, 400, 10**6])
def test_states_are_the_same_in_memory_and_on_disk(tmp_path: Path, budget: int) -> None:
    store = Store(tmp_path / "s", budget, lambda client: NEWCOMER)
    for round_ in (1, 2):
        for k in range(5):
            store.put(k, state(10 * round_ + k), round_)
        store.commit()
    for k in range(5):
        identical(store.get(k), state(20 + k))
        assert store.get(k)["conv"].is_contiguous(memory_format=torch.channels_last)
    assert len(list((tmp_path / "s").glob("*"))) > 0 if budget < 1000 else not (tmp_path / "s").exists()


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    store = Store(tmp_path / "s", 500, lambda client: NEWCOMER)
    for k in range(50):
        store.put(k, state(k), 1)
        assert store._in_memory <= 500
    store.commit()
    for k in range(50):
        identical(store.get(k), state(k))


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["put", "commit", "rollback", "flush"])), max_size=30))
@settings(max_examples=40, deadline=None)
def test_any_sequence_agrees_with_a_dict(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[int, str]]
) -> None:
    store = Store(tmp_path_factory.mktemp("s"), 500, lambda client: NEWCOMER)
    truth: dict[int, Tree] = {}
    pending: dict[int, Tree] = {}
    kept: dict[int, Saved] = {}  # as a checkpoint would have it
    for number, (client, action) in enumerate(actions):
        if action == "put":
            pending[client] = state(number)
            store.put(client, pending[client], number)
        elif action == "commit":
            truth |= pending
            pending = {}
            store.commit()
        elif action == "rollback":
            pending = {}
            store.rollback()
        else:
            for saved in store.flush(store.changes()):
                kept[saved.client] = saved
            assert kept.keys() == truth.keys()
            assert all(store.path(k, saved.round).exists() for k, saved in kept.items())
        assert store._in_memory <= 500
        assert store.members == sorted(truth)
        for k, tree in truth.items():
            identical(store.get(k), tree)


def test_readers_and_a_writer_at_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "s", 300, lambda client: NEWCOMER)
    for k in range(8):
        store.put(k, state(k), 0)
    store.commit()
    wrong: list[int] = []

    def read() -> None:
        wrong.extend(i for i in range(200) if store.get(i % 8)["w"][0] != i % 8)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for t in threads:
        t.start()
    for round_ in range(1, 20):
        for k in range(8):
            store.put(k, state(k), round_)
    for t in threads:
        t.join()
    assert not wrong


def files(store: Store) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir()) if store.folder.exists() else []


def test_changes_are_told_once_with_what_they_replace(tmp_path: Path) -> None:
    store = Store(tmp_path / "s", 10**6, lambda client: NEWCOMER)
    for round_, clients in ((1, (0, 1)), (2, (0,)), (3, (2,))):
        for k in clients:
            store.put(k, state(k), round_)
        store.commit()
        if round_ == 1:
            first = store.flush(store.changes())
    second = store.flush(store.changes())
    assert [(s.client, s.round, s.replaces) for s in first] == [(0, 1, None), (1, 1, None)]
    assert [(s.client, s.round, s.replaces) for s in second] == [(0, 2, 1), (2, 3, None)]
    assert store.flush(store.changes()) == []
    assert len(files(store)) == 4, "what a checkpoint has named is not the store's to delete"


def test_what_no_checkpoint_knows_leaves_no_file_behind(tmp_path: Path) -> None:
    """Without checkpoints, on disk alone: one file a client, however many rounds there were."""
    store = Store(tmp_path / "s", 0, lambda client: NEWCOMER)
    for round_ in range(1, 6):
        for k in range(3):
            store.put(k, state(k), round_)
        store.commit()
    assert files(store) == [f"client-{k:06d}.round-000005.safetensors" for k in range(3)]
    store.put(0, state(9), 6)
    store.rollback()
    assert len(files(store)) == 3


def test_changes_stay_as_they_were_while_rounds_go_on(tmp_path: Path) -> None:
    store = Store(tmp_path / "s", 10**6, lambda client: NEWCOMER)
    store.put(0, state(1), 1)
    store.commit()
    changes = store.changes()
    store.put(0, state(2), 2)
    store.commit()
    (saved,) = store.flush(changes)
    identical(read_tree(store.path(0, saved.round)), state(1))
    identical(store.get(0), state(2))


def test_a_view_does_not_keep_what_it_looks_at(tmp_path: Path) -> None:
    """A block of clients trained at once hands out views; each would hold the whole block in memory."""
    store = Store(tmp_path / "s", 10**6, lambda client: NEWCOMER)
    block = torch.randn(64, 25)
    store.put(0, {"w": block[3]}, 1)
    store.commit()
    assert store.get(0)["w"].untyped_storage().nbytes() == 100
    identical(store.get(0), {"w": block[3]})


def test_a_put_does_not_look_at_all_clients(tmp_path: Path) -> None:
    """Counted, not timed: the slots that are visited by a round do not grow with the clients there are."""
    store = Store(tmp_path / "s", 100 * 196, lambda client: NEWCOMER)
    store.restore(Saved(k, 1, "") for k in range(20_000))

    class Counting(dict):  # type: ignore[type-arg]
        visits = 0

        def items(self) -> Any:
            Counting.visits += len(self)
            return super().items()

        values = __iter__ = items  # type: ignore[assignment]

    store._slots = Counting(store._slots)
    for k in range(10):
        store.put(k, state(k), 2)
    store.commit()
    store.flush(store.changes())
    assert Counting.visits == 0
