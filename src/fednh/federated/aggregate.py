"""How uploads are averaged, for every method that averages: by the number of samples, or such that a few broken or
hostile clients cannot ruin the result.

An accumulator takes a round's uploads one by one and makes their average, which `uploads.mean()` gives. A method says
what its uploads mean:

`UploadSpec.by_class` (prototypes, class gradients): each row is about one class. A client that lacks the class says
nothing about it: its row is zero, or its mark for the class is 0. Such rows are left out. The robust value is taken
over the owners of the class and scaled by their share of the round, as the plain mean does when it averages in the zero
rows. A class may have too few owners to tell which of them is hostile, so the length of every row is bounded first, by
the longest row of the median client. In `UploadSpec.counted` a row's length is the number of samples behind it:
directions are trimmed, lengths are weights.
`UploadSpec.marks` (ownership, newcomers) are 0 or 1 and are only counted: trimming or clipping would falsify the count.
`UploadSpec.weight` (FedAS's Fisher trace) is the upload's own weight in either mean. Robust rules do not look at it:
who sends an upload must not choose how much it counts.

weighted_mean: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017.
trimmed_mean and median: Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning", ICML 2018.
norm_clip: Sun, Kairouz, Suresh, McMahan, "Can You Really Backdoor Federated Learning?", 2019; the bound is the
median norm of the round, so it needs no tuning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from fednh.methods.base import Method, UploadSpec
from fednh.tree import Tree, Uploads, add, divide, double, double_dtype, mean, prefix, stack

# --- overrides for single clients -----------------------------------------------------------------------------------
# What the server keeps for single clients: their records, made by `Method.records`.
#
# A record holds tensors that one client receives in place of the broadcast's tensors of the same names; whoever has
# none receives the broadcast as it is. So a message has one form, whoever it is for, and costs the same. A checkpoint
# holds the records in the server's file, under the clients' numbers.


ClientOverrides = Mapping[int, Tree]  # client -> its record
PART = "records"  # where records lie in a checkpoint


def received(down: Tree, records: ClientOverrides, client: int) -> Tree:
    """What the client receives: the broadcast, with what its record has in place of it."""
    return {**down, **records.get(client, {})}


def merge_overrides(server: Tree, records: ClientOverrides) -> Tree:
    """The server's state and all records as one Tree."""
    return server | {n: v for k, record in records.items() for n, v in prefix(f"{PART}.{k}", record).items()}


def split_overrides(state: Tree) -> tuple[Tree, dict[int, Tree]]:
    """The server's state and the records: the inverse of `joined`."""
    server: Tree = {}
    records: dict[int, Tree] = {}
    for name, value in state.items():
        part, _, rest = name.partition(".")
        if part != PART:
            server[name] = value
            continue
        client, _, own = rest.partition(".")
        records.setdefault(int(client), {})[own] = value
    return server, records


# --- accumulators and rules -----------------------------------------------------------------------------------------


LEAST_WEIGHT = 1e-20  # of an upload by `UploadSpec.weight`: if all are zero, all count alike


class Accumulator(Protocol):
    """Takes a round's uploads one by one, as they come, and gives what `Method.aggregate` works on.

    The same uploads in the same order give the same bits. An upload may be the sum of those of several `clients`, where
    the rule is the plain mean and no method looks at single uploads (checks.check_secure).
    """

    @property
    def count(self) -> int: ...
    def add(self, upload: Tree, samples: int, clients: int = 1) -> None: ...
    def uploads(self) -> Uploads: ...


def accumulator(name: str, server: Tree, trim: float, method: Method) -> Accumulator:
    """The accumulator of the rule called `name` (config: aggregator); `server` is the state that clients started from.

    Means are running sums, so that no upload is kept. Robust rules and methods that look at single uploads keep all.
    """
    if method.upload.single or name not in ("mean", "weighted_mean"):
        return AllUploads(name, server, trim, method)
    return _running(name, server, method)


def _running(name: str, server: Tree, method: Method) -> Accumulator:
    return RunningWeightedMean(server, method) if name != "mean" or method.upload.weight else RunningMean()


