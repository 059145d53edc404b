"""Augmentation of whole batches at once: seeded tensor code, no Python per sample."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PADDING = 4


def crop_flip(images: Tensor, rng: torch.Generator) -> Tensor:  # uint8 (B, H, W, C) -> the same
    """A random crop after padding with 4 black pixels, and a horizontal flip with probability 1/2.

    Every sample's rows and columns are chosen by index, so a flip is only a column index that runs backwards.
    """
    batch, height, width, channels = images.shape
    padded = F.pad(images, (0, 0, PADDING, PADDING, PADDING, PADDING))
    offset = torch.randint(2 * PADDING + 1, (2, batch, 1), generator=rng)
    flip = torch.randint(2, (batch, 1), generator=rng)
    column = torch.arange(width)
    rows = offset[0] + torch.arange(height)  # (B, H)
    columns = offset[1] + torch.where(flip == 1, width - 1 - column, column)  # (B, W)
    row_start = (torch.arange(batch)[:, None] * padded.shape[1] + rows) * padded.shape[2]  # (B, H)
    pixel = (row_start[:, :, None] + columns[:, None, :]).flatten().to(images.device)
    return padded.reshape(-1, channels).index_select(0, pixel).view(batch, height, width, channels)
