"""The ClientApp: a site that Flower calls; start it with `flower-supernode --node-config site.toml`.

An order is obeyed only if the federation's server has signed it for this site (signing.py) and the site's own rules
allow it (site_config.py). Otherwise it is refused and logged before its content is read. A site that cannot carry out
an order replies with a problem. The text of an error may quote data, so it goes to the site's own log only; the text
of a refusal quotes nothing but the request, so it is sent.

`Site` works on an order with its own data and the personal state on its own disk (layout.StateFolder). An order names
the round whose state to start from: the last whose upload the server accepted. So a repeated order, a server restarted
from a checkpoint, or an answer that came too late does not change the result.

What leaves a site passes `finalize_reply`, last, where it is checked, logged and signed. It has some of these records
and nothing else; a sample, a label or a path is in none of them. Many methods upload all of the personal model:

    said      who the site is and what its data are like (`Hello`), a problem in words, or an acknowledgement
    facts     its number and the round, samples processed, their loss; as far as the owner's rules allow
    upload    what the method declares (docs/what-leaves-a-site.md has it by method)
    figures   metrics of its personal and of the global model; as far as the owner's rules allow
    masked    with `federation.secure` in place of `upload`: what the method declares, under masks
    secure    keys, sealed shares and signatures of a secure sum (secure_messages.py)
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from safetensors import SafetensorError, safe_open

from fednh import extras
from fednh.config import Config
from fednh.config.schema import ModelConfig
from fednh.data import scaling
from fednh.data.batches import ClientData, Samples, samples_of, subset
from fednh.data.dataset import Dataset, digest, one_site, select_rows
from fednh.data.disclosure import not_agreed
from fednh.data.sources.registry import absolute, file_of
from fednh.errors import Refused, UserError
from fednh.federated import checks, evaluate, similarity
from fednh.federated import client as clients
from fednh.federated.architectures import initial_state
from fednh.federated.compress import Compression
from fednh.federated.setup import (
    Federation,
    build_federation,
    data_folder,
    frozen_recipe,
    load_data,
    prepared,
    test_sample,
    weights_of,
)
from fednh.flower import protocol, secure_messages, signing
from fednh.flower.audit import SiteEvents
from fednh.flower.layout import StateFolder
from fednh.flower.paid_answers import PaidAnswers
from fednh.flower.protocol import Answer, Hello, Number, Order, Task
from fednh.flower.secure_site import MaskedOrder, SecureSite
from fednh.flower.signing import ssh_fingerprint
from fednh.flower.site_config import METRICS, Agreement, SiteConfig, read_site_config
from fednh.io.files import atomic_write, keep_private, read_tree, sha256, write_bytes, write_tree
from fednh.machine import one_thread
from fednh.metric_names import HELD
from fednh.models import check_size
from fednh.models.backbone import PINNED, Recipe, check_body_size
from fednh.models.features import is_features
from fednh.privacy.accounting import Release
from fednh.privacy.ledger import Balance, covers
from fednh.privacy.marks import Marks
from fednh.privacy.noise import SystemNoise
from fednh.privacy.plan import PrivacyPlan, make_plan
from fednh.privacy.private_data import PRIVATE, left_to_sum
from fednh.runs import fingerprint
from fednh.runs.model_file import after_rounds, write_model, write_outcomes
from fednh.text import one_line
from fednh.tree import Tree, canonical, prefix, strip_prefix

RECORDS = ("said", "facts", "upload", "figures", secure_messages.RECORD, secure_messages.MASKED)
Seal = Callable[[RecordDict], RecordDict]


def finalize_reply(
    content: RecordDict, events: SiteEvents | None, seal: Seal | None, refused: str | None = None
) -> RecordDict:
    """The reply as it is sent: checked, logged, signed. `refused` says why an order was not obeyed."""
    if unknown := sorted(set(content) - set(RECORDS)):
        raise Refused(f"a reply would hold {unknown[0]!r}, which is not among what leaves a site")
    if events is not None:
        content = events.left(content) if refused is None else events.refused(refused, content)
    return seal(content) if seal is not None else content


log = logging.getLogger("flwr")
NEWEST = 2  # states that stay, whatever the server says
STATES = 100  # states that are kept at most, whatever it says
NOISED = "privacy"  # in the metadata of a state that was made under privacy: the level


class Site:
    """One site at work on one order. `agreement` has what it agreed on before; None where there is nothing secret."""

    def __init__(
        self,
        site_config: SiteConfig,
        toml: str,
        task: Task | None,
        agreement: Agreement | None = None,
        network: str | None = None,
    ):
        """`network` is the one that an order names; None in a query, whose answer does not depend on it."""
        self.agreement = None if site_config.divided else agreement
        model = site_config.policy.config(toml, site_config.data).model
        self.chosen = (site_config.policy.network or "") if model.differs else ""
        if network is not None:
            site_config = with_network(site_config, model, network)
        self.config = _config(toml, site_config)
        if self.agreement is not None:
            self.agreement.check(self.config)
        self.site_config = site_config = with_weights(site_config, self.config)
        self.config = _config(toml, site_config)
        self.shared = toml, _shared(site_config), task
        self.fed = _federation(*self.shared)
        site_config.policy.check_numbers(self.fed.method.numbers(self.fed.net.num_classes, self.fed.net.dim))
        self.index = self.fed.parts[max(site_config.part, 0)]
        self.kept = StateFolder(site_config.home).kept(self.config.federation.name, site_config.site)
        if len(self.index) < self.fewest:
            raise Refused(f"it would train on fewer samples than the {self.fewest} of its policy (allow.samples)")

    @property
    def fewest(self) -> int:
        """The fewest samples behind any number that leaves; parts of public sets are no secret."""
        return 1 if self.site_config.divided else self.site_config.policy.allow.samples

    def hello(self) -> tuple[Hello, int]:
        """The site's name and the form of its data, and how often it has said so; file names are not disclosed.

        A site with its own data repeats its first greeting, so that no two of them can be compared.
        """
        divided = self.site_config.divided
        name = self.fed.dataset.name if divided else self.config.federation.name
        site = self.fed.sites[self.site_config.part] if divided and self.fed.sites else self.site_config.site
        task, times = Task.of(self.fed, name, divided), 1
        if not divided:
            data = _own_data(*self.shared[:2]).data
            if self.private and data.fitted:
                raise Refused("means and deviations of its features would leave without noise; its data must be scaled")
            mean, std = statistics(data, self.fewest)
            task = task.model_copy(update={"scale": data.scale, "mean": mean, "std": std})
        if self.agreement is not None:
            first, times = self.agreement.keep(self.config, json.loads(task.text()))
            task = self._first(Task.read(json.dumps(first)), task)
        return Hello(site=site, task=task, number=self.site_config.part, network=self.chosen), times

    @staticmethod
    def _first(said: Task, task: Task) -> Task:
        """The first greeting's task, if it still describes the data."""
        if (said.shape, said.classes, said.preprocessing) != (task.shape, task.classes, task.preprocessing):
            raise Refused("the form of its data is not that of its first greeting; its owner must agree anew")
        return said

    def read(self, content: RecordDict) -> tuple[Tree, Tree]:
        """The broadcast and the rest of the global model; tensors of another form than the config's are refused."""
        down, whole = _tensor_specs(*self.shared)
        more = {name: whole[name] for name in protocol.tree_names(content, "global") if name in whole}
        device = self.config.home
        return protocol.read_tree(content, "down", device, down), protocol.read_tree(content, "global", device, more)

    def answer(self, order: Order, down: Tree, more: Tree, balance: Balance | None = None) -> Answer:
        """Evaluate, train, save the state; `more` is the part of the global model that the broadcast lacks.

        Under privacy `balance` has what the samples have cost, this answer included.
        """
        self._balance = balance
        if self.agreement is not None:
            self.agreement.keep(self.config)
        answer = self._answer(order, down, more)
        if balance is not None:
            return answer.upload_alone()
        return answer.without_metrics({*METRICS} - {*self.site_config.policy.allow.metrics})

    # --- privacy -----------------------------------------------------------------------------------------------

    _balance: Balance | None = None

    @property
    def private(self) -> bool:
        return self.config.privacy.level != "none"

    @cached_property
    def privacy(self) -> PrivacyPlan | None:
        """What this site's answers spend, from the config alone; None: nothing is noised."""
        fed, config = self.fed, self.config
        plan = make_plan(config, fed.method, fed.net, self._initial(), config.rounds)
        if plan is not None and fed.dataset.fitted:
            raise Refused("means and deviations of its features would leave without noise; its data must be scaled")
        return plan

    def releases(self, order: Order) -> Sequence[Release]:
        """What an answer to this order spends."""
        if self.privacy is None or not order.round:
            return ()
        if self.config.privacy.level != "sample":
            raise Refused("privacy.level = 'client' leaves the noise to the server; a site adds its own: use 'sample'")
        held = strip_prefix(self._load_state(order.last), PRIVATE)
        return self.privacy.due(order.round, [name.replace("_", " ") for name in held])

    @property
    def paid(self) -> PaidAnswers:
        """Who pays for this site's answers."""
        return PaidAnswers(self.site_config, self.config.federation.name, self.kept, self._marks())

    def _marks(self) -> Marks:
        """What this site's samples are recognised by, whatever the server makes of them."""
        if (own := _own_data(*self.shared[:2]).marks if not self.site_config.divided else None) is not None:
            return own
        part, data = max(self.site_config.part, 0), self.fed.dataset
        rows = np.concatenate([self.index, self.fed.held_out[part]])
        return Marks.of(f"part {part} of {self.site_config.parts} of {data.name}", None, data.x_train[rows])

    def _answer(self, order: Order, down: Tree, more: Tree) -> Answer:
        self._warn_changed_data(order)
        kept = self._load_state(order.last)
        metrics: dict[str, Number] = {}
        if order.evaluate:
            if order.final and order.last == 0:  # it joined too late to train in any round
                late = self._update(order.client, order.evaluate, kept, down)
                kept = kept if checks.not_finite(late) else late.keep
            metrics = self._evaluate(order, kept, down, more)
        if not order.round:
            return Answer(order.client, 0, metrics=metrics)
        update = self._packed(self._update(order.client, order.round, kept, down), kept, down)
        if not covers(self.releases(order), update.released):
            raise Refused("its answer would hold more than it has paid for")
        samples = update.samples or None  # a round may train nothing: then there is no loss either
        loss = update.loss_sum if samples else None
        if what := checks.not_finite(update):
            log.warning("round %d: %s is not finite: no state is saved, and the server refuses it", order.round, what)
            loss = math.nan  # the upload may be finite: the loss tells the server to refuse it
        else:
            self._save_state(order.round, update.keep, order.since)
        return Answer(order.client, order.round, update.upload, samples, loss, update.gradient_norm, metrics)

    def _update(self, client: int, round_: int, kept: Tree, down: Tree) -> clients.ClientResult:
        data = self._data(client, round_, "train")
        checks.check_share(data.share, client)
        look, settings, fed = self.config.diagnostics.gradient_norm, self.config.fit_settings(round_), self.fed
        if self.privacy is not None and self.privacy.mechanisms is not None:
            noised = self.privacy.mechanisms, SystemNoise()
            left = fed.method.upload.class_sums if self.config.federation.secure else ()
            return clients.private_update(fed.method, fed.net, kept, down, data, settings, *noised, left_to_sum=left)
        return clients.update(fed.method, fed.net, kept, down, data, settings, look)

    @cached_property
    def compression(self) -> Compression | None:
        """How uploads leave; None: as they are."""
        return Compression.of(self.config.federation)

    def _packed(self, update: clients.ClientResult, kept: Tree, down: Tree) -> clients.ClientResult:
        """The result with a packed upload; what of it is not sent yet is part of the state that the site keeps."""
        if self.compression is None or update.upload is None:
            return update
        owed, spec = strip_prefix(kept, clients.UNSENT), self.fed.method.upload
        packed, left = self.compression.pack(update.upload, down, owed, spec)
        return replace(update, upload=packed, keep={**update.keep, **prefix(clients.UNSENT, left)})

    def _data(self, client: int, round_: int, purpose: str) -> ClientData:
        return ClientData(self.fed.train, self.index, self.config.seed, round_, client, purpose, self.fewest)

    # --- evaluation --------------------------------------------------------------------------------------------

    def _evaluate(self, order: Order, kept: Tree, down: Tree, more: Tree) -> dict[str, Number]:
        """Evaluate the personal and the global model on the site's samples: aggregate numbers only."""
        fed, round_ = self.fed, order.evaluate
        data, test, held = self._data(order.client, round_, "personal"), self._test, self._held_out()
        settings, how = self.config.fit_settings(round_), self.config.personal
        model = clients.personal_model(fed.method, fed.net, kept, down, data, settings, how=how)
        self._save_model(model, order)
        shared = fed.method.global_model({**self._initial(), **down})
        shared = None if shared is None else {**shared, **more}
        person = clients.measured(fed.method, fed.net, order.client, data, model, shared, test, held)
        if order.final:
            trees = [canonical(tree) for tree in (model, shared) if tree is not None]
            predictors = (partial(fed.method.scores, fed.net, tree) for tree in trees)
            person = evaluate.with_confidence(person, held, *predictors)
        if person.outcomes is not None:  # of single held-out samples: no message holds anything of it
            rows = self.fed.held_out[max(self.site_config.part, 0)]
            kept_here = person.outcomes.of_rows(rows, fed.dataset.group_train) if len(rows) else person.outcomes
            write_outcomes(self.kept.outcomes_file, kept_here)
        keys = (*(("pm_v", "pm_l") if len(test) >= self.fewest else ()), *(HELD if len(held) >= self.fewest else ()))
        numbers: dict[str, Number | None] = {key: getattr(person, key) for key in keys}
        if self.site_config.divided and person.per_class is not None:  # -1: the test set lacks the class
            numbers["per_class"] = [-1.0 if right is None else right for right in person.per_class]
        if order.final and shared is not None and not self.site_config.divided and len(data) >= similarity.FEWEST:
            about = similarity.similarity_quantiles(
                fed.method, fed.net, shared, fed.train, self.index, self.config.seed
            )
            numbers["novelty"] = None if about is None else list(about["quantiles"].values())
        return {"samples": len(data), **{key: value for key, value in numbers.items() if value is not None}}

    @cached_property
    def _test(self) -> Samples:
        """The balanced test set; empty if this site has none."""
        if self.site_config.divided:
            return self.fed.test
        if self.site_config.test is None:
            return subset(self.fed.test, self.index[:0])
        return load_test_set(self.config, self.site_config.test, self.fed.dataset)

    def _held_out(self) -> Samples:
        """The site's own samples that it does not train on: those held out, or the test part of its own source."""
        held = self.fed.held_out[max(self.site_config.part, 0)]
        if len(held) or self.site_config.divided:
            return subset(self.fed.train, held)
        return samples_of(self.fed.dataset, "test", device=self.config.home)  # all of it, whatever eval.samples is

    def _save_model(self, model: Tree, order: Order) -> None:
        fed = self.fed
        about = similarity.similarity_quantiles(fed.method, fed.net, model, fed.train, self.index, self.config.seed)
        card = after_rounds(fed.card(self.config, max(self.site_config.part, 0)), order.evaluate)
        card |= {"client": order.client, "novelty": about}
        if (spent := self._balance) is not None:
            card["privacy"] = {"level": self.config.privacy.level, **spent.told()}
        write_model(self.kept.personal_model, model, card)

    def _initial(self) -> Tree:
        return initial_state(self.fed.method, self.fed.net, self.config.seed, self.config.home)

    # --- personal state ----------------------------------------------------------------------------------------

    def _load_state(self, last: int) -> Tree:
        """The state that the site kept after round `last`; if it is lost, the newest older one, else a new one."""
        if last > 0:
            for round_, path in sorted(self.kept.states().items(), reverse=True):
                if round_ > last:
                    continue
                try:
                    if self.private and not _was_noised(path):  # an upload would be made from it that no account covers
                        log.warning("%s was made without noise, so it is not used under privacy", path)
                        continue
                    tree = read_tree(path, self.config.home)
                except (OSError, SafetensorError) as error:
                    log.warning("%s is damaged (%s); looking for an older one", path, error)
                    continue
                if round_ < last:
                    log.warning(
                        "the state of round %d is not in %s; using that of round %d", last, self.kept.path, round_
                    )
                return tree
            log.warning("no state is left in %s: this site starts anew", self.kept.path)
        return self.fed.method.enroll(self._initial())

    def basis(self, order: Order) -> bytes:
        """What the answer to an order depends on at the site: its samples, and the state that it starts from."""
        own = order.evaluate and self.site_config.test is not None
        test = digest(self._test.x.numpy(force=True), self._test.y.numpy(force=True)) if own else None
        samples = json.dumps([self.fed.raw_fingerprint, test], sort_keys=True).encode()
        state = max(((n, path) for n, path in self.kept.states().items() if n <= order.last), default=None)
        return samples if state is None else samples + state[1].read_bytes()

    def _warn_changed_data(self, order: Order) -> None:
        """Warn in the site's log if its data have changed since earlier rounds: the held-out samples change too."""
        if self.fed.raw_fingerprint is None:
            return
        changes = fingerprint.changed_since(self.kept.fingerprint_file, self.fed.raw_fingerprint, anew=order.last == 0)
        if changes:
            log.warning(
                "the data of this site are not those of the rounds before: %s; samples that it was trained on may now "
                "be among those held out, and metrics on them too good",
                changes,
            )

    def _save_state(self, round_: int, tree: Tree, since: int) -> None:
        """Write a round's state, and delete the oldest one if the server no longer needs it (`since`).

        A server must not be able to destroy what a site has learned: one new state pushes out at most one old one, the
        newest two always stay, and a state that is replaced by another one of the same round is set aside.
        """
        path, aside = self.kept.state(round_), self.kept.replaced(round_)
        before = path.read_bytes() if path.exists() else b""
        write_tree(path, tree, {NOISED: self.config.privacy.level} if self.private else None)
        if before and before != path.read_bytes() and not aside.exists():
            write_bytes(aside, before)
        oldest, *others = self.kept.states()
        if (oldest < since and len(others) >= NEWEST) or len(others) >= STATES:
            self.kept.state(oldest).unlink()
            self.kept.replaced(oldest).unlink(missing_ok=True)