class RunningMean:
    """The plain mean."""

    def __init__(self) -> None:
        self.total: Tree = {}
        self.count = 0

    def add(self, upload: Tree, samples: int = 0, clients: int = 1) -> None:
        self.total = add(self.total, upload, self.count)
        self.count += clients

    def uploads(self) -> Uploads:
        return Uploads(divide(self.total, self.count), self.count)


class RunningWeightedMean:
    """The mean in which what the server holds counts by the samples behind it, or by the weight that the method sends.

    Rows by class have counts of their own, marks are counted, and what the server does not hold (SCAFFOLD's changes of
    control variates) is defined as a plain mean: these stay what they are.
    """

    def __init__(self, server: Tree, method: Method):
        self.weighted = server.keys() - {*method.upload.by_class, *method.upload.marks}
        self.own = method.upload.weight
        self.total: Tree = {}
        self.weight: dict[str, float] = {}
        self.count, self.first = 0, 1.0

    def add(self, upload: Tree, samples: int, clients: int = 1) -> None:
        counts = max(float(upload[self.own]), LEAST_WEIGHT) if self.own else samples
        if self.count == 0:
            self.first = counts
        self.count += 1
        for name, value in upload.items():
            share = counts / self.first if name in self.weighted else 1.0
            self.total[name] = value * share + self.total.get(name, 0)
            self.weight[name] = share + self.weight.get(name, 0.0)

    def uploads(self) -> Uploads:
        return Uploads({name: value / self.weight[name] for name, value in self.total.items()}, self.count)


class AllUploads:
    """Keeps all uploads, for rules and methods that compare them."""

    def __init__(self, name: str, server: Tree, trim: float, method: Method):
        self.name, self.server, self.trim, self.method = name, server, trim, method
        self.trees: list[Tree] = []
        self.samples: list[int] = []

    @property
    def count(self) -> int:
        return len(self.trees)

    def add(self, upload: Tree, samples: int, clients: int = 1) -> None:
        self.trees.append(upload)
        self.samples.append(samples)

    def uploads(self) -> Uploads:
        return Uploads(self._average(), self.count, tuple(self.trees))

    def _average(self) -> Tree:
        if self.name == "median":
            return trimmed(self.trees, 0.5, self.method.upload)
        if self.name == "trimmed_mean":
            return trimmed(self.trees, self.trim, self.method.upload)
        if self.name == "norm_clip":
            return norm_clipped(self.trees, self.server, self.method.upload)
        running = _running(self.name, self.server, self.method)
        for tree, number in zip(self.trees, self.samples, strict=True):
            running.add(tree, number)
        return running.uploads().mean()


def trimmed(trees: Iterable[Tree], share: float, spec: UploadSpec) -> Tree:
    """Coordinate by coordinate, the mean without the smallest and largest values; a share of 0.5 is the median.

    At each end as many values are cut as hostile clients are expected in the round (`share` of its clients, at least
    one), because all of these may claim to own the same class. At least one or two values remain in the middle.
    """
    uploads = stack(trees)
    count = len(next(iter(uploads.values()), ()))
    cut = max(1, int(count * share + 1e-9))
    out: Tree = {}
    for name, values in uploads.items():
        if name in spec.marks:
            out[name] = _counted(values)
        elif name in spec.by_class:
            rows, speaks = _by_class(uploads, name, spec)
            weight = _lengths(rows) if name in spec.counted else None
            out[name] = _middle(rows, speaks, cut, weight).reshape(values.shape[1:])
        else:
            everybody = torch.ones(count, 1, dtype=torch.bool, device=values.device)
            out[name] = _middle(values.reshape(count, 1, -1), everybody, cut).reshape(values.shape[1:])
    return out


