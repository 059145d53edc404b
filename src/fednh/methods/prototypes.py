"""Max-separated class prototypes: Eq. (1), "Initialization", of FedNH (Dai et al., AAAI 2023).

    max M^2  over unit vectors w_1 .. w_C in R^d  with  ||w_i - w_j||^2 >= M^2 for all i != j

The paper solves it with an interior point method. Here the optimum is written down where it is known: d = 2 (regular
polygon), C <= d + 1 (regular simplex), C <= 2d (Rankin 1955: no two at less than a right angle). Beyond that it is
searched: annealed Riesz energies from many starts, then a sequence of linear programs on the closest pairs. The
search is seeded and bounded by a count of evaluations, not by a clock, so it finds the same points every time; it
aims at 15 seconds on one core, and its result is cached on disk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor

from fednh.core.tree import Tree, select
from fednh.errors import UserError
from fednh.models.net import Net
from fednh.storage import cache as caches

Array = NDArray[np.float64]

SEARCH_LIMIT = 3000  # classes; above it the C x C matrix alone makes the search too slow and too large
SECONDS = 15.0  # what a search may cost, by the estimate in `_search`
MOST_STARTS, MOST_STEPS, FINALISTS = 100, 150, 5
POLISH_LIMIT = 250  # C * d; the linear programs stay cheap up to here
SHARPNESS = (4.0, 32.0, 256.0, 2048.0)  # Riesz exponents: only the closest pairs matter as they grow
FINISH = 16384.0  # the exponent for the finalists
SPARSE_SHARPNESS = (4.0, 64.0)  # for rows with zeros: the first finds the simplex where there is one
IRREDUCIBLE = {3: 0b1011, 5: 0b100101, 7: 0b10000011, 9: 0b1000010001}  # polynomials over GF(2), by degree


@dataclass(frozen=True)
class Separation:
    """Unit vectors and how far apart they are (float64, measured on the float32 points themselves)."""

    points: Tensor  # (C, d) float32, unit rows
    min_distance: float  # M of Eq. (1); infinite for a single class
    max_cosine: float
    how: str  # how it was found, in words


def separated(classes: int, dim: int, *, cache: Path | Literal["user"] | None = "user") -> Separation:
    """The best known (C <= 2d, or d = 2: optimal) solution of Eq. (1).

    Searched results are kept in `cache`: a folder, None for no cache, or "user" for the user's (see storage/cache.py).

    >>> round(separated(6, 2).min_distance, 6)
    1.0
    """
    _check(classes, dim)
    if dim == 1 and classes > 2:
        raise UserError(f"classes = {classes} cannot be separated in dim = 1, which has 2 unit vectors; raise dim")
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

    folder = caches.folder("prototypes") if cache == "user" else cache
    file = None if folder is None else folder / f"v1-{classes}x{dim}.safetensors"
    found = None if file is None else _read(file, classes, dim)
    if found is None:
        found = _best(classes, dim)
        if file is not None:
            _write(file, found)
    return found


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
            raise UserError(f"{name} = {value} must be at least 1")


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


def _best(classes: int, dim: int) -> Separation:
    bases = _unbiased_bases(classes, dim)
    known = None if bases is None else _measured(bases, "closed form: mutually unbiased bases (Kerdock)")
    if classes > SEARCH_LIMIT:
        if known is None:
            raise UserError(
                f"classes = {classes} is too many to separate in dim = {dim} (the search takes up to {SEARCH_LIMIT}): "
                f'raise dim to {(classes + 1) // 2} or more, or take head_init = "orthogonal"'
            )
        return known
    with threadpool_limits(1):  # sums depend on the number of threads, and the search would amplify that
        x, starts = _search(classes, dim)
    polish = " and linear programs" if classes * dim <= POLISH_LIMIT else ""
    found = _measured(x, f"numerical: annealed Riesz energy{polish}, {starts} start{'s' * (starts > 1)}")
    return found if known is None or found.max_cosine < known.max_cosine else known


def _unbiased_bases(classes: int, dim: int) -> Array | None:
    """Points +-v of mutually unbiased bases, d = 16, 64, 256 or 1024: the cosines between bases are +-1/sqrt(d).

    With some ten classes per dimension the search no longer comes near them. They are the standard basis, and for each
    s in GF(2^(m-1)) the Hadamard basis times the signs of a quadratic form Q_s, where any two forms differ by one of
    full rank (Calderbank, Cameron, Kantor and Seidel 1997: a Kerdock set).
    """
    m = dim.bit_length() - 1  # dim = 2^m with m even
    if dim != 1 << m or m - 1 not in IRREDUCIBLE or classes > dim * (dim + 2):
        return None
    bits = (np.arange(dim)[:, None] >> np.arange(m)) & 1  # (d, m)
    walsh = (1 - 2 * (bits @ bits.T % 2)) / math.sqrt(dim)  # Sylvester's Hadamard matrix
    found = [np.eye(dim)]
    for s in range(-(-classes // (2 * dim)) - 1):
        traces = np.array([*(_trace(_product(s, 1 << i, m - 1), m - 1) for i in range(m - 1)), 1])
        form = np.outer(traces, traces)  # its last column is Tr(s e_i), the rest gains Tr(s^2 e_i e_j)
        for i in range(m - 1):
            for j in range(i + 1, m - 1):
                square = _product(_product(s, 1 << i, m - 1), _product(s, 1 << j, m - 1), m - 1)
                form[i, j] ^= _trace(square, m - 1)
        signs = 1 - 2 * (((bits @ np.triu(form, 1)) * bits).sum(axis=1) % 2)
        found.append(walsh * signs)
    return np.concatenate([half for basis in found for half in (basis, -basis)])[:classes]


def _product(a: int, b: int, degree: int) -> int:
    """In GF(2^degree), elements as bit masks."""
    product = 0
    while b:
        product ^= a * (b & 1)
        a <<= 1
        a ^= IRREDUCIBLE[degree] * (a >> degree)
        b >>= 1
    return product


def _trace(a: int, degree: int) -> int:
    total = 0
    for _ in range(degree):
        total, a = total ^ a, _product(a, a, degree)
    return total


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
    if classes * dim <= POLISH_LIMIT:
        finished = [_polish(x) for x in finished]
    return min([*finished, *best], key=_max_cosine), starts


def _descend(x: Array, sharpness: tuple[float, ...], steps: int, keep: Array | float = 1.0) -> Array:
    """Unit rows of less energy, with smaller and smaller distances in view; entries where `keep` is 0 stay 0."""
    from scipy.optimize import minimize  # takes a while to import, and most runs need no search

    for p in sharpness:
        found = minimize(
            _energy,
            x.ravel(),
            args=(x.shape, p, keep),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": steps, "maxfun": 2 * steps, "maxcor": 20, "gtol": 1e-10, "ftol": 1e-13},
        )
        x = _unit(found.x.reshape(x.shape))
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


def _polish(x: Array) -> Array:
    """Sequential linear programming: the step within a trust region that most lowers the linearised largest cosine."""
    from scipy.optimize import linprog

    classes, dim = x.shape
    first, second = np.triu_indices(classes, 1)
    every = np.arange(classes)
    best, radius = _max_cosine(x), 0.05
    for _ in range(20):
        cosines = (x @ x.T)[first, second]
        near = cosines > best - 4 * radius  # the others can hardly become the closest in one step
        i, j, pair = first[near], second[near], np.arange(np.count_nonzero(near))
        change = np.zeros((len(pair), classes, dim))  # of each cosine, by each coordinate
        change[pair, i], change[pair, j] = x[j], x[i]
        outward = np.zeros((classes, classes, dim))  # steps have no part in it: they stay on the sphere, to first order
        outward[every, every] = x
        found = linprog(  # the variables: all steps, then the largest cosine after them
            np.append(np.zeros(x.size), 1.0),
            A_ub=np.column_stack([change.reshape(-1, x.size), -np.ones(len(pair))]),
            b_ub=-cosines[near],
            A_eq=np.column_stack([outward.reshape(-1, x.size), np.zeros(classes)]),
            b_eq=np.zeros(classes),
            bounds=[(-radius, radius)] * x.size + [(-1.0, 1.0)],
        )
        if found.x is None:
            break
        moved = _unit(x + found.x[:-1].reshape(x.shape))
        reached, promised = _max_cosine(moved), float(found.x[-1])
        if best - reached < 0.5 * (best - promised):
            radius /= 4
        if reached < best:
            x, best = moved, reached
        if radius < 1e-8 or best - promised < 1e-12:
            break
    return x


def _read(file: Path, classes: int, dim: int) -> Separation | None:
    """None for anything but a sound file: the search can always be done again."""
    try:
        with safe_open(file, framework="pt") as stored:
            points = stored.get_tensor("points").clone()  # not a view of a file that another process may replace
            how, distance = stored.metadata()["how"], stored.metadata()["distance"]
    except (OSError, SafetensorError, KeyError, TypeError):
        return None
    if points.shape != (classes, dim) or points.dtype != torch.float32:
        return None
    if not torch.allclose(points.double().norm(dim=1), torch.ones(classes, dtype=torch.float64), atol=1e-6):
        return None
    cosine = _max_cosine(points.double().numpy())
    found = Separation(points, math.sqrt(2 - 2 * cosine), cosine, f"{how}; read from the cache")
    return found if f"{found.min_distance:.6f}" == distance else None


def _write(file: Path, found: Separation) -> None:
    data = save({"points": found.points}, {"how": found.how, "distance": f"{found.min_distance:.6f}"})
    caches.keep(file, lambda draft: draft.write_bytes(data))


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
        "projection.weight": (torch.rand(space, net.dim, generator=rng) * 2 - 1) / net.dim**0.5,
        "projection.bias": (torch.rand(space, generator=rng) * 2 - 1) / net.dim**0.5,
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
        found = start if classes == 1 else _descend(start, SPARSE_SHARPNESS, MOST_STEPS, keep)
    return torch.from_numpy(found).float()


def not_unit(head: Tensor) -> str | None:  # (C, d)
    """Which prototype is not of unit length, in words, if any."""
    length = head.norm(dim=1)
    worst = int((length - 1).abs().argmax())
    off = abs(float(length[worst]) - 1)
    return f"prototype {worst} has length {float(length[worst]):.6f}, not 1" if not off < 1e-4 else None
