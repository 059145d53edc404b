"""One client's part of a run, as functions of what it was sent, what it kept, and its own data.

The pool's loop and real sites call these functions, and backends/vmap.py maps the same hooks over a block of clients:
it cannot matter to a method where a client lives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednh.config.schema import OWN, PersonalConfig
from fednh.data.batches import ClientData, Samples, subset
from fednh.federated import evaluate
from fednh.federated.evaluate import Personal
from fednh.interrupt import no_progress
from fednh.methods.base import Method
from fednh.methods.fit import Fit, LocalFit
from fednh.methods.losses import BatchLoss, Loss, log_share, of_batch
from fednh.methods.optimizers import FitSettings
from fednh.models.net import Net
from fednh.privacy.accounting import Release
from fednh.privacy.noise import Noise
from fednh.privacy.private_data import PRIVATE, Mechanisms, PrivateData
from fednh.privacy.private_fit import PrivateFit
from fednh.runs.model_file import Classes, Outcomes
from fednh.tree import Tree, canonical, double, finite, has_prefix, is_statistic, prefix, select, strip_prefix

# --- the gradient's norm --------------------------------------------------------------------------------------------
# Optional measurements of a run's own training; measuring changes no result and draws no random number.


class GradientNorm:
    """||grad_body F_k||^2 at the received model: the full gradient of the method's own loss on all the client's data.

    It is measured before the first step of `fit`. If a round has several fits, the one that starts from the received
    body and trains it counts (Ditto also trains a personal copy); where none does (MR-MTL), or no body travels (Local,
    FedProto), it is the first fit that trains the client's own body, and the norm is that where it starts. Samples are
    not augmented.
    """

    def __init__(self, data: ClientData, received: Tree):
        self.data, self.received = data, select(received, "body")
        self.value: float | None = None
        self.found = False  # whether the value is that at the received body

    def __call__(self, params: Tree, loss: Loss, only: tuple[str, ...]) -> None:
        moves = any(has_prefix(name, only) for name in select(params, "body"))
        here = all(name in params and torch.equal(params[name], value) for name, value in self.received.items())
        if moves and (self.value is None or (here and not self.found)):
            self.value, self.found = self._measure(params, loss), here

    def _measure(self, params: Tree, loss: Loss) -> float:
        moved = {name: value for name, value in select(params, "body").items() if not is_statistic(name)}
        body = {name: value.detach().clone().requires_grad_() for name, value in moved.items()}
        total = [torch.zeros_like(value) for value in body.values()]
        for x, y, _ in self.data.batches():
            value = loss({**params, **body}, x, y).sum()
            parts = torch.autograd.grad(value, list(body.values()), allow_unused=True)
            total = [sofar if part is None else sofar + part for sofar, part in zip(total, parts, strict=True)]
        return float(sum(part.square().sum() for part in total)) / len(self.data) ** 2


# --- normalisation that stays with the client -------------------------------------------------------------------------
# Normalisation that stays with the client, for every method (the FedBN way: Li et al., ICLR 2021).
#
# With model.norm = "local" no method sees the parameters and running statistics of normalisation layers: they are in no
# server state, upload or average. A client keeps them beside what its method keeps, under NORM, and binds them to the
# network while it works. Where a method trains the body, `fit` here trains the client's normalisation with it, on batch
# statistics; everything else, and a batch of one sample, is computed with the client's running statistics.


NORM = "normalisation"  # the name of a client's normalisation in its kept Tree

Watch = Callable[[Tree, Loss, tuple[str, ...]], None]


class LocalNorm:
    """One client's normalisation while it is at work; `with` binds it to the network in this thread."""

    def __init__(self, net: Net, kept: Tree, device: torch.device):
        start = (strip_prefix(kept, NORM) or net.norm) if net.stateful else {}
        self.net, self.state = net, {name: value.to(device, copy=True) for name, value in start.items()}

    def __enter__(self) -> LocalNorm:
        if self.state:
            self.net.bind_norm(self.state)
        return self

    def __exit__(self, *_: object) -> None:
        if self.state:
            self.net.bind_norm(None)

    def kept(self) -> Tree:
        """The Tree that the client keeps: parameters and running statistics."""
        return prefix(NORM, self.state)

    def fit(self, inner: Fit) -> Fit:
        """`inner`, with the client's normalisation trained beside the body, or with that of the tree."""
        if self.net.statistics:
            return _StatisticsFit(self.net, inner)
        return _NormFit(self, inner) if self.state else inner

    def preserving_stats(self, watch: Watch | None) -> Watch | None:
        """`watch`, with the running statistics as they were after it: measuring changes nothing."""
        if watch is None:
            return watch
        if self.net.statistics:  # they are part of the tree
            return lambda params, loss, only: watch(
                {name: value.clone() if is_statistic(name) else value for name, value in params.items()}, loss, only
            )
        if not self.state:
            return watch

        def look(params: Tree, loss: Loss, only: tuple[str, ...]) -> None:
            before = {name: value.clone() for name, value in self.state.items()}
            watch(params, loss, only)
            self.state.update(before)
            self.net.bind_norm(self.state)

        return look


