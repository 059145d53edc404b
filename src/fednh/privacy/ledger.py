"""A site's ledger: what was released of its data, over all runs and federations. A release is paid before it is made.

It is a file of chained lines (io/chain.py):

    data     by what the samples of an account are recognised (marks.py)
    paid     for the answer to one order: which releases, and what the account has come to with them
    stored   the answer is on disk, with its SHA-256: only now may it leave, and only it
    summed   of a secure sum: the answer has its noise, and may leave under masks; with the SHA-256 of both
    agreed   of a secure sum: in which sum of which sites; the same noise in another sum could be subtracted

So an answer is paid, computed, stored and sent, in this order. A crash before `stored` has let nothing out: the same
order is answered with the same payment. After `stored` the answer of the disk is sent again; if it is lost, another
one must be paid. A crash may lose budget, it never gains any.

Data with a mark in common are one account, also through others between them. Payments of other data do not count: a
sample is in none of them.

A ledger cannot tell by itself that it was deleted, or replaced by an older copy. So whoever opens it names the lines
that must be in it: those that the site's audit log has recorded, and those that the server has heard of.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from fednh.errors import Refused
from fednh.io.chain import Head, Log, append, read
from fednh.privacy.accounting import LARGEST, Release, epsilon
from fednh.privacy.marks import Marks

SETTLED = {
    "summed": "the upload of this order has left with other noise: it leaves no more",
    "agreed": "this order was summed up over other sites before: the two sums could be subtracted",
}


class Allowance(NamedTuple):
    """What an account may come to."""

    epsilon: float  # infinite: it is only kept
    delta: float


class Balance(NamedTuple):
    """What an account has come to, and the newest line of the ledger."""

    epsilon: float
    delta: float
    head: Head | None

    def told(self) -> dict[str, float | None]:
        """Epsilon and delta for files; an epsilon that is too large to be told is None."""
        return {"epsilon": self.epsilon if math.isfinite(self.epsilon) else None, "delta": self.delta}


class Ledger:
    """The ledger in one file; `known` are lines that it must have."""

    def __init__(self, file: Path, site: str, known: Iterable[Head] = ()):
        self.file, self.site, self.known = file, site, tuple(known)
        self._lock = FileLock(file.with_name(f".{file.name}.lock"))

    @property
    def answering(self) -> FileLock:
        """Held while an answer is paid, computed and stored: else two processes would use one payment.

        Folders of one site that share a ledger have it in common.
        """
        digest = hashlib.sha256(self.site.encode()).hexdigest()[:8]
        return FileLock(self.file.with_name(f".{self.file.name}.{digest}.lock"))

    def pay(self, work: str, releases: Sequence[Release], marks: Marks, budget: Allowance, **facts: Any) -> Balance:
        """Pay for the answer to an order, whose digest is `work`; Refused if it costs more than is left.

        A payment whose answer was never stored is used, since nothing of it has left.
        """
        with self._opened() as log:
            account = _Account.of(log, marks)
            if _unsent(log, work, self.site):
                return Balance(account.epsilon(budget.delta), budget.delta, log.head)
            total = account.affordable(releases, budget)
            data = account.line if account.has(marks) else append(self.file, "data", **marks.write()).line
            what = {"site": self.site, **facts, "work": work, "data": data}
            cost = {"releases": [asdict(each) for each in releases], "epsilon": total, "delta": budget.delta}
            return Balance(total, budget.delta, append(self.file, "paid", **what, **cost))

    def check(self, releases: Sequence[Release], marks: Marks, budget: Allowance) -> None:
        """Refuse releases that are not affordable, without paying for them."""
        with self._opened() as log:
            _Account.of(log, marks).affordable(releases, budget)

    def stored(self, work: str, sha256: str) -> Head:
        """Record that the answer to an order is on disk: from now on it may leave."""
        with self._opened():
            return append(self.file, "stored", site=self.site, work=work, sha256=sha256)

    def answer_to(self, work: str) -> str | None:
        """The SHA-256 of the newest stored answer to an order; None if there is none."""
        with self._opened() as log:
            rows = [row for row in log.lines if _of(row, "stored", work, self.site)]
            return str(rows[-1]["sha256"]) if rows else None

    def settle(self, event: str, work: str, what: str) -> Head | None:
        """Record what becomes of the answer to an order; None if it is recorded, Refused if it was something else."""
        with self._opened() as log:
            before = [row["what"] for row in log.lines if _of(row, event, work, self.site)]
            if not before:
                return append(self.file, event, site=self.site, work=work, what=what)
            if before[-1] != what:
                raise Refused(SETTLED[event])
            return None

    def balance(self, marks: Marks, delta: float) -> Balance:
        """What the account of these data has come to."""
        with self._opened() as log:
            return Balance(_Account.of(log, marks).epsilon(delta), delta, log.head)

    @contextmanager
    def _opened(self) -> Iterator[Log]:
        """The ledger's lines, checked; nobody else writes meanwhile."""
        with self._lock:
            log = read(self.file) if self.file.exists() else Log(self.file, [])
            if problem := (None if log.torn else log.problem) or log.lacks(self.known):
                raise Refused(
                    "its ledger of what was released is damaged, lost or an old copy, so nothing more is released "
                    "here; its owner restores the newest copy"
                ) from LedgerProblem(f"{self.file}: {problem}")
            yield log


