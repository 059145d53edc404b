"""Many small clients at once: `client_update` mapped over a block of them by `torch.func.vmap`.

A method is written for one client and runs here unchanged. Inside the map every tensor is one client's, while each
operation works on the whole block; so a small client costs arithmetic, not Python calls. Clients differ in size: all
are padded to the largest of the block with copies of their own first sample, which have weight zero, and a client that
has no batch left in a step is not updated in it.

`choose_engine` decides between "loop", one client at a time, and "vmap". Both call the same methods on the same random
draws and give the same numbers, up to rounding. Within one engine the bits do not depend on who computes: blocks are
made from the clients, not from the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.func import vmap

from fednh.config import Config
from fednh.data.batches import EVAL_BATCH, ClientData, Samples, blank_samples, drawn_number
from fednh.data.partitions import Indices
from fednh.errors import ConfigError
from fednh.federated.client import ClientResult
from fednh.federated.setup import Federation
from fednh.methods.base import Method
from fednh.methods.fit import Sgd, dense, descend, like, moving_names
from fednh.methods.losses import BatchLoss, Loss, of_batch
from fednh.models.net import Net
from fednh.seeding import torch_rng
from fednh.tree import Tree, finite_rows, stack

# --- a block --------------------------------------------------------------------------------------------------------


class Block:
    """The data of K clients as padded matrices, outside of the map; n is the largest client's size."""

    def __init__(
        self, samples: Samples, parts: Sequence[Indices], clients: Sequence[int], seed: int, round_: int, purpose: str
    ):
        self.samples, self.parts, self.clients = samples, parts, clients
        self.sizes = np.array([len(part) for part in parts])
        self.width = int(self.sizes.max())
        index = np.empty((len(parts), self.width), np.int64)
        for row, part in zip(index, parts, strict=True):
            row[: len(part)], row[len(part) :] = part, part[0]
        device = samples.x.device
        real = np.arange(self.width) < self.sizes[:, None]
        self.index = torch.from_numpy(index).to(device)  # (K, n)
        self.real = torch.from_numpy(real).to(device, torch.float32)  # (K, n): 0 marks padding
        x = samples.floats(samples.x[self.index.flatten()])
        self.x = x.view(*index.shape, *x.shape[1:])  # (K, n, ...)
        self.y = samples.y[self.index]  # (K, n)
        self.counts = torch.zeros(len(parts), samples.num_classes, device=device).scatter_add_(1, self.y, self.real)
        self._address, self._purpose = (seed, round_), purpose

    def __len__(self) -> int:
        return len(self.parts)

    def shuffle(self) -> Tensor:  # (K, n)
        """A new order of every client's samples, the same as `ClientData.shuffled` draws; padding stays last."""
        order = np.zeros((len(self), self.width), np.int64)
        for row, size, rng in zip(order, self.sizes, self._rngs, strict=True):
            row[:size] = torch.randperm(int(size), generator=rng).numpy()
        return torch.from_numpy(order).to(self.index.device)

    def random(self, times: int) -> Tensor:  # (K, times, n)
        """The numbers that each client's `ClientData.random` would give; padding gets zeros."""
        keys = torch.zeros(len(self), times, self.width)
        for row, size, client in zip(keys, self.sizes, self.clients, strict=True):
            row[:, :size] = torch.rand(times, int(size), generator=self._rng("method", client))
        return keys.to(self.index.device)

    @cached_property
    def _rngs(self) -> list[torch.Generator]:
        return [self._rng(self._purpose, client) for client in self.clients]

    def _rng(self, purpose: str, client: int) -> torch.Generator:
        seed, round_ = self._address
        return torch_rng(seed, purpose, round_, client)


def outside(work: Callable[..., Sequence[Tensor]], *mapped: Tensor) -> list[Tensor]:
    """Step out of the map: call `work` with every tensor as the whole block's (K, ...), and map what it returns.

    At least one of the tensors must be mapped. The rule by which a `torch.autograd.Function` is mapped could do the
    same, but every step needs a call, and its calls would take a twentieth of a round.
    """
    level = functorch.current_level()
    size = next(
        functorch.get_unwrapped(value).shape[functorch.maybe_get_bdim(value)]
        for value in mapped
        if functorch.is_batchedtensor(value)
    )
    whole = [_whole(value, size) for value in mapped]
    map_ = functorch.pop_dynamic_layer_stack()
    try:
        made = work(*whole)
    finally:
        functorch.push_dynamic_layer_stack(map_)
    return [functorch._add_batch_dim(value, 0, level) for value in made]


def _whole(value: Tensor, size: int) -> Tensor:  # (size, ...)
    if not functorch.is_batchedtensor(value):
        return value.expand(size, *value.shape)
    return functorch.get_unwrapped(value).movedim(functorch.maybe_get_bdim(value), 0)


