"""Labelled data for a trained model.

`load_for` reads a source in the model's terms: its sizes, its columns, its class names. `select_eval_samples` says on
which samples a model is measured, and on how many of them it was trained. The run that a model comes from knows: its
settings and its data, which must be those that it began with, give every client's training samples and those that were
held out.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from fednh.config import Config, load
from fednh.data.dataset import Dataset, Inputs, Labels
from fednh.data.partitions import Indices
from fednh.data.sources.images import rule
from fednh.data.sources.registry import absolute, find, uses
from fednh.errors import Notice, UserError
from fednh.federated.setup import divide, fingerprint_of, load_data
from fednh.inference import inputs
from fednh.models.features import is_features, recipe_of
from fednh.runs import fingerprint
from fednh.runs.layout import RunLayout
from fednh.runs.model_file import REMEMBERED, Card, remembered
from fednh.runs.run_folder import read_config, read_partition
from fednh.text import plural, some


def load_for(
    card: Card, source: str, settings: Mapping[str, Any] | None = None, known: Mapping[str, Any] | None = None
) -> Dataset:
    """The data of a source with labels by the model's classes and samples of the model's shape, not yet normalised."""
    return align_to_model(card, loaded(source_config(card, source, settings, known)), source)


def source_config(
    card: Card, source: str, settings: Mapping[str, Any] | None = None, known: Mapping[str, Any] | None = None
) -> Config:
    """A config under which a source is read as the model's own data were, unless `settings` say otherwise.

    `known` are settings of the run below [data] that its model's card may not have.
    """
    given, named = settings or {}, find(source)
    if inputs.is_text(card) and (named is None or named[0].named):  # only arrays can hold features
        raise UserError(f"{source}: a model that takes texts is measured on features: write them with `fednh features`")
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


def align_to_model(card: Card, data: Dataset, source: str) -> Dataset:
    """The data with labels by the model's classes and samples of the model's shape, not yet normalised."""
    features, how = is_features(data.preprocessing), card.preprocessing
    if features and not inputs.takes(recipe_of(data.preprocessing, source), card):
        raise UserError(f"{source} holds features of another network than those that the model was trained on")
    x_train = inputs.samples(data.x_train, card)
    return replace(
        data,
        x_train=x_train,
        y_train=_renamed(data.y_train, data.classes, card.classes, source),
        x_test=inputs.samples(data.x_test, card) if len(data.x_test) else x_train[:0],
        y_test=_renamed(data.y_test, data.classes, card.classes, source),
        classes=card.classes,
        mean=data.mean if features else tuple(how.mean),
        std=data.std if features else tuple(how.std),
        scale=data.scale if features else how.scale,
    )


def _as_in(card: Card, source: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under which a source is read as the model's own data were."""
    how, named = card.sample_form, find(source)
    if named is None or not named[0].named:
        return {}
    kind, address = named
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
        settings["missing"] = {c["name"]: list(c["missing"]) for c in how["columns"] if c.get("missing")}
        settings["missing_indicator"] = any(c.get("indicator") for c in how["columns"])
    return {f"data.{key}": value for key, value in settings.items() if uses(kind, key)}


def _renamed(labels: Labels, theirs: Sequence[str], ours: Sequence[str], source: str) -> Labels:
    """Labels by our numbering; a class that we do not know is refused."""
    unknown = [theirs[c] for c in np.unique(labels) if theirs[c] not in ours]
    if unknown:
        raise UserError(
            f"{source} has {plural(len(unknown), 'class', 'classes')} that the model does not know: {some(unknown)}; "
            f"it knows {some(ours, 10)}"
        )
    number = np.array([ours.index(name) if name in ours else -1 for name in theirs], np.int64)
    return number[labels]


# --- samples to measure a model on ---------------------------------------------------------------------------------

CHOICE = {"data.sites", "data.without"}


@dataclass(frozen=True)
class EvalSamples:
    """Samples to measure a model on, and what is known about them."""

    x: Inputs
    y: Labels
    data: str
    split: str
    trained_on: int | None  # how many of them the model was trained on; None: not known
    warning: str | None  # what must be said about metrics on these samples


class Training:
    """The data of the run in a folder: who trained on what, and what was held out."""

    def __init__(self, run: Path):
        self.run, self.config = run, read_config(run, finished=True)
        fingerprint.check_settings(run, self.config)

    @cached_property
    def data(self) -> Dataset:
        """What the run was made of; refused if it is not the same any more."""
        if not (read_partition(self.run) or {}).get("counts"):
            raise UserError(f"the samples of the run in {self.run} stayed with its sites")
        data = load_data(self.config)
        fingerprint.check_data(self.run, fingerprint_of(self.config, data))
        return data

    @cached_property
    def parts(self) -> tuple[list[Indices], list[Indices]]:
        """Every client's samples to train on, and those that it held out."""
        return divide(self.data, self.config)

    def held_out(self, client: int | None) -> Indices:
        """What the client held out, or all of them together."""
        return np.concatenate(self.parts[1]) if client is None else self.parts[1][client]

    def samples(self, card: Card, others: Inputs) -> set[bytes]:
        """Digests of all samples that a model of the run was trained on, to be compared with those of others."""
        data, parts = align_to_model(card, self.data, self.config.data.name), self.parts[0]
        if data.x_train.ndim != others.ndim:
            raise UserError("images cannot be compared with features")
        if card.client is not None and self._nothing_is_shared():
            parts = [parts[card.client]]
        index = np.concatenate(parts)
        return set(_digests(data.x_train[index], data.y_train[index]))

    def _nothing_is_shared(self) -> bool:
        for shared in (found := RunLayout(self.run).shared_models()):
            with safe_open(shared.broadcast_model, "pt") as opened:
                if list(opened.keys()):
                    return False
        return bool(found)


