"""A method made of choices: where a round starts from, what a client keeps, and under which names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fednh.methods.base import MODEL, ClientData, Fit, Method, Net, Tree, cross_entropy, prefix, select, strip_prefix

Source = Literal["received", "kept", "halfway", "before"]


@dataclass(frozen=True)
class KeptOrReceived(Method):
    """FedAvg whose clients start from what they received, from what they kept, or from a mixture.

    A client keeps its model under the `names` of the broadcast ("same"), below "last" ("other"), or both, of which the
    first is its newest model and the other the one before. A newcomer keeps nothing, or the initial model (`enrolls`).
    """

    cite = "none"

    body: Source = "received"
    head: Source = "received"
    names: Literal["none", "same", "other", "both"] = "same"
    enrolls: bool = False
    uploads: Literal["all", "body"] = "all"

    def enroll(self, initial: Tree) -> Tree:
        return self.keeps(initial, initial) if self.enrolls else {}

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        start = {name: self.start(name, kept, received) for name in received}
        model = fit(start, cross_entropy(net.logits), only=MODEL)
        before = {name: kept.get(name, received[name]) for name in received}
        return self.keeps(model, before), model if self.uploads == "all" else select(model, "body")

    def start(self, name: str, kept: Tree, received: Tree) -> Tensor:
        came, newest, last = received[name], kept.get(name), strip_prefix(kept, "last").get(name)
        newest = last if newest is None else newest
        source = self.body if name.startswith("body.") else self.head
        if newest is None or source == "received":
            return came
        if source == "halfway":
            return (came + newest) / 2
        return newest if source == "kept" or last is None else last

    def keeps(self, model: Tree, before: Tree) -> Tree:
        other = prefix("last", before if self.names == "both" else model)
        return {"none": {}, "same": model, "other": other, "both": {**model, **other}}[self.names]
