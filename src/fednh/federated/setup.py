"""What a run works on, made from its config: the samples, who holds them, the network and the method."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednh.config import Config
from fednh.data import scaling, splits
from fednh.data.batches import Samples, samples_of, subset
from fednh.data.dataset import Dataset
from fednh.data.inspection import about_test_set
from fednh.data.partitions import Indices, class_table, left_out
from fednh.data.sources.registry import file_of, load
from fednh.data.splits import DEFAULT_SHARE, FEWEST_HELD, balanced_sample, hold_out, hold_out_fold, limited
from fednh.errors import DataError, Notice, UserError
from fednh.federated.architectures import Architectures
from fednh.io import cache
from fednh.machine import check_machine
from fednh.methods import Method
from fednh.models import Net, build_net
from fednh.models.backbone import Backbone, Recipe, build_backbone
from fednh.models.features import is_features, recipe_of, with_features
from fednh.runs import fingerprint
from fednh.runs.model_file import card_of
from fednh.seeding import numpy_rng

Counts = NDArray[np.int64]  # (K, C): how many samples of each class (columns) every client (rows) has


@dataclass(frozen=True)
class Federation:
    """What a run works on; it does not change. With the same seed, all methods share its data and partition."""

    dataset: Dataset
    train: Samples
    test: Samples
    parts: list[Indices]  # client -> indices into `train`, to train on
    architectures: Architectures
    dealt: tuple[str, ...]  # client -> the name of its network
    held_out: list[Indices] = field(default_factory=list)  # client -> indices into `train`, to measure on
    statistics: tuple[scaling.Scaling, ...] = ()  # what each natural site measured; the data set has the agreed ones
    sites: tuple[str, ...] = ()  # the clients' names, where they are natural sites
    raw_fingerprint: dict[str, Any] | None = None  # fingerprint of the data before they were scaled

    def __post_init__(self) -> None:
        if not self.held_out:
            object.__setattr__(self, "held_out", [part[:0] for part in self.parts])

    @property
    def method(self) -> Method:
        return self.architectures.method

    @property
    def net(self) -> Net:
        """The only network, or the first."""
        return self.architectures.net

    def with_method(self, method: Method) -> Federation:
        """The same clients for another method."""
        return replace(self, architectures=replace(self.architectures, method=method))

    @property
    def measures_held_out(self) -> bool:
        return any(map(len, self.held_out))

    def name(self, client: int) -> str:
        return client_name(client, self.sites)

    def class_counts(self) -> Counts:
        """Training samples of each class (columns) on every client (rows)."""
        return class_counts(self.dataset, self.parts)

    def card(self, config: Config, client: int | None = None) -> dict[str, Any]:
        """Metadata that a saved model needs to be used elsewhere; with `client`, for that client's personal model."""
        whose = {} if client is None else {"client": client, **({"site": self.sites[client]} if self.sites else {})}
        net = self.net if client is None else self.architectures.nets[self.dealt[client]]
        return {**self._card(config, net), **whose}

    def cards(self, config: Config) -> dict[str, dict[str, Any]]:
        """Metadata for the global model of each architecture."""
        return {name: self._card(config, net) for name, net in self.architectures.nets.items()}

    def _card(self, config: Config, net: Net) -> dict[str, Any]:
        data = self.dataset
        preprocessing = {**data.preprocessing, "scale": data.scale, "mean": data.mean, "std": data.std}
        return card_of(config, net, data.shape, data.classes, data.name, preprocessing, data.reading)

    def _notes(self, config: Config) -> list[str]:
        """What to say about the data when a run starts."""
        used = left_out(config.partition.kind, self.dataset, self.parts, self.held_out)
        if config.data.limit is not None:
            used = [
                f"clients train on {config.data.limit:,} of their samples, or on all if they have fewer (data.limit)"
            ]
        return [*about_test_set(self.dataset), *used, *self._sampled()]

    def _sampled(self) -> list[str]:
        """What to say where models are evaluated on a part of the test set."""
        there, used = len(self.dataset.y_test), len(self.test)
        return (
            [f"evaluated on {used:,} of {there:,} test samples, classes alike (eval.samples)"] if used < there else []
        )

    def server_side(self, config: Config) -> ServerSide:
        """What the server knows where all samples are in one place."""
        return ServerSide(
            name=self.dataset.name,
            classes=self.dataset.classes,
            architectures=self.architectures,
            network_of=self.dealt.__getitem__,
            test=self.test if len(self.test) else None,
            cards=self.cards(config),
            counts=self.class_counts(),
            sites=self.sites,
            raw_fingerprint=self.raw_fingerprint,
            notes=tuple(f"{self.dataset.name}: {words}" for words in self._notes(config)),
            train=self.train,
            trained_on=np.concatenate(self.parts),
            held_out=self.held_out,
            measured=self.dataset.fitted,
            groups=self.dataset.group_train,
        )


def client_name(client: int, sites: Sequence[str]) -> str:
    """What messages call a client."""
    return f"site {sites[client]} (client {client})" if sites else f"client {client}"


