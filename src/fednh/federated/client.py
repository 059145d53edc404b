"""One client's part of a run, as functions of what it was sent, what it kept, and its own data.

The pool's loop and real sites call these functions, and backends/vmap.py maps the same hooks over a block of clients:
it cannot matter to a method where a client lives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednh.config.schema import OWN, PersonalConfig
from fednh.data.batches import EVAL_BATCH, ClientData, Samples, subset
from fednh.federated import evaluate
from fednh.federated.evaluate import Personal
from fednh.federated.local_norm import LocalNorm, without_norm
from fednh.interrupt import no_progress
from fednh.methods.base import Method
from fednh.methods.fit import LocalFit, Sgd
from fednh.methods.losses import SMOOTHING, Loss, log_share
from fednh.models.net import Net
from fednh.runs.model_file import Classes, Outcomes
from fednh.tree import Tree, canonical, finite, has_prefix, select

# --- the gradient's norm --------------------------------------------------------------------------------------------
# Optional measurements of a run's own training; measuring changes no result and draws no random number.


class GradientNorm:
    """||grad_body F_k||^2 at the received model: the full gradient of the method's own loss on all the client's data.

    It is measured before the first step of `fit`. If a round has several fits, the one that starts from the received
    body and trains it counts (Ditto also trains a personal copy); where no body travels (Local, FedProto) it is the
    first fit that trains the client's own body. Samples are not augmented.
    """

    def __init__(self, data: ClientData, received: Tree):
        self.data, self.received = data, select(received, "body")
        self.value: float | None = None

    def __call__(self, params: Tree, loss: Loss, only: tuple[str, ...]) -> None:
        moves = any(has_prefix(name, only) for name in select(params, "body"))
        here = all(name in params and torch.equal(params[name], value) for name, value in self.received.items())
        if self.value is None and moves and here:
            self.value = self._measure(params, loss)

    def _measure(self, params: Tree, loss: Loss) -> float:
        body = {name: value.detach().clone().requires_grad_() for name, value in select(params, "body").items()}
        total = [torch.zeros_like(value) for value in body.values()]
        for x, y, _ in self.data.batches():
            value = loss({**params, **body}, x, y).sum()
            parts = torch.autograd.grad(value, list(body.values()), allow_unused=True)
            total = [sofar if part is None else sofar + part for sofar, part in zip(total, parts, strict=True)]
        return float(sum(part.square().sum() for part in total)) / len(self.data) ** 2


# --- a body that clients share --------------------------------------------------------------------------------------
# Personal models with the body that every client received: the test set passes through that body once for all.
#
# Their heads differ, or a prior that they add. What the body makes of the test set is remembered and given to
# `method.logits` by a Net that knows it, so that methods need not be aware of it.


MOST = 256 << 20  # bytes of features to remember


class SharedBody:
    """The features of a test set under a body that clients share; they are computed when a client asks for them."""

    def __init__(self) -> None:
        self._features: Tensor | None = None

    def __reduce__(self) -> tuple[type[SharedBody], tuple[()]]:
        return SharedBody, ()  # elsewhere they are computed anew

    def features(
        self, net: Net, down: Tree, model: Tree, test: Samples, tick: Callable[[int], None] = no_progress
    ) -> Tensor | None:  # (N, D)
        """The features of all `test` samples if `model` has the very body of `down`, which all clients received.

        Two threads that ask at once compute the same; waiting would take as long.
        """
        if net.stateful or not _same_body(down, model) or 4 * len(test) * net.dim > MOST:
            return None
        if self._features is None:
            body, made = canonical(select(down, "body")), list[Tensor]()
            for x in torch.split(test.x, EVAL_BATCH):
                tick(0)  # it may be stopped here; progress counts samples when they are classified
                with torch.no_grad():
                    made.append(net.features(body, test.floats(x)))
            self._features = torch.cat(made)
        return self._features


class CachedFeaturesNet(Net):
    """`net`, which knows already what the body in `params` makes of `x`."""

    def __init__(self, net: Net, params: Tree, x: Tensor, features: Tensor):
        self.__dict__.update(net.__dict__)
        self._known = select(params, "body"), x, features

    def features(self, params: Tree, x: Tensor) -> Tensor:
        body, seen, features = self._known
        return features if x is seen and _same_body(body, params) else super().features(params, x)


def _same_body(one: Tree, other: Tree) -> bool:
    """Whether two trees hold the same tensors, not only equal ones, as their body."""
    first, second = select(one, "body"), select(other, "body")
    return first.keys() == second.keys() and all(value is second[name] for name, value in first.items())


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
    status: Literal["trained", "silent", "failed", "refused"] = "trained"
    problem: str = ""  # a sentence, for a client that has not trained
    error: Exception | None = field(default=None, compare=False)  # in the process in which it was raised
    fallback_reason: str = ""  # why this client's block was computed one client at a time, if its block is to blame


def update(
    method: Method, net: Net, kept: Tree, received: Tree, data: ClientData, sgd: Sgd, gradient_norm: bool = False
) -> ClientResult:
    """Train one client; returns what it keeps and what it uploads."""
    probe = GradientNorm(data, received) if gradient_norm else None
    with LocalNorm(net, kept, data.index.device) as norm:
        fit = LocalFit(data, sgd, norm.undisturbed(probe), training=_training(net, data), frozen=net.frozen)
        keep, upload = method.client_update(net, without_norm(kept), received, data, norm.fit(fit))
    keep = {**keep, **norm.kept()}
    norm_at_start = probe.value if probe else None
    return ClientResult(keep, upload, fit.samples, fit.loss_sum, norm_at_start, finite(keep), finite(upload))


def _training(net: Net, data: ClientData) -> Callable[[], AbstractContextManager[object]]:
    """What turns the net's random layers on, where it has some."""
    return partial(net.training, data.noise) if net.random else nullcontext


