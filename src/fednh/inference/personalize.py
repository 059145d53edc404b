"""A site that never took part gets a personal model from a finished run, by the method's own personalisation.

It is enrolled as any client, from the configuration alone; it receives what the server would send after the last round,
trains as in one round of the method, unless that changes nothing it keeps, and its personal model is what the method
calls so. Inputs are scaled as in the run, by the statistics in the model's card: a newcomer measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fednh.config import Config
from fednh.config.schema import OWN, PersonalConfig
from fednh.data.batches import ClientData, Samples, samples_of
from fednh.data.dataset import Dataset, one_site
from fednh.data.partitions import Indices
from fednh.data.splits import DEFAULT_SHARE, hold_out
from fednh.errors import UserError
from fednh.federated import checks, client, evaluate, similarity
from fednh.federated.architectures import initial_state
from fednh.inference.eval_data import Training, load_for, of_run, trained_on
from fednh.inference.model import Model, backbone_for
from fednh.io.files import write_json
from fednh.machine import one_thread
from fednh.methods import METHODS, Method
from fednh.methods.optimizers import FitSettings
from fednh.metric_names import HELD_MACRO, HELD_SHARE
from fednh.models import Net
from fednh.models.backbone import Backbone
from fednh.models.features import with_features
from fednh.models.sentences import SentenceEncoder
from fednh.runs import fingerprint
from fednh.runs.layout import MODEL, RunLayout, SharedModels
from fednh.runs.model_file import Card, Classes, Outcomes, architecture, read_model, write_model
from fednh.runs.run_folder import read_config
from fednh.seeding import numpy_rng, torch_rng
from fednh.tree import Tree, canonical


@dataclass(frozen=True)
class Personalised:
    """A site's personal model with its card, and its comparison with others on held-out samples."""

    params: Tree
    card: dict[str, Any]
    comparison: dict[str, Any]
    outcomes: Outcomes  # the held-out samples, with what the personal and the global model take them for
    alone: Classes  # the same by the model that was trained on the site's data alone
    backbone: Backbone | SentenceEncoder | None = None

    @cached_property
    def model(self) -> Model:
        """The model, to predict with."""
        card = Card.model_validate(self.card)
        return Model(self.params, card, *architecture(card), self.backbone)

    def write(self, folder: Path) -> None:
        write_json(folder / "comparison.json", self.comparison)
        write_model(folder / MODEL, self.params, self.card)


def empty_folder(folder: Path) -> Path:
    """The folder, if a personal model can be written to it."""
    if (folder / MODEL).exists() or (folder.exists() and not folder.is_dir()):
        raise UserError(f"{folder} holds something already; choose another folder")
    return folder


def personalize(
    run: Path,
    source: str,
    epochs: int | None = None,
    holdout: float | None = None,
    settings: Mapping[str, Any] | None = None,
    site: str | None = None,
    weights: str | Path | None = None,
    network: str | None = None,
) -> Personalised:
    """Train on a site's data; without `holdout` its test set is held out, or a fifth where it has none.

    Of a source that holds several sites, `site` is the one that is meant. `weights` are those of a frozen body, where
    they are not in a place that the model knows. Where clients have different networks, `network` names the site's.
    """
    config, shared_models = read_config(run), _shared_models(run, network)
    received, card = read_model(shared_models.broadcast_model)
    fingerprint.check_settings(run, config)
    net, method = architecture(card, fingerprint.weights_of(run, config))
    images = data = _of_site(load_for(card, source, settings, of_run(config, "group")), site, source)
    backbone = backbone_for(card, shared_models.broadcast_model, weights)
    if isinstance(backbone, Backbone):
        data = with_features(data, backbone, config.features.views)
    index, held_index = _divided(config, data, holdout)
    train, held = samples_of(data, "train", config.data.augment), _held_out(data, held_index)
    fitting = _settings(config, epochs)
    with checks.with_context(method, "personalising failed"):
        initial = initial_state(method, net, config.seed)
        kept = method.enroll(initial)
        params = _trained(method, net, kept, received, train, index, fitting, config.seed, config.personal)
    alone = METHODS["local"]()
    fresh = canonical(net.init(torch_rng(config.seed, "init")))
    local = _trained(alone, net, fresh, {}, train, index, fitting, config.seed)
    shared = read_model(file)[0] if (file := shared_models.global_model).exists() else None
    guessed = {
        "global": None if shared is None else _guessed(method, net, shared, held),
        "personalised": (personal := _guessed(method, net, params, held)),
        "local": (by_local := _guessed(alone, net, local, held)),
    }
    outcomes = Outcomes(held.y.cpu().numpy().astype(np.int32), personal, guessed["global"])
    if held_index is not None:
        outcomes = outcomes.of_rows(held_index, data.group_train)
    counts = np.bincount(data.y_train[index], minlength=len(card.classes))
    comparison = {
        "run": str(run),
        "method": card.method.get("name"),
        "data": source,
        "site": site,
        "epochs": fitting.epochs,
        "lr": fitting.lr,
        "trained_on": len(index),
        "held_out": len(held),
        # By the run: then its global model is better here than it would be elsewhere.
        "held_out_trained_on": _trained_on(run, card, images, held_index),
        "classes": {name: int(n) for name, n in zip(card.classes, counts, strict=True) if n},
        "lacks": [name for name, n in zip(card.classes, counts, strict=True) if not n],
        **{name: None if guesses is None else _metrics(guesses, held) for name, guesses in guessed.items()},
    }
    about = card.model_dump(mode="json", exclude_none=True)
    about.pop("privacy", None)  # the run's account knows nothing of these samples
    about["trained_on"] = {**about["trained_on"], "personalised_on": source, "epochs": fitting.epochs}
    about["novelty"] = similarity.similarity_quantiles(method, net, params, train, index, config.seed)
    return Personalised(params, about, comparison, outcomes, by_local, backbone)


