"""The audit of this implementation: it holds, and half of its noise does not."""

from __future__ import annotations

import pytest
import torch

from fednh.attacks.canaries import audit
from fednh.config import load
from fednh.errors import UserError
from fednh.privacy.accounting import gaussian_noise
from fednh.privacy.noise import SeededNoise
from fednh.privacy.private_data import Mechanisms

CONFIG = load(None, {"data.name": "digits", "privacy.level": "sample", "privacy.epsilon": 8.0})
NOISE = gaussian_noise(8.0, 1e-5)
MECHANISMS = Mechanisms(clip=0.7, rate=0.1, gradients=2**0.5 * NOISE, sums=NOISE, counts=5.0)


def test_the_claim_holds():
    audits = audit(CONFIG, MECHANISMS, seed=0, side=50)
    assert [round(a.claimed, 1) for a in audits] == [8.0, 8.0]
    assert all(a.passed for a in audits)
    assert all(a.gaussian > 0.7 * a.claimed for a in audits)  # the canaries are seen: the bound is not idle
    assert all(a.one_run > 1 for a in audits)


@pytest.mark.parametrize("factor", [0.5])
def test_half_of_the_noise_is_noticed(monkeypatch, factor):
    honest = SeededNoise.gaussian

    def weak(self: SeededNoise, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
        return factor * honest(self, shape)

    monkeypatch.setattr(SeededNoise, "gaussian", weak)
    assert not any(a.passed for a in audit(CONFIG, MECHANISMS, seed=0, side=50))


def test_a_run_without_noise_has_nothing_to_audit():
    with pytest.raises(UserError, match="nothing to audit"):
        audit(CONFIG, None, 0)
