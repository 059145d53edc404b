"""Whole numbers from the discrete Gaussian distribution, exactly: P(x) is proportional to exp(-x^2 / (2 sigma^2)).

Canonne, Kamath, Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020, Algorithms 1 to 3, on arrays.
Only whole numbers are drawn and compared, so no probability is rounded: what a continuous sampler's floating-point
numbers give away (Mironov, CCS 2012) is not there. sigma is a whole number; then its Laplace distribution takes the
scale t = sigma, and a proposal y is accepted with chance
    exp(-(|y| - sigma^2 / t)^2 / (2 sigma^2)) = exp(-(|y| - sigma)^2 / (2 sigma^2)).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = Callable[[int], bytes]  # this many random bytes; `os.urandom` in deployments
Whole = NDArray[np.int64]
Words = NDArray[np.uint64]
Marks = NDArray[np.bool_]

LARGEST = 1 << 28  # of sigma: 2 sigma^2 times any k below `_LONG` fits 63 bits
_LONG = 32  # a loop that goes on after so many draws does so with Python's whole numbers
_FAR = 1 << 31  # the square of a larger number needs more than 63 bits


def discrete_gaussian(sigma: int, size: int, random: Bytes = os.urandom) -> Whole:
    """`size` independent numbers of standard deviation `sigma` (a little less below 1)."""
    if not 1 <= sigma <= LARGEST:
        raise ValueError(f"the standard deviation {sigma} is not between 1 and {LARGEST}")
    found, missing = [np.zeros(0, np.int64)], size
    while missing > 0:  # at least a quarter of the proposals is accepted, on average
        proposed = _discrete_laplace(sigma, 2 * missing + 16, random)
        accepted = proposed[_accepted(np.abs(proposed) - sigma, sigma, random)][:missing]
        found.append(accepted)
        missing -= len(accepted)
    return np.concatenate(found)


def _accepted(q: Whole, sigma: int, random: Bytes) -> Marks:
    """Marks with chance exp(-q^2 / (2 sigma^2)) each."""
    below = 2 * sigma * sigma
    far = np.abs(q) >= _FAR
    near = np.where(far, 0, q)
    marks = _exp_marks((near * near).astype(np.uint64), np.uint64(below), random)
    for place in np.flatnonzero(far):  # exp(-8) of the proposals at most, and none with a usual sigma
        marks[place] = _exp_mark(int(q[place]) ** 2, below, random)
    return marks


def _discrete_laplace(t: int, size: int, random: Bytes) -> Whole:
    """Numbers y with chance proportional to exp(-|y| / t): Algorithm 2, up to `size` of them."""
    u = _uniform(np.full(size, t, np.uint64), random)
    u = u[_exp_marks_below_one(u, np.uint64(t), random)]
    v = _geometric(len(u), random)
    x = u.astype(np.int64) + t * v
    negative = _uniform(np.full(len(x), 2, np.uint64), random).astype(bool)
    keep = ~(negative & (x == 0))
    y: Whole = np.where(negative, -x, x)[keep]
    return y


def _geometric(size: int, random: Bytes) -> Whole:
    """How often a coin with chance exp(-1) shows heads before it first shows tails."""
    counts = np.zeros(size, np.int64)
    going = np.arange(size)
    while len(going):
        one = np.ones(len(going), np.uint64)
        going = going[_exp_marks_below_one(one, np.uint64(1), random)]
        counts[going] += 1
    return counts


def _exp_marks(above: Words, below: np.uint64, random: Bytes) -> Marks:
    """Marks with chance exp(-above / below) each: Algorithm 1, for any ratio."""
    whole, rest = above // below, above % below
    marks = _exp_marks_below_one(rest, below, random)
    going = np.flatnonzero(marks & (whole > 0))
    left = whole[going]
    while len(going):  # exp(-1) once for every whole
        one = np.ones(len(going), np.uint64)
        heads = _exp_marks_below_one(one, np.uint64(1), random)
        marks[going[~heads]] = False
        left = left[heads] - np.uint64(1)
        going, left = going[heads][left > 0], left[left > 0]
    return marks


def _exp_marks_below_one(above: Words, below: np.uint64, random: Bytes) -> Marks:
    """Marks with chance exp(-above / below) each, where that ratio is at most 1.

    k counts draws that come out with chance ratio / k, k = 1, 2, ...; the mark is whether the first that does not has
    an odd k.
    """
    marks = np.zeros(len(above), np.bool_)
    going, k = np.arange(len(above)), 1
    while len(going):
        if k == _LONG:
            for place in going:
                marks[place] = _exp_mark(int(above[place]), int(below), random, k)
            break
        drawn = _uniform(np.full(len(going), int(below) * k, np.uint64), random)
        heads = drawn < above[going]
        marks[going[~heads]] = k % 2 == 1
        going, k = going[heads], k + 1
    return marks


def _exp_mark(above: int, below: int, random: Bytes, k: int = 1) -> bool:
    """The same for one ratio of any size, with Python's whole numbers; `k` draws have been made."""
    while above > below:
        if not _exp_mark(1, 1, random):
            return False
        above -= below
    while _below(below * k, random) < above:
        k += 1
    return k % 2 == 1


def _below(most: int, random: Bytes) -> int:
    """A whole number from 0 to `most` - 1, of any size."""
    length = (most.bit_length() + 7) // 8 + 8
    limit = (1 << 8 * length) // most * most
    while (drawn := int.from_bytes(random(length), "little")) >= limit:
        pass
    return drawn % most


def _uniform(most: Words, random: Bytes) -> Words:
    """Whole numbers from 0 to `most` - 1, one for each, none more likely than another."""
    drawn = _words(len(most), random)
    while len(again := np.flatnonzero(drawn >= _multiple(most))):  # the last, incomplete multiple is drawn again
        drawn[again] = _words(len(again), random)
    result: Words = drawn % most
    return result


def _multiple(most: Words) -> Words:
    """The largest multiple of `most` up to 2^64 - 1, or a little less."""
    top = np.uint64(np.iinfo(np.uint64).max)
    result: Words = top // most * most
    return result


def _words(count: int, random: Bytes) -> Words:
    words: Any = np.frombuffer(random(8 * count), np.uint64).copy()
    return words  # type: ignore[no-any-return]