class VmapClientData:
    """The `data` that a method is given inside the map: one client's, with the interface of `ClientData`.

    `me` is the client's row number. Indexing a matrix of the block with it gives the client's own part, mapped.
    """

    def __init__(self, block: Block, me: Tensor):
        self.block, self.me = block, me
        # (n, ...), (n,), (n,), (C,)
        self.x, self.y, self.real, self.counts = outside(lambda _: (block.x, block.y, block.real, block.counts), me)

    @property
    def share(self) -> Tensor:  # (C,)
        return self.counts / self.counts.sum()

    def batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        columns = (torch.split(column, EVAL_BATCH) for column in (self.x, self.y, self.real))
        yield from zip(*columns, strict=True)

    def random(self, times: int, size: int | None = None) -> Tensor:  # (times, n)
        return self.block.random(times)[self.me]

    def drawn(self, share: float, batch_size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The batches that each client's `ClientData.drawn` would give; what others have more of has weight zero."""
        numbers = [drawn_number(share, int(size)) for size in self.block.sizes]
        number = torch.tensor(numbers, device=self.real.device)[self.me]
        keys = self.random(1)[0] + 2 * (1 - self.real)  # padding last
        order = keys.argsort(stable=True)[: max(numbers)]
        weight = (torch.arange(max(numbers), device=order.device) < number).to(self.real.dtype)
        for chunk, counts in zip(torch.split(order, batch_size), torch.split(weight, batch_size), strict=True):
            yield self.x[chunk], self.y[chunk], counts


class BlockFit:
    """`fit` inside the map: what `LocalFit` does, for all clients of the block in step."""

    def __init__(self, data: VmapClientData, sgd: Sgd, frozen: Collection[str] = ()):
        self.data, self.sgd, self.frozen = data, sgd, frozen
        self.samples = 0  # each client's, in units of its size
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=data.block.index.device)

    def __call__(
        self, params: Tree, loss: Loss, *, only: tuple[str, ...], epochs: int | None = None, plain: bool = False
    ) -> Tree:
        # One batch holds all samples of every client: their order cannot matter to losses of single samples.
        whole = self.data.block.width <= self.sgd.batch_size
        return self._trained(params, of_batch(loss), only, epochs, plain, shuffled=not whole)

    def batchwise(
        self, params: Tree, loss: BatchLoss, *, only: tuple[str, ...], epochs: int | None = None, plain: bool = False
    ) -> Tree:
        return self._trained(params, loss, only, epochs, plain)

    def _trained(
        self,
        params: Tree,
        loss: BatchLoss,
        only: tuple[str, ...],
        epochs: int | None,
        plain: bool,
        shuffled: bool = True,
    ) -> Tree:
        sgd, data = self.sgd.plain if plain else self.sgd, self.data
        params = dict(sorted(params.items()))
        names = moving_names(params, only, self.frozen)
        if not names:
            return params
        fixed = {name: value for name, value in params.items() if name not in names}
        step = BlockStep(sgd)
        moving = dict(zip(names, outside(step.begin, data.me, *(params[name] for name in names)), strict=True))
        smallest = int(data.block.sizes.min())
        for _ in range(sgd.epochs if epochs is None else epochs):
            order = data.block.shuffle()[data.me] if shuffled else None
            for start in range(0, data.block.width, sgd.batch_size):
                here = slice(start, start + sgd.batch_size)
                real = data.real[here]
                count = real.sum()
                chunk = here if order is None else order[here]
                weight = real / count.clamp(min=1)
                values, carried = loss({**fixed, **moving}, data.x[chunk], data.y[chunk], weight)
                step.everyone = start < smallest
                (value,) = outside(step, (values * weight).sum(), count)
                for name, new in carried.items():
                    fixed[name] = new.detach() if step.everyone else torch.where(count > 0, new.detach(), fixed[name])
                self.loss_sum = self.loss_sum + value * count
            self.samples += 1
        return {**fixed, **{name: value.detach().contiguous() for name, value in moving.items()}}

    def reach(self, epochs: int | None = None) -> Tensor:  # (): a client of fewer batches takes fewer steps
        batches = (self.data.real.sum() / self.sgd.batch_size).ceil()
        return self.sgd.reach((self.sgd.epochs if epochs is None else epochs) * batches)


