"""The Method: what a federated-learning paper defines, and nothing that it does not.

A method is a frozen dataclass whose fields are its paper's hyper-parameters. Its hooks are pure functions from Trees
to Trees, written for one client; executors map them over many, in one process or across a network.

    server --broadcast--> received --client_update--> kept (stays at the client), upload (travels)
       ^                                                                            |
       +----------------------------aggregate, records------------------------------+

A client's hooks are given two Trees: `kept`, what it kept from its last round (or from `enroll`), and `received`, what
the server has just sent. Where a name is in both, the method says which one counts. By default the whole server state
travels down, uploads are averaged and replace what the server held, and a client's personal model is its latest local
one: a method's file holds only what its paper says differently. All clients receive the same, unless the method makes
`records`: tensors that one client receives in place of the broadcast's.

Everything that a method is written in can be imported from here (`__all__`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, final

import torch
from pydantic import ConfigDict
from torch import Tensor

from fednh.data.batches import ClientData
from fednh.methods.fit import Fit
from fednh.methods.losses import (
    SMOOTHING,
    BatchLoss,
    Logits,
    Loss,
    balanced_softmax,
    class_means,
    cross_entropy,
    log_share,
    scaled_cosine,
    squared_distance,
    unit,
    unvmap_any,
)
from fednh.methods.sums import added, feature_sums, not_gram, sent_once, unsent
from fednh.models.net import Net, uniform_weights
from fednh.models.prototypes import not_unit, projected_simplex, sparse_head, uniform_head
from fednh.tree import Tree, Uploads, double, is_statistic, mean, prefix, select, strip_prefix

MODEL = ("body", "head")  # the names of a whole network

__all__ = [
    "MODEL",
    "SMOOTHING",
    "BatchLoss",
    "ClientData",
    "Fit",
    "Logits",
    "Loss",
    "Method",
    "Net",
    "Tree",
    "UploadSpec",
    "Uploads",
    "added",
    "balanced_softmax",
    "class_means",
    "cross_entropy",
    "double",
    "feature_sums",
    "is_statistic",
    "log_share",
    "mean",
    "not_gram",
    "not_unit",
    "prefix",
    "projected_simplex",
    "scaled_cosine",
    "select",
    "sent_once",
    "sparse_head",
    "squared_distance",
    "strip_prefix",
    "uniform_head",
    "uniform_weights",
    "unit",
    "unsent",
    "unvmap_any",
]


def _nothing_wrong(upload: Tree) -> str | None:
    return None


@dataclass(frozen=True)
class UploadSpec:
    """What the parts of an upload are, by name: averaging rules, checks and sites treat them accordingly."""

    by_class: tuple[str, ...] = ()  # row c is about class c, zero if a client lacks it
    marks: tuple[str, ...] = ()  # of 0 and 1, which are counted; with one a class: the classes that a client owns
    counted: tuple[str, ...] = ()  # of `by_class`: the length of a row is the number of samples behind it
    class_counts: bool = False  # class counts are in another part than `counted`
    untrained: tuple[str, ...] = ()  # estimated by clients, not trained: no optimiser of the server moves them
    # `data.class_sums` as they are, or zeros: in a secure sum their noise may be that of all clients together
    class_sums: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()  # sums over samples, which the server adds up: no other rule than the mean keeps them
    recorded: tuple[str, ...] = ()  # what `records` needs; none: all clients receive the same
    weight: str = ""  # the part, a number, by which the upload counts in the mean, in place of counting like all others
    single: bool = False  # `aggregate` reads `uploads.trees`; if not, no upload need be kept
    problem: Callable[[Tree], str | None] = _nothing_wrong  # why an upload contradicts the paper; see `bound`

    @property
    def tells_counts(self) -> bool:
        """Whether an upload holds how many samples of each class a client has; sites refuse that by default."""
        return bool(self.counted) or self.class_counts


@dataclass(frozen=True)
class Method(ABC):
    """Hooks in the order in which a run calls them. Only `client_update` has no default.

    A whole method, in which clients share a head and no body ever travels:

    >>> @dataclass(frozen=True)
    ... class SharedHead(Method):
    ...     head_epochs: int = 1  # on the head alone, before all is trained
    ...     def enroll(self, initial):
    ...         return select(initial, "body")
    ...     def client_update(self, net, kept, received, data, fit):
    ...         loss = cross_entropy(net.logits)
    ...         start = {**select(kept, "body"), **select(received, "head")}
    ...         tuned = fit(start, loss, only=("head",), epochs=self.head_epochs)
    ...         model = fit(tuned, loss, only=MODEL)
    ...         return model, select(model, "head")  # (kept, uploaded)
    >>> from fednh.testing import one_round
    >>> sorted(one_round(SharedHead()).results[0].upload)
    ['head.weight']
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # an unknown hyper-parameter is an error
    cite: ClassVar[str]  # the paper, in one line
    title: ClassVar[str] = ""  # its name in tables and figures; empty: the class's name
    look: ClassVar[tuple[str, int] | None] = None  # in figures: colour, number of dashes and marker; None: by its name
    headless: ClassVar[bool] = False  # no head is uploaded: the global model's is the one that the run started from
    patents: ClassVar[tuple[str, ...]] = ()  # that may cover it and methods derived from it; see NOTICE
    model: ClassVar[tuple[str, ...]] = MODEL  # the names that `logits` needs to predict
    training_free: ClassVar[bool] = False  # no round trains: by default one round, in which every client takes part
    # the names of the server's state that belong to a network, where clients have different ones: each architecture has
    # its own, averaged over its clients, and all others are shared; None: the method needs one network for all
    by_architecture: ClassVar[tuple[str, ...] | None] = None
    doubles: ClassVar[bool] = False  # its sums need double precision, which not every device has
    sgd_only: ClassVar[bool] = False  # `client_update` asks for `fit.reach`, which SGD from a fresh start has
    prior: ClassVar[float] = 0.0  # personal.prior where that is not set: the weight of log class shares in logits
    cosine: ClassVar[bool] = False  # logits are params["scale"] times cosines to unit prototypes, the rows of the head

    @property
    def upload(self) -> UploadSpec:
        """What uploads hold beside parameters: a class attribute, or a property where it depends on the fields."""
        return UploadSpec()

    @property
    def kept_is_trained(self) -> bool:
        """Whether a round changes what a client keeps and its personal model is made of.

        If not, a newcomer's personal model needs no round before it.
        """
        return True

    def passes(self, epochs: float) -> dict[str, float]:
        """How often a client goes through its samples in a round, by the settings that say so; `epochs`: train.epochs.

        A real site compares each number with its own limit (`allow.epochs`) before it works. Settings whose names end
        in "epochs" count; a method adds others that multiply a client's work, and leaves out those of the server.
        """
        own = [field.name for field in fields(self) if field.name.endswith("epochs")]
        return {"train.epochs": epochs, **{f"method.{name}": getattr(self, name) for name in own}}

    def numbers(self, classes: int, dim: int) -> int:
        """The size of the largest tensor that a client makes beside the network's, with `dim` features before the head.

        A real site compares it with its own limit (`allow.parameters`) before it makes any.
        """
        return dim * dim  # of a random rotation, for example

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        """The server's whole state. Call `net.init(rng)` first: then all methods start from the same weights."""
        return net.init(rng)

    def enroll(self, initial: Tree) -> Tree:
        """What a new client keeps before its first round, from the server's *initial* state; by default nothing.

        It depends on the configuration alone, so a site can compute it by itself and may join at any time.
        """
        return {}

    def broadcast(self, server: Tree) -> Tree:
        """What travels down; by default the whole state of the server."""
        return server

    @abstractmethod
    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        """One client's round: (what it keeps, what it uploads)."""

    def aggregate(self, server: Tree, uploads: Uploads) -> Tree:
        """The server's next state, from at least one upload; by default their mean replaces what the server held."""
        return {**server, **uploads.mean()}

    def records(self, server: Tree, uploads: Sequence[Tree]) -> list[Tree]:
        """What each client of the round receives from now on in place of the broadcast's tensors of the same names.

        Asked after `aggregate`, whose result `server` is, if `upload.recorded` is not empty: with these parts of the
        uploads that were used, in whose order the records are returned. The server keeps every client's latest record;
        a client that never took part has none and receives the broadcast as it is.
        """
        return [{} for _ in uploads]

    def global_model(self, server: Tree) -> Tree | None:
        """What `logits` needs to predict for any client; None where the method has no such model."""
        return select(server, *self.model)

    def personal_model(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> Tree:
        """What `logits` needs to predict for this client.

        By default the client's latest local model, as in the FedNH paper's evaluation of methods that define no other:
        what the client kept, and what it received for names that it does not keep.
        """
        return select({**received, **kept}, *self.model)

    def problem(self, server: Tree) -> str | None:
        """Why the server's state contradicts the paper, in words, or None. Asked after every round."""
        return not_unit(server["head.weight"]) if self.cosine else None

    def logits(self, net: Net, params: Tree, x: Tensor) -> Tensor:  # (B, ...) -> (B, C)
        """Class scores from a global or personal model, without a prior."""
        return (scaled_cosine(net) if self.cosine else net.logits)(params, x)

    @final
    def scores(self, net: Net, params: Tree, x: Tensor) -> Tensor:  # (B, ...) -> (B, C)
        """`logits` by the `temperature` () plus the class `prior` (C,), where a personal model holds them.

        The largest is the prediction.
        """
        logits = self.logits(net, params, x)
        if "temperature" in params:
            logits = logits / params["temperature"]
        return logits + params["prior"] if "prior" in params else logits