def _was_noised(state: Path) -> bool:
    """Whether a state was made under privacy."""
    with safe_open(state, "pt") as file:
        return NOISED in (file.metadata() or {})


def _shared(site_config: SiteConfig) -> SiteConfig:
    """What decides which data and model a site has: all parts of a divided set have it in common."""
    own = {"part": -1, "site": "" if site_config.divided else site_config.site}
    return site_config.model_copy(update={**own, "home": Path(), "orders": Path(), "key": Path(), "peers": Path()})


def _config(toml: str, site_config: SiteConfig) -> Config:
    """The server's config as this site applies it: with its own network alone."""
    config = site_config.policy.config(toml, site_config.data)
    data = _updated(config.data, **site_config.reading)
    model = config.model.only(site_config.policy.network or config.model.names[0])
    return config.model_copy(update={"device": site_config.device or config.home, "data": data, "model": model})


def with_network(site_config: SiteConfig, model: ModelConfig, network: str) -> SiteConfig:
    """The site's settings with the network that an order names, which must be its own choice if it has made one."""
    own = site_config.policy.network
    if network not in (model.names if model.differs else ("",)):
        raise Refused(f"the order is for the network {network!r}, and model.name has {', '.join(model.names)}")
    if not model.differs:
        return site_config
    if own not in (None, network):
        raise Refused(f"the order is for the network {network!r}, and this site trains {own!r}")
    return site_config.model_copy(update={"policy": _updated(site_config.policy, network=network)})


