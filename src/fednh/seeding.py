"""Randomness by address: every draw comes from (seed, purpose, round, client), never from a shared stream.

So a result does not depend on how many workers there are, on who finishes first, or on whether the run was
interrupted: a generator can be recreated from its address alone.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np
import torch


def numpy_rng(seed: int, purpose: str, *address: int) -> np.random.Generator:
    """A NumPy generator for one address; `address` is usually (round,) or (round, client)."""
    return np.random.default_rng(np.random.SeedSequence([seed, crc32(purpose.encode()), *address]))


def torch_rng(seed: int, purpose: str, *address: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator for one address, by default on the CPU."""
    state = np.random.SeedSequence([seed, crc32(purpose.encode()), *address]).generate_state(1, np.uint64)
    return torch.Generator(device).manual_seed(int(state[0] >> 1))
