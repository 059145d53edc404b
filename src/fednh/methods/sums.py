"""Sums over samples that every client sends once, for methods that train nothing.

A mean, a Gram matrix and what is solved from them need sums alone: the server adds the clients' sums up, and the result
is that of all samples in one place, however they are divided and in whatever rounds clients take part. A client marks
in what it keeps that it has sent; its later uploads are zeros. What a client keeps is stored only if its upload was
used, so that a lost upload is sent again.

Sums are of float64 at the server and, where something is solved from them, on the wire. Features are float32; a product
of two is exact in float64, so sums of N samples differ between divisions by no more than N * 1e-16 of the sum of
absolute values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from fednh.tree import Tree, Uploads


def unsent(initial: Tree) -> Tree:
    """What a client keeps before its sums were used."""
    return {"sent": torch.zeros((), device=next(iter(initial.values())).device)}


@torch.no_grad()
def feature_sums(
    features: Callable[[Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor, Tensor]],
    num_classes: int,
    gram: bool = False,
) -> Tree:
    """`sums` (C, D) of every class's features and their `counts` (C,); with `gram` also sum h h' (D, D), of all.

    `batches` yields (x, y, weight): a sample of weight zero is padding and does not count.
    """
    total: Tree = {}
    for x, y, weight in batches:
        h = features(x).double()
        member = F.one_hot(y, num_classes).to(h) * weight.to(h)[:, None]  # (B, C)
        part = {"sums": member.T @ h, "counts": member.sum(0)}
        part |= {"gram": (h * weight.to(h)[:, None]).T @ h} if gram else {}
        total = {name: total[name] + value for name, value in part.items()} if total else part
    return total


def sent_once(kept: Tree, upload: Tree) -> tuple[Tree, Tree]:
    """What a client keeps and uploads: the sums the first time, zeros after that."""
    fresh = 1 - kept["sent"]
    return {"sent": torch.ones_like(fresh)}, {name: value * fresh for name, value in upload.items()}


def added(server: Tree, uploads: Uploads, *names: str) -> Tree:
    """The server's sums of these names with a round's uploads added."""
    average = uploads.mean()
    return {name: server[name] + average[name] * uploads.count for name in names}


def not_gram(upload: Tree) -> str | None:
    """A sum of h h' is symmetric and has no negative eigenvalue."""
    gram = upload["gram"].double()
    largest = float(gram.abs().max())
    if float((gram - gram.T).abs().max()) > 1e-6 * largest:
        return "its Gram matrix is not symmetric"
    least = float(torch.linalg.eigvalsh(gram)[0])
    if least < -1e-6 * len(gram) * largest:
        return f"its Gram matrix has the eigenvalue {least:.3g}, and a sum of squares has none below 0"
    return None
