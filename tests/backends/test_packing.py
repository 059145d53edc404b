"""What travels to other machines comes back as it was: bits, types and the order in memory."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednh.backends.ray_worker import _sendable, as_arrays, as_tensors, pack, pack_data, unpack, unpack_data, versions
from fednh.backends.tasks import EvaluateTask, Measured, SimulatedData, TrainTask
from fednh.data.batches import samples_of
from fednh.federated.client import ClientResult
from fednh.federated.evaluate import Personal
from fednh.methods.fit import Sgd
from fednh.models import Net
from tests.helpers.tiny import tiny_dataset


def travelled(value: Any) -> Any:
    """As Ray does it: arrays outside of the pickle, and not writable at the other end."""
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(text, buffers=[bytes(buffer) for buffer in buffers])


def layout(tree: dict[str, torch.Tensor]) -> list[Any]:
    return [(name, value.dtype, value.shape, value.stride()) for name, value in tree.items()]


TREES = {
    "empty": {},
    "plain": {"b": torch.randn(3, 4), "a": torch.randn(5), "scalar": torch.tensor(2.5)},
    "channels last": {"conv": torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last)},
    "transposed": {"w": torch.randn(3, 7).T},
    "a view": {"w": torch.randn(6, 4)[2]},
    "types": {"n": torch.arange(3), "yes": torch.tensor([True, False]), "half": torch.randn(4).bfloat16()},
    "none": {"w": torch.zeros(0, 3)},
}


@pytest.mark.parametrize("name", TREES)
def test_trees_come_back_as_they_were(name: str) -> None:
    tree = TREES[name]
    trees = [tree, {key: value.clone() for key, value in tree.items()}, {"other": torch.ones(2)}]
    for there, back in zip(trees, unpack(travelled(pack(trees))), strict=True):
        assert layout(there) == layout(back)
        for key, value in back.items():
            assert torch.equal(value, there[key])
            value.zero_()  # it is its own: writing to it harms nobody
    assert all(torch.equal(value, TREES[name][key]) for key, value in trees[1].items())


def test_the_tensors_of_a_block_stay_in_one_memory() -> None:
    """As on one machine, where they are rows of one tensor; it is sent once."""
    rows = torch.randn(50, 1000)
    packed = pack([{"w": row} for row in rows])
    assert packed.nbytes < 2 * rows.nbytes
    back = [tree["w"] for tree in unpack(packed)]
    assert {value.untyped_storage().data_ptr() for value in back} == {back[0].untyped_storage().data_ptr()}
    assert [value.storage_offset() for value in back] == [row.storage_offset() for row in rows]
    assert torch.equal(torch.stack(back), rows)


def test_results_come_back_in_their_order() -> None:
    person = Personal(7, 50.0, 60.0, None)
    results = [
        ClientResult({"k": torch.ones(2)}, {"u": torch.zeros(3)}, 10, 1.5),
        ClientResult(
            status="failed", problem="client 4 failed", error=ValueError(lambda: None)
        ),  # such an error cannot be pickled
        ClientResult({}, {"u": torch.ones(3)}, 20, 2.5, gradient_norm=0.25),
        Measured(person),
        Measured(person, {"m": torch.arange(4.0)}, {"levels": [0.1]}),
    ]
    back = unpack(travelled(pack([_sendable(result) for result in results])))
    assert [type(result) for result in back] == [type(result) for result in results]
    assert torch.equal(back[0].keep["k"], torch.ones(2))
    assert back[1] == ClientResult(status="failed", problem="client 4 failed")
    assert (back[2].keep, back[2].samples, back[2].loss_sum, back[2].gradient_norm) == ({}, 20, 2.5, 0.25)
    assert torch.equal(back[2].upload["u"], torch.ones(3))
    assert back[3] == Measured(person)
    assert torch.equal(back[4].model["m"], torch.arange(4.0))
    assert (back[4].person, back[4].novelty) == (person, {"levels": [0.1]})


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_parts_are_the_same_by_client(sizes: list[int]) -> None:
    samples: Any = samples_of(tiny_dataset(), "train")
    parts = [np.arange(size) + 10 * k for k, size in enumerate(sizes)]
    empty: Any = None
    data = SimulatedData(samples, samples, parts, parts[::-1], empty, ("mlp",) * len(parts), ("a", "b"))
    *packed, there = travelled(pack_data(data, pickle.dumps))
    back = unpack_data(*packed, "cpu")
    assert there == versions()
    assert [part.tolist() for part in back.parts] == [part.tolist() for part in parts]
    assert [part.tolist() for part in back.held_out] == [part.tolist() for part in parts[::-1]]
    assert all(part.flags.writeable for part in (*back.parts, *back.held_out))
    assert torch.equal(back.test.x, samples.x)
    assert back.sites == data.sites


def test_samples_are_shared_and_nobody_is_warned(recwarn: pytest.WarningsRecorder) -> None:
    samples = samples_of(tiny_dataset(), "train")
    packed: Any = travelled(as_arrays(samples))
    back = as_tensors(packed, "cpu")
    assert back.x.data_ptr() == packed.x.ctypes.data
    for key in ("x", "y", "gain", "shift"):
        assert torch.equal(getattr(back, key), getattr(samples, key))
    assert (back.num_classes, back.augment) == (samples.num_classes, samples.augment)
    assert not recwarn.list


def test_a_task_travels_with_its_trees() -> None:
    down, shared = {"w": torch.randn(2, 3)}, {"w": torch.randn(3, 2).T, "x": torch.ones(1)}
    records = {4: {"w": torch.full((2, 3), 4.0)}, 11: {"w": torch.randn(3, 2).T}}
    for task in (
        TrainTask(down, Sgd(), 1, 2, True, True),
        EvaluateTask(down, None, Sgd(), 1, 2),
        EvaluateTask(down, shared, Sgd(), 1, 2, True),
        TrainTask(down, Sgd(), 1, 2, records=records),
        EvaluateTask(down, shared, Sgd(), 1, 2, True, records=records),
    ):
        back = unpack(travelled(pack(task)))
        assert type(back) is type(task)
        assert torch.equal(back.down["w"], down["w"])
        assert set(back.records) == set(task.records)
        for client, record in task.records.items():
            assert layout(back.records[client]) == layout(record)
            assert torch.equal(back.records[client]["w"], record["w"])
        assert (back.settings, back.seed, back.round) == (task.settings, 1, 2)
        if isinstance(task, EvaluateTask) and task.shared is not None:
            assert layout(back.shared) == layout(shared)
            assert back.final


def test_a_network_travels(net: Net) -> None:
    from ray import cloudpickle

    back = pickle.loads(cloudpickle.dumps(net))
    params, x = net.init(torch.Generator().manual_seed(3)), torch.randn(2, 4)
    assert torch.equal(back.logits(params, x), net.logits(params, x))
    assert torch.equal(back.init(torch.Generator().manual_seed(3))["head.weight"], params["head.weight"])
