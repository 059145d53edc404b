"""CReFF: Shang, Lu, Huang, Wang, "Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training
with Federated Features", IJCAI 2022.

FedAvg, and beside it a classifier that the server re-trains on features of its own making: clients report how the head
would move on their real features of each class (Eq. (5)), the server shapes synthetic features until the head would
move the same way on them (Eq. (7)), and trains a new head on these, which are balanced (Eq. (8)).
For a linear head the gradient has a closed form, (softmax - one-hot) x feature, so no class needs a pass of its own.
Both learning rates are 0.01, as the FedNH paper found necessary with many clients (appendix).
Deviation: real features are taken without augmentation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fednh.methods.base import MODEL, ClientData, Fit, Method, Net, Tree, Uploads, UploadSpec, cross_entropy, select


@dataclass(frozen=True)
class CReFF(Method):
    """FedAvg whose global head is re-trained at the server on balanced synthetic features that match real gradients."""

    cite = (
        "Shang et al., Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training, IJCAI 2022"
    )
    look = ("#a8506e", 8)
    upload = UploadSpec(by_class=("gradient",), marks=("owned",))

    features_per_class: Annotated[int, Field(ge=1)] = 100  # synthetic ("federated") features of each class
    match_steps: Annotated[int, Field(ge=0)] = 100  # steps of gradient matching a round
    match_lr: Annotated[float, Field(gt=0)] = 0.01
    retrain_epochs: Annotated[int, Field(ge=0)] = 300  # epochs of classifier re-training a round
    retrain_lr: Annotated[float, Field(gt=0)] = 0.01
    retrain_batch: Annotated[int, Field(ge=1)] = 64
    draws: Annotated[int, Field(ge=1)] = 10  # real gradients are averaged over this many draws ...
    draw_size: Annotated[int, Field(ge=1)] = 64  # ... of up to this many images of a class

    def passes(self, epochs: float) -> dict[str, float]:
        return {"train.epochs": epochs, "method.draws": self.draws}  # the server re-trains

    def numbers(self, classes: int, dim: int) -> int:
        return classes * dim * max(classes, self.features_per_class)  # `gradient` and `features`

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        server = net.init(rng)
        return {
            **server,
            "retrained": server["head.weight"].clone(),  # (C, D)
            "features": torch.randn(net.num_classes, self.features_per_class, net.dim, generator=rng),
            "seed": torch.randint(2**31, (), generator=rng),  # of the re-training's shuffles
        }

    def broadcast(self, server: Tree) -> Tree:
        return select(server, *MODEL, "retrained")

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        gradient = self.real_gradient(net, received, data)
        model = fit(select(received, *MODEL), cross_entropy(net.logits), only=MODEL)
        return model, {**model, "gradient": gradient, "owned": (data.counts > 0).to(gradient.dtype)}

    @torch.no_grad()
    def real_gradient(self, net: Net, received: Tree, data: ClientData) -> Tensor:  # (C, C, D)
        """For each class, the re-trained head's gradient on the client's real features of it; zero if it has none."""
        batches = [(net.features(received, x), y, weight) for x, y, weight in data.batches()]
        h, y, real = (torch.cat(column) for column in zip(*batches, strict=True))
        label = F.one_hot(y, net.num_classes).to(h.dtype)  # (n, C)
        error = (h @ received["retrained"].T).softmax(1) - label  # (n, C)
        weight = self.draw_weights(data.random(self.draws, self.draw_size), y, real, data.counts)
        return torch.einsum("nk,nc,nd->kcd", label * weight[:, None], error, h)

    def draw_weights(self, keys: Tensor, y: Tensor, real: Tensor, counts: Tensor) -> Tensor:  # (T, n) keys -> (n,)
        """Each sample's weight in the average over draws: a draw takes the `draw_size` smallest keys of a class."""
        order = (y + keys * 0.999 + (1 - real) * 2 * len(counts)).argsort(1)  # by class, then by key; padding last
        place = order.argsort(1)  # a sample's position in that order
        first = (counts.cumsum(0) - counts)[y]  # where the sample's class starts in that order
        taken = (place - first < self.draw_size) * real
        return taken.to(keys.dtype).mean(0) / counts[y].clamp(min=1, max=self.draw_size)

    def aggregate(self, server: Tree, uploads: Uploads) -> Tree:
        average = uploads.mean()
        owners = average.pop("owned")  # share of the round's clients that own the class
        target = average.pop("gradient") / owners.clamp(min=1e-12)[:, None, None]  # mean over the owners
        features = self.match(server["features"], server["retrained"], target, (owners > 0).to(target.dtype))
        return {**server, **average, "features": features, "retrained": self.retrain(features, int(server["seed"]))}

    def match(self, features: Tensor, head: Tensor, target: Tensor, owned: Tensor) -> Tensor:
        """Move the features (C, M, D) of owned classes until the head's gradients on them align with `target`."""
        features = features.clone()
        label = torch.eye(len(head), dtype=head.dtype, device=head.device)[:, None]  # (C, 1, C)
        for _ in range(self.match_steps):
            features.requires_grad_()
            error = (features @ head.T).softmax(-1) - label  # (C, M, C)
            gradient = error.transpose(1, 2) @ features / features.shape[1]  # (C, C, D)
            mismatch = (1 - F.cosine_similarity(gradient, target, dim=-1)).sum(1)  # row by row
            (slope,) = torch.autograd.grad((mismatch * owned).sum(), features)
            features = features.detach() - self.match_lr * slope
        return features.detach()

    @torch.no_grad()
    def retrain(self, features: Tensor, seed: int) -> Tensor:  # (C, M, D) -> (C, D)
        """A new linear head by SGD on the synthetic features; the gradient of a linear softmax is written out."""
        classes, per_class, dim = features.shape
        rng = torch.Generator().manual_seed(seed)
        head: Tensor = ((torch.rand(classes, dim, generator=rng) * 2 - 1) / dim**0.5).to(features.device)
        flat = features.reshape(-1, dim)
        label = torch.eye(classes, device=features.device).repeat_interleave(per_class, 0)
        for _ in range(self.retrain_epochs):
            order = torch.randperm(len(flat), generator=rng).to(features.device)
            features_in_turn = torch.split(flat[order], self.retrain_batch)
            for h, onehot in zip(features_in_turn, torch.split(label[order], self.retrain_batch), strict=True):
                error = torch.softmax(h @ head.T, 1).sub_(onehot)
                head.addmm_(error.T, h, alpha=-self.retrain_lr / len(h))
        return head

    def global_model(self, server: Tree) -> Tree:
        bias = {"head.bias": torch.zeros_like(server["head.bias"])} if "head.bias" in server else {}
        return {**select(server, "body"), "head.weight": server["retrained"], **bias}