@dataclass(frozen=True)
class ServerSide:
    """What the server of a run knows, wherever the samples are: all that the round loop works on."""

    name: str  # of the data
    classes: tuple[str, ...]
    architectures: Architectures
    network_of: Callable[[int], str]  # client -> the name of its network
    test: Samples | None  # the balanced test set, if the server has one
    cards: dict[str, dict[str, Any]]  # architecture -> metadata in the file of its global model
    counts: Counts = field(default_factory=lambda: np.zeros((0, 0), np.int64))  # no rows: only the sites know
    sites: tuple[str, ...] = ()
    raw_fingerprint: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()  # about the data, for the user
    train: Samples | None = None  # the training samples, where all are in one place
    trained_on: Indices | None = None  # those of them that clients train on
    held_out: Sequence[Indices] = ()  # client -> the rows that it holds out
    measured: bool = False  # means and deviations of the samples were measured on them
    groups: Indices | None = None  # row -> the group that it belongs to

    @property
    def method(self) -> Method:
        return self.architectures.method

    @property
    def net(self) -> Net:
        """The only network, or the first."""
        return self.architectures.net

    @cached_property
    def one_class(self) -> list[int]:
        """The natural sites with a single class, which any model can learn to name: means over sites leave them out.

        None if all sites are like that, and none where only the sites know their classes.
        """
        few = np.flatnonzero((self.counts > 0).sum(axis=1) < 2).tolist() if self.sites else []
        return few if len(few) < len(self.counts) else []

    @cached_property
    def few_held(self) -> list[int]:
        """The natural sites with so few held-out samples that one of them would move a mean over sites.

        None if all sites are like that.
        """
        if not self.sites:
            return []
        known, single = {client: len(held) for client, held in enumerate(self.held_out) if len(held)}, self.one_class
        rest = {client: n for client, n in known.items() if client not in single}
        few = [client for client, n in rest.items() if n < FEWEST_HELD]
        return few if len(few) < len(rest) else []


def class_counts(data: Dataset, parts: list[Indices]) -> Counts:
    """Training samples of each class (columns) in every part (rows)."""
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return class_table(data.y_train[np.concatenate(parts)], owner, len(parts), data.num_classes)


def network(config: Config, shape: tuple[int, ...], num_classes: int, features: bool = False) -> Net:
    """The network that a config describes, for samples of this shape; behind a frozen body, for its features.

    For data that are such features, `auto` is a linear head.
    """
    m = config.model
    name, args = m.trained
    name = "linear" if features and name == "auto" else name
    head, norm, weights = (None, "refuse", None) if m.frozen == "body" else (m.head, m.norm_rule, m.weights)
    fixed = partial(build_net, name, shape, num_classes, args, convolution=m.convolution, dim=m.common_dim)
    net = fixed(head=head, norm=norm, weights=weights)
    net.precision = config.precision
    return net


def networks(config: Config, shape: tuple[int, ...], num_classes: int, features: bool = False) -> Architectures:
    """The networks of all clients, with the run's method."""
    nets = {}
    for name in config.model.names:
        nets[name] = network(config.model_copy(update={"model": config.model.only(name)}), shape, num_classes, features)
    return Architectures(config.build_method(), nets)


def load_data(config: Config) -> Dataset:
    """The samples that a config names; images of any size get the size that a frozen body wants."""
    settings = config.data.model_dump()
    if config.model.frozen == "body" and settings.get("size") is None:
        settings["size"] = [config.features.size] * 2
    return load(config.data.name, data_folder(config), settings)


def prepared(config: Config, data: Dataset) -> Dataset:
    """The samples as clients train on them: as they are, or the features of a frozen body."""
    if is_features(data.preprocessing):
        _check_features(config, recipe_of(data.preprocessing, data.name), data.name)
    if config.model.frozen == "none" or is_features(data.preprocessing):
        return data
    return with_features(data, backbone_of(config, data.num_classes), config.features.views)


def _check_features(config: Config, recipe: Recipe, where: str) -> None:
    """Refuse features of another network than `model.frozen` asks for."""
    if config.model.frozen == "body" and not frozen_recipe(config).agrees(recipe):
        raise DataError(
            f"{where} holds features of {recipe.name} at {recipe.size} pixels, not of the frozen body that model.name "
            f"and features describe; leave model.frozen out to use them"
        )


def backbone_of(config: Config, num_classes: int) -> Backbone:
    """The frozen body that a config describes."""
    return build_backbone(frozen_recipe(config), num_classes, weights_of(config))


def frozen_recipe(config: Config) -> Recipe:
    """What a config says of its frozen body; of the weights only if it has their checksum."""
    m, how = config.model, config.features
    own = {"mean": how.mean, "std": how.std}
    pixels = {key: tuple(value) for key, value in own.items() if value is not None}
    return Recipe(name=m.network, args=m.args, head=m.head, size=how.size, sha256=how.sha256 or "", **pixels)


def weights_of(config: Config) -> Path | None:
    """The file of weights that a config names."""
    return None if config.model.weights is None else Path(config.model.weights)


