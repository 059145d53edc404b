"""Checks of every round: of its picks, its uploads and the server's state. They are cheap and always on.

The loop calls them. What a paper rules out is a matter of `UploadSpec.problem`; on Flower the size of a message is
checked before it is read (flower/transport.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import isfunction, unwrap
from pathlib import Path
from statistics import median_low
from traceback import walk_tb
from types import FrameType

import numpy as np
import torch

from fednh.config import Config
from fednh.data.batches import ClientData, blank_samples
from fednh.errors import ConfigError, RunError
from fednh.federated.client import ClientResult
from fednh.methods.base import Method
from fednh.methods.losses import BatchLoss, Loss
from fednh.models.net import Net
from fednh.text import one_line
from fednh.tree import Tree, double, finite, select

# --- errors of a method ---------------------------------------------------------------------------------------------
# Errors in a method or a model, reported with the method, the hook, the line and the client or server at work.


SCORES = Method.scores.__code__  # no hook: it only calls `logits`


def error_sentence(method: Method, error: Exception, what: str) -> str:
    """One sentence: `what` failed, with which error, and where in the method it was raised."""
    place = _place(method, error)
    return f"{type(method).__name__}: {what}: {type(error).__name__}: {error}" + (f" ({place})" if place else "")


@contextmanager
def with_context(method: Method, what: str) -> Iterator[None]:
    """An error that comes out of the method becomes a RunError that says `what` failed; all others pass unchanged."""
    try:
        yield
    except Exception as error:
        ours = type(error).__module__.partition(".")[0] == "fednh"  # already a clear message, or a request to stop
        if ours or isinstance(error, MemoryError) or _place(method, error) is None:
            raise
        raise RunError(error_sentence(method, error, what)) from error


def _place(method: Method, error: Exception) -> str | None:
    """The hook that was called and the method's line at which it ended; None if the error is not the method's.

    A method reads uploads from a generator: a disk error while they are produced is not the method's fault.
    """
    frames = list(walk_tb(error.__traceback__))
    called = [i for i, (frame, _) in enumerate(frames) if frame.f_locals.get("self") is method]
    inside = [i for i in called if frames[i][0].f_code is not SCORES] or called
    if not inside or (isinstance(error, OSError) and any(_ours(frame) for frame, _ in frames[inside[-1] + 1 :])):
        return None
    own = [row for row in frames[inside[0] :] if row[0].f_code.co_filename in _files(type(method))]
    frame, line = own[-1] if own else frames[inside[-1]]
    return f"{frames[inside[0]][0].f_code.co_name}, {Path(frame.f_code.co_filename).name} line {line}"


def _files(kind: type) -> set[str]:
    """Where a class's functions were written; on another machine its module may not be there (see backends/ray.py)."""
    return {unwrap(each).__code__.co_filename for each in vars(kind).values() if isfunction(each)}


