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
from functools import cached_property, partial
from itertools import chain
from math import prod
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fednh.config import Config
from fednh.data.batches import EVAL_BATCH, ClientData, Samples, blank_samples, drawn_number, summed_by_class
from fednh.data.partitions import Indices
from fednh.errors import ConfigError
from fednh.federated.client import OPTIMIZER, ClientResult, methods_own
from fednh.federated.setup import Federation
from fednh.methods.base import Method
from fednh.methods.fit import Calls, moving_names
from fednh.methods.losses import BatchLoss, Loss, of_batch
from fednh.methods.maps import outside
from fednh.methods.optimizers import FitSettings, Sgd, State, as_tree, dense, like
from fednh.models.net import Net
from fednh.seeding import torch_rng
from fednh.tree import Tree, double, finite_rows, prefix, stack, strip_prefix

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

    def walk(self, batch_size: int, steps: int) -> Iterator[tuple[Tensor, Tensor, Indices]]:  # (K, b), (K, b), (K,)
        """So many batches of every client, their weights and sizes; who is through its samples begins a new order."""
        clients, width = len(self), min(batch_size, self.width)
        orders, at = [np.empty(0, np.int64)] * clients, np.zeros(clients, np.int64)
        for _ in range(steps):
            index, taken = np.zeros((clients, width), np.int64), np.zeros(clients, np.int64)
            for k, (size, rng) in enumerate(zip(self.sizes, self._rngs, strict=True)):
                if at[k] == len(orders[k]):
                    orders[k], at[k] = torch.randperm(int(size), generator=rng).numpy(), 0
                chunk = orders[k][at[k] : at[k] + batch_size]
                index[k, : len(chunk)], taken[k] = chunk, len(chunk)
            at += taken
            weight = torch.from_numpy(np.arange(width) < taken[:, None])
            yield torch.from_numpy(index).to(self.index.device), weight.to(self.index.device, torch.float32), taken

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

    def class_sums(self, features: Callable[[Tensor], Tensor]) -> Tensor:  # (C, D)
        return summed_by_class(features, self.batches(), len(self.counts))

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

    def __init__(
        self, data: VmapClientData, settings: FitSettings, frozen: Collection[str] = (), memory: Tree | None = None
    ):
        self.data, self.settings, self.frozen = data, settings, frozen
        self.memory: Tree = memory or {}
        self.calls = Calls()
        self.samples = np.zeros(len(data.block), np.int64)  # that each client has processed
        self.loss_sum = double(torch.zeros((), device=data.block.index.device))

    def __call__(
        self, params: Tree, loss: Loss, *, only: tuple[str, ...], epochs: float | None = None, plain: bool = False
    ) -> Tree:
        # One batch holds all samples of every client: their order cannot matter to losses of single samples.
        whole = self.data.block.width <= self.settings.batch_size
        return self._trained(params, of_batch(loss), only, epochs, plain, shuffled=not whole)

    def batchwise(
        self, params: Tree, loss: BatchLoss, *, only: tuple[str, ...], epochs: float | None = None, plain: bool = False
    ) -> Tree:
        return self._trained(params, loss, only, epochs, plain)

    def _trained(
        self,
        params: Tree,
        loss: BatchLoss,
        only: tuple[str, ...],
        epochs: float | None,
        plain: bool,
        shuffled: bool = True,
    ) -> Tree:
        settings, data = self.settings.plain if plain else self.settings, self.data
        params = dict(sorted(params.items()))
        names = moving_names(params, only, self.frozen)
        if not names:
            return params
        fixed = {name: value for name, value in params.items() if name not in names}
        step, call = BlockStep(settings), self.calls.name(only)
        moving = dict(zip(names, outside(step.begin, data.me, *(params[name] for name in names)), strict=True))
        if memory := strip_prefix(self.memory, call):
            outside(partial(step.restore, names, list(memory)), data.me, *memory.values())
        for chunk, real, step.everyone in self._batches(epochs, shuffled):
            count = real.sum()
            weight = real / count.clamp(min=1)
            values, carried = loss({**fixed, **moving}, data.x[chunk], data.y[chunk], weight)
            (value,) = outside(step, (values * weight).sum(), count)
            for name, new in carried.items():
                fixed[name] = new.detach() if step.everyone else torch.where(count > 0, new.detach(), fixed[name])
            self.loss_sum = self.loss_sum + value * count
        if settings.keep_state:
            state = as_tree(names, step.state)
            mapped = outside(lambda _: list(state.values()), data.me)
            self.memory = {**self.memory, **prefix(call, dict(zip(state, mapped, strict=True)))}
        return {**fixed, **{name: value.detach().contiguous() for name, value in moving.items()}}

    def _batches(self, epochs: float | None, shuffled: bool) -> Iterator[tuple[Tensor | slice, Tensor, bool]]:
        """Rows of every batch, the weights of its samples, and whether every client has one in it."""
        data, block, size = self.data, self.data.block, self.settings.batch_size
        steps = self.settings.steps if epochs is None else None
        if steps is not None and shuffled:
            for index, weight, taken in block.walk(size, steps):
                self.samples += taken
                yield index[data.me], weight[data.me], True
            return
        # Not shuffled, every batch has all samples: a step is an epoch.
        times = self._epochs(epochs) if steps is None else steps
        whole, share = times // 1, times % 1
        smallest = int(block.sizes.min())
        for _ in range(int(whole)):
            order = block.shuffle()[data.me] if shuffled or share else None
            for start in range(0, block.width, size):
                here = slice(start, start + size)
                yield here if order is None else order[here], data.real[here], start < smallest
            self.samples += block.sizes
        if share:
            numbers = np.array([drawn_number(share, int(each)) for each in block.sizes])
            order = block.shuffle()[data.me]
            real = torch.from_numpy(np.arange(block.width) < numbers[:, None])
            weight = real.to(block.real)[data.me]
            for start in range(0, int(numbers.max()), size):
                here = slice(start, min(start + size, int(numbers.max())))
                yield order[here], weight[here], start < int(numbers.min())
            self.samples += numbers

    def _epochs(self, epochs: float | None) -> float:
        return self.settings.epochs if epochs is None else epochs

    def reach(self, epochs: float | None = None) -> Tensor:  # (): a client of fewer batches takes fewer steps
        sizes, size, steps = self.data.block.sizes, self.settings.batch_size, self.settings.steps
        if epochs is None and steps is not None:
            taken = np.full(len(sizes), steps)
        else:
            passes = self._epochs(epochs)
            whole, share = passes // 1, passes % 1
            rest = np.array([drawn_number(share, int(each)) if share else 0 for each in sizes])
            taken = whole * -(-sizes // size) + -(-rest // size)
        return self.settings.reach(torch.from_numpy(taken).to(self.data.real)[self.data.me])


class BlockStep:
    """Steps of all clients of a block, outside of the map: one backward pass, then clipping and the optimiser's step.

    A client's loss depends on its own parameters alone, so the gradient of the sum over clients has each client's in
    its row.
    """

    everyone = True  # whether every client has a sample in the batch; set before a step

    state: State

    def __init__(self, settings: FitSettings):
        self.settings = settings

    def begin(self, me: Tensor, *params: Tensor) -> list[Tensor]:  # (K, ...) each
        """Every client's own copy of the parameters. Matrices lie transposed in memory, as their gradients do."""
        self.params = [_own(value.mT).mT if value.ndim == 3 else _own(value) for value in params]
        self.state = self.settings.fresh(self.params, len(me))
        return [value.requires_grad_() for value in self.params]

    def restore(self, names: Sequence[str], kept: Sequence[str], me: Tensor, *values: Tensor) -> list[Tensor]:
        """Every client's own state of the optimiser, from the tree that `as_tree` made; what it lacks stays fresh."""
        before = dict(zip(kept, values, strict=True))
        for slot, rows in self.state.items():
            for name, row in zip(names, rows, strict=True):
                if f"{slot}.{name}" in before:
                    row.copy_(before[f"{slot}.{name}"])
        return []

    def __call__(self, value: Tensor, count: Tensor) -> tuple[Tensor]:  # (K,), (K,)
        """Every client's loss, once its parameters are updated; `count` is 0 for clients that have no batch left."""
        parts = torch.autograd.grad(value.sum(), self.params, allow_unused=True)
        with torch.no_grad():
            here = [i for i, part in enumerate(parts) if part is not None]
            params = [self.params[i] for i in here]
            state = {slot: [column[i] for i in here] for slot, column in self.state.items()}
            gradients = self._clipped([like(parts[i], p) for i, p in zip(here, params, strict=True)])
            if self.everyone:
                self.settings.move(params, gradients, state)
                return (value.detach(),)
            rows = count.nonzero().flatten()
            theirs, slopes = ([each[rows] for each in column] for column in (params, gradients))
            memory = {slot: [each[rows] for each in column] for slot, column in state.items()}
            self.settings.move(theirs, slopes, memory)
            for whole, part in zip(chain(params, *state.values()), chain(theirs, *memory.values()), strict=True):
                whole.index_copy_(0, rows, part)
        return (value.detach(),)

    def _clipped(self, gradients: list[Tensor]) -> list[Tensor]:
        """Every client's gradient, no longer than `clip`."""
        if self.settings.clip <= 0:
            return gradients
        norms = [torch.linalg.vector_norm(dense(each).reshape(len(each), -1), dim=1) for each in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)  # (K,)
        shrink = (self.settings.clip / (norm + 1e-6)).clamp(max=1.0)
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
    settings: FitSettings,
    own: Sequence[Tree] = (),
) -> list[ClientResult]:
    """`client.update` for all clients of the block at once; each has received its `own` in place of `received`."""
    processed = []

    def one(me: Tensor, kept: Tree, received: Tree) -> tuple[Tree, Tree, Tensor]:
        data = VmapClientData(block, me)
        fit = BlockFit(data, settings, net.frozen, strip_prefix(kept, OPTIMIZER))
        keep, upload = method.client_update(net, methods_own(kept), received, cast(ClientData, data), fit)
        processed.extend(fit.samples.tolist())
        return {**keep, **prefix(OPTIMIZER, fit.memory)}, upload, fit.loss_sum

    keep, upload, loss = mapped(one, block, kept, received, own)
    sound, sendable = (finite_rows(tree, len(block)) for tree in (keep, upload))
    own_memory = {name: [row.clone() for row in value.unbind()] for name, value in keep.items()}  # the block's is freed
    rows = {name: value.unbind() for name, value in upload.items()}
    return [
        ClientResult(
            {name: values[k] for name, values in own_memory.items()},
            {name: values[k] for name, values in rows.items()},
            samples,
            loss_sum,
            kept_finite=sound[k],
            upload_finite=sendable[k],
        )
        for k, (samples, loss_sum) in enumerate(zip(processed, loss.tolist(), strict=True))
    ]


