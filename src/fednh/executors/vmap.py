"""Many small clients at once: `client_update` mapped over a block of them by `torch.func.vmap`.

A method is written for one client and runs here unchanged. Inside the map every tensor is one client's, while each
operation works on the whole block; so a small client costs arithmetic, not Python calls. Clients differ in size: all
are padded to the largest of the block with copies of their own first sample, which have weight zero, and a client
that has no batch left in a step is not updated in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fednh.core.client import Update
from fednh.core.fit import Sgd
from fednh.core.losses import BatchLoss, Loss, of_batch
from fednh.core.seeding import torch_rng
from fednh.core.tree import Tree, belongs, finite_rows, stack
from fednh.data.batches import EVAL_BATCH, ClientData, Samples, drawn_number
from fednh.data.partitions import Indices
from fednh.methods.base import Method
from fednh.models.net import Net


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
        self.y = samples.y[self.index]  # (K, n)
        self.counts = torch.zeros(len(parts), samples.num_classes, device=device).scatter_add_(1, self.y, self.real)
        self._address = (seed, round_)
        self._rngs = [self._rng(purpose, client) for client in clients]

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

    def _rng(self, purpose: str, client: int) -> torch.Generator:
        seed, round_ = self._address
        return torch_rng(seed, purpose, round_, client)


class OneOfBlock:
    """The `data` that a method is given inside the map: one client's, with the interface of `ClientData`.

    `me` is the client's row number. Indexing a matrix of the block with it gives the client's own part, mapped.
    """

    def __init__(self, block: Block, me: Tensor):
        self.block, self.me = block, me
        self.counts = block.counts[me]  # (C,)
        self.y = block.y[me]  # (n,)
        self.real = block.real[me]  # (n,)
        self.x = block.samples.floats(block.samples.x[block.index[me]])  # (n, ...)

    @property
    def share(self) -> Tensor:  # (C,)
        return self.counts / self.counts.sum()

    def batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        columns = (torch.split(column, EVAL_BATCH) for column in (self.x, self.y, self.real))
        yield from zip(*columns, strict=True)

    def random(self, times: int) -> Tensor:  # (times, n)
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

    def __init__(self, data: OneOfBlock, sgd: Sgd):
        self.data, self.sgd = data, sgd
        self.samples = 0  # each client's, in units of its size
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=data.block.index.device)

    def __call__(self, params: Tree, loss: Loss, *, only: tuple[str, ...], epochs: int | None = None) -> Tree:
        # One batch holds all samples of every client: their order cannot matter to losses of single samples.
        whole = self.data.block.width <= self.sgd.batch_size
        return self._trained(params, of_batch(loss), only, epochs, shuffled=not whole)

    def batchwise(self, params: Tree, loss: BatchLoss, *, only: tuple[str, ...], epochs: int | None = None) -> Tree:
        return self._trained(params, loss, only, epochs)

    def _trained(
        self, params: Tree, loss: BatchLoss, only: tuple[str, ...], epochs: int | None, shuffled: bool = True
    ) -> Tree:
        sgd, data = self.sgd, self.data
        params = dict(sorted(params.items()))
        fixed = {name: value for name, value in params.items() if not belongs(name, only)}
        # Adding a mapped zero gives every client its own copy of parameters that are shared when received.
        moving = {name: value + 0 * data.real[0] for name, value in params.items() if name not in fixed}
        if not moving:
            raise ValueError(f"nothing to train: no name in {sorted(params)} belongs to {only}")
        velocity = {name: torch.zeros_like(value) for name, value in moving.items()}
        used: set[str] = set()  # what the loss does not depend on is not decayed either, as in `LocalFit`

        def objective(moving: Tree, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tree]:
            values, carried = loss({**fixed, **moving}, x, y, weight)
            value = (values * weight).sum()
            if not used:
                used.update(_depends_on(value, moving))
            return value, carried

        slope = grad_and_value(objective, has_aux=True)
        smallest = int(data.block.sizes.min())
        for _ in range(sgd.epochs if epochs is None else epochs):
            order = data.block.shuffle()[data.me] if shuffled else None
            for start in range(0, data.block.width, sgd.batch_size):
                here = slice(start, start + sgd.batch_size)
                real = data.real[here]
                count = real.sum()
                chunk = here if order is None else order[here]
                gradients, (value, carried) = slope(moving, data.x[chunk], data.y[chunk], real / count.clamp(min=1))
                # If every client has a sample in this batch, all are updated and no mask is needed.
                active = None if start < smallest else (count > 0).to(value.dtype)
                move({name: moving[name] for name in moving if name in used}, velocity, gradients, sgd, active)
                for name, new in carried.items():
                    fixed[name] = new if active is None else torch.where(active > 0, new, fixed[name])
                self.loss_sum = self.loss_sum + value * count
            self.samples += 1
        return {**fixed, **moving}

    def reach(self, epochs: int | None = None) -> Tensor:  # (): a client of fewer batches takes fewer steps
        batches = (self.data.real.sum() / self.sgd.batch_size).ceil()
        return self.sgd.reach((self.sgd.epochs if epochs is None else epochs) * batches)


def _depends_on(value: Tensor, params: Tree) -> list[str]:
    """The names that a value has a gradient for, even if it is zero."""
    gradients = torch.autograd.grad(value, list(params.values()), retain_graph=True, allow_unused=True)
    return [name for name, gradient in zip(params, gradients, strict=True) if gradient is not None]


def move(params: Tree, velocity: Tree, gradients: Tree, sgd: Sgd, active: Tensor | None) -> None:
    """Clipping, weight decay and momentum in place, as `fit.Momentum` does; `active` is 0 for clients not to update."""
    if sgd.clip > 0:
        norm = torch.stack([torch.linalg.vector_norm(gradients[name]) for name in params]).square().sum().sqrt()
        shrink = (sgd.clip / (norm + 1e-6)).clamp(max=1.0)
    for name, p in params.items():
        g, v = gradients[name], velocity[name]
        if sgd.clip > 0:
            g = g * shrink  # not in place: two names may share one gradient tensor
        if sgd.weight_decay > 0:
            g = g.add(p, alpha=sgd.weight_decay)
        if active is None:
            p.add_(v.mul_(sgd.momentum).add_(g), alpha=-sgd.lr)
        else:
            v.copy_(torch.where(active > 0, sgd.momentum * v + g, v))
            p.add_(v * active, alpha=-sgd.lr)


def update_block(
    method: Method,
    net: Net,
    block: Block,
    kept: Sequence[Tree],
    received: Tree,
    sgd: Sgd,
    own: Sequence[Tree] = (),
) -> list[Update]:
    """`client.update` for all clients of the block at once; each has received its `own` in place of `received`."""
    epochs = []

    def one(me: Tensor, kept: Tree, received: Tree) -> tuple[Tree, Tree, Tensor]:
        data = OneOfBlock(block, me)
        fit = BlockFit(data, sgd)
        keep, upload = method.client_update(net, kept, received, cast(ClientData, data), fit)
        epochs.append(fit.samples)
        return keep, upload, fit.loss_sum

    keep, upload, loss = _mapped(one, block, kept, received, own)
    sound, sendable = (finite_rows(tree, len(block)) for tree in (keep, upload))
    own_memory = {name: [row.clone() for row in value.unbind()] for name, value in keep.items()}  # the block's is freed
    rows = {name: value.unbind() for name, value in upload.items()}
    return [
        Update(
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