def norm_clipped(trees: Iterable[Tree], server: Tree, spec: UploadSpec) -> Tree:
    """The mean, after each upload's step and other parts are scaled down to at most the round's median norm."""
    uploads = list(trees)
    special = [name for name in uploads[0] if name in spec.marks or name in spec.by_class]
    plain = [{n: v for n, v in tree.items() if n not in special} for tree in uploads]
    moves = [{n: v - server[n] for n, v in tree.items() if n in server} for tree in plain]
    others = sorted(plain[0].keys() - moves[0].keys())
    shrink = _shrink(torch.stack([_norm(move) for move in moves]))
    total = mean({n: server[n] + s * v for n, v in move.items()} for move, s in zip(moves, shrink, strict=True))
    for name in others:
        factors = _shrink(torch.stack([_norm({name: tree[name]}) for tree in uploads]))
        total |= mean({name: tree[name] * s} for tree, s in zip(uploads, factors, strict=True))
    together = stack([{name: tree[name] for name in special} for tree in uploads])
    for name, values in together.items():
        if name in spec.marks:
            total[name] = _counted(values)
        else:
            total[name] = _by_class(together, name, spec)[0].mean(0).reshape(values.shape[1:])
    return {name: total[name] for name in uploads[0]}


def _counted(marks: Tensor) -> Tensor:  # (K, ...) -> (...)
    """The share of clients whose mark is 1; any other value is rounded to 0 or 1."""
    return (marks > 0.5).to(marks.dtype).mean(0)


def _by_class(uploads: Tree, name: str, spec: UploadSpec) -> tuple[Tensor, Tensor]:  # (K, R, D), (K, R)
    """Rows of bounded length, zero where a client lacks the class, and which client owns which class."""
    values = uploads[name]
    rows = values.reshape(len(values), values.shape[1], -1)
    marks = [uploads[mark] for mark in spec.marks if uploads[mark].shape == rows.shape[:2]]
    speaks = marks[0] > 0.5 if marks else (rows != 0).any(2)
    rows = rows * speaks[..., None]
    lengths, speakers = _lengths(rows), speaks.any(1)
    if speakers.any():
        bound = lengths.amax(1)[speakers].median()
        rows = rows * (bound / lengths.clamp(min=1e-300)).clamp(max=1.0)[..., None].to(rows.dtype)
    return rows, speaks


def _lengths(rows: Tensor) -> Tensor:  # (K, R, D) -> (K, R), in double: the square of a hostile number may overflow
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=2, dtype=double_dtype(rows.device))
    return lengths


def _middle(rows: Tensor, speaks: Tensor, cut: int, weight: Tensor | None = None) -> Tensor:
    """(K, R, D) -> (R, D): the mean of the owners' middle values, times the owners' share of all clients.

    With weights (K, R), which are the rows' lengths, directions are ordered and averaged by weight.
    """
    count, speakers = len(rows), speaks.sum(0)[:, None]  # (R, 1)
    if weight is not None:
        rows = rows / weight.clamp(min=1e-30)[..., None].to(rows.dtype)
    ordered, who = rows.masked_fill(~speaks[..., None], torch.inf).sort(0)  # rows of non-owners go last
    cuts = ((speakers - 1).clamp(min=0) // 2).clamp(max=cut)
    place = torch.arange(count, device=rows.device)[:, None, None]
    inside = (place >= cuts) & (place < speakers - cuts)
    if weight is None:
        middle = ordered.masked_fill(~inside, 0).sum(0) / (speakers - 2 * cuts).clamp(min=1)
        return middle * speakers / count
    heavy = weight[..., None].to(rows.dtype).expand_as(rows).gather(0, who) * inside
    middle = (ordered.masked_fill(~inside, 0) * heavy).sum(0) / heavy.sum(0).clamp(min=1e-30)
    return middle * weight.sum(0)[:, None].to(rows.dtype) / count


def _norm(tree: Tree) -> Tensor:
    return torch.stack([double(v).square().sum() for v in tree.values()] or [torch.zeros(())]).sum().sqrt()


def _shrink(norms: Tensor) -> Tensor:  # (K,) -> (K,)
    """Factors that bring every norm down to the median of those that are not zero."""
    spoken = norms[norms > 0]
    if len(spoken) == 0:
        return torch.ones_like(norms)
    return (spoken.median() / norms.clamp(min=1e-30)).clamp(max=1.0).to(torch.float32)
