"""What must hold in every round, checked while running: cheap, always on, and named when it is broken."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fednh.core.client import Form, form_of
from fednh.core.tree import Tree
from fednh.errors import RunError
from fednh.methods.base import Method
from fednh.words import one_line


def check_picks(picked: Sequence[int], here: Sequence[int], round_: int) -> None:
    if len(set(picked)) != len(picked):
        raise RunError(f"invariant broken in round {round_}: a client was picked twice: {sorted(picked)}")
    if not all(k in here for k in picked):
        raise RunError(f"invariant broken in round {round_}: a picked client does not exist: {sorted(picked)}")


def check_share(share: torch.Tensor, client: int) -> None:  # (C,)
    """A client's class weights, which PM(L) and FedROD use, sum to one."""
    if not abs(float(share.sum()) - 1) < 1e-4:  # a client without samples has no number here
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


def check_upload(method: Method, upload: Tree, declared: Form, client: int, round_: int) -> None:
    """A client uploads what the method declared, and nothing else."""
    if problem := form_problem(form_of(upload), declared):
        raise RunError(
            f"invariant broken by {type(method).__name__}: the upload of client {client} in round {round_}: {problem}"
        )


def check_server(method: Method, server: Tree, declared: Form, round_: int) -> None:
    """The server keeps its form, and the method finds nothing wrong with it."""
    problem = form_problem(form_of(server), declared) or method.problem(server)
    if problem:
        raise RunError(f"invariant broken by {type(method).__name__} in round {round_}: {problem}")
