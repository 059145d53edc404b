"""The Method: what a federated-learning paper defines, and nothing that it does not.

A method is a frozen dataclass whose fields are its paper's hyper-parameters. Its hooks are pure functions from Trees
to Trees, written for one client; engines map them over many, in one process or across a network.

    server ---broadcast--->  {**kept, **received} ---client_update--->  kept (stays), upload (travels)
       ^                                                                        |
       +-----------------------------------aggregate----------------------------+
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import ConfigDict
from torch import Tensor

from fednh.core.fit import Fit
from fednh.core.tree import Tree
from fednh.data.batches import ClientData
from fednh.models.net import Net

MODEL = ("body", "head")  # the names of a whole network


@dataclass(frozen=True)
class Method(ABC):
    """Hooks in the order in which a run calls them."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # an unknown hyper-parameter is an error
    cite: ClassVar[str]  # the paper, in one line
    patents: ClassVar[tuple[str, ...]] = ()  # that may concern it, and with it what derives from it; see NOTICE
    cosine: ClassVar[bool] = False  # logits are params["scale"] times the cosine to every class's prototype
    by_class: ClassVar[tuple[str, ...]] = ()  # uploads by class: row c is about class c, zero where a client lacks it
    marks: ClassVar[tuple[str, ...]] = ()  # uploads of 0 and 1, which are counted; one a class says which are owned

    @property
    def counted(self) -> tuple[str, ...]:
        """Of `by_class` those whose rows are as long as the number of samples behind them."""
        return ()

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        """All that the server remembers. Call `net.init(rng)` first: then all methods start from the same weights."""
        return net.init(rng)

    def enroll(self, initial: Tree) -> Tree:
        """A new client's persistent state, from the server's *initial* state.

        It depends on the configuration alone, so a site can make it without asking and may join at any time.
        """
        return {}

    @abstractmethod
    def broadcast(self, server: Tree) -> Tree:
        """What travels down."""

    @abstractmethod
    def client_update(self, net: Net, own: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        """One client's round: (what it keeps, what it uploads). `own` is {**kept, **received}: the received wins."""

    @abstractmethod
    def aggregate(self, server: Tree, uploads: Iterable[Tree]) -> Tree:
        """The server's next state, from at least one upload. `uploads` may be a generator: iterate once."""

    def upload_problem(self, upload: Tree) -> str | None:
        """What cannot be true of an upload, in words, by what the paper says; asked where uploads are bounded."""
        return None

    def global_model(self, server: Tree) -> Tree | None:
        """What `logits` needs to predict for anybody; None where the method has no such model."""
        return {name: value for name, value in server.items() if name.partition(".")[0] in MODEL}

    def personal_model(self, net: Net, own: Tree, data: ClientData, fit: Fit) -> Tree:
        """What `logits` needs to predict for this client. `own` is {**received, **kept}: the kept wins.

        By default the client's latest local model, as the paper evaluates methods that name no other.
        """
        return {name: value for name, value in own.items() if name.partition(".")[0] in MODEL}

    def problem(self, server: Tree) -> str | None:
        """What is wrong with the server's state, in words, if anything: what the paper says must always hold."""
        return None

    def logits(self, net: Net, params: Tree, x: Tensor) -> Tensor:  # (B, ...) -> (B, C)
        """Class scores from a global or personal model; the largest one is the prediction."""
        return net.logits(params, x)