class BlockStep:
    """Steps of all clients of a block, outside of the map: one backward pass, then clipping, weight decay and momentum.

    A client's loss depends on its own parameters alone, so the gradient of the sum over clients has each client's in
    its row.
    """

    everyone = True  # whether every client has a sample in the batch; set before a step

    def __init__(self, sgd: Sgd):
        self.sgd = sgd

    def begin(self, me: Tensor, *params: Tensor) -> list[Tensor]:  # (K, ...) each
        """Every client's own copy of the parameters. Matrices lie transposed in memory, as their gradients do."""
        self.params = [_own(value.mT).mT if value.ndim == 3 else _own(value) for value in params]
        self.velocity = [torch.zeros_like(value) for value in self.params]
        return [value.requires_grad_() for value in self.params]

    def __call__(self, value: Tensor, count: Tensor) -> tuple[Tensor]:  # (K,), (K,)
        """Every client's loss, once its parameters are updated; `count` is 0 for clients that have no batch left."""
        parts = torch.autograd.grad(value.sum(), self.params, allow_unused=True)
        with torch.no_grad():
            moved = [row for row in zip(self.params, parts, self.velocity, strict=True) if row[1] is not None]
            params, gradients, velocity = ([row[i] for row in moved] for i in range(3))
            gradients = self._clipped([like(g, p) for p, g in zip(params, gradients, strict=True)])
            if self.everyone:
                descend(params, gradients, velocity, self.sgd)
                return (value.detach(),)
            rows = count.nonzero().flatten()
            theirs, slopes, speeds = ([each[rows] for each in column] for column in (params, gradients, velocity))
            descend(theirs, slopes, speeds, self.sgd)
            for whole, part in zip((*params, *velocity), (*theirs, *speeds), strict=True):
                whole.index_copy_(0, rows, part)
        return (value.detach(),)

    def _clipped(self, gradients: list[Tensor]) -> list[Tensor]:
        """Every client's gradient, no longer than `clip`."""
        if self.sgd.clip <= 0:
            return gradients
        norms = [torch.linalg.vector_norm(dense(each).reshape(len(each), -1), dim=1) for each in gradients]
        shrink = (self.sgd.clip / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp(max=1.0)  # (K,)
        if shrink.device.type == "cpu" and bool((shrink == 1).all()):
            return gradients
        # not in place: two names may share one gradient tensor
        return [each * shrink.view(-1, *[1] * (each.ndim - 1)) for each in gradients]


def _own(value: Tensor) -> Tensor:
    return value.detach().clone(memory_format=torch.contiguous_format)


def update_block(
    method: Method,
    net: Net,
    block: Block,
    kept: Sequence[Tree],
    received: Tree,
    sgd: Sgd,
    own: Sequence[Tree] = (),
) -> list[ClientResult]:
    """`client.update` for all clients of the block at once; each has received its `own` in place of `received`."""
    epochs = []

    def one(me: Tensor, kept: Tree, received: Tree) -> tuple[Tree, Tree, Tensor]:
        data = VmapClientData(block, me)
        fit = BlockFit(data, sgd, net.frozen)
        keep, upload = method.client_update(net, kept, received, cast(ClientData, data), fit)
        epochs.append(fit.samples)
        return keep, upload, fit.loss_sum

    keep, upload, loss = _mapped(one, block, kept, received, own)
    sound, sendable = (finite_rows(tree, len(block)) for tree in (keep, upload))
    own_memory = {name: [row.clone() for row in value.unbind()] for name, value in keep.items()}  # the block's is freed
    rows = {name: value.unbind() for name, value in upload.items()}
    return [
        ClientResult(
            {name: values[k] for name, values in own_memory.items()},
            {name: values[k] for name, values in rows.items()},
            size * epochs[0],
            loss_sum,
            kept_finite=sound[k],
            upload_finite=sendable[k],
        )
        for k, (size, loss_sum) in enumerate(zip(block.sizes.tolist(), loss.tolist(), strict=True))
    ]


def _mapped(
    one: Callable[..., Any], block: Block, kept: Sequence[Tree], received: Tree, own: Sequence[Tree] = ()
) -> Any:
    rows = torch.arange(len(block), device=block.index.device)
    apart = stack(own) if own and own[0] else {}
    axes = {name: 0 if name in apart else None for name in received} if apart else None
    # "same": the draws of `Block` come from each client's own generator and must not be mapped
    return vmap(one, in_dims=(0, 0 if kept[0] else None, axes), randomness="same")(
        rows, stack(kept) if kept[0] else {}, {**received, **apart}
    )


# --- loop or vmap ---------------------------------------------------------------------------------------------------


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


def choose_engine(
    config: Config, fed: Federation, server: Tree, note: Callable[[str], None] = lambda words: None
) -> str:
    """The engine that a config asks for; "auto" follows a fixed rule, so that the same run always gets the same engine.

    The rule: vmap where at least `FEWEST` clients are picked a round, the model has no convolutions, eight typical
    clients or more fit into a block, with the sums that they send, and no setting needs the loop. A `note` tells that a
    method cannot be mapped.
    """
    if config.engine == "loop" or (config.engine == "auto" and not _worth(config, fed, server)):
        return "loop"
    expected, fault = _obstacle(config, fed), None
    if not expected:
        fault = _does_not_map(fed, server)
    if config.engine == "vmap" and (expected or fault):
        raise ConfigError(f"engine = 'vmap' cannot be used: {expected or fault}; use engine = 'loop'")
    if fault:
        note(f"clients are computed one by one: {fault}")
    return "loop" if expected or fault else "vmap"


def _worth(config: Config, fed: Federation, server: Tree) -> bool:
    typical = int(np.median([len(part) for part in fed.parts]))
    convolutions = any(len(shape) > 2 for shape in fed.net.parameter_shapes)
    picked = config.participation.rate * len(fed.parts)
    sums = sum(server[name].nbytes for name in fed.method.upload.summed)  # a client's are as large as the server's
    fits = block_size(fed, typical) >= 8 and 8 * sums <= STATE_BYTES
    return picked >= FEWEST and not convolutions and fits


def _obstacle(config: Config, fed: Federation) -> str | None:
    if fed.train.views > 1:
        return "each client draws views of its samples on its own (features.views = 1 turns it off)"
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
