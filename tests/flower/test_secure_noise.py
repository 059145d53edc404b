"""Secure sums under privacy.level = "sample": class sums have the noise of all sites together, and not that of each."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fednh.errors import ConfigError
from fednh.privacy.grid import Grid, Words
from fednh.privacy.private_data import Mechanisms, PrivateData
from fednh.tree import Tree
from tests.helpers.config import small
from tests.helpers.federation import federate

NOISE = 20.0
SETTINGS = {
    **{"partition.clients": 4, "participation.rate": 1.0, "rounds": 1, "model.args": {"hidden": [64]}},
    **{"federation.secure": True, "method.aggregation": "sum", "method.head_init": "means"},
}


def summed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **more: object) -> Tensor:
    """The sum of class sums that a server gets in a round that trains nothing."""
    seen, tree = list[Tree](), Grid.tree

    def look(self: Grid, total: Words) -> Tree:
        seen.append(tree(self, total))
        return seen[-1]

    monkeypatch.setattr(Grid, "tree", look)
    federate(small("fednh", **{**SETTINGS, **more}), tmp_path)
    monkeypatch.setattr(Grid, "tree", tree)
    return seen[0]["upload.prototypes"].double()


def test_any_t_sites_have_the_noise_of_the_account_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = summed(tmp_path / "plain", monkeypatch)
    noised = summed(tmp_path / "private", monkeypatch, **{"privacy.level": "sample", "privacy.noise": NOISE})
    found, needed, sites = float((noised - exact).std()), 3, 4
    assert abs(found / (NOISE * math.sqrt(sites / needed)) - 1) < 0.12, "of four sites that three could stand for"


class Nothing:
    """Stands for a client's data and noise."""

    counts = torch.ones(2)

    def class_sums(self, features: object) -> Tensor:
        return torch.tensor([[1 / 3, 2.0]], dtype=torch.float64)


def test_an_upload_that_is_not_the_class_sums_as_they_are_is_refused() -> None:
    """Its noise would be too small."""
    data = PrivateData(Nothing(), Mechanisms(1, 1, 1, 1, 1), Nothing(), {}, left_to_sum=True)  # type: ignore[arg-type]
    total = data.class_sums(lambda x: x)
    assert torch.equal(data.left({"sums": total.float()}, ["sums"])["sums"], total), "exact, not rounded to float32"
    assert not data.left({"sums": torch.zeros(1, 2)}, ["sums"])["sums"].any(), "sums that were sent before"
    with pytest.raises(ConfigError, match=r"is not data\.class_sums as they are"):
        data.left({"sums": 2 * total.float()}, ["sums"])
    assert [release.name for release in data.spent] == ["class sums"]
