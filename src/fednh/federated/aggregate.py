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

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from fednh.methods.base import Method, UploadSpec
from fednh.tree import FAN, RemoteSums, RemoteTree, SumTree, Tree, Uploads, double, double_dtype, mean, prefix, stack

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


@dataclass(frozen=True)
class SumRule:
    """How the uploads of a round are added up, by whoever has them: some names are multiplied by a client's share."""

    weighted: frozenset[str] = frozenset()  # the names that count by the share
    reference: float = 1.0  # the samples of a client whose share is 1
    forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None = None  # of uploads; others are refused

    def scaled(self, upload: Tree, share: float) -> Tree:
        return {n: v * share if n in self.weighted else v for n, v in upload.items()} if self.weighted else upload


class Accumulator(Protocol):
    """Takes a round's uploads one by one, as they come, and gives what `Method.aggregate` works on.

    The same uploads at the same places of a round's order give the same bits. An upload may be the sum of those of
    several `clients`, where the rule is the plain mean and no method looks at single uploads (checks.check_secure).
    """

    @property
    def count(self) -> int: ...
    @property
    def rule(self) -> SumRule | None:
        """How uploads are added up, if nothing but their sum is needed; None: each is needed here."""

    def add(self, upload: Tree, samples: int, clients: int = 1, place: int | None = None) -> None:
        """Add the upload at this place of the order; None: the next one."""

    def uploads(self) -> Uploads: ...


def accumulator(name: str, server: Tree, trim: float, method: Method, reference: float = 0) -> Accumulator:
    """The accumulator of the rule called `name` (config: aggregator); `server` is the state that clients started from.

    Means are running sums, so that no upload is kept. Robust rules and methods that look at single uploads keep all.
    """
    if method.upload.single or name not in ("mean", "weighted_mean"):
        return AllUploads(name, server, trim, method, reference)
    return _running(name, server, method, reference)


def _running(name: str, server: Tree, method: Method, reference: float) -> RunningMean:
    if name == "mean" and not method.upload.weight:
        return RunningMean()
    weighted, own = server.keys() - {*method.upload.by_class, *method.upload.marks}, method.upload.weight
    return RunningMean(weighted, own, 0 if own else reference)


class RunningMean:
    """The plain mean, or one in which what the server holds counts by samples, or by the weight that the method sends.

    Rows by class have counts of their own, marks are counted, and what the server does not hold (SCAFFOLD's changes of
    control variates) is defined as a plain mean: these stay what they are. Uploads are added up in a SumTree.
    """

    def __init__(self, weighted: Collection[str] = (), own: str = "", reference: float = 0):
        """`own`: the part of an upload that is its weight; `reference`: a weight that is 1, by default the first."""
        self.weighted, self.own, self.reference = frozenset(weighted), own, reference
        self.sums, self.elsewhere = SumTree(), cast(RemoteSums | None, None)
        self.count, self.weight, self.next = 0, 0.0, 0

    @property
    def rule(self) -> SumRule | None:
        """None where only the uploads themselves say how much they count."""
        unknown = self.own or (self.weighted and not self.reference)
        return None if unknown else SumRule(self.weighted, self.reference or 1)

    def add(self, upload: Tree, samples: int = 0, clients: int = 1, place: int | None = None) -> None:
        counts = max(float(upload[self.own]), LEAST_WEIGHT) if self.own else samples
        self.reference = self.reference or counts or 1
        share = counts / self.reference
        place = self.next if place is None else place
        if isinstance(upload, RemoteTree):
            self.elsewhere = self.elsewhere or upload.sums()
            self.elsewhere.add(upload, place)
        else:
            self.sums.add(SumRule(self.weighted).scaled(upload, share), place // FAN)
        self.count, self.weight, self.next = self.count + clients, self.weight + share, place + 1

    def uploads(self) -> Uploads:
        if self.count == 0:
            raise ValueError("nothing to average")
        total = (self.elsewhere or self.sums).total()
        divided = {n: v / (self.weight if n in self.weighted else self.count) for n, v in total.items()}
        return Uploads(divided, self.count)


class AllUploads:
    """Keeps all uploads, for rules and methods that compare them."""

    rule = None

    def __init__(self, name: str, server: Tree, trim: float, method: Method, reference: float = 0):
        self.name, self.server, self.trim, self.method, self.reference = name, server, trim, method, reference
        self.trees: list[Tree] = []
        self.samples: list[int] = []
        self.places: list[int | None] = []

    @property
    def count(self) -> int:
        return len(self.trees)

    def add(self, upload: Tree, samples: int, clients: int = 1, place: int | None = None) -> None:
        self.trees.append(upload)
        self.samples.append(samples)
        self.places.append(place)

    def uploads(self) -> Uploads:
        return Uploads(self._average(), self.count, tuple(self.trees))

    def _average(self) -> Tree:
        if self.name == "median":
            return trimmed(self.trees, 0.5, self.method.upload)
        if self.name == "trimmed_mean":
            return trimmed(self.trees, self.trim, self.method.upload)
        if self.name == "norm_clip":
            return norm_clipped(self.trees, self.server, self.method.upload)
        running = _running(self.name, self.server, self.method, self.reference)
        for tree, number, place in zip(self.trees, self.samples, self.places, strict=True):
            running.add(tree, number, 1, place)
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