def mapped(
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
    """Blocks of clients with one network, of neighbours in the order, which is by size: little is padded."""
    nets = fed.architectures.nets
    if len(nets) == 1:
        yield from _blocks_of(fed.net, fed, order)
        return
    for name, net in nets.items():
        yield from _blocks_of(net, fed, [client for client in order if fed.dealt[client] == name])


def _blocks_of(net: Net, fed: Federation, order: Sequence[int]) -> Iterator[Sequence[int]]:
    """Blocks of neighbours, equally large as far as they fit."""
    wanted = min(LARGEST, max(SMALLEST, -(-len(order) // BLOCKS)))
    even = -(-len(order) // max(1, -(-len(order) // wanted)))
    start = 0
    while start < len(order):
        end = start + min(even, block_size(net, len(fed.parts[order[start]])))
        yield order[start:end]
        start = end


def block_size(net: Net, samples: int) -> int:
    """How many clients with this many samples go into a block: their states and data should stay in the CPU cache."""
    parameters = sum(prod(shape) for shape in net.parameter_shapes)
    by_data = DATA_BYTES // (4 * prod(net.shape) * max(1, samples))
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
    nets = fed.architectures.nets.values()
    convolutions = any(len(shape) > 2 for net in nets for shape in net.parameter_shapes)
    picked = config.participation.rate * len(fed.parts) / len(nets)  # clients of one network
    sums = sum(server[name].nbytes for name in fed.method.upload.summed)  # a client's are as large as the server's
    fits = min(block_size(net, typical) for net in nets) >= 8 and 8 * sums <= STATE_BYTES
    return picked >= FEWEST and not convolutions and fits


def _obstacle(config: Config, fed: Federation) -> str | None:
    if fed.train.views > 1:
        return "each client draws views of its samples on its own (features.views = 1 turns it off)"
    if fed.train.augment:
        return "training images are augmented, each client's on its own (data.augment = 'none' turns it off)"
    if config.diagnostics.gradient_norm:
        return "diagnostics.gradient_norm measures one client at a time"
    if any(net.random for net in fed.architectures.nets.values()):
        return "the model has random layers, such as dropout, which each client draws for itself"
    if any(net.stateful for net in fed.architectures.nets.values()):
        return "model.norm = 'local' gives every client a normalisation of its own"
    if any(net.statistics for net in fed.architectures.nets.values()):
        return "model.norm = 'average' updates every client's running statistics on its own"
    return None


def _does_not_map(fed: Federation, server: Tree) -> str | None:
    """Try two rounds of the method on two blank clients: why it cannot be mapped, or None.

    Two rounds, because the second begins with what the first one kept.
    """
    samples = blank_samples(fed.net.shape, fed.net.num_classes, fed.train.x.device)
    everything, method = np.arange(len(samples)), fed.method
    for name, net in fed.architectures.nets.items():
        alone = fed.architectures.view(server, name)
        kept, down = [method.enroll(alone)] * 2, method.broadcast(alone)
        try:
            for round_ in range(2):
                block = Block(samples, [everything, everything[:1]], [0, 1], 0, round_, "train")
                kept = [update.keep for update in update_block(method, net, block, kept, down, Sgd(epochs=1))]
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            return f"{type(method).__name__} or its model does not run for many clients at once ({reason})"
    return None