def _ours(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__"))
    return name.startswith("fednh.") and not name.startswith("fednh.methods.")


# --- uploads that are far too long ----------------------------------------------------------------------------------
# Refuses uploads with far too large a norm before they are averaged: one rule for deployments and simulations.
#
# One finite upload of 1e30 outweighs all others in a mean. So with a `bound` the parts of an upload are measured: the
# length of its step away from the server's state, and of each part that the server does not hold, such as prototypes.
#
# - The usual length is the median of the round, or of an earlier one if that was longer: steps shrink while a model
# learns, and a client that joins late still takes long ones. - An upload more than `bound` times the usual length is
# refused. With only two uploads there is no majority: the shorter one sets the usual length, and the bound is
# squared. - An upload longer than usual, and more than `bound` times its client's longest recent one, is refused too.
#
# Honest clients differ in samples and steps. The bound catches what cannot be honest; it does not replace a robust
# average (aggregate.py).


# The bound in a deployment, unless the config says otherwise. Honest sites with 13 and 433 samples were seen to differ
# from the usual length by a factor of up to 13.
NORM_MEMORY = 5  # past rounds of a client that are compared

Norms = dict[str, float]  # by part of an upload; "step", or "cnn/step", is the part that the server holds


def norms(upload: Tree, server: Tree) -> Norms:
    """How long the parts of an upload are."""
    squares: Norms = {}
    for name, value in upload.items():
        network, mark, _ = name.rpartition("/")  # of steps, only those of the same network can be compared
        part = f"{network}{mark}step" if name in server else name.partition(".")[0]
        away = double(value) - double(server[name]) if name in server else double(value)
        squares[part] = squares.get(part, 0.0) + float(away.square().sum())
    return {part: square**0.5 for part, square in squares.items()}


def typical_norms(uploads: Mapping[int, Norms], before: Norms) -> Norms:
    """The usual lengths after a round with these uploads; a single upload does not change them."""
    typical = dict(before)
    for part in {part for each in uploads.values() for part in each}:
        spoken = [each[part] for each in uploads.values() if each.get(part, 0.0) > 0]
        if len(spoken) > 1:
            typical[part] = max(typical.get(part, 0.0), median_low(spoken))
    return typical


def norm_problems(
    uploads: Mapping[int, Norms], past: Mapping[int, Sequence[Norms]], normal: Norms, bound: float
) -> dict[int, str]:
    """Why uploads of a round are refused, by client; `past` has the lengths of each client's accepted uploads."""
    problems: dict[int, str] = {}
    most = bound if len(uploads) > 2 else bound**2
    for client, each in sorted(uploads.items()):
        for part, length in sorted(each.items()):
            expected = normal.get(part, 0.0)
            before = max((row.get(part, 0.0) for row in past.get(client, ())[-NORM_MEMORY:]), default=0.0)
            if expected > 0 and length > most * expected:
                problems.setdefault(client, _words(part, length / expected, most, "the median of the round"))
            elif before > 0 and length > max(bound * before, expected):
                problems.setdefault(client, _words(part, length / before, bound, "what it uploaded before"))
    return problems


def _words(part: str, times: float, most: float, what: str) -> str:
    name = "its step" if part == "step" else f"its part {part!r}"
    return f"{name} is {times:.3g} times as long as {what}; the limit is {most:g} times (bound)"


# --- invariants -----------------------------------------------------------------------------------------------------


TensorSpecs = dict[str, tuple[tuple[int, ...], torch.dtype]]  # what a Tree looks like: name -> shape and type


def form_of(tree: Tree) -> TensorSpecs:
    return {name: (tuple(value.shape), value.dtype) for name, value in tree.items()}


def declared_upload(method: Method, net: Net, initial: Tree) -> TensorSpecs:
    """What an upload of this method looks like, found by a round without training on one blank sample a class."""
    samples = blank_samples(net.shape, net.num_classes, next(iter(initial.values())).device)
    data = ClientData(samples, np.arange(len(samples)))
    kept, received = method.enroll(initial), method.broadcast(initial)
    return form_of(method.client_update(net, kept, received, data, _NoOpFit())[1])


def check_personal(model: str, method: Method, name: str, initial: Tree) -> None:
    """Personal models can be the global one (`personal.model`) only if clients receive all of it, and no records."""
    if model == "own":
        return
    whole = method.global_model(initial)
    try:
        sent = method.global_model(method.broadcast(initial))
    except KeyError:
        sent = None
    if whole is None or sent is None or sent.keys() != whole.keys() or method.upload.recorded:
        why = "has no global model" if whole is None else "does not send all of its global model to clients"
        raise ConfigError(
            f"personal.model = 'global' is not supported by method {name}, which {why}; leave it at 'own'"
        )


def check_shared(method: Method, name: str, initial: Tree, uploaded: TensorSpecs) -> None:
    """Refuse a method that shares the body alone where there is none to train: nothing would be federated."""
    if select(initial, "body") or uploaded.keys() - {"scale"} or method.global_model(initial) is None:
        return
    raise ConfigError(
        f"method {name} shares the body alone, and this network has none to train; put a trainable part before the "
        f"head (model.adapter = 'linear' or 'mlp' behind a frozen body), or choose another method"
    )


def check_aggregator(aggregator: str, method: Method, name: str) -> None:
    """Sums over samples are added up: any rule but the plain mean would change what they are sums of."""
    if method.upload.summed and aggregator != "mean":
        raise ConfigError(
            f"aggregator = {aggregator!r} is not supported by method {name}, whose clients send sums that the server "
            f"adds up; leave it at 'mean'"
        )


def check_secure(config: Config, method: Method) -> None:
    """Of secure sums the server has a sum: refuse what looks at single uploads."""
    if not config.federation.secure:
        return
    name, spec = config.method["name"], method.upload
    if spec.single or spec.weight:
        raise ConfigError(
            f"federation.secure is not supported by method {name}, whose server computes from single uploads; choose "
            f"another method"
        )
    if spec.recorded:
        raise ConfigError(
            f"federation.secure is not supported by method {name}, whose server makes something of its own for each "
            f"client from its upload; choose another method"
        )
    if config.aggregator != "mean":
        raise ConfigError(
            f"aggregator = {config.aggregator!r} compares or weighs single uploads, and with federation.secure the "
            f"server has their sum alone; leave it at 'mean'"
        )
    if config.bound:
        raise ConfigError(
            f"bound = {config.bound:g} measures single uploads, and with federation.secure the server has their sum "
            f"alone; leave it out"
        )
    if config.diagnostics.gradient_norm:
        raise ConfigError(
            "diagnostics.gradient_norm is a number of every single site, which federation.secure hides; leave it out"
        )
    if config.federation.min_clients < 2:
        raise ConfigError("federation.min_clients = 1 with federation.secure: the sum of one upload hides nothing")


class _NoOpFit:
    """`fit` that trains nothing."""

    def __call__(
        self, params: Tree, loss: Loss, *, only: tuple[str, ...], epochs: float | None = None, plain: bool = False
    ) -> Tree:
        return params

    def batchwise(
        self, params: Tree, loss: BatchLoss, *, only: tuple[str, ...], epochs: float | None = None, plain: bool = False
    ) -> Tree:
        return params

    def reach(self, epochs: float | None = None) -> float:
        return 1.0


def check_picks(picked: Sequence[int], here: Sequence[int], round_: int) -> None:
    if len(set(picked)) != len(picked):
        raise RunError(f"invariant broken in round {round_}: a client was picked twice: {sorted(picked)}")
    if not all(k in here for k in picked):
        raise RunError(f"invariant broken in round {round_}: a picked client does not exist: {sorted(picked)}")


def check_share(share: torch.Tensor, client: int) -> None:  # (C,)
    """A client's class weights, which PM(L) and FedROD use, sum to one."""
    if not abs(float(share.sum()) - 1) < 1e-4:  # "not <": a client without samples has NaN here
        raise RunError(f"invariant broken: the class weights of client {client} sum to {float(share.sum()):g}, not 1")


def form_problem(form: TensorSpecs, declared: TensorSpecs) -> str | None:
    """How a tree of this form differs from what was declared, or None."""
    for name in sorted(declared.keys() | form.keys()):
        if name not in form:
            return f"{name} is missing"
        if name not in declared:
            return f"{one_line(name, 80)} does not belong there"
        if form[name] != declared[name]:
            return f"{name} is {form[name][0]} {form[name][1]}, not {declared[name][0]} {declared[name][1]}"
    return None


def not_finite(result: ClientResult) -> str | None:
    """What of a client's result is not finite, in words, or None: such a result is refused as a whole.

    A state that is not finite would spoil all of the client's later rounds.
    """
    looked = finite(result.upload or {}) if result.upload_finite is None else result.upload_finite
    if not (math.isfinite(result.loss_sum or 0.0) and looked):
        return "the upload"
    kept = finite(result.keep) if result.kept_finite is None else result.kept_finite
    return None if kept else "the personal state"


def check_upload(method: Method, upload: Tree, declared: TensorSpecs, client: int, round_: int) -> None:
    """A client uploads what the method declared, and nothing else."""
    if problem := form_problem(form_of(upload), declared):
        raise RunError(
            f"invariant broken by {type(method).__name__}: the upload of client {client} in round {round_}: {problem}"
        )


def check_records(method: Method, records: Sequence[Tree], down: TensorSpecs, number: int, round_: int) -> None:
    """One record for each upload that was used, and in it nothing that the broadcast lacks."""
    problem = None if len(records) == number else f"{len(records)} records are made of {number} uploads"
    for record in records:
        problem = problem or form_problem(form_of(record), {name: down[name] for name in record if name in down})
    if problem:
        raise RunError(f"invariant broken by {type(method).__name__}: the records of round {round_}: {problem}")


def check_server(
    method: Method, server: Tree, declared: TensorSpecs, problem_of: Callable[[Tree], str | None], round_: int
) -> None:
    """The server's state keeps its names, shapes and types, and the method finds no problem in it."""
    problem = form_problem(form_of(server), declared) or problem_of(server)
    if problem:
        raise RunError(f"invariant broken by {type(method).__name__} in round {round_}: {problem}")