OPTIMIZER = "optimizer"  # the name of the optimiser's state in a client's kept Tree, where it is kept
UNSENT = "unsent"  # ... and of what compression has lost so far of its uploads (compress.py)


def methods_own(kept: Tree) -> Tree:
    """The method's own part of what the client kept."""
    return select(kept, *{name.partition(".")[0] for name in kept} - {NORM, OPTIMIZER, PRIVATE, UNSENT})


class _NormFit:
    def __init__(self, norm: LocalNorm, inner: Fit):
        self.norm, self.inner = norm, inner

    def __call__(
        self, params: Tree, loss: Loss, *, only: tuple[str, ...], epochs: float | None = None, plain: bool = False
    ) -> Tree:
        return self.batchwise(params, of_batch(loss), only=only, epochs=epochs, plain=plain)

    def batchwise(
        self, params: Tree, loss: BatchLoss, *, only: tuple[str, ...], epochs: float | None = None, plain: bool = False
    ) -> Tree:
        norm, net = self.norm, self.norm.net
        mine = {name: norm.state[name] for name in net.trained_norms if has_prefix(name, only)}

        def with_bound_norm(working: Tree, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tree]:
            net.bind_norm({**norm.state, **{name: working[name] for name in mine}}, training=len(x) > 1)
            try:
                return loss({name: value for name, value in working.items() if name not in mine}, x, y, weight)
            finally:
                net.bind_norm(norm.state)

        if not any(has_prefix(name, only) for name in norm.state):
            return self.inner.batchwise(params, loss, only=only, epochs=epochs, plain=plain)
        out = self.inner.batchwise({**params, **mine}, with_bound_norm, only=only, epochs=epochs, plain=plain)
        norm.state.update({name: out[name] for name in mine})
        return {name: value for name, value in out.items() if name not in mine}

    def reach(self, epochs: float | None = None) -> float | Tensor:
        return self.inner.reach(epochs)


class _StatisticsFit:
    """A fit that updates the running statistics of what it trains, in trees that contain them."""

    def __init__(self, net: Net, inner: Fit):
        self.net, self.inner = net, inner

    def __call__(
        self, params: Tree, loss: Loss, *, only: tuple[str, ...], epochs: float | None = None, plain: bool = False
    ) -> Tree:
        return self.batchwise(params, of_batch(loss), only=only, epochs=epochs, plain=plain)

    def batchwise(
        self, params: Tree, loss: BatchLoss, *, only: tuple[str, ...], epochs: float | None = None, plain: bool = False
    ) -> Tree:
        mine = {name: value.clone() for name, value in params.items() if is_statistic(name) and has_prefix(name, only)}
        if not mine:
            return self.inner.batchwise(params, loss, only=only, epochs=epochs, plain=plain)

        def on_batch_statistics(working: Tree, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tree]:
            with self.net.batch_statistics(len(x) > 1):
                return loss(working, x, y, weight)

        return self.inner.batchwise({**params, **mine}, on_batch_statistics, only=only, epochs=epochs, plain=plain)

    def reach(self, epochs: float | None = None) -> float | Tensor:
        return self.inner.reach(epochs)


# --- one client -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClientResult:
    """What comes out of a client's round, from whoever computed it to the server's checks."""

    keep: Tree = field(default_factory=dict)  # stays with the client; the server never reads it
    upload: Tree | None = None  # None: there is none, and `problem` says why
    samples: int | None = None  # training samples processed; None: the client does not report it
    loss_sum: float | None = None  # their summed loss; None: the client does not report it
    gradient_norm: float | None = None  # squared, of the body at the received model, where it was asked for
    kept_finite: bool | None = None  # None: nobody has looked
    upload_finite: bool | None = None  # None: nobody that the server trusts has looked
    client: int = -1
    together: tuple[int, ...] = ()  # clients of whose uploads `upload` is the sum: nobody has seen a single one
    bytes_up: int | None = None  # that travelled for the upload; None: those of its tensors
    status: Literal["trained", "silent", "failed", "refused"] = "trained"
    problem: str = ""  # a sentence, for a client that has not trained
    error: Exception | None = field(default=None, compare=False)  # in the process in which it was raised
    age: int = 0  # rounds that have passed since the one it was trained in
    released: tuple[Release, ...] = ()  # what the upload has cost in privacy; does not depend on the samples
    fallback_reason: str = ""  # why this client's block was computed one client at a time, if its block is to blame