def statistics(data: Dataset, fewest: int) -> scaling.Scaling:
    """The mean and deviation that a site tells of its features or channels: of all its samples, or none of few."""
    if len(data.y_train) < fewest:
        raise Refused(f"it has fewer samples than the {fewest} of its policy (allow.samples)")
    if not data.fitted:
        return scaling.Scaling(data.mean, data.std)
    return scaling.statistics(data.x_train, data.scale, data.preprocessing, fewest)


class OwnData(NamedTuple):
    """The samples of a site with its own source."""

    data: Dataset
    marks: Marks | None  # by which its ledger recognises them; None: nothing asks for privacy


@lru_cache(maxsize=2)
def _own_data(toml: str, site_config: SiteConfig) -> OwnData:
    """The samples of a site with its own source, as they were read; loaded once per process."""
    config = _own_config(toml, site_config)
    with _hide_data_errors():
        data = one_site(_loaded(config), site_config.site)
    if problem := not_agreed(data, config.data.classes, config.data.columns):
        raise Refused(f"this site discloses nothing about its data that is not agreed: {problem}")
    if config.privacy.level != "none" and config.data.classes is None:
        raise Refused(
            "how many classes its samples have would leave without noise: list all classes in data.classes of the "
            "federation's config"
        )
    with _hide_data_errors():
        marks = None if config.privacy.level == "none" else _marks_of(config, data)
        return OwnData(_prepared(config, site_config, data), marks)


