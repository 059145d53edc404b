"""DP-SGD for a block of small clients at once: the private `fit` and `data` inside of the map of vmap.py.

Every client's noise and choice of samples come from its own generator, drawn outside of the map in the order in which
privacy/private_fit.py draws them for one client: both engines have the same numbers, up to rounding. A step's batches
differ in size; they are padded with each client's first sample, which counts zero.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from fednh.backends.vmap import Block, VmapClientData, mapped
from fednh.data.batches import ClientData
from fednh.federated.client import ClientResult, methods_own
from fednh.methods.base import Method
from fednh.methods.maps import outside
from fednh.methods.optimizers import FitSettings, like
from fednh.models.net import Net
from fednh.privacy.accounting import Release
from fednh.privacy.noise import Noise
from fednh.privacy.private_data import PRIVATE, Mechanisms, PrivateData
from fednh.privacy.private_fit import Mover, PrivateFit
from fednh.tree import Tree, finite_rows, prefix, strip_prefix


class BlockNoise:
    """Inside the map: each client's own noise."""

    def __init__(self, me: Tensor, noises: Sequence[Noise]):
        self.me, self.noises = me, noises

    def gaussian(self, shape: torch.Size | tuple[int, ...]) -> Tensor:
        return self._mapped([noise.gaussian(shape) for noise in self.noises])

    def once(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._mapped([noise.once(name, shape) for noise in self.noises])

    def chosen(self, samples: int, rate: float) -> Tensor:
        raise NotImplementedError("clients of a block differ in size; see `BlockPrivateFit.batches`")

    def augmenting(self, seeded: torch.Generator) -> torch.Generator:
        raise NotImplementedError("samples of a block are not augmented")

    def _mapped(self, rows: list[Tensor]) -> Tensor:
        return outside(lambda me: (torch.stack(rows).to(me.device),), self.me)[0]


class BlockMover:
    """`Mover` inside the map; parameters and state lie outside of it."""

    def __init__(self, me: Tensor, params: Tree, settings: FitSettings):
        self.me, self.settings = me, settings
        self.params = dict(zip(params, outside(self._begin, me, *params.values()), strict=True))

    def _begin(self, me: Tensor, *params: Tensor) -> list[Tensor]:  # (K, ...) each
        self.own = [value.detach().clone(memory_format=torch.contiguous_format) for value in params]
        self.state = self.settings.fresh(self.own, len(me))
        return self.own

    def __call__(self, gradients: list[Tensor]) -> None:
        outside(self._move, self.me, *gradients)

    def _move(self, me: Tensor, *gradients: Tensor) -> list[Tensor]:
        with torch.no_grad():
            self.settings.move(self.own, [like(g, p) for g, p in zip(gradients, self.own, strict=True)], self.state)
        return []


class BlockPrivateFit(PrivateFit):
    """`PrivateFit` inside the map, for all clients of the block in step."""

    def __init__(
        self,
        data: PrivateData,
        settings: FitSettings,
        block: Block,
        noise: BlockNoise,
        frozen: Collection[str] = (),
    ):
        super().__init__(data, settings, frozen=frozen)
        self.block, self.noises, self.me = block, noise.noises, noise.me

    def mover(self, params: Tree, settings: FitSettings) -> Mover:
        return cast(Mover, BlockMover(self.me, params, settings))

    def batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        rate, block = self.data.mechanisms.rate, self.block
        chosen = [noise.chosen(int(size), rate) for noise, size in zip(self.noises, block.sizes, strict=True)]
        width = max(map(len, chosen))
        rows, weight = torch.zeros(len(block), width, dtype=torch.long), torch.zeros(len(block), width)
        for k, each in enumerate(chosen):
            rows[k, : len(each)], weight[k, : len(each)] = each, 1.0
        rows, weight = rows.to(block.index.device), weight.to(block.index.device)
        raw = self.data.raw
        for start in range(0, width, batch_size):
            here = slice(start, start + batch_size)
            mine, counts = outside(lambda _, here=here: (rows[:, here], weight[:, here]), self.me)
            yield raw.x[mine], raw.y[mine], counts  # type: ignore[attr-defined]


def private_update_block(
    method: Method,
    net: Net,
    block: Block,
    kept: Sequence[Tree],
    received: Tree,
    settings: FitSettings,
    own: Sequence[Tree],
    mechanisms: Mechanisms,
    noises: Sequence[Noise],
) -> list[ClientResult]:
    """`client.private_update` for all clients of the block at once."""
    released: list[Release] = []

    def one(me: Tensor, kept: Tree, received: Tree) -> tuple[Tree, Tree]:
        raw, noise = cast(ClientData, VmapClientData(block, me)), BlockNoise(me, noises)
        data = PrivateData(raw, mechanisms, noise, strip_prefix(kept, PRIVATE))
        fit = BlockPrivateFit(data, settings, block, noise, net.frozen)
        keep, upload = method.client_update(net, methods_own(kept), received, cast(ClientData, data), fit)
        released[:] = data.spent
        return {**keep, **prefix(PRIVATE, data.kept)}, upload

    keep, upload = mapped(one, block, kept, received, own)
    sound, sendable = (finite_rows(tree, len(block)) for tree in (keep, upload))
    return [
        ClientResult(
            {name: value[k].clone() for name, value in keep.items()},
            {name: value[k] for name, value in upload.items()},
            kept_finite=sound[k],
            upload_finite=sendable[k],
            released=tuple(released),
        )
        for k in range(len(block))
    ]
