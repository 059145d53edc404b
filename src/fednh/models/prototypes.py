"""Max-separated class prototypes: Eq. (1), "Initialization", of FedNH (Dai et al., AAAI 2023).

    max M^2  over unit vectors w_1 .. w_C in R^d  with  ||w_i - w_j||^2 >= M^2 for all i != j

The paper solves it with an interior point method. Here the optimum is written down where it is known: d = 2 (regular
polygon), C <= d + 1 (regular simplex), C <= 2d (Rankin 1955: no two at less than a right angle). Beyond that it is
searched: annealed Riesz energies from many starts. The search is seeded and bounded by a count of evaluations, not by a
clock, so it finds the same points every time; it aims at 15 seconds on one core.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor

from fednh.errors import ConfigError
from fednh.models.net import Net, uniform_weights
from fednh.tree import Tree, select

Array = NDArray[np.float64]

SEARCH_LIMIT = 3000  # classes; above it the C x C matrix alone makes the search too slow and too large
SECONDS = 15.0  # what a search may cost, by the estimate in `_search`
MOST_STARTS, MOST_STEPS, FINALISTS = 100, 150, 5
SHARPNESS = (4.0, 32.0, 256.0, 2048.0)  # Riesz exponents: only the closest pairs matter as they grow
FINISH = 16384.0  # the exponent for the finalists
SPARSE_SHARPNESS = (4.0, 64.0)  # for rows with zeros: the first finds the simplex where there is one


@dataclass(frozen=True)
class Separation:
    """Unit vectors and how far apart they are (float64, measured on the float32 points themselves)."""

    points: Tensor  # (C, d) float32, unit rows
    min_distance: float  # M of Eq. (1); infinite for a single class
    max_cosine: float
    how: str  # how it was found, in words


def separated(classes: int, dim: int) -> Separation:
    """The best known (C <= 2d, or d = 2: optimal) solution of Eq. (1).

    >>> round(separated(6, 2).min_distance, 6)
    1.0
    """
    _check(classes, dim)
    if dim == 1 and classes > 2:
        raise ConfigError(f"classes = {classes} cannot be separated in dim = 1, which has 2 unit vectors; raise dim")
    if classes == 1:
        return _measured(np.eye(1, dim), "trivial: one class")
    if dim == 2:
        angle = 2 * np.pi * np.arange(classes) / classes
        return _measured(np.stack([np.cos(angle), np.sin(angle)], axis=1), "closed form: regular polygon")
    if classes <= dim + 1:
        return _measured(_simplices(classes, dim, 1), "closed form: regular simplex")
    if classes <= 2 * dim:
        parts = classes - dim
        return _measured(_simplices(classes, dim, parts), f"closed form: orthoplex bound, {parts} orthogonal simplices")
    return _best(classes, dim)


def orthogonal(classes: int, dim: int, generator: torch.Generator) -> Tensor:  # (C, d)
    """What the authors' code starts from: orthonormal rows for C <= d, else the unit rows of an orthogonal init."""
    _check(classes, dim)
    rows = torch.empty(classes, dim, device=generator.device)
    return torch.nn.functional.normalize(torch.nn.init.orthogonal_(rows, generator=generator), dim=1)


def rotated(points: Tensor, generator: torch.Generator) -> Tensor:  # (C, d) -> (C, d)
    """`points` turned by a uniformly random rotation, under which Eq. (1) is invariant."""
    dim = points.shape[1]
    q, r = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64, device=generator.device))
    q = q * torch.where(r.diagonal() < 0, -1.0, 1.0)  # without the signs, QR favours some directions
    if torch.linalg.det(q) < 0:
        q[:, 0] = -q[:, 0]  # a mirror image otherwise
    turned: Tensor = points.double() @ q.to(points.device)  # float64, to preserve the cosines
    return turned.to(points.dtype)


def _check(classes: int, dim: int) -> None:
    for name, value in (("classes", classes), ("dim", dim)):
        if value < 1:
            raise ConfigError(f"{name} = {value} must be at least 1")