def personal_model(
    method: Method,
    net: Net,
    kept: Tree,
    received: Tree,
    data: ClientData,
    sgd: Sgd,
    tick: Callable[[int], None] = no_progress,
    how: PersonalConfig = OWN,
) -> Tree:
    """The client's own model, as `method.scores` takes it; its normalisation is part of it.

    The method makes it, or (`how.model`) it is the global model as it was received; the client's class prior may be put
    into it. `tick` is called before every step of training, if the method trains here.
    """
    with LocalNorm(net, kept, data.index.device) as norm:
        fit = norm.fit(LocalFit(data, sgd, tick=tick, training=_training(net, data), frozen=net.frozen))
        shared = method.global_model(received) if how.model == "global" else None
        model = method.personal_model(net, without_norm(kept), received, data, fit) if shared is None else shared
    prior = {"prior": how.prior * log_share(data.counts, how.smoothing)} if how.prior else {}  # (C,)
    return {**model, **prior, **norm.state}


def logits_of(
    method: Method,
    net: Net,
    model: Tree,
    test: Samples,
    tick: Callable[[int], None] = no_progress,
    features: torch.Tensor | None = None,
) -> torch.Tensor:  # (N, C)
    """A model's class scores of all samples; their `features` (N, D) may be known. Every batch begins with a `tick`."""
    model, done = canonical(model), 0

    def predict(x: torch.Tensor) -> torch.Tensor:
        nonlocal done
        tick(len(x))
        known, done = (None if features is None else features[done : done + len(x)]), done + len(x)
        return method.scores(net if known is None else CachedFeaturesNet(net, model, x, known), model, x)

    return evaluate.logits_of(predict, test)


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
    prior: Sequence[float] = (),
    smoothing: float = SMOOTHING,
    features: torch.Tensor | None = None,
) -> Personal:
    """What a client's own `model` achieves on the balanced test set and, like the `shared` one, on held-out samples.

    PM(V) and PM(L) need the client's own classes alone; without `every_class` only those are looked at. They are also
    measured with each of `prior` times the log class share added to the logits, whose counts have `smoothing` more of
    each class. `features` (N, D) are the test set's under the model's body, where they are known.
    """
    total = evaluate.total_per_class(test)
    looked_at = test
    if not every_class:
        own = of_own_classes(test, data.counts)
        looked_at, features = subset(test, own), None if features is None else features[own]
    added = [None, *(tau * log_share(data.counts, smoothing) for tau in prior)]  # (C,) each
    rows = [torch.zeros_like(total) for _ in added]  # correct by class
    if len(looked_at):
        logits = logits_of(method, net, model, looked_at, tick, features)
        rows = [evaluate.count_correct((logits if a is None else logits + a).argmax(1), looked_at) for a in added]
    person, *others = (evaluate.personal(client, correct, total, data.counts) for correct in rows)
    person = replace(
        person,
        samples=len(data),
        per_class=person.per_class if every_class else None,
        prior={f"{tau:g}": {"pm_v": p.pm_v, "pm_l": p.pm_l} for tau, p in zip(prior, others, strict=True)},
    )
    if not len(held):
        return person
    trees = (model,) if shared is None else (model, shared)
    guessed = [_classes(logits_of(method, net, tree, held, tick).argmax(1)) for tree in trees]
    outcomes = Outcomes(_classes(held.y), guessed[0], None if shared is None else guessed[1])
    return replace(person, outcomes=outcomes, **evaluate.held_metrics(outcomes, held.num_classes))


def of_own_classes(test: Samples, counts: torch.Tensor) -> NDArray[np.int64]:
    """Which test samples have a class that a client with these training `counts` owns."""
    return torch.nonzero((counts > 0).to(test.y.device)[test.y]).flatten().cpu().numpy()


def _classes(column: torch.Tensor) -> Classes:
    return column.cpu().numpy().astype(np.int32)