def select_eval_samples(
    card: Card, path: Path, source: str | None, split: str | None, settings: Mapping[str, Any] | None = None
) -> EvalSamples:
    """The samples of a source to measure the model at `path` on.

    Without a source they are those of the model's run. Without a split they are what the run held out, where it did and
    the source is its own data, else the source's test set.
    """
    run = run_of(path)
    training = None if run is None else Training(run)
    if source is None:
        if training is None:
            raise UserError(f"{path} is not in a run folder, which would say what the data are; give data")
        source = training.config.data.name
    config = _config_for(card, training, source, settings)
    own = training is not None and config.data == training.config.data
    if training is not None and own and split in (None, "held"):
        try:
            index = training.held_out(card.client)
        except UserError as error:
            if split is None:
                raise UserError(f"{error}; or measure on what they are now, by split = test, train or all") from error
            raise
        if split == "held" or any(map(len, training.parts[1])):
            return _held(card, training, index, source)
    if split == "held":
        raise UserError(
            f"split = held needs the data of the model's own run"
            f"{f', {training.config.data.name}, read as the run read them' if training else ', in its run folder'}"
        )
    data = align_to_model(card, loaded(config), source)
    x, y = _split(data, split or "test", source)
    return _with_warning(card, training, x, y, source, split or "test")


def run_of(path: Path) -> Path | None:
    """The run folder that a model is in, or that is given itself."""
    if path.is_dir():
        return path if RunLayout(path).started else None
    for folder in path.absolute().parents[1:3]:
        if RunLayout(folder).started and RunLayout(folder).models in path.absolute().parents:
            return folder
    return None


def trained_on(x: Inputs, y: Labels, samples: set[bytes]) -> int:
    """How many samples are among those, by content."""
    return sum(digest in samples for digest in _digests(x, y))


def _held(card: Card, training: Training, index: Indices, source: str) -> EvalSamples:
    if not len(index):
        client = f"client {card.client}" if card.site is None else f"site {card.site} (client {card.client})"
        owner = "the run" if card.client is None else client
        raise UserError(f"{owner} held out no samples (data.holdout); choose split = test, or other data")
    data = align_to_model(card, training.data, source)
    x, y = data.x_train[index], data.y_train[index]
    return _with_warning(card, training, x, y, source, "held")


def _config_for(card: Card, training: Training | None, source: str, settings: Mapping[str, Any] | None) -> Config:
    """How to read a source: the run's own as the run read it, others as the card says; `settings` overrule both.

    Sites that the run did not read are others, too: their words and classes are the model's.
    """
    given = settings or {}
    if training is None:
        return source_config(card, source, given)
    if CHOICE & set(given) or absolute(source) != training.config.data.name:
        return source_config(card, source, given, of_run(training.config))
    own = {f"data.{key}": value for key, value in training.config.data.model_dump().items() if value is not None}
    like_run = {"model": training.config.model, "features": training.config.features}  # a frozen body decides on sizes
    return load(None, {**own, **given}).model_copy(update=like_run)


def _split(data: Dataset, split: str, source: str) -> tuple[Inputs, Labels]:
    if split == "train":
        return data.x_train, data.y_train
    if split == "all":
        return np.concatenate([data.x_train, data.x_test]), np.concatenate([data.y_train, data.y_test])
    if not len(data.y_test):
        raise UserError(
            f"{source} has no test samples; give data that the model was not trained on, with split = all if it has "
            f"no test set of its own"
        )
    return data.x_test, data.y_test


def _with_warning(card: Card, training: Training | None, x: Inputs, y: Labels, source: str, split: str) -> EvalSamples:
    """Count the samples that the model was trained on, and say so."""
    unknown = "a model file alone does not say"
    number, words = None, None
    if training is not None:
        try:
            number = trained_on(x, y, training.samples(card, x))
        except UserError as error:
            unknown = str(error)
    if number:
        words = f"the model was trained on {number:,} of these {len(y):,} samples, so the metrics are too good"
    elif number is None and split != "test":
        words = f"the model may have been trained on these samples ({unknown}); then the metrics are too good"
    return EvalSamples(x, y, source, split, number, words)


def _digests(x: Inputs, y: Labels) -> list[bytes]:
    return [
        blake2b(row.tobytes() + label.tobytes(), digest_size=16).digest()
        for row, label in zip(np.ascontiguousarray(x), y, strict=True)
    ]
