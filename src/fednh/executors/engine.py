"""Which engine computes the clients of a run: "loop", one client at a time, or "vmap", blocks of small ones.

Both call the same methods on the same random draws and give the same numbers, up to rounding. Within one engine the
bits do not depend on who computes: blocks are made from the clients, not from the workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from fednh.config import Config
from fednh.core.federation import Federation
from fednh.core.fit import Sgd
from fednh.core.tree import Tree
from fednh.data.batches import blank_samples
from fednh.errors import UserError
from fednh.executors.vmap import Block, update_block

FEWEST = 32  # clients per round: with fewer, vmap does not pay off
LARGEST = 64  # clients in a block: more gain nothing
STATE_BYTES = 16 << 20  # of one copy of a block's parameters
DATA_BYTES = 32 << 20  # of a block's padded samples


def blocks(fed: Federation, order: Sequence[int]) -> Iterator[list[int]]:
    """Blocks of neighbours in the order, as many as fit; the order is by size, so little is padded."""
    block: list[int] = []
    limit = 0
    for client in order:
        if not block:
            limit = block_size(fed, len(fed.parts[client]))
        block.append(client)
        if len(block) == limit:
            yield block
            block = []
    if block:
        yield block


def block_size(fed: Federation, samples: int) -> int:
    """How many clients with this many samples go into a block: their states and data should stay in the CPU cache."""
    parameters = sum(prod(shape) for shape in fed.net.parameter_shapes)
    by_data = DATA_BYTES // (4 * prod(fed.net.shape) * max(1, samples))
    return max(1, min(LARGEST, STATE_BYTES // (4 * parameters), by_data))


def choose(config: Config, fed: Federation, server: Tree) -> str:
    """The engine that a config asks for; "auto" follows a fixed rule, so that the same run always gets the same engine.

    The rule: vmap where at least `FEWEST` clients are picked a round, the model has no convolutions, eight typical
    clients or more fit into a block, and no setting needs the loop.
    """
    if config.engine == "loop" or (config.engine == "auto" and not _worth(config, fed)):
        return "loop"
    obstacle = _obstacle(config, fed) or _does_not_map(fed, server)
    if obstacle and config.engine == "vmap":
        raise UserError(f"engine = 'vmap' cannot be used: {obstacle}; use engine = 'loop'")
    return "loop" if obstacle else "vmap"


def _worth(config: Config, fed: Federation) -> bool:
    typical = int(np.median([len(part) for part in fed.parts]))
    convolutions = any(len(shape) > 2 for shape in fed.net.parameter_shapes)
    picked = config.participation.rate * len(fed.parts)
    return picked >= FEWEST and not convolutions and block_size(fed, typical) >= 8


def _obstacle(config: Config, fed: Federation) -> str | None:
    if fed.train.augment:
        return "training images are augmented, each client's on its own (data.augment = 'none' turns it off)"
    if config.diagnostics.gradient_norm:
        return "diagnostics.gradient_norm measures one client at a time"
    if fed.net.random:
        return "the model has random layers, such as dropout, which each client draws for itself"
    if fed.net.stateful:
        return "model.norm = 'local' gives every client a normalisation of its own"
    return None


def _does_not_map(fed: Federation, server: Tree) -> str | None:
    """Try the method on two blank clients without training: why it cannot be mapped, or None."""
    samples = blank_samples(fed.net.shape, fed.net.num_classes, fed.train.x.device)
    everything = np.arange(len(samples))
    kept, down = fed.method.enroll(server), fed.method.broadcast(server)
    try:
        block = Block(samples, [everything, everything[:1]], [0, 1], 0, 0, "train")
        update_block(fed.method, fed.net, block, [kept, kept], down, Sgd(epochs=1))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        return f"{type(fed.method).__name__} or its model does not run for many clients at once ({reason})"
    return None