def _marks_of(config: Config, data: Dataset) -> Marks:
    return Marks.of(
        absolute(config.data.name), file_of(config.data.name, data_folder(config)), data.x_train, data.x_test
    )


def _own_config(toml: str, site_config: SiteConfig) -> Config:
    config = _config(toml, site_config)
    data, partition = _updated(config.data, name=site_config.data), _updated(config.partition, name="site")
    return config.model_copy(update={"data": data, "partition": partition})


@lru_cache(maxsize=2)
def _federation(toml: str, site_config: SiteConfig, task: Task | None) -> Federation:
    """The site's data, network and method, loaded once per process; the parts of a divided set share it."""
    if site_config.data is None:
        config = _config(toml, site_config)
        config = config.model_copy(update={"partition": _updated(config.partition, clients=site_config.parts)})
        with _hide_data_errors():
            data = _prepared(config, site_config, load_data(config))
            _check_body(data, task)
            _check_size(config, site_config, data)
            return build_federation(config, data)
    config, data = _own_config(toml, site_config), _own_data(toml, site_config).data
    if task is not None:
        if (data.shape, data.classes) != (task.shape, task.classes):
            raise Refused("this site's data has another shape or other classes than the federation agreed on")
        _check_body(data, task)
        data = replace(data, scale=task.scale, mean=task.mean, std=task.std, fitted=False)
    with _hide_data_errors():
        _check_size(config, site_config, data)
        return build_federation(config, data)


