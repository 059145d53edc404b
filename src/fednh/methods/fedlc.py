"""FedLC: Zhang, Li, Li, Xu, Wu, Ding, Wu, "Federated Learning with Label Distribution Skew via Logits Calibration",
ICML 2022.

Before the softmax every logit is lowered by tau * n_c^(-1/4), where n_c counts the client's samples of class c: a rare
class must win by a wider margin, and a class that the client lacks is left out. FedAvg otherwise.
Deviation: the paper's sum in the denominator leaves out the true class, which lets the loss fall without bound
and is empty for a client with one class; here it is the usual softmax over all classes that the client has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor

from fednh.methods.base import MODEL, ClientData, Fit, Method, Net, Tree, cross_entropy


@dataclass(frozen=True)
class FedLC(Method):
    """FedAvg trained on logits that are calibrated by the client's class counts."""

    cite = "Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022"
    look = ("#e0705a", 20)

    tau: Annotated[float, Field(gt=0)] = 1.0  # the strength of the calibration

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        margin = self.tau * data.counts ** (-0.25)  # (C,); infinite for a class that the client lacks

        def calibrated(params: Tree, x: Tensor) -> Tensor:
            return net.logits(params, x) - margin

        model = fit(received, cross_entropy(calibrated), only=MODEL)
        return model, model
