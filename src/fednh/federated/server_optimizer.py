"""The server's optimiser: how far the server moves when clients have trained.

The mean of a round's uploads minus what the server had sent is a step d_t (a pseudo-gradient with its sign turned).
By default the server takes it as it is. Otherwise, with learning rate eta = server.lr and moments that start at zero:

mean      w <- w + eta d_t
momentum  m <- beta m + d_t,  w <- w + eta m              FedAvgM: Hsu, Qi, Brown, "Measuring the Effects of
                                                          Non-Identical Data Distribution", 2019
adam      m <- beta m + (1 - beta) d_t,  v <- beta2 v + (1 - beta2) d_t^2,  w <- w + eta m / (sqrt(v) + tau)
yogi      the same with v <- v - (1 - beta2) d_t^2 sign(v - d_t^2)
                                                          FedAdam, FedYogi: Reddi et al., "Adaptive Federated
                                                          Optimization", ICLR 2021; v starts at tau^2, and moments are
                                                          not corrected for their start, as in its Algorithm 2

w is what clients train and upload (body, head, scale). Prototypes and other rows by class, marks, statistics, and what
the server does not hold go to the method as they are. Moments stay at the server; checkpoints hold them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fednh.config.schema import ServerConfig
from fednh.errors import UserError
from fednh.methods.base import Method
from fednh.tree import Tree, Uploads, has_prefix, is_statistic, prefix, strip_prefix

PART = "server_optimizer"  # where the moments lie in a checkpoint


@dataclass(frozen=True)
class ServerOptimizer:
    """Turns the mean of uploads into what the server's next weights are."""

    config: ServerConfig
    method: Method

    @property
    def active(self) -> bool:
        """Whether anything differs from taking the mean as it is."""
        return self.config.optimizer != "mean" or self.config.learning_rate != 1.0

    def moved(self, server: Tree, upload: Iterable[str]) -> list[str]:
        """The names of an upload that the optimiser moves: those that the server holds and clients train."""
        spec = self.method.upload
        left_alone = {*spec.by_class, *spec.marks, *spec.untrained, *spec.summed}
        trained = (name for name in upload if name in server and not is_statistic(name))
        return [name for name in trained if name not in left_alone]

    def check(self, server: Tree, upload: Iterable[str]) -> None:
        """Refuse a method whose clients upload nothing that they train."""
        if self.active and not self.moved(server, upload):
            raise UserError(
                f"server.optimizer = {self.config.optimizer!r} moves weights that clients train and the server "
                f"averages, and {type(self.method).__name__} has none; leave it out"
            )

    def step(self, server: Tree, uploads: Uploads, moments: Tree) -> tuple[Uploads, Tree]:
        """The uploads with the moved weights in place of their mean, and the next moments."""
        if not self.active:
            return uploads, moments
        average, following = dict(uploads.mean()), dict(moments)  # of a network that nobody trained they stay
        for name in self.moved(server, average):
            step, own = self._step(average[name] - server[name], strip_prefix(moments, name))
            average[name] = server[name] + self.config.learning_rate * step
            following |= prefix(name, own)
        return replace(uploads, average=average), following

    def _step(self, d: Tensor, moments: Tree) -> tuple[Tensor, Tree]:
        """One tensor's step, without the learning rate, and its next moments."""
        rule, beta, beta2, tau = self.config.optimizer, self.config.momentum, self.config.beta2, self.config.tau
        if rule == "mean":
            return d, {}
        before = moments.get("m", torch.zeros_like(d))
        if rule == "momentum":
            m = beta * before + d
            return m, {"m": m}
        m = beta * before + (1 - beta) * d
        v, square = moments.get("v", torch.full_like(d, tau**2)), d.square()
        v = beta2 * v + (1 - beta2) * square if rule == "adam" else v - (1 - beta2) * square * (v - square).sign()
        return m / (v.sqrt() + tau), {"m": m, "v": v}


def merge_moments(server: Tree, moments: Tree) -> Tree:
    """The server's state and its optimiser's moments as one Tree, for a checkpoint."""
    return server | prefix(PART, moments)


def split_moments(state: Tree) -> tuple[Tree, Tree]:
    """The server's state and the moments: the inverse of `merge_moments`."""
    return {n: v for n, v in state.items() if not has_prefix(n, (PART,))}, strip_prefix(state, PART)