def _measured(x: Array, how: str) -> Separation:
    points = torch.from_numpy(_unit(x)).float()
    cosine = _max_cosine(points.double().numpy())
    return Separation(points, math.sqrt(2 - 2 * cosine), cosine, how)


def _unit(x: Array) -> Array:
    rows: Array = x / np.linalg.norm(x, axis=1, keepdims=True)
    return rows


def _max_cosine(x: Array) -> float:
    """In blocks of rows, as C may be large; -inf, the empty maximum, for one row. May exceed 1 by rounding: clipped."""
    highest = -math.inf
    for start in range(0, len(x), 1024):
        cosines = x[start : start + 1024] @ x.T
        np.fill_diagonal(cosines[:, start:], -np.inf)
        highest = max(highest, float(cosines.max()))
    return min(highest, 1.0)


def _simplices(classes: int, dim: int, parts: int) -> Array:
    """`parts` regular simplices in orthogonal subspaces: one is the simplex, d of them are the orthoplex.

    Any C = d + parts points of this kind meet Rankin's bound (largest cosine 0); unlike a subset of the +-e_i, these
    also sum to zero, so no direction is favoured.
    """
    x = np.zeros((classes, dim))
    column = row = 0
    for size in (len(part) for part in np.array_split(np.arange(classes), parts)):  # size points span size - 1 axes
        x[row : row + size, column : column + size - 1] = _helmert(size).T
        column, row = column + size - 1, row + size
    return _unit(x)


def _helmert(size: int) -> Array:  # (size - 1, size)
    """An orthonormal basis of the complement of (1, .., 1): its columns are a centred simplex."""
    k = np.arange(1, size)[:, None]  # row k has k ones, then -k
    rows: Array = np.where(np.arange(size) < k, 1.0, np.where(np.arange(size) == k, -k, 0.0)) / np.sqrt(k * (k + 1))
    return rows


@cache  # a process may need the same head for several runs
def _best(classes: int, dim: int) -> Separation:
    if classes > SEARCH_LIMIT:
        raise ConfigError(
            f"classes = {classes} is too many to separate in dim = {dim} (the search takes up to {SEARCH_LIMIT}): "
            f'raise dim to {(classes + 1) // 2} or more, or take head_init = "orthogonal"'
        )
    with threadpool_limits(1):  # sums depend on the number of threads, and the search would amplify that
        x, starts = _search(classes, dim)
    return _measured(x, f"numerical: annealed Riesz energy, {starts} start{'s' * (starts > 1)}")


