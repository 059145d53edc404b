"""A site's own data in a trained model's terms: its sizes, its columns, its class names."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fednh.config import Config, load
from fednh.core.federation import load_data
from fednh.data.dataset import Dataset, Labels
from fednh.data.images import rule
from fednh.data.sources import find, uses
from fednh.errors import Notice, UserError
from fednh.storage.model_file import REMEMBERED, Card, remembered
from fednh.trained import inputs


def load_for(
    card: Card, source: str, settings: Mapping[str, Any] | None = None, known: Mapping[str, Any] | None = None
) -> Dataset:
    """The data of a source with labels by the model's classes and samples of the model's shape, not yet normalised."""
    return in_terms_of(card, loaded(reading(card, source, settings, known)), source)


def reading(
    card: Card, source: str, settings: Mapping[str, Any] | None = None, known: Mapping[str, Any] | None = None
) -> Config:
    """A config under which a source is read as the model's own data were, unless `settings` say otherwise.

    `known` are settings of the run below [data] that its model's card may not have.
    """
    given = settings or {}
    how = _as_in(card, source, {**(known or {}), **remembered(card)}, given)
    return load(None, {**how, "data.name": source, **given})


def of_run(config: Config, *more: str) -> dict[str, Any]:
    """The settings by which a run's data were read and files of the same form are."""
    return {key: value for key in (*REMEMBERED, *more) if (value := getattr(config.data, key)) is not None}


def loaded(config: Config) -> Dataset:
    """Load the data of a config; notes on how they were read become warnings."""
    data = load_data(config)
    for note in data.notes:
        warnings.warn(note, Notice, stacklevel=4)
    return data


def in_terms_of(card: Card, data: Dataset, source: str) -> Dataset:
    """The data with labels by the model's classes and samples of the model's shape, not yet normalised."""
    return replace(
        data,
        x_train=inputs.samples(data.x_train, card),
        y_train=_renamed(data.y_train, data.classes, card.classes, source),
        x_test=inputs.samples(data.x_test, card) if len(data.x_test) else _none(data, card),
        y_test=_renamed(data.y_test, data.classes, card.classes, source),
        classes=card.classes,
        mean=tuple(card.preprocessing.mean),
        std=tuple(card.preprocessing.std),
        scale=card.preprocessing.scale,
    )


def _none(data: Dataset, card: Card) -> Any:
    return inputs.samples(data.x_train[:1], card)[:0]


def _as_in(card: Card, source: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under which a source is read as the model's own data were."""
    how, found = card.preprocessing.model_extra or {}, find(source)
    if found is None or not found[0].named:
        return {}
    kind, address = found
    settings = kind.applicable(address, known, {key.removeprefix("data."): value for key, value in given.items()})
    if "group" in known and "group" not in settings and "data.group" not in given:
        words = (
            f"{source} has no {known['group']!r}, by which the run kept samples together: they are held out one by one"
        )
        warnings.warn(f"{words}; say which column it is with data.group", Notice, stacklevel=4)
    settings["classes"] = list(card.classes)  # a site may lack some
    if "size" in how:
        settings |= {"size": list(how["size"]), "fit": rule(how)}
    if "columns" in how:
        agreed = {c["name"]: list(c["values"]) if c["kind"] == "category" else "number" for c in how["columns"]}
        settings["columns"] = agreed
    return {f"data.{key}": value for key, value in settings.items() if uses(kind, key)}


def _renamed(labels: Labels, theirs: Sequence[str], ours: Sequence[str], source: str) -> Labels:
    """Labels by our numbering; a class that we do not know is refused."""
    there = np.unique(labels)
    unknown = [theirs[c] for c in there if theirs[c] not in ours]
    if unknown:
        raise UserError(
            f"{source} has {len(unknown)} classes that the model does not know: {', '.join(unknown[:5])}"
            f"{', ...' * (len(unknown) > 5)}; it knows {', '.join(ours[:10])}{', ...' * (len(ours) > 10)}"
        )
    number = np.array([ours.index(name) if name in ours else -1 for name in theirs], np.int64)
    return number[labels]