def _prepared(config: Config, site_config: SiteConfig, data: Dataset) -> Dataset:
    """The samples as the site trains on them; a frozen body that is too large is refused before it is built."""
    if config.model.frozen != "none":
        check = site_config.policy.check_parameters
        check_body_size(frozen_recipe(config), data.num_classes, weights_of(config), check)
    return prepared(config, data)


def _check_body(data: Dataset, task: Task | None) -> None:
    """Refuse an order that says that the features come from another frozen body than this site has."""
    if task is None:
        return
    body = Recipe.model_validate(data.preprocessing["backbone"]) if is_features(data.preprocessing) else None
    if body is not None and (task.body is None or not body.same(task.body)):
        raise Refused("the features of this site come from another frozen body than the order says is agreed")


def _check_size(config: Config, site_config: SiteConfig, data: Dataset) -> None:
    """Refuse a model that is larger than the site allows, before any of it is built."""
    name, args = config.model.trained
    check_size(name, data.shape, data.num_classes, args, site_config.policy.check_parameters, config.model.common_dim)


@contextmanager
def _hide_data_errors() -> Iterator[None]:
    """Keep errors about a site's data in its own log: their text may quote the data."""
    try:
        yield
    except Refused:
        raise
    except UserError as error:
        log.error("%s", error)
        raise Refused("its data cannot be used as the federation's config asks; the site's own log says why") from error


