"""The inputs of a linear layer, from its update alone.

A layer computes W x + b. Whatever is trained, however long, in batches of whatever order, the gradient of [W, b] for a
sample is its own delta times [x, 1]. So the change of [W, b], less weight decay, is A X: one row [x_i, 1] of X for
every sample, and in A what each unit took from it. Its rank is the number of samples, as long as the layer has more
units and inputs than that. ReLU leaves most of A at zero: a unit that is silent for a sample takes nothing from it. So
columns of A are the sparsest vectors in the space that the columns of A X span, and with them X is solved for; the last
entry of a row, which is 1, says how long it is. (Dimitrov et al., "SPEAR: Exact Gradient Inversion of Batches in
Federated Learning", NeurIPS 2024, use the same sparsity, and find the vectors by drawing rows; here they are found by
reweighted least squares from random starts: Chartrand & Yin, ICASSP 2008.)
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

STARTS = 128  # at once
STEPS = 40  # of reweighting
POWER = 0.75  # of the weights: minimises sum |z|^(2 - 2 * POWER)
NEARLY = 0.6  # of the rounding's level in singular values: what is below counts as zero
APART = 0.1  # how much of a column must be new, of length 1
FLOOR = 3e-7  # of the largest singular value: rounding that is expected, and how closely vectors are searched
BLUR = 20.0  # singular values are told apart from rounding by this factor


def rank(update: Tensor) -> int:
    """How many samples an update has: where its singular values drop by `BLUR` and more; 0: nowhere."""
    values = torch.linalg.svdvals(update.double())
    falls = values[:-1] / values[1:].clamp(min=1e-300)
    return int(falls.argmax()) + 1 if len(falls) and float(falls.max()) > BLUR else 0


def inputs(update: Tensor, number: int, rng: np.random.Generator, tries: int) -> tuple[Tensor, Tensor] | None:
    """The rows [x] (number, d) of which an update [W, b] (units, d + 1) is made, and how sure each is.

    How sure: by how many units confirm it beyond those that any vector could be fitted to. None: the update is not of
    this rank, because there are more samples than units or inputs, or noise.
    """
    update = update.double()
    if number >= min(update.shape):
        return None
    left, heat, right = torch.linalg.svd(update, full_matrices=False)
    noise = max(float(heat[number]), FLOOR * float(heat[0]))
    if heat[number - 1] < BLUR * noise:
        return None
    columns, rows = left[:, :number] * heat[:number], right[:number]
    columns = columns[columns.norm(dim=1) > 30 * noise]
    if len(columns) <= number:
        return None
    if number == 1:
        found, sure = torch.ones(1, 1, dtype=torch.float64), [len(columns)]
    else:
        found, sure = _sparsest(columns, noise, rng, tries)
    if found.shape[1] < number:
        return None
    solved = torch.linalg.lstsq(found, rows).solution  # (number, d + 1)
    return solved[:, :-1] / solved[:, -1:], torch.tensor(sure) - number


def _sparsest(columns: Tensor, noise: float, rng: np.random.Generator, tries: int) -> tuple[Tensor, list[int]]:
    """The combinations (n, n) of columns that are zero in most places, sparsest first, independent of each other."""
    number = columns.shape[1]
    flat, scale, turn = torch.linalg.svd(columns / columns.norm(dim=1, keepdim=True), full_matrices=False)
    pool: dict[bytes, tuple[int, Tensor]] = {}
    for _ in range(max(1, tries // STARTS)):
        start = torch.from_numpy(rng.normal(size=(STARTS, number)))
        q = _reweighted(flat, start) @ torch.diag(1 / scale) @ turn
        q = q / q.norm(dim=1, keepdim=True)
        for each in q[((columns @ q.T).abs() < NEARLY * noise).sum(0) >= number + 2]:
            refined, zero = each, (columns @ each).abs() < NEARLY * noise
            for _ in range(3):
                refined = torch.linalg.svd(columns[zero])[2][-1]
                zero = (columns @ refined).abs() < NEARLY * noise
                if int(zero.sum()) < number:
                    break
            else:
                pool.setdefault(zero.numpy().tobytes(), (int(zero.sum()), refined))
    chosen, basis, sure = list[Tensor](), list[Tensor](), list[int]()
    for count, q in sorted(pool.values(), key=lambda item: -item[0]):
        new = columns @ q
        new = new / new.norm()
        for other in basis:
            new = new - (other @ new) * other
        if new.norm() > APART and len(chosen) < number:
            basis.append(new / new.norm())
            chosen.append(q)
            sure.append(count)
    return torch.stack(chosen, 1) if chosen else torch.zeros(number, 0, dtype=torch.float64), sure


def _reweighted(flat: Tensor, q: Tensor) -> Tensor:  # (m, n), (B, n) -> (B, n)
    """Unit vectors q for which flat q has many entries near zero."""
    q, smooth = q / q.norm(dim=1, keepdim=True), 0.1
    for _ in range(STEPS):
        z = (q @ flat.T).square()
        weight = 1 / (z + smooth**2 * z.mean(1, keepdim=True)).pow(POWER)
        q = torch.linalg.eigh(torch.einsum("bm,mi,mj->bij", weight, flat, flat))[1][..., 0]
        smooth = max(smooth * 0.8, 1e-7)
    return q
