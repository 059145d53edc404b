"""Checks of every round: of its picks, its uploads and the server's state. They are cheap and always on.

The loop calls them (`Rounds._checked`). Uploads that are far too long are a matter of outliers.py, what a paper rules
out of `Method.upload_problem`; on Flower the size of a message is checked before it is read (flower/bounds.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from fednh.core.client import Report
from fednh.core.losses import BatchLoss, Loss
from fednh.core.tree import Tree, finite
from fednh.data.batches import ClientData, blank_samples
from fednh.errors import RunError, UserError
from fednh.methods.base import Method
from fednh.models.net import Net
from fednh.words import one_line

Form = dict[str, tuple[tuple[int, ...], torch.dtype]]  # what a Tree looks like: name -> shape and type


def form_of(tree: Tree) -> Form:
    return {name: (tuple(value.shape), value.dtype) for name, value in tree.items()}


def declared_upload(method: Method, net: Net, initial: Tree) -> Form:
    """What an upload of this method looks like, found by a round without training on one blank sample a class."""
    samples = blank_samples(net.shape, net.num_classes, next(iter(initial.values())).device)
    data = ClientData(samples, np.arange(len(samples)))
    kept, received = method.enroll(initial), method.broadcast(initial)
    return form_of(method.client_update(net, kept, received, data, _Still())[1])


def check_personal(model: str, method: Method, name: str, initial: Tree) -> None:
    """Personal models can be the global one (`personal.model`) only if clients receive all of it, and no records."""
    if model == "own":
        return
    whole = method.global_model(initial)
    try:
        sent = method.global_model(method.broadcast(initial))
    except KeyError:
        sent = None
    if whole is None or sent is None or sent.keys() != whole.keys() or method.recorded:
        why = "has no global model" if whole is None else "does not send all of its global model to clients"
        raise UserError(f"personal.model = 'global' cannot be had with method {name}, which {why}; leave it at 'own'")


class _Still:
    """`fit` that trains nothing."""

    def __call__(
        self, params: Tree, loss: Loss, *, only: tuple[str, ...], epochs: int | None = None, plain: bool = False
    ) -> Tree:
        return params

    def batchwise(
        self, params: Tree, loss: BatchLoss, *, only: tuple[str, ...], epochs: int | None = None, plain: bool = False
    ) -> Tree:
        return params

    def reach(self, epochs: int | None = None) -> float:
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


def form_problem(form: Form, declared: Form) -> str | None:
    """How a tree of this form differs from what was declared, or None."""
    for name in sorted(declared.keys() | form.keys()):
        if name not in form:
            return f"{name} is missing"
        if name not in declared:
            return f"{one_line(name, 80)} does not belong there"
        if form[name] != declared[name]:
            return f"{name} is {form[name][0]} {form[name][1]}, not {declared[name][0]} {declared[name][1]}"
    return None


def not_finite(report: Report) -> str | None:
    """What of a client's report is not finite, in words, or None: such a report is refused as a whole.

    A state that is not finite would spoil all of the client's later rounds.
    """
    looked = finite(report.upload) if report.upload_finite is None else report.upload_finite
    if not (math.isfinite(report.loss_sum or 0.0) and looked):
        return "the upload"
    return None if report.kept_finite else "the personal state"


def check_upload(method: Method, upload: Tree, declared: Form, client: int, round_: int) -> None:
    """A client uploads what the method declared, and nothing else."""
    if problem := form_problem(form_of(upload), declared):
        raise RunError(
            f"invariant broken by {type(method).__name__}: the upload of client {client} in round {round_}: {problem}"
        )


def check_records(method: Method, records: Sequence[Tree], down: Form, number: int, round_: int) -> None:
    """One record for each upload that was used, and in it nothing that the broadcast lacks."""
    problem = None if len(records) == number else f"{len(records)} records are made of {number} uploads"
    for record in records:
        problem = problem or form_problem(form_of(record), {name: down[name] for name in record if name in down})
    if problem:
        raise RunError(f"invariant broken by {type(method).__name__}: the records of round {round_}: {problem}")


def check_server(method: Method, server: Tree, declared: Form, round_: int) -> None:
    """The server's state keeps its names, shapes and types, and the method finds no problem in it."""
    problem = form_problem(form_of(server), declared) or method.problem(server)
    if problem:
        raise RunError(f"invariant broken by {type(method).__name__} in round {round_}: {problem}")