@lru_cache(maxsize=2)
def _tensor_specs(
    toml: str, site_config: SiteConfig, task: Task | None
) -> tuple[checks.TensorSpecs, checks.TensorSpecs]:
    """The forms of the broadcast and of the global model, computed once per process."""
    method, net = (fed := _federation(toml, site_config, task)).method, fed.net
    config = _config(toml, site_config)
    initial = initial_state(method, net, config.seed, config.home)
    return checks.form_of(method.broadcast(initial)), checks.form_of(method.global_model(initial) or {})


def _loaded(config: Config) -> Dataset:
    """Load the data; notes on how they were read go to the site's own log."""
    data = load_data(config)
    for note in (*data.notes, *data.warnings):
        log.warning("%s", note)
    return data


def load_test_set(config: Config, source: str, task: Task | Dataset) -> Samples:
    """The test set of a source, or all of it if it has none, scaled as the federation agreed."""
    whole = _updated(
        config.data, name=source, sites=None, without=None, group=None, merge_test=False
    )  # nothing of it is divided
    data = _loaded(config.model_copy(update={"data": whole}))
    if not len(data.y_test):
        data = replace(data, x_test=data.x_train, y_test=data.y_train, site_test=data.site_train)
    data = prepared(config, select_rows(data, np.arange(len(data.y_train)) < 1))  # no more training samples are needed
    if (data.shape, data.classes) != (task.shape, task.classes):
        raise UserError(
            f"{source} as a test set has samples of shape {data.shape} and the classes {', '.join(data.classes)}, but "
            f"the sites have {task.shape} and {', '.join(task.classes)}"
        )
    data = replace(data, scale=task.scale, mean=task.mean, std=task.std)
    return test_sample(config, samples_of(data, "test", device=config.home))


# --- weights of a frozen body ---------------------------------------------------------------------------------------


class WeightsMissing(Refused):
    """The agreed weights are not at this site, which takes a file of up to `room` bytes from the server."""

    def __init__(self, sha256: str, room: int):
        how = f"it takes {room:,} bytes of them" if room else "it takes none from the server (allow.weights)"
        super().__init__(
            f"the weights of the frozen body with SHA-256 {sha256} are not at this site, and {how}; its owner may give "
            "the file (weights = of its site.toml)"
        )
        self.sha256, self.room = sha256, room


