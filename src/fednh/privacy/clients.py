"""Privacy of whole clients: McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018.

A client's move is its whole upload, less what the server holds of it. Each is scaled to a norm of at most C, over all
names together; the server adds them up, adds Gaussian noise of standard deviation m C, and divides by the number of
clients that a round is expected to have. Clients are drawn by Poisson sampling, and how many were tells about them.

`clip = "adaptive"`: Andrew et al., "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021.
C follows the median of norms. With b the share of moves no longer than C,
    C <- C exp(-ETA (b - MEDIAN)),
so that C falls while most moves fit into it. b is released, too, with noise s on the number of those (sensitivity 1/2
around its middle), and the noise of the sum is raised so that both together cost what m alone would:
    m_sum = (m^-2 - (2 s)^-2)^-1/2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fednh.config.schema import PrivacyConfig
from fednh.privacy.noise import Noise
from fednh.tree import Tree, Uploads

FIRST_CLIP = 0.1  # of the adaptive clip
MEDIAN, ETA = 0.5, 0.2
SHARE = 20  # the noise on the number of short moves is at least one part in so many of a round's clients

Specs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def first_clip(privacy: PrivacyConfig) -> float:
    return FIRST_CLIP if privacy.clip == "adaptive" else float(privacy.clip)


def count_noise(noise: float, expected: float) -> float:
    """The standard deviation of the noise on the number of short moves."""
    return max(expected / SHARE, noise)


def sum_noise(noise: float, expected: float) -> float:
    """The noise multiplier of the sum, such that sum and number together cost what `noise` alone would."""
    return 1 / math.sqrt(1 / noise**2 - 1 / (2 * count_noise(noise, expected)) ** 2)


class PrivateMean:
    """An accumulator of uploads: their clipped moves as a noised mean with a fixed denominator."""

    def __init__(
        self, server: Tree, specs: Specs, privacy: PrivacyConfig, noise: float, clip: float, expected: float, rng: Noise
    ):
        """`noise`: the multiplier of the account; `expected`: the clients that a round has on average."""
        self.server, self.clip, self.expected, self.rng = server, clip, max(expected, 1.0), rng
        self.adaptive = privacy.clip == "adaptive"
        self.noise = sum_noise(noise, self.expected) if self.adaptive else noise
        self.count_noise = count_noise(noise, self.expected)
        device = next(iter(server.values())).device
        self.total = {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in specs.items()}
        self.count = self.short = 0

    def add(self, upload: Tree, samples: int = 0, clients: int = 1) -> None:
        move = {name: value - self.server[name] if name in self.server else value for name, value in upload.items()}
        norm = torch.stack([value.double().square().sum() for value in move.values()]).sum().sqrt()
        self.short += int(norm <= self.clip)
        self.count += clients
        if norm.isfinite():  # a difference of finite numbers may be infinite, and no factor makes it short
            shrink = self.clip / norm.clamp(min=self.clip)
            self.total = {name: total + (shrink * move[name]).to(total) for name, total in self.total.items()}

    def uploads(self) -> Uploads:
        """The noised mean; its count is the fixed one."""
        mean = {name: (total + self._noise(total)) / self.expected for name, total in sorted(self.total.items())}
        average = {name: self.server[name] + value if name in self.server else value for name, value in mean.items()}
        return Uploads(average, max(1, round(self.expected)))

    def next_clip(self) -> float:
        """The clip of the next round. Asked once, after `uploads`."""
        if not self.adaptive:
            return self.clip
        short = self.short - self.count / 2 + self.count_noise * float(self.rng.gaussian(()))
        share = short / self.expected + 0.5
        return self.clip * math.exp(-ETA * (min(max(share, 0.0), 1.0) - MEDIAN))

    def _noise(self, total: Tensor) -> Tensor:
        return self.clip * self.noise * self.rng.gaussian(total.shape).to(total)