def test_sample(config: Config, test: Samples) -> Samples:
    """The test samples to evaluate on: all, or `eval.samples` of them, the same for all methods and rounds."""
    if config.eval.samples is None or config.eval.samples >= len(test):
        return test
    return subset(test, balanced_sample(test.y.numpy(force=True), config.eval.samples, numpy_rng(config.seed, "test")))


def data_folder(config: Config) -> Path:
    """The folder in which data sets are looked up by name."""
    return cache.data_folder(config.data.dir)


def fingerprint_of(config: Config, data: Dataset) -> dict[str, Any]:
    """What was read, and from where."""
    file = file_of(config.data.name, data_folder(config))
    size = {"bytes": file.stat().st_size} if file is not None and file.is_file() else {}
    return {**data.fingerprint, "path": config.data.name if file is None else str(file), **size}


def build_federation(config: Config, dataset: Dataset | None = None, run: Path | None = None) -> Federation:
    """Load, divide and check everything that a run needs; bad input is found here, before anything is written.

    Pass `dataset` to reuse loaded data. If the folder `run` holds a run that has already begun, data and weights
    must be those that it began with.
    """
    check_machine(config.devices, config.precision)
    natural = config.partition.kind.natural
    data = dataset or load_data(config)
    raw_fingerprint = fingerprint_of(config, data)
    if run is not None:
        fingerprint.check(run, config, raw_fingerprint)
    data = prepared(config, data)
    parts, held_out = divide(data, config)
    for words in splits.not_divided(
        data, parts, held_out, client_names(data, config, len(parts)), _share(data, config)
    ):
        warnings.warn(words, Notice, 2)
    data, statistics = scaled(data, config, parts, held_out)
    return Federation(
        dataset=data,
        train=samples_of(data, "train", config.data.augment, config.home),
        test=test_sample(config, samples_of(data, "test", device=config.home)),
        parts=parts,
        architectures=networks(config, data.shape, data.num_classes, is_features(data.preprocessing)),
        dealt=dealt(config, len(parts), data.sites if natural else ()),
        held_out=held_out,
        statistics=statistics,
        sites=data.sites if natural else (),
        raw_fingerprint=raw_fingerprint,
    )


def dealt(config: Config, clients: int, sites: Sequence[str] = ()) -> tuple[str, ...]:
    """The name of each client's network."""
    return tuple(config.model.of_client(client, sites[client] if sites else None) for client in range(clients))


def scaled(
    data: Dataset, config: Config, parts: list[Indices], held_out: list[Indices]
) -> tuple[Dataset, tuple[scaling.Scaling, ...]]:
    """The data with the statistics that the run uses, and what each natural site measured.

    Under data.limit sites measure what they train on alone: they are to be as if they had no more samples.
    """
    measured = held_out if config.data.limit is None else [part[:0] for part in parts]
    return scaling.fit(data, parts, measured, config.partition.kind.natural)


def divide(data: Dataset, config: Config) -> tuple[list[Indices], list[Indices]]:
    """Each client's samples to train on, and those that it holds out."""
    owned = config.partition.kind.divide(data, numpy_rng(config.seed, "partition"))
    limit = config.data.limit
    if limit is None and data.held_train is None and not _share(data, config):
        return owned, [owned[0][:0]] * len(owned)
    # By name, so that a site holds out the same samples alone as in the simulation of all sites.
    names = client_names(data, config, len(owned))
    both = [_held_out(data, config, part, name) for part, name in zip(owned, names, strict=True)]
    parts = [train for train, _ in both]
    if limit is not None:  # what is held out does not depend on it
        streams = [numpy_rng(config.seed, f"limit {name}") for name in names]
        parts = [limited(data.y_train, part, limit, rng) for part, rng in zip(parts, streams, strict=True)]
    return parts, [held for _, held in both]


def _held_out(data: Dataset, config: Config, part: Indices, name: str) -> tuple[Indices, Indices]:
    """The samples that a client trains on and those that it holds out: as published, a share, or one of its folds."""
    if data.held_train is not None and config.data.folds is None and config.data.holdout is None:
        held_here = data.held_train[part]
        return part[~held_here], part[held_here]
    if config.data.folds is None:
        rng = numpy_rng(config.seed, f"holdout {name}")
        return hold_out(data.y_train, part, _share(data, config), rng, data.group_train)
    rng = numpy_rng(0, f"folds {name}")  # of every seed the same
    train, held = hold_out_fold(data.y_train, part, config.data.folds, config.data.fold, rng, data.group_train)
    if len(part) and not len(train):
        what = "sample" if data.group_train is None else "group of samples"
        raise UserError(f"data.folds: {name} has a single {what}, so nothing is left to train on; leave it out")
    return train, held


def client_names(data: Dataset, config: Config, clients: int) -> list[str]:
    """The clients' names: the sites', where they are natural ones."""
    return list(data.sites) if config.partition.kind.natural else [f"client {k}" for k in range(clients)]


def _share(data: Dataset, config: Config) -> float:
    """The share of its samples that every client holds out."""
    if config.data.folds is not None:
        return 1 / config.data.folds
    if config.data.holdout is not None:
        return config.data.holdout
    return 0.0 if len(data.y_test) else DEFAULT_SHARE