def _search(classes: int, dim: int) -> tuple[Array, int]:
    """The best of several starts, and their number."""
    cost = 1e-4 + 4e-8 * classes**2 + 1e-7 * classes * dim  # seconds per evaluation, measured on one slow core
    evaluations = SECONDS / cost  # the budget; the best few starts get one stage more
    steps = int(min(MOST_STEPS, max(5, evaluations / (len(SHARPNESS) + 1))))
    starts = int(min(MOST_STARTS, max(1, (evaluations / steps - FINALISTS) / len(SHARPNESS))))
    rng = np.random.default_rng([classes, dim])
    tried = []
    for start in range(starts):
        # A soft first stage leads to few, even configurations; the best one is not always among them (C = 13, d = 3).
        sharpness = SHARPNESS[start // 2 % 3 :]
        # Every other start is antipodal, x and -x, which descent preserves: the great symmetric configurations
        # (24-cell, 600-cell, the 240 roots of E8) are then found within a few starts, otherwise hardly ever.
        if start % 2:
            half = rng.standard_normal(((classes + 1) // 2, dim))
            x = _descend(np.concatenate([half, -half]), sharpness, steps)[:classes]
        else:
            x = _descend(rng.standard_normal((classes, dim)), sharpness, steps)
        tried.append((_max_cosine(x), x))
    distinct = {round(cosine, 4): x for cosine, x in sorted(tried, key=lambda t: t[0], reverse=True)}
    best = [distinct[cosine] for cosine in sorted(distinct)[:FINALISTS]]
    finished = [_descend(x, (FINISH,), steps) for x in best]
    return min([*finished, *best], key=_max_cosine), starts


def _descend(x: Array, sharpness: tuple[float, ...], steps: int, keep: Array | float = 1.0) -> Array:
    """Unit rows of less energy, with smaller and smaller distances in view; entries where `keep` is 0 stay 0."""
    from scipy.optimize import minimize  # takes a while to import, and most runs need no search

    for p in sharpness:
        minimum = minimize(
            _energy,
            x.ravel(),
            args=(x.shape, p, keep),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": steps, "maxfun": 2 * steps, "maxcor": 20, "gtol": 1e-10, "ftol": 1e-13},
        )
        x = _unit(minimum.x.reshape(x.shape))
    return x


def _energy(flat: Array, shape: tuple[int, int], p: float, keep: Array | float = 1.0) -> tuple[float, Array]:
    """log(sum over pairs of (1 - cos)^-p) / p, which tends to -log of the smallest 1 - cos, and its gradient.

    A power rather than an exponential, as it needs no scale: 1 - cos is 0.9 in R^64 and 0.001 in a crowded R^3.
    """
    y = flat.reshape(shape)
    norm = np.linalg.norm(y, axis=1, keepdims=True)
    x = y / norm
    gap = np.maximum(1 - x @ x.T, 1e-12)
    np.fill_diagonal(gap, np.inf)
    smallest = gap.min()
    weight = np.log(gap / smallest)
    weight *= -p
    np.exp(weight, out=weight)
    total = weight.sum()
    weight /= gap
    slope = (2 / total) * (weight @ x)
    slope -= x * (x * slope).sum(axis=1, keepdims=True)  # along the sphere; y's length does not matter
    return float(np.log(total) / p - np.log(smallest)), (keep * slope / norm).ravel()


def uniform_head(classes: int, dim: int, how: str, rng: torch.Generator) -> Tensor:  # (C, d)
    """A head of unit prototypes: "separated" solves Eq. (1), turned at random; "orthogonal" has right angles."""
    if how == "orthogonal":
        return orthogonal(classes, dim, rng)
    return rotated(separated(classes, dim).points, rng)


def projected_simplex(net: Net, rng: torch.Generator) -> Tree:
    """A body, and behind a linear projection of its features a head of separated prototypes: FedETF's and FedGELA's.

    The projection's space has as many dimensions as the features, or as there are classes if they are more.
    """
    space = max(net.dim, net.num_classes)
    return {
        **select(net.init(rng), "body"),
        "projection.weight": uniform_weights((space, net.dim), net.dim, rng),
        "projection.bias": uniform_weights((space,), net.dim, rng),
        "head.weight": uniform_head(net.num_classes, space, "separated", rng),  # (C, space)
    }


def sparse_head(classes: int, dim: int, sparsity: float, rng: torch.Generator) -> Tensor:  # (C, d)
    """Unit prototypes with `sparsity` of each row zero, in random places, and else as far apart as that allows.

    At least two entries of a row stay, so that it can turn. Where the regular simplex has such a form, it is found.
    """
    points = uniform_head(classes, dim, "separated", rng)
    zeros = max(0, min(round(sparsity * dim), dim - 2))
    order = torch.rand(classes, dim, generator=rng).argsort(1).argsort(1)  # in each row a random order of 0 .. d-1
    keep = (order >= zeros).double().numpy()
    start = _unit(points.double().numpy() * keep)
    with threadpool_limits(1):  # see `_best`
        rows = start if classes == 1 else _descend(start, SPARSE_SHARPNESS, MOST_STEPS, keep)
    return torch.from_numpy(rows).float()


def not_unit(head: Tensor) -> str | None:  # (C, d)
    """Which prototype is not of unit length, in words, if any."""
    length = head.norm(dim=1)
    worst = int((length - 1).abs().argmax())
    off = abs(float(length[worst]) - 1)
    return f"prototype {worst} has length {float(length[worst]):.6f}, not 1" if not off < 1e-4 else None
