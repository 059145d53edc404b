"""A model file: the tensors, and a card in its metadata that says all that is needed to use them elsewhere.

The card is JSON under the key "fednh": format, the version of fednh, the method with its hyper-parameters, the
architecture, the shape of a sample, the class names, the preprocessing, and what the model was trained on. Beside it:
`Outcomes`, the predictions for the samples that a client holds out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from fednh import __version__
from fednh.config import Config, build_method, explain
from fednh.data.sources.images import recipe
from fednh.errors import UserError
from fednh.io.files import read_tree, write_bytes, write_tree
from fednh.methods import Method
from fednh.models import Net, build_net
from fednh.models.backbone import Recipe
from fednh.models.features import is_features, recipe_of
from fednh.runs.layout import run_name
from fednh.tree import Tree

# --- predictions for held-out samples -------------------------------------------------------------------------------
# What became of every sample that a client holds out, after the last round: its class, and what the models predict.
#
# A file a client, small: a few numbers a sample, in the order of the held-out samples. Accuracy, precision, recall
# and confusion of a site follow from it, and so does the comparison of two models on the same samples. By its row in
# the data a sample is known again in runs of other seeds and folds. It stays where the samples are: in the run folder
# of a simulation, on a real site's own disk.


Classes = NDArray[np.int32]
Rows = NDArray[np.int64]
Shares = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Outcomes:
    """One client's held-out samples: the class of each, and the classes that its models take it for."""

    label: Classes  # (N,)
    personal: Classes  # (N,)
    shared: Classes | None = None  # (N,), by the global model; None: the method makes none
    sample: Rows | None = None  # (N,), its row in the training part of the data as read; None: an older run
    group: Rows | None = None  # (N,), the group that it belongs to (data.group)
    confidence: Shares | None = None  # (N,), the probability of the class in `personal`; None: an older run
    shared_confidence: Shares | None = None  # (N,), the same of `shared`

    def __len__(self) -> int:
        return len(self.label)

    def of_rows(self, rows: Rows, groups: Rows | None) -> Outcomes:
        """The same with the samples' rows in the data, and their groups, of which `groups` has one for every row."""
        return replace(self, sample=rows, group=None if groups is None else groups[rows])


OUTCOME_COLUMNS: dict[str, tuple[str, type[np.generic]]] = {  # name in the file -> attribute, type
    "label": ("label", np.int32),
    "personal": ("personal", np.int32),
    "global": ("shared", np.int32),
    "sample": ("sample", np.int64),
    "group": ("group", np.int64),
    "confidence": ("confidence", np.float32),
    "global_confidence": ("shared_confidence", np.float32),
}


def write_outcomes(file: Path, outcomes: Outcomes, sync: bool = True) -> None:
    held: dict[str, NDArray[Any]] = {
        name: np.ascontiguousarray(column, type_)
        for name, (attribute, type_) in OUTCOME_COLUMNS.items()
        if (column := getattr(outcomes, attribute)) is not None
    }
    write_bytes(file, safetensors.numpy.save(held), sync)


def read_outcomes(file: Path) -> Outcomes:
    try:
        held = safetensors.numpy.load(file.read_bytes())
        there = {attribute: held[name] for name, (attribute, _) in OUTCOME_COLUMNS.items() if name in held}
        outcomes = Outcomes(**{"label": held["label"], "personal": held["personal"], **there})
        if any(column.shape != outcomes.label.shape or column.ndim != 1 for column in held.values()):
            raise ValueError("its columns differ in length")
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); restore it from a copy, or run again") from error
    return outcomes


# --- models ---------------------------------------------------------------------------------------------------------


FORMAT = 1  # of the card; a reader refuses a newer one
REMEMBERED = ("label", "site", "encoding", "separator", "decimal", "layout")  # by which later files are read, too


