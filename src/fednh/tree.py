"""Tree: the state of everything, as one flat dict from dotted name to tensor.

A `state_dict`, a safetensors file and what travels between server and client are all the same thing, so one
set of functions serves them all. Trees are values: no function here changes one, and nothing else should.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fednh.errors import UserError

Tree = dict[str, Tensor]


def has_prefix(name: str, parts: tuple[str, ...]) -> bool:
    """Whether `name` is one of `parts` or lies below one: "body.conv1.weight" belongs to "body"."""
    return any(name == part or name.startswith(part + ".") for part in parts)


def select(tree: Tree, *parts: str) -> Tree:
    """The entries below any of `parts`: `select(own, "body", "scale")`."""
    return {name: value for name, value in tree.items() if has_prefix(name, parts)}


def is_statistic(name: str) -> bool:
    """Whether a name is that of batch normalisation's running statistics, which are part of a model but not trained."""
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def prefix(part: str, tree: Tree) -> Tree:
    """Put a tree below a name: "head.weight" becomes "personal.head.weight"."""
    return {f"{part}.{name}": value for name, value in tree.items()}


def strip_prefix(tree: Tree, part: str) -> Tree:
    """What lies below a name, without it: the inverse of `prefix`."""
    return {name.removeprefix(part + "."): value for name, value in tree.items() if name.startswith(part + ".")}


def double(value: Tensor) -> Tensor:
    """In double precision, where the device has it: Apple's (mps) does not."""
    return value.to(double_dtype(value.device))


