from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import identical
from fednh.store import Store
from fednh.tree import Tree, arranged

NEWCOMER = {"w": torch.zeros(25)}


def state(value: float) -> Tree:
    return arranged({"w": torch.full((25,), value), "conv": torch.full((2, 3, 2, 2), value)})  # 196 bytes


def test_a_client_that_never_took_part_is_a_newcomer(tmp_path: Path) -> None:
    store = Store(tmp_path / "s", 10**6, NEWCOMER)
    assert store.get(3) is NEWCOMER
    assert store.members == []


def test_put_counts_from_the_commit(tmp_path: Path) -> None:
    store = Store(tmp_path / "s", 10**6, NEWCOMER)
    store.put(1, state(1), 1)
    assert store.get(1) is NEWCOMER
    store.commit()
    identical(store.get(1), state(1))
    store.put(1, state(2), 2)
    store.rollback()
    identical(store.get(1), state(1))


@pytest.mark.parametrize("budget", [0, 400, 10**6])
def test_states_are_the_same_in_memory_and_on_disk(tmp_path: Path, budget: int) -> None:
    store = Store(tmp_path / "s", budget, NEWCOMER)
    for round_ in (1, 2):
        for k in range(5):
            store.put(k, state(10 * round_ + k), round_)
        store.commit()
    for k in range(5):
        identical(store.get(k), state(20 + k))
        assert store.get(k)["conv"].is_contiguous(memory_format=torch.channels_last)
    assert len(list((tmp_path / "s").glob("*"))) > 0 if budget < 1000 else not (tmp_path / "s").exists()


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    store = Store(tmp_path / "s", 500, NEWCOMER)
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
    store = Store(tmp_path_factory.mktemp("s"), 500, NEWCOMER)
    truth: dict[int, Tree] = {}
    pending: dict[int, Tree] = {}
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
            assert store.flush(store.snapshot()).keys() == truth.keys()
            store.prune([])
        assert store.members == sorted(truth)
        for k, tree in truth.items():
            identical(store.get(k), tree)


def test_readers_and_a_writer_at_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "s", 300, NEWCOMER)
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