def update(
    method: Method,
    net: Net,
    kept: Tree,
    received: Tree,
    data: ClientData,
    settings: FitSettings,
    gradient_norm: bool = False,
) -> ClientResult:
    """Train one client; returns what it keeps and what it uploads."""
    probe = GradientNorm(data, received) if gradient_norm else None
    with LocalNorm(net, kept, data.index.device) as norm:
        fit = LocalFit(
            data,
            settings,
            norm.preserving_stats(probe),
            training=_training(net, data),
            frozen=net.unmoved,
            memory=strip_prefix(kept, OPTIMIZER),
        )
        keep, upload = method.client_update(net, methods_own(kept), received, data, norm.fit(fit))
    keep = {**keep, **norm.kept(), **prefix(OPTIMIZER, fit.memory)}
    norm_at_start = probe.value if probe else None
    return ClientResult(keep, upload, fit.samples, fit.loss_sum, norm_at_start, finite(keep), finite(upload))


def private_update(
    method: Method,
    net: Net,
    kept: Tree,
    received: Tree,
    data: ClientData,
    settings: FitSettings,
    mechanisms: Mechanisms,
    noise: Noise,
    tick: Callable[[int], None] = no_progress,
    left_to_sum: Sequence[str] = (),
) -> ClientResult:
    """`update` such that all of the result is noised: the method sees no sample but through what `PrivateData` tells.

    It reports neither how many samples it has nor their loss. The class sums that are `left_to_sum` have no noise yet.
    """
    data.rng = noise.augmenting(data.rng)
    private = PrivateData(data, mechanisms, noise, strip_prefix(kept, PRIVATE), bool(left_to_sum))
    fit = PrivateFit(private, settings, tick, net.unmoved)
    keep, upload = method.client_update(net, methods_own(kept), received, cast(ClientData, private), fit)
    upload = {**upload, **private.left(upload, left_to_sum)}
    keep = {**keep, **prefix(PRIVATE, private.kept)}
    return ClientResult(
        keep, upload, kept_finite=finite(keep), upload_finite=finite(upload), released=tuple(private.spent)
    )


def _training(net: Net, data: ClientData) -> Callable[[], AbstractContextManager[object]]:
    """What turns the net's random layers on, where it has some."""
    return partial(net.training, data.noise) if net.random else nullcontext


def personal_model(
    method: Method,
    net: Net,
    kept: Tree,
    received: Tree,
    data: ClientData,
    settings: FitSettings,
    tick: Callable[[int], None] = no_progress,
    how: PersonalConfig = OWN,
) -> Tree:
    """The client's own model, as `method.scores` takes it; its normalisation is part of it.

    The method makes it, or (`how.model`) it is the global model as it was received; the client's class prior may be put
    into it, and a temperature (`how.calibrate`). `tick` is called before every step of training, if the method trains
    here.
    """
    with LocalNorm(net, kept, data.index.device) as norm:
        fit = norm.fit(LocalFit(data, settings, tick=tick, training=_training(net, data), frozen=net.unmoved))
        shared = method.global_model(received) if how.model == "global" else None
        model = method.personal_model(net, methods_own(kept), received, data, fit) if shared is None else shared
        tau, heat = method.prior if how.prior is None else how.prior, dict[str, Tensor]()
        if method.training_free if how.calibrate is None else how.calibrate:
            temperature, tau = calibrated(method, net, model, data, (tau,) if tau else TAUS, how.smoothing, tick)
            heat = {"temperature": torch.full((), temperature, device=data.index.device)}
    prior = {"prior": tau * log_share(data.counts, how.smoothing)} if tau or heat else {}  # (C,)
    return {**model, **heat, **prior, **norm.state}


# --- calibration ------------------------------------------------------------------------------------------------------
# A client chooses the temperature of its logits and the weight tau of its class prior by the likelihood of its own
# training samples. These are divided into folds, class by class; the prior that a sample is predicted with has the
# counts of the other folds alone, since a client's own counts know the sample's label. The model is the same for all
# folds: where it has fitted these samples closely, the temperature comes out too low.

FOLDS = 5
MOST_CALIBRATED = 2000  # samples looked at: enough for two numbers, without a pass over a large set
TEMPERATURES = tuple(2 ** (k / 2) for k in range(-8, 9))  # 1/16 to 16
TAUS = tuple(k / 4 for k in range(9))  # 0 to 2
TIE = 1e-9  # relative: likelihoods this near the largest count as equal, whatever an engine's rounding