def with_weights(site_config: SiteConfig, config: Config) -> SiteConfig:
    """The site's settings with the file of the agreed weights: its owner's, or the one that the server has sent."""
    agreed, policy = config.features.sha256, site_config.policy
    if config.model.frozen == "none" or agreed is None:
        return site_config
    if config.model.name in PINNED:
        if agreed != PINNED[config.model.name]:
            raise Refused(f"features.sha256 = {agreed!r} is not that of the published {config.model.name}")
        if not extras.installed("backbones"):
            raise Refused(f"model.name = {config.model.name!r} needs the extra `backbones`, which is not at this site")
        return site_config
    if policy.weights is not None:
        if not (own := Path(policy.weights)).is_file() or sha256(own) != agreed:
            raise Refused(f"the file of weights at this site is not the agreed one, whose SHA-256 is {agreed}")
        return site_config
    folder = StateFolder(site_config.home)
    file = folder.weights(agreed)
    if not file.is_file() or sha256(file) != agreed:
        others = sum(path.stat().st_size for path in folder.received_weights() if path != file)
        raise WeightsMissing(agreed, min(max(0, policy.allow.weights - others), protocol.SIZE))
    return site_config.model_copy(update={"policy": _updated(policy, weights=str(file))})


def store_weights(site_config: SiteConfig, missing: WeightsMissing, content: bytes) -> None:
    """Keep the weights that the server sends: the agreed ones, as a safetensors file, whole or not at all."""
    if not 0 < len(content) <= missing.room:
        raise Refused(
            f"the server sends weights of {len(content):,} bytes; up to {missing.room:,} are taken here (allow.weights)"
        )
    if hashlib.sha256(content).hexdigest() != missing.sha256:
        raise Refused(f"the weights that the server sends do not have the agreed SHA-256 {missing.sha256}")
    folder = StateFolder(site_config.home)
    with FileLock(folder.weights_lock):
        for torn in folder.torn_weights():
            torn.unlink()
        try:
            with atomic_write(folder.weights(missing.sha256)) as draft:
                draft.write_bytes(content)
                with safe_open(draft, "pt"):  # its header fits its size
                    pass
        except SafetensorError as error:
            raise Refused("the weights that the server sends are no safetensors file") from error


def _updated(section: Any, **values: Any) -> Any:
    return section.model_copy(update=values)


# --- messages -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VerifiedMessage:
    """One message to work on."""

    site_config: SiteConfig
    content: RecordDict
    envelope: signing.Envelope
    guard: signing.ReplayGuard
    agreement: Agreement
    events: SiteEvents

    def site(self, network: str | None = None) -> Site:
        return Site(self.site_config, *protocol.read_config(self.content), self.agreement, network)


Handler = Callable[[VerifiedMessage], RecordDict]


def _hello(message: VerifiedMessage) -> RecordDict:
    try:
        site = message.site()
    except WeightsMissing as missing:
        if protocol.WEIGHTS not in message.content:
            raise
        store_weights(message.site_config, missing, protocol.read_weights(message.content))
        site = message.site()
    if site.private:
        site.paid.check(site.releases(Order(client=0, round=1)))
    hello, times = site.hello()
    message.events.facts["greeting"] = times
    if times == 1 and not message.site_config.divided:
        message.events.new()
    return hello.write()


def _notice(message: VerifiedMessage) -> RecordDict:
    text = protocol.read_notice(message.content)
    if message.events.times:
        log.warning("the server says: %s", text)
    return protocol.ack()


def _answer(message: VerifiedMessage) -> RecordDict:
    order, policy = protocol.Order.read(message.content), message.site_config.policy
    policy.check_order(order)
    site = message.site(order.network)
    received = site.read(message.content)
    summed = secure_messages.RECORD in message.content
    if summed != (site.config.federation.secure and order.round > 0):
        raise Refused("federation.secure: the order and the config do not agree whether this is a secure sum")
    asked = RecordDict({name: each for name, each in message.content.items() if name != secure_messages.RECORD})
    work = signing.Work.of(asked, site.basis(order))

    def computed() -> Answer:
        # From here on the samples are used. That this fails may say something about them, so it counts, too.
        if new := message.guard.count(work, policy.allow.rounds):
            message.events.new()
        compute = partial(site.answer, order, *received)
        return _paid(message, site, order, work, compute, new) if site.private else compute()

    # An answer under privacy is paid and stored whatever becomes of a secure sum: its order gets it again.
    answer = cache(computed)
    if site.private:
        answer()
    if not summed:
        return answer().write(packed=site.compression is not None)
    secure = SecureSite(message.site_config, message.envelope)
    mechanisms = None if site.privacy is None else site.privacy.mechanisms
    training = MaskedOrder(
        work.digest,
        signing.asked_alike(asked),
        site.config.federation.min_clients,
        left_to_sum(site.fed.method.upload.class_sums, mechanisms),
        paid=site.private,
    )
    return _settled(message, secure, secure.masked(message.content, training, answer))


