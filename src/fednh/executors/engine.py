"""Which engine computes the clients of a run: "loop", one client at a time, or "vmap", blocks of small ones.

Both call the same methods on the same random draws and give the same numbers, up to rounding. Within one engine the
bits do not depend on who computes: blocks are made from the clients, not from the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
SMALLEST, LARGEST = 32, 128  # clients in a block: fewer cost too many calls, more gain nothing ...
BLOCKS = 8  # ... and in between a round has this many blocks, for as many workers
STATE_BYTES = 16 << 20  # of one copy of a block's parameters
DATA_BYTES = 32 << 20  # of a block's padded samples


def blocks(fed: Federation, order: Sequence[int]) -> Iterator[Sequence[int]]:
    """Blocks of neighbours in the order, equally large as far as they fit; the order is by size: little is padded."""
    wanted = min(LARGEST, max(SMALLEST, -(-len(order) // BLOCKS)))
    even = -(-len(order) // max(1, -(-len(order) // wanted)))
    start = 0
    while start < len(order):
        end = start + min(even, block_size(fed, len(fed.parts[order[start]])))
        yield order[start:end]
        start = end


def block_size(fed: Federation, samples: int) -> int:
    """How many clients with this many samples go into a block: their states and data should stay in the CPU cache."""
    parameters = sum(prod(shape) for shape in fed.net.parameter_shapes)
    by_data = DATA_BYTES // (4 * prod(fed.net.shape) * max(1, samples))
    return max(1, min(LARGEST, STATE_BYTES // (4 * parameters), by_data))


def choose(config: Config, fed: Federation, server: Tree, note: Callable[[str], None] = lambda words: None) -> str:
    """The engine that a config asks for; "auto" follows a fixed rule, so that the same run always gets the same engine.

    The rule: vmap where at least `FEWEST` clients are picked a round, the model has no convolutions, eight typical
    clients or more fit into a block, and no setting needs the loop. A `note` tells that a method cannot be mapped.
    """
    if config.engine == "loop" or (config.engine == "auto" and not _worth(config, fed)):
        return "loop"
    expected, fault = _obstacle(config, fed), None
    if not expected:
        fault = _does_not_map(fed, server)
    if config.engine == "vmap" and (expected or fault):
        raise UserError(f"engine = 'vmap' cannot be used: {expected or fault}; use engine = 'loop'")
    if fault:
        note(f"clients are computed one by one: {fault}")
    return "loop" if expected or fault else "vmap"


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
    """Try two rounds of the method on two blank clients: why it cannot be mapped, or None.

    Two rounds, because the second begins with what the first one kept.
    """
    samples = blank_samples(fed.net.shape, fed.net.num_classes, fed.train.x.device)
    everything = np.arange(len(samples))
    kept, down = [fed.method.enroll(server)] * 2, fed.method.broadcast(server)
    try:
        for round_ in range(2):
            block = Block(samples, [everything, everything[:1]], [0, 1], 0, round_, "train")
            kept = [update.keep for update in update_block(fed.method, fed.net, block, kept, down, Sgd(epochs=1))]
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        return f"{type(fed.method).__name__} or its model does not run for many clients at once ({reason})"
    return None