def _of_site(data: Dataset, site: str | None, source: str) -> Dataset:
    """The samples of one site."""
    if site is None and len(data.sites) > 1:
        raise UserError(
            f"{source} holds {len(data.sites)} sites ({', '.join(data.sites)}), but a personal model is for one: "
            f"choose it by site = ..."
        )
    if site is None:
        return data
    if not data.sites:
        raise UserError(f"{source} does not say which site a sample comes from; leave site = {site!r} out")
    return one_site(data, site)


def _trained_on(run: Path, card: Card, data: Dataset, held: Indices | None) -> int | None:
    """How many of the samples to compare on the run was trained on; None if its data are not at hand."""
    x, y = (data.x_test, data.y_test) if held is None else (data.x_train[held], data.y_train[held])
    try:
        return trained_on(x, y, Training(run).samples(card, x))
    except UserError:
        return None


def _shared_models(run: Path, network: str | None) -> SharedModels:
    """What the run's server would send to a newcomer, and its global model; of the newcomer's network."""
    layout = RunLayout(run)
    found = {read_model(each.broadcast_model)[1].model.name: each for each in layout.shared_models()}
    if not found:
        raise UserError(
            f"{run} holds no finished run to start from ({layout.broadcast_model} is missing); finish it with "
            f"`fednh resume`"
        )
    if network is None and len(found) == 1:
        return next(iter(found.values()))
    if network not in found:
        raise UserError(f"network = {network!r} is not one of {run}; choose one of {', '.join(found)}")
    return found[network]


def _divided(config: Config, data: Dataset, holdout: float | None) -> tuple[Indices, Indices | None]:
    """The samples to train on, and those held out; None: the test set is."""
    everything = np.arange(len(data.y_train))
    if holdout is None and len(data.y_test):
        return everything, None
    rng = numpy_rng(config.seed, "holdout personalize")
    share = DEFAULT_SHARE if holdout is None else holdout
    train, held = hold_out(data.y_train, everything, share, rng, data.group_train)
    if len(held) == 0:
        whole = "" if data.group_train is None else ", as data.group keeps groups whole"
        raise UserError(
            f"{data.name}: holdout = {share:g} of {len(everything)} samples leaves none to compare on{whole}"
        )
    return train, held


def _held_out(data: Dataset, held: Indices | None) -> Samples:
    if held is None:
        return samples_of(data, "test")
    return samples_of(replace(data, x_test=data.x_train[held], y_test=data.y_train[held], site_test=None), "test")


def _settings(config: Config, epochs: int | None) -> FitSettings:
    """The run's, at its full rate: the same for all that is compared, whatever it starts from."""
    settings = config.train.fit_settings
    return settings if epochs is None else replace(settings, epochs=epochs, steps=None)


def _trained(
    method: Method,
    net: Net,
    kept: Tree,
    received: Tree,
    train: Samples,
    index: Indices,
    settings: FitSettings,
    seed: int,
    how: PersonalConfig = OWN,
) -> Tree:
    """A newcomer's round, where it changes what is kept (normalisation too), and its personal model."""
    with one_thread():
        if (method.kept_is_trained and how.model == "own") or net.stateful:
            data = ClientData(train, index, seed, purpose="personalize")
            kept = client.update(method, net, kept, received, data, settings).keep
        data = ClientData(train, index, seed, purpose="personalize personal")
        return canonical(client.personal_model(method, net, kept, received, data, settings, how=how))


def _guessed(method: Method, net: Net, params: Tree, held: Samples) -> Classes:
    """The classes that a model takes held-out samples for."""
    logits = evaluate.logits_of(lambda x: method.scores(net, params, x), held)
    classes: Classes = logits.argmax(1).cpu().numpy().astype(np.int32)
    return classes


def _metrics(guessed: Classes, held: Samples) -> dict[str, float | None]:
    correct = evaluate.count_correct(torch.from_numpy(guessed).to(held.y), held)
    macro, share = evaluate.held_accuracy(correct, evaluate.total_per_class(held))
    return {HELD_MACRO: macro, HELD_SHARE: share}