@torch.no_grad()
def calibrated(
    method: Method,
    net: Net,
    model: Tree,
    data: ClientData,
    taus: Sequence[float],
    smoothing: float,
    tick: Callable[[int], None],
) -> tuple[float, float]:
    """The temperature and tau of the grid with the largest mean log-likelihood of logits / temperature + tau log share.

    Of equally good pairs the temperature nearest to 1 is taken, then the smallest tau.
    """
    step = -(-len(data) // MOST_CALIBRATED)
    seen = ClientData(data.samples, data.index[::step].cpu().numpy()) if step > 1 else data
    bare, logits = canonical({name: value for name, value in model.items() if name != "prior"}), list[Tensor]()
    for x, _, _ in seen.batches():
        tick(0)
        logits.append(double(method.scores(net, bare, x)))
    shares = log_share(_other_folds(seen.y, data.counts, folds_of(seen.y)), smoothing)  # (n, C)
    return best_pair(torch.cat(logits), shares, seen.y, taus)


def folds_of(y: Tensor) -> Tensor:  # (n,) -> (n,)
    """Each sample's fold, from 0 on: its place among those of its class, by FOLDS."""
    order = y.argsort(stable=True)
    first = torch.searchsorted(y[order].contiguous(), y)  # where the sample's class starts in that order
    return (order.argsort() - first) % FOLDS


def _other_folds(y: Tensor, counts: Tensor, fold: Tensor) -> Tensor:  # (n,), (C,), (n,) -> (n, C)
    """For each sample the class counts of the client, less those of the sample's fold, in double precision."""
    mine = double(torch.zeros(FOLDS, len(counts), device=y.device))
    mine.index_put_((fold, y), torch.ones_like(y, dtype=mine.dtype), accumulate=True)
    return (double(counts) - mine)[fold]


def best_pair(
    logits: Tensor, shares: Tensor, y: Tensor, taus: Sequence[float]
) -> tuple[float, float]:  # (n, C), (n, C), (n,)
    """The pair of TEMPERATURES and `taus` that makes the labels likeliest."""
    pairs = sorted(product(TEMPERATURES, taus), key=lambda pair: (abs(math.log(pair[0])), pair))
    losses = [-_mean_log_likelihood(logits / heat + tau * shares, y) for heat, tau in pairs]
    least = min(losses)
    return next(pair for pair, loss in zip(pairs, losses, strict=True) if loss <= least + TIE * abs(least))


def _mean_log_likelihood(scores: Tensor, y: Tensor) -> float:  # (n, C), (n,)
    return float(scores.log_softmax(1).gather(1, y[:, None]).mean())


def guesses(
    method: Method, net: Net, model: Tree, test: Samples, tick: Callable[[int], None] = no_progress
) -> torch.Tensor:  # (N,)
    """The classes that a model takes all samples for. Every batch begins with a `tick`."""
    model = canonical(model)

    def predict(x: torch.Tensor) -> torch.Tensor:
        tick(len(x))
        return method.scores(net, model, x)

    return evaluate.logits_of(predict, test).argmax(1)


def measured(
    method: Method,
    net: Net,
    client: int,
    data: ClientData,
    model: Tree,
    shared: Tree | None,
    test: Samples,
    held: Samples,
    tick: Callable[[int], None] = no_progress,
    every_class: bool = True,
) -> Personal:
    """What a client's own `model` achieves on the balanced test set and, like the `shared` one, on held-out samples.

    PM(V) and PM(L) need the client's own classes alone; without `every_class` only those are looked at.
    """
    total = evaluate.total_per_class(test)
    looked_at = test if every_class else subset(test, of_own_classes(test, data.counts))
    correct = torch.zeros_like(total)
    if len(looked_at):
        correct = evaluate.count_correct(guesses(method, net, model, looked_at, tick), looked_at)
    person = evaluate.personal(client, correct, total, data.counts)
    person = replace(person, samples=len(data), per_class=person.per_class if every_class else None)
    if not len(held):
        return person
    trees = (model,) if shared is None else (model, shared)
    guessed = [_classes(guesses(method, net, tree, held, tick)) for tree in trees]
    outcomes = Outcomes(_classes(held.y), guessed[0], None if shared is None else guessed[1])
    return replace(person, outcomes=outcomes, **evaluate.held_metrics(outcomes, held.num_classes))


def of_own_classes(test: Samples, counts: torch.Tensor) -> NDArray[np.int64]:
    """Which test samples have a class that a client with these training `counts` owns."""
    return torch.nonzero((counts > 0).to(test.y.device)[test.y]).flatten().cpu().numpy()


def _classes(column: torch.Tensor) -> Classes:
    return column.cpu().numpy().astype(np.int32)
