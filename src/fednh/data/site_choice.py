"""Which sites of a source are read: data.sites names them, data.without leaves some out; then the others are not there.

So one site can be held out of a run without copying files: the run's classes, columns and statistics do not know it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fednh.data.dataset import Dataset
from fednh.data.labels import in_order
from fednh.data.scaling import measure
from fednh.errors import UserError, did_you_mean


class Choice(Protocol):
    """The two settings; each is None where it is not set."""

    @property
    def sites(self) -> list[str] | None: ...

    @property
    def without(self) -> list[str] | None: ...


def is_made(choice: Choice) -> bool:
    return choice.sites is not None or choice.without is not None


def chosen_words(choice: Choice) -> str:
    """The choice as text; empty where none is made."""
    return f" sites={choice.sites} without={choice.without}" if is_made(choice) else ""


def chosen(known: Sequence[str], choice: Choice, where: str) -> list[str]:
    """Those of the sites that are read, in their order."""
    for key, names in (("sites", choice.sites), ("without", choice.without)):
        if names is None:
            continue
        if not known:
            raise UserError(f"data.{key} chooses sites, but {where} does not say which site a sample comes from")
        if strangers := [name for name in names if name not in known]:
            raise UserError(f"data.{key}: {where} has no site {strangers[0]!r}{did_you_mean(strangers[0], known)}")
    kept = [name for name in known if choice.sites is None or name in choice.sites]
    kept = [name for name in kept if name not in (choice.without or ())]
    if not kept and is_made(choice):
        raise UserError(f"data.sites and data.without leave no site of {where}; it has {', '.join(known)}")
    return kept


def rows_of(names: Sequence[str], choice: Choice, where: str) -> NDArray[np.bool_]:
    """Marks the rows to read, given the site of each."""
    if not is_made(choice):
        return np.ones(len(names), bool)
    kept = set(chosen(in_order(set(names)), choice, where))
    return np.array([name in kept for name in names], bool)


def restricted(data: Dataset, choice: Choice, where: str) -> Dataset:
    """A data set that was read as a whole, without the other sites; statistics are measured again."""
    if not is_made(choice):
        return data
    kept = chosen(data.sites, choice, where)
    place = np.array([kept.index(name) if name in kept else -1 for name in data.sites], np.int64)
    assert data.site_train is not None  # a data set that names sites says so of every training sample
    train = place[data.site_train] >= 0
    rows: dict[str, Any] = {"x_train": data.x_train[train], "y_train": data.y_train[train]}
    rows["group_train"] = None if data.group_train is None else data.group_train[train]
    rows["site_train"] = place[data.site_train][train]
    if data.site_test is not None:
        theirs = np.where(data.site_test < 0, -1, place[data.site_test])
        test = theirs >= 0
        rows |= {"x_test": data.x_test[test], "y_test": data.y_test[test], "site_test": theirs[test]}
    elif len(data.y_test):
        note = f"{where}: its test samples do not say which site they come from, so all of them are kept"
        rows["notes"] = (*data.notes, note)
    if data.fitted:
        mean, std = measure(rows["x_train"], data.scale, data.preprocessing)
        rows |= {"mean": mean, "std": std}
    return replace(data, sites=tuple(kept), **rows)
