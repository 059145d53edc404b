"""What a step of DP-SGD costs against a plain one, in CPU time of one thread: Conv2, and an MLP in blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from benchmarks.limit import BATCH
from benchmarks.row import Row
from benchmarks.speed import federation, images, small_clients
from fednh.backends.private_vmap import private_update_block
from fednh.backends.vmap import Block, update_block
from fednh.data.batches import ClientData
from fednh.federated import client
from fednh.federated.setup import Federation
from fednh.methods.base import Method
from fednh.methods.fit import Sgd
from fednh.privacy.noise import SeededNoise
from fednh.privacy.private_data import Mechanisms
from fednh.seeding import torch_rng
from fednh.tree import Tree

EVERY = Mechanisms(
    clip=1.0, rate=1.0, gradients=1.0, sums=1.0, counts=1.0
)  # every sample in every step, as a plain one
CLIENTS = 64  # in a block
STEPS = 5


def rows() -> Iterator[Row]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield _row("Conv2, batch 64: a private step against a plain one", 3.0, *_conv2())
        yield _row("MLP in blocks: a private step against a plain one", 2.0, *_mlp())
    finally:
        torch.set_num_threads(before)


def _row(name: str, goal: float, plain: Callable[[int], object], private: Callable[[int], object]) -> Row:
    usual, ours = _a_step(plain), _a_step(private)
    detail = f"CPU time on one thread: private {1000 * ours:.1f} ms, plain {1000 * usual:.1f} ms"
    return Row(name, ours / usual, "x", goal, True, detail)


def _a_step(work: Callable[[int], object]) -> float:
    """CPU seconds of a step, by what STEPS more of them take; best of a few."""
    found = {1: float("inf"), 1 + STEPS: float("inf")}
    for _ in range(4):
        for steps in found:
            started = time.process_time()
            work(steps)
            found[steps] = min(found[steps], time.process_time() - started)
    return (found[1 + STEPS] - found[1]) / STEPS


def _conv2() -> tuple[Callable[[int], object], Callable[[int], object]]:
    _, fed = federation(images(BATCH, 32), np.arange(BATCH)[None], **{"method.name": "fedavg", "model.name": "conv2"})
    method, kept, down = _start(fed)

    def plain(steps: int) -> object:
        return client.update(method, fed.net, kept, down, ClientData(fed.train, fed.parts[0]), Sgd(epochs=steps))

    def private(steps: int) -> object:
        data = ClientData(fed.train, fed.parts[0])
        noise = SeededNoise(0, 1, 0)
        return client.private_update(method, fed.net, kept, down, data, Sgd(epochs=steps), EVERY, noise)

    return plain, private


def _mlp() -> tuple[Callable[[int], object], Callable[[int], object]]:
    data, parts = small_clients()
    settings = {"method.name": "fedavg", "model.name": "mlp", "model.args": {}}
    _, fed = federation(data, parts[:CLIENTS], **settings)
    method, kept, down = _start(fed)

    def block() -> Block:
        return Block(fed.train, fed.parts, range(CLIENTS), 0, 1, "train")

    def plain(steps: int) -> object:
        return update_block(method, fed.net, block(), [kept] * CLIENTS, down, Sgd(epochs=steps))

    def private(steps: int) -> object:
        noises = [SeededNoise(0, 1, k) for k in range(CLIENTS)]
        every = [kept] * CLIENTS
        return private_update_block(method, fed.net, block(), every, down, Sgd(epochs=steps), (), EVERY, noises)

    return plain, private


def _start(fed: Federation) -> tuple[Method, Tree, Tree]:
    server = fed.method.init(fed.net, torch_rng(0, "init"))
    return fed.method, fed.method.enroll(server), fed.method.broadcast(server)
