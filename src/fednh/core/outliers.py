"""Refuses uploads with far too large a norm before they are averaged: one rule for deployments and simulations.

One finite upload of 1e30 outweighs all others in a mean. So with a `bound` the parts of an upload are measured: the
length of its step away from the server's state, and of each part that the server does not hold, such as prototypes.

- The usual length is the median of the round, or of an earlier one if that was longer: steps shrink while a model
  learns, and a client that joins late still takes long ones.
- An upload more than `bound` times the usual length is refused. With only two uploads there is no majority: the
  shorter one sets the usual length, and the bound is squared.
- An upload longer than usual, and more than `bound` times its client's longest recent one, is refused too.

Honest clients differ in samples and steps. The bound catches what cannot be honest; it does not replace a robust
average (aggregate.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_low

from fednh.core.tree import Tree

# The bound in a deployment, unless the config says otherwise. Honest sites with 13 and 433 samples were seen to differ
# from the usual length by a factor of up to 13.
DEFAULT_BOUND = 100.0
MEMORY = 5  # past rounds of a client that are compared

Lengths = dict[str, float]  # by part of an upload; "step" is the part that the server holds


def lengths(upload: Tree, server: Tree) -> Lengths:
    """How long the parts of an upload are."""
    squares: Lengths = {}
    for name, value in upload.items():
        part = "step" if name in server else name.partition(".")[0]
        away = value.double() - server[name].double() if name in server else value.double()
        squares[part] = squares.get(part, 0.0) + float(away.square().sum())
    return {part: square**0.5 for part, square in squares.items()}


def usual(uploads: Mapping[int, Lengths], before: Lengths) -> Lengths:
    """The usual lengths after a round with these uploads; a single upload does not change them."""
    found = dict(before)
    for part in {part for each in uploads.values() for part in each}:
        spoken = [each[part] for each in uploads.values() if each.get(part, 0.0) > 0]
        if len(spoken) > 1:
            found[part] = max(found.get(part, 0.0), median_low(spoken))
    return found


def problems(
    uploads: Mapping[int, Lengths], past: Mapping[int, Sequence[Lengths]], normal: Lengths, bound: float
) -> dict[int, str]:
    """Why uploads of a round are refused, by client; `past` has the lengths of each client's accepted uploads."""
    found: dict[int, str] = {}
    most = bound if len(uploads) > 2 else bound**2
    for client, each in sorted(uploads.items()):
        for part, length in sorted(each.items()):
            expected = normal.get(part, 0.0)
            before = max((row.get(part, 0.0) for row in past.get(client, ())[-MEMORY:]), default=0.0)
            if expected > 0 and length > most * expected:
                found.setdefault(client, _words(part, length / expected, most, "the median of the round"))
            elif before > 0 and length > max(bound * before, expected):
                found.setdefault(client, _words(part, length / before, bound, "what it uploaded before"))
    return found


def _words(part: str, times: float, most: float, what: str) -> str:
    name = "its step" if part == "step" else f"its part {part!r}"
    return f"{name} is {times:.3g} times as long as {what}; the limit is {most:g} times (bound)"
