"""Uploads averaged by a rule, as the round loop does it: one by one into an accumulator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fednh.federated.aggregate import accumulator
from fednh.methods import Method
from fednh.tree import Tree, Uploads


def averaged_by(
    name: str, trees: Iterable[Tree], server: Tree, method: Method, samples: Sequence[int] = (), trim: float = 0.2
) -> Uploads:
    into = accumulator(name, server, trim, method)
    for k, tree in enumerate(trees):
        into.add(tree, samples[k] if samples else 1)
    return into.uploads()