def _paid(
    message: VerifiedMessage, site: Site, order: Order, work: signing.Work, compute: Callable[..., Answer], new: bool
) -> Answer:
    """The answer under privacy: paid before it is computed, and stored before it leaves."""
    answer, fresh = site.paid.answer(order, work.digest, site.releases(order), compute)
    if fresh and not new:  # it was killed before: now it leaves for the first time
        message.events.new()
    message.events.spent(answer.balance)
    return answer


def _secure(stage: str, message: VerifiedMessage) -> RecordDict:
    secure = SecureSite(message.site_config, message.envelope)
    return _settled(message, secure, secure.stage(stage, message.content))


def _settled(message: VerifiedMessage, secure: SecureSite, reply: RecordDict) -> RecordDict:
    """The reply, of whose line in the ledger the audit log knows."""
    if secure.settled is not None:
        message.events.settled(secure.settled)
    return reply


def _handle(work: Handler, message: Message, context: Context) -> Message:
    """Check the order, do it, sign the reply."""
    seal: Seal | None = None  # a reply to a forged order is not signed
    events: SiteEvents | None = None
    name = str(context.node_config.get("site", ""))
    try:
        site_config = read_site_config(context.node_config)
        name = site_config.site
        keep_private(site_config.home)
        events = SiteEvents(site_config.home, name, message)
        envelope, guard = _accepted(site_config, message, context)
        seal = partial(signing.sign_reply, key=signing.read_site_private(site_config.key), envelope=envelope)
        order = signing.without_signature(message.content)
        events.asked(ssh_fingerprint(site_config.orders.read_text()), envelope.federation, order)
        key = signing.key_fingerprint(signing.read_orders_public(site_config.orders))
        agreement = Agreement(StateFolder(site_config.home).agreement(site_config.site, key))
        with one_thread():
            content = work(VerifiedMessage(site_config, order, envelope, guard, agreement, events))
        reply = finalize_reply(content, events, seal)
    except Refused as error:
        data, cause = message.metadata, error.__cause__  # the cause may quote data: it stays in the site's own logs
        why = str(error) if cause is None else f"{error}: {cause}"
        room = error.room if isinstance(error, WeightsMissing) else 0
        reply = finalize_reply(protocol.error_reply(f"refused: {error}", name, room), events, seal, refused=why)
        if events is None or events.times:
            log.error("refused: %s (message %r of node %d)", one_line(why), data.message_type[:50], data.src_node_id)
    except Exception as error:
        problem = protocol.error_reply(f"{type(error).__name__}; the site's own log says more", name)
        reply = finalize_reply(problem, events, seal, refused=f"{type(error).__name__}: {error}")
        if events is None or events.times:
            log.error("this site could not do what it was asked", exc_info=error)
    return Message(reply, reply_to=message)


def _accepted(
    site_config: SiteConfig, message: Message, context: Context
) -> tuple[signing.Envelope, signing.ReplayGuard]:
    """The order's envelope, with this site's name; Refused unless the server signed it and it is new."""
    data = message.metadata
    if data.dst_node_id != context.node_id or data.run_id != context.run_id:
        raise Refused("the message is for another node or run")
    known = signing.Envelope("", context.run_id, data.message_type, data.group_id, context.node_id, site_config.site)
    public = signing.read_orders_public(site_config.orders)
    envelope = signing.check_order(message.content, public, known)
    guard = signing.ReplayGuard(site_config.home, site_config.site, public)
    guard.accept(envelope.counter)
    return replace(envelope, site=site_config.site), guard


app = ClientApp()
app.query()(partial(_handle, _hello))
app.query(protocol.NOTICE.partition(".")[2])(partial(_handle, _notice))
app.train()(partial(_handle, _answer))
app.evaluate()(partial(_handle, _answer))
for stage in secure_messages.STAGES:
    if stage != "masked":  # which is the order to train
        app.train(stage)(partial(_handle, partial(_secure, stage)))
