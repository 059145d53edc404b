"""Privacy of whole clients: clipped moves, noise on their sum, a fixed denominator, an adaptive clip."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fednh.config import load
from fednh.config.schema import PrivacyConfig
from fednh.federated.checks import form_of
from fednh.federated.plan import picked_clients
from fednh.privacy.clients import PrivateMean, count_noise, sum_noise
from fednh.privacy.noise import SeededNoise


class Ones:
    def __init__(self, size: float):
        self.size = size

    def gaussian(self, shape: Sequence[int]) -> Tensor:
        return torch.full(tuple(shape), self.size)


SERVER = {"a": torch.ones(2), "b": torch.zeros(1)}


def private_mean(clip: float, expected: float, noise: float = 0.0, adaptive: bool = False) -> PrivateMean:
    privacy = PrivacyConfig(level="client", noise=1.5, clip="adaptive" if adaptive else clip)
    return PrivateMean(SERVER, form_of(SERVER), privacy, 1.5, clip, expected, Ones(noise))  # type: ignore[arg-type]


@pytest.mark.parametrize("drawn", [0, 1, 3])
def test_moves_are_clipped_as_a_whole_and_divided_by_the_expected_number(drawn: int) -> None:
    """A move of (3, 0; 4) has length 5 and is scaled to 2; the denominator is 4, whoever was drawn."""
    mean = private_mean(2.0, 4.0, noise=1.0)
    for _ in range(drawn):
        mean.add({"a": torch.tensor([4.0, 1.0]), "b": torch.tensor([4.0])})
    uploads = mean.uploads()
    noise = 2.0 * 1.5
    torch.testing.assert_close(uploads.mean()["a"], 1 + torch.tensor([1.2 * drawn + noise, noise]) / 4)
    torch.testing.assert_close(uploads.mean()["b"], torch.tensor([1.6 * drawn + noise]) / 4)
    assert uploads.count == 4


def test_short_moves_stay_as_they_are() -> None:
    mean = private_mean(2.0, 1.0)
    mean.add({"a": torch.tensor([1.5, 1.0]), "b": torch.tensor([-0.5])})
    torch.testing.assert_close(mean.uploads().mean(), {"a": torch.tensor([1.5, 1.0]), "b": torch.tensor([-0.5])})


@pytest.mark.parametrize("start", [1.0, 100.0])
def test_the_adaptive_clip_finds_the_norm_of_moves_from_both_sides(start: float) -> None:
    clip = start
    for round_ in range(60):
        privacy = PrivacyConfig(level="client", noise=1.0, clip="adaptive")
        mean = PrivateMean(SERVER, form_of(SERVER), privacy, 1.0, clip, 50.0, SeededNoise(0, round_, 0))
        for _ in range(50):
            mean.add({"a": torch.tensor([11.0, 1.0]), "b": torch.zeros(1)})  # a move of length 10
        mean.uploads()
        clip = mean.next_clip()
    assert clip == pytest.approx(10.0, rel=0.15)


@pytest.mark.parametrize(("noise", "expected"), [(1.0, 100.0), (3.0, 10.0)])
def test_sum_and_number_of_short_moves_cost_what_the_account_says(noise: float, expected: float) -> None:
    """One client moves the sum by one clip, and the centred number by a half."""
    together = 1 / sum_noise(noise, expected) ** 2 + 0.25 / count_noise(noise, expected) ** 2
    assert together == pytest.approx(1 / noise**2)


def test_clients_are_drawn_by_poisson_sampling() -> None:
    config = load("digits", {"privacy.level": "client", "privacy.noise": 1.0, "participation.rate": 0.3})
    numbers = [len(picked_clients(config, round_, 50)) for round_ in range(400)]
    mean = sum(numbers) / 400
    assert mean == pytest.approx(15, abs=0.6)
    assert sum((n - mean) ** 2 for n in numbers) / 400 == pytest.approx(50 * 0.3 * 0.7, rel=0.25)


def test_a_move_too_long_for_a_number_counts_nothing() -> None:
    """The difference of two finite numbers may be infinite: the sum must stay a number."""
    mean = private_mean(2.0, 1.0)
    server = {"a": torch.full((2,), -3e38), "b": torch.zeros(1)}
    mean.server = server
    mean.add({"a": torch.full((2,), 3e38), "b": torch.zeros(1)})
    torch.testing.assert_close(mean.uploads().mean(), server)