def double_dtype(device: torch.device) -> torch.dtype:
    """The widest floating-point type of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def to_device(value: Any, device: str) -> Any:
    """The same with all tensors on a device, also those in dicts, lists, tuples and dataclasses; unchanged if they are.

    >>> to_device({"a": (torch.ones(2), "text")}, "meta")["a"][0].device
    device(type='meta')
    """
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: to_device(each, device) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_device(each, device) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        now = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        moved = {name: to_device(each, device) for name, each in now.items()}
        return replace(value, **moved) if any(moved[name] is not now[name] for name in now) else value
    return value


def mean(trees: Iterable[Tree]) -> Tree:
    """The plain average, name by name.

    It takes a single pass, so the trees may come from a generator and need not be kept. The sum is taken in the order
    given: the same trees in the same order give the same bits.
    """
    total: Tree = {}
    count = 0
    for tree in trees:
        total = add(total, tree, count)
        count += 1
    return divide(total, count)


def add(total: Tree, tree: Tree, count: int, own: bool = False) -> Tree:
    """The sum of `count` trees with one more added. `total` is changed in place; the first is copied, if not `own`."""
    if count == 0:
        return tree if own else {name: value.clone() for name, value in tree.items()}
    if tree.keys() != total.keys():
        raise ValueError(f"trees to average differ in names: {sorted(tree.keys() ^ total.keys())}")
    if total:  # not every method uploads something
        torch._foreach_add_(list(total.values()), [tree[name] for name in total])
    return total


def compact(tree: Tree) -> Tree:
    """The tree, in which no tensor looks at a part of a larger memory and keeps all of it."""
    return {n: v if v.untyped_storage().nbytes() == v.nbytes else v.clone() for n, v in tree.items()}


def divide(total: Tree, count: int) -> Tree:
    """A sum of `count` trees as their mean."""
    if count == 0:
        raise ValueError("nothing to average")
    return {name: value / count for name, value in total.items()}


FAN = 16  # items of a node in a tree of sums


class SumTree:
    """The sum of numbered trees, by a shape that follows from their numbers alone: the same bits, whoever adds up.

    Trees number 0 to 15 are added in their order, so are 16 to 31, and so on: these are the sums of level 0. Sixteen of
    them, in their order, make a sum of level 1. A number may be missing. Up to sixteen trees are simply added up.

    >>> sums = SumTree()
    >>> for number in range(40):
    ...     sums.add({"w": torch.full((1,), float(number))}, number // FAN)
    >>> sums.total()
    {'w': tensor([780.])}

    What was added up elsewhere is added like a tree: it is all of a group, or its beginning.
    """

    def __init__(self) -> None:
        self._open: list[tuple[int, Tree] | None] = []  # by level: the sum that is not finished, and which one it is

    def add(self, tree: Tree, group: int, level: int = 0) -> None:
        """Add a tree, or a sum that was made elsewhere, to sum number `group` of a level. They come in their order."""
        for k in range(max(len(self._open), level + 1)):
            if k == len(self._open):
                self._open.append(None)
            if (here := self._open[k]) is not None and (k < level or here[0] != group // FAN ** (k - level)):
                self._open[k] = None
                self._put(here[1], here[0] // FAN, k + 1, own=True)
        self._put(tree, group, level, own=False)

    def total(self, level: int = 0) -> Tree:
        """The sum of all, which is also that of a group of this level if all belong to one."""
        top = max(level, len(self._open) - 1)
        for k in range(top):
            if (here := self._open[k]) is not None:
                self._open[k] = None
                self._put(here[1], here[0] // FAN, k + 1, own=True)
        last = self._open[-1] if self._open else None
        return {} if last is None else last[1]

    def _put(self, tree: Tree, group: int, level: int, own: bool) -> None:
        """Add to the open sum of a level, in place, or begin one: with the tree itself if it is our `own`."""
        if level == len(self._open):
            self._open.append(None)
        here = self._open[level]
        self._open[level] = group, add({} if here is None else here[1], tree, int(here is not None), own)


class RemoteTree(Tree):
    """A Tree whose numbers are on another machine: tensors of torch's meta device, which have a form and no data."""

    def sums(self) -> RemoteSums:
        """What adds up this tree and others of its kind, where they are."""
        raise NotImplementedError


class RemoteSums(Protocol):
    """A SumTree of remote trees."""

    def add(self, tree: RemoteTree, number: int) -> None: ...
    def total(self) -> Tree: ...


@dataclass(frozen=True)
class Uploads:
    """A round's uploads: their average by the federation's rule (its `aggregator`, see `federated/aggregate.py`).

    Single uploads are there for a method that declares `UploadSpec(single=True)`: `mean(uploads.trees)` is the plain
    average, whatever the rule is. Other rounds need not keep them.
    """

    average: Tree
    count: int
    kept: tuple[Tree, ...] | None = None

    @classmethod
    def of(cls, trees: Iterable[Tree], rule: Callable[[list[Tree]], Tree] = mean) -> Uploads:
        """Uploads that are all at hand, averaged by `rule`: for tests of a method."""
        rows = list(trees)
        return cls(rule(rows), len(rows), tuple(rows))

    def mean(self) -> Tree:
        """The average by the federation's rule."""
        return self.average

    @property
    def trees(self) -> tuple[Tree, ...]:
        """The single uploads, in the order of the round."""
        if self.kept is None:
            raise UserError("a method that reads uploads.trees declares it: upload = UploadSpec(single=True)")
        return self.kept


def stack(trees: Iterable[Tree]) -> Tree:
    """Many trees as one with a leading axis: name -> (K, ...)."""
    rows = list(trees)
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def size(tree: Tree) -> int:
    """Bytes of all tensors: what it costs to send or to keep."""
    return sum(value.nbytes for value in tree.values())


def finite(tree: Tree) -> bool:
    """Whether every number is finite. One number of a device answers, where the sum of all of them is finite."""
    if not tree:
        return True
    sums = torch.stack([value.sum().to(torch.float32) for value in tree.values()])
    return math.isfinite(sums.sum()) or all(bool(torch.isfinite(value).all()) for value in tree.values())


def finite_rows(stacked: Tree, count: int) -> list[bool]:
    """Whether every number of each of `count` stacked trees is finite: name -> (count, ...)."""
    sums = torch.zeros(count, dtype=torch.float64)
    for value in stacked.values():
        sums += value.reshape(count, -1).sum(1).cpu()
    return [
        math.isfinite(each) or finite({name: value[k] for name, value in stacked.items()})
        for k, each in enumerate(sums.tolist())
    ]


def canonical(tree: Tree) -> Tree:
    """The same values in one form: names sorted, convolution weights in channels_last order, which is faster on CPUs.

    A tree read from disk or from the network has its names and numbers in another order. Sums over names, such as a
    gradient's norm, depend on it in their last bit; arranging a tree before use makes results independent of where it
    came from.
    """
    return {
        name: value.contiguous(memory_format=torch.channels_last) if value.ndim == 4 else value.contiguous()
        for name, value in sorted(tree.items())
    }
