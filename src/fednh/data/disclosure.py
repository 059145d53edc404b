"""What sites may reveal about their data: names and values that the federation's config lists, and no others.

A site's first message describes its preprocessing, which includes class names and the values of text columns. Any that
the config does not list would be read from the site's own data, and might name a person.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fednh.data.dataset import Dataset
from fednh.data.scaling import feature_slices
from fednh.data.sources.table import MANY_VALUES

AT = "of the federation's config"


def not_agreed(
    data: Dataset, classes: Sequence[str] | None, columns: Mapping[str, str | Sequence[str]] | None
) -> str | None:
    """What a site would have to reveal that is not in `data.classes` and `data.columns`, and what to set; or None.

    The sentence leaves a site in its refusal: it quotes none of them, and does not say how many there are.
    """
    reasons = [*_classes(data, classes), *_columns(data, columns or {})]
    return "; ".join(reasons) or None


def _classes(data: Dataset, agreed: Sequence[str] | None) -> list[str]:
    held = len(np.unique(data.y_train))
    if _names_rows(held, len(data.y_train)):
        return ["the label names rows, because it is another one in most of them; choose another column"]
    numbers = tuple(str(k) for k in range(data.num_classes))
    if data.classes in (tuple(agreed or ()), numbers):  # numbers from 0 are no names: they say how many there are
        return []
    return [f"the names of its classes are not agreed: list all classes in data.classes {AT}"]


def _columns(data: Dataset, agreed: Mapping[str, str | Sequence[str]]) -> list[str]:
    text = rows = False
    for column, features in feature_slices(data.preprocessing):
        if column["kind"] == "category":
            held = int((data.x_train[:, features][:, :-1] > 0).any(axis=0).sum())
            rows |= _names_rows(held, len(data.x_train))
            text |= list(agreed.get(column["name"], ())) != list(column["values"])
    reasons = []
    if rows:
        reasons.append("a text column names rows rather than describing them: leave it out of data.columns")
    elif text:
        reasons.append(
            "the values of its text columns are not agreed: list the columns to use, with their values, in "
            f"data.columns {AT}, and leave out names and notes"
        )
    if not agreed and any(_is_number(column["name"]) for column in data.preprocessing.get("columns", [])):
        reasons.append(
            "a name of its columns is a number, so its first line may be data: add a line of names, or list columns "
            f"in data.columns {AT}"
        )
    return reasons


def _names_rows(different: int, rows: int) -> bool:
    return different > MANY_VALUES and 2 * different > rows


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True