class Architecture(BaseModel):
    """Which network: a model by name or import path, and its constructor's arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str
    args: dict[str, Any] = Field(default_factory=dict)


class Normalisation(BaseModel):
    """How a raw value v of a sample reaches the network, (v / scale - mean) / std, and how a sample is made."""

    model_config = ConfigDict(extra="allow", frozen=True)
    scale: float = Field(gt=0)
    mean: list[float] = Field(min_length=1)
    std: list[float] = Field(min_length=1)


class Card(BaseModel):
    """The metadata of a model file; other keys are kept unchanged."""

    model_config = ConfigDict(extra="allow", frozen=True)
    format: int = Field(1, ge=1)
    fednh: str = "unknown"
    method: dict[str, Any]
    model: Architecture
    shape: tuple[int, ...] = Field(min_length=1, max_length=3)  # of a sample; of a frozen body's images
    classes: tuple[str, ...] = Field(min_length=1)
    features: Recipe | None = None  # of a frozen body, whose features the tensors of the file are for
    preprocessing: Normalisation
    trained_on: dict[str, Any] = Field(default_factory=dict)
    novelty: dict[str, Any] | None = None  # quantiles of training similarities, where logits are cosines
    client: int | None = None  # of a personal model: its client
    site: str | None = None  # the client's name, where it is a natural site

    @property
    def sample_form(self) -> dict[str, Any]:
        """What a sample is and how it is made of a raw input, as `Dataset.preprocessing` had it in training."""
        return self.preprocessing.model_extra or {}


def write_model(path: Path, tree: Tree, card: dict[str, Any], sync: bool = True) -> None:
    """A model with its card."""
    write_tree(path, tree, {"fednh": json.dumps(card, sort_keys=True)}, sync)


def read_model(path: Path) -> tuple[Tree, Card]:
    """A model's tensors and its card, or one sentence on what is wrong with the file."""
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get("fednh")
        if text is None:
            raise UserError(f"{path} is a safetensors file without a card: it was not saved by fednh")
        card = Card.model_validate(json.loads(text))
        if card.format > FORMAT:
            raise UserError(f"{path} has a card of format {card.format}, made by fednh {card.fednh}; upgrade fednh")
        return read_tree(path), card
    except ValidationError as error:
        raise UserError(f"{path} has a card that cannot be used: {explain(error)}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, SafetensorError) as error:
        raise UserError(f"{path} is not a model saved by fednh: {error}") from error


def remembered(card: Card) -> dict[str, Any]:
    """How the files that a model was trained on were read, for files of the same form: settings below [data]."""
    return _known({key: card.trained_on.get(key) for key in REMEMBERED})


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def card_of(
    config: Config,
    net: Net,
    shape: tuple[int, ...],
    classes: tuple[str, ...],
    data: str,
    preprocessing: dict[str, Any],
    reading: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The metadata that a saved model needs to be used elsewhere; `reading` is what was found of the file's form."""
    recipe_of_body: dict[str, Any] = {}
    if is_features(preprocessing):
        backbone, raw = recipe_of(preprocessing, data), preprocessing["inputs"]
        recipe_of_body = {"features": preprocessing["backbone"]}
        if raw["kind"] == "image":
            shape, pixels = (raw["channels"], *raw["size"]), slice(raw["channels"])
            preprocessing = {**raw, "scale": 255.0, "mean": backbone.mean[pixels], "std": backbone.std[pixels]}
        else:
            preprocessing = {**raw, "scale": 1.0, "mean": [0.0], "std": [1.0]}
    if preprocessing.get("kind") == "image":
        rest = {key: value for key, value in preprocessing.items() if key != "fit"}
        preprocessing = {**rest, "resize": recipe(shape[0], preprocessing.get("fit", "stretch"))}
    return {
        "format": FORMAT,
        "fednh": __version__,
        "method": config.method,
        "model": {**net.card, "args": config.model.only(net.name).trained[1]},
        **recipe_of_body,
        "shape": shape,
        "classes": classes,
        "preprocessing": preprocessing,
        "trained_on": {
            "run": run_name(config),
            "data": data,
            "seed": config.seed,
            "rounds": config.rounds,
            "precision": config.precision,
            **_known({key: getattr(config.data, key) for key in REMEMBERED}),
            **(reading or {}),
        },
    }


def after_rounds(card: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The card of a model that has had so many rounds, which may be fewer than were planned."""
    return {**card, "trained_on": {**card["trained_on"], "rounds": rounds}}


def architecture(card: Card, weights: Path | None = None) -> tuple[Net, Method]:
    """The network and the method that a card describes; `weights` is a file for the network to start from.

    A model file may come from anybody: by import path it can name classes of networks and methods, and nothing else.
    """
    own = {k: v for k, v in (card.model.model_extra or {}).items() if k in ("head", "norm", "convolution", "dim")}
    shape = card.shape if card.features is None else (card.features.dim,)
    start = None if weights is None or card.features is not None else str(weights)
    net = build_net(card.model.name, shape, len(card.classes), card.model.args, weights=start, **own)
    return net, build_method(card.method)