class LedgerProblem(Exception):
    """What is wrong with a ledger, for its owner."""


@dataclass(frozen=True)
class Account:
    """For reports: the payments of the data that belong together."""

    epsilon: float
    delta: float
    payments: list[dict[str, Any]]

    @property
    def words(self) -> str:
        return spent(self.epsilon, self.delta)


def accounts(log: Log) -> list[Account]:
    """The accounts of a ledger, in the order in which they were opened, at the delta of each one's last payment."""
    found = []
    for group in _groups(log):
        if rows := _payments(log, {row["line"] for row in group}):
            delta = float(rows[-1]["delta"])
            found.append(Account(epsilon(_releases(rows), delta), delta, rows))
    return found


@dataclass(frozen=True)
class _Account:
    """The part of a ledger that counts for some data."""

    data: list[dict[str, Any]]
    payments: list[dict[str, Any]]

    @classmethod
    def of(cls, log: Log, marks: Marks) -> _Account:
        near = [row for group in _groups(log) if any(marks.meets(Marks.read(row)) for row in group) for row in group]
        return cls(near, _payments(log, {row["line"] for row in near}))

    def has(self, marks: Marks) -> bool:
        """Whether the newest data of the account are exactly these."""
        return bool(self.data) and Marks.read(self.data[-1]) == marks

    @property
    def line(self) -> int:
        return int(self.data[-1]["line"])

    def epsilon(self, delta: float, more: Sequence[Release] = ()) -> float:
        return epsilon([*_releases(self.payments), *more], delta)

    def affordable(self, more: Sequence[Release], budget: Allowance) -> float:
        """What the account comes to with these releases; Refused if that is too much."""
        total = self.epsilon(budget.delta, more)
        if total > budget.epsilon:
            raise Refused(
                f"its privacy budget is spent: another answer would bring its samples to {spent(total, budget.delta)}, "
                f"and its owner allows {budget.epsilon:g} (allow.epsilon of its site.toml)"
            )
        return total


def _groups(log: Log) -> list[list[dict[str, Any]]]:
    """The lines about data, together where a mark is in common."""
    groups: list[list[dict[str, Any]]] = []
    for row in (row for row in log.lines if row["event"] == "data"):
        marks = Marks.read(row)
        near = [group for group in groups if any(marks.meets(Marks.read(each)) for each in group)]
        groups = [group for group in groups if group not in near]
        groups.append(sorted((row, *(each for group in near for each in group)), key=lambda each: int(each["line"])))
    return groups


def _payments(log: Log, data: set[int]) -> list[dict[str, Any]]:
    return [row for row in log.lines if row["event"] == "paid" and row["data"] in data]


def _releases(payments: Iterable[dict[str, Any]]) -> list[Release]:
    return [Release(**each) for row in payments for each in row["releases"]]


def _of(row: dict[str, Any], event: str, work: str, site: str) -> bool:
    return row["event"] == event and (row.get("work"), row.get("site")) == (work, site)


def _unsent(log: Log, work: str, site: str) -> bool:
    """Whether an order was paid more often than an answer to it was stored."""
    paid, stored = (sum(_of(row, event, work, site) for row in log.lines) for event in ("paid", "stored"))
    return paid > stored


def covers(paid: Iterable[Release], released: Iterable[Release]) -> bool:
    """Whether nothing was released that is not paid."""
    return _kinds(released) <= _kinds(paid)


def _kinds(releases: Iterable[Release]) -> Counter[tuple[str, float, float]]:
    kinds = Counter[tuple[str, float, float]]()
    for each in releases:
        kinds[each.name, each.noise, each.rate] += each.count
    return kinds


def spent(epsilon_: float, delta: float) -> str:
    """An account in words."""
    much = f"epsilon {epsilon_:.3g}" if math.isfinite(epsilon_) else f"more than epsilon {LARGEST:g}"
    return f"{much} at delta {delta:g}"
