"""Personal models with the body that every client received: the test set passes through that body once for all.

Their heads differ, or a prior that they add. What the body makes of the test set is remembered and given to
`method.logits` by a Net that knows it, so that methods need not be aware of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fednh.core.meter import unhurried
from fednh.core.tree import Tree, arranged, select
from fednh.data.batches import EVAL_BATCH, Samples
from fednh.models.net import Net

MOST = 256 << 20  # bytes of features to remember


class SharedBody:
    """The features of a test set under a body that clients share; they are computed when a client asks for them."""

    def __init__(self) -> None:
        self._features: Tensor | None = None

    def __reduce__(self) -> tuple[type[SharedBody], tuple[()]]:
        return SharedBody, ()  # elsewhere they are computed anew

    def features(
        self, net: Net, down: Tree, model: Tree, test: Samples, tick: Callable[[int], None] = unhurried
    ) -> Tensor | None:  # (N, D)
        """The features of all `test` samples if `model` has the very body of `down`, which all clients received.

        Two threads that ask at once compute the same; waiting would take as long.
        """
        if net.stateful or not _same_body(down, model) or 4 * len(test) * net.dim > MOST:
            return None
        if self._features is None:
            body, made = arranged(select(down, "body")), list[Tensor]()
            for x in torch.split(test.x, EVAL_BATCH):
                tick(0)  # it may be stopped here; progress counts samples when they are classified
                with torch.no_grad():
                    made.append(net.features(body, test.floats(x)))
            self._features = torch.cat(made)
        return self._features


class KnowingNet(Net):
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
