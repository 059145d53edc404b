from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fednh.config import PartitionConfig
from fednh.core.seeding import numpy_rng
from fednh.data.partitions import PARTITIONS, Drawn, uses
from fednh.data.partitions import settings as all_settings
from fednh.data.partitions.dirichlet import Dirichlet
from fednh.errors import UserError


def split(labels: np.ndarray, config: PartitionConfig, seed: int) -> list[np.ndarray]:
    kind = config.kind
    assert isinstance(kind, Drawn)
    return kind.draw(labels, numpy_rng(seed, "partition"))


labels_of = st.integers(2, 8).flatmap(
    lambda c: st.lists(st.integers(0, c - 1), min_size=60, max_size=400).map(lambda y: np.array(y, np.int64))
)
how = st.builds(
    PartitionConfig,
    name=st.sampled_from([name for name, kind in PARTITIONS.items() if not kind.natural]),
    clients=st.integers(1, 12),
    beta=st.sampled_from([0.05, 0.3, 1.0, 100.0]),
    classes_per_client=st.integers(1, 4),
    shards_per_client=st.integers(1, 4),
    min_samples=st.integers(1, 12),
    min_classes=st.integers(1, 3),
)


@given(labels_of, how, st.integers(0, 2**31 - 1))
@settings(max_examples=150, deadline=None)
def test_every_partition_is_sound_or_refused(labels: np.ndarray, config: PartitionConfig, seed: int) -> None:
    """Each sample in exactly one client, the minimum respected, the same seed the same parts; or a clear refusal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drawn, "tries", 20)
        try:
            parts = split(labels, config, seed)
        except UserError:
            return
        again = split(labels, config, seed)
    assert len(parts) == config.clients
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert min(map(len, parts)) >= config.min_samples
    if config.name == "dirichlet":
        assert all(len(np.unique(labels[p])) >= config.min_classes for p in parts)
    if config.name == "classes":
        assert all(len(np.unique(labels[p])) <= config.classes_per_client for p in parts)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


CIFAR_LIKE = np.repeat(np.arange(10), 500)


def test_another_seed_gives_another_partition() -> None:
    config = PartitionConfig(clients=10)
    a, b = split(CIFAR_LIKE, config, 0), split(CIFAR_LIKE, config, 1)
    assert any(not np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_dirichlet_is_more_uneven_for_a_smaller_beta() -> None:
    def owned(beta: float) -> float:
        parts = split(CIFAR_LIKE, PartitionConfig(clients=20, beta=beta, min_classes=1), 0)
        return float(np.mean([len(np.unique(CIFAR_LIKE[p])) for p in parts]))

    assert owned(0.1) < owned(0.5) < owned(100.0) == 10


def test_a_full_client_gets_no_more_of_later_classes() -> None:
    """FedDF's scheme: no client holds more than N/K before its last class arrives."""
    parts = Dirichlet(clients=20, beta=0.3, min_samples=1, min_classes=1).draw(CIFAR_LIKE, numpy_rng(0, "t"))
    fair = len(CIFAR_LIKE) / 20
    for part in parts:
        y = CIFAR_LIKE[part]
        before_last = (y < y.max()).sum()
        assert before_last < fair


def test_iid_parts_are_equal() -> None:
    sizes = [len(p) for p in split(CIFAR_LIKE, PartitionConfig(name="iid", clients=7), 0)]
    assert max(sizes) - min(sizes) <= 1


def test_shards_give_few_classes() -> None:
    parts = split(CIFAR_LIKE, PartitionConfig(name="shards", clients=10, shards_per_client=2), 0)
    assert max(len(np.unique(CIFAR_LIKE[p])) for p in parts) <= 2
    assert {len(p) for p in parts} == {500}


def test_classes_are_shared_evenly() -> None:
    parts = split(CIFAR_LIKE, PartitionConfig(name="classes", clients=10, classes_per_client=3), 0)
    assert [len(np.unique(CIFAR_LIKE[p])) for p in parts] == [3] * 10
    holders = [sum(c in CIFAR_LIKE[p] for p in parts) for c in range(10)]
    assert holders == [3] * 10


def test_quantity_varies_the_size_only() -> None:
    sizes = sorted(len(p) for p in split(CIFAR_LIKE, PartitionConfig(name="quantity", clients=10, beta=0.5), 0))
    assert sizes[-1] > 3 * sizes[0]


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"clients": 1000}, "cannot give 1000 clients at least 10 each"),
        ({"clients": 400, "beta": 0.01}, "no Dirichlet(0.01) draw in"),
        ({"name": "classes", "classes_per_client": 11}, "only 10 classes"),
        ({"name": "classes", "clients": 2, "classes_per_client": 2}, "cannot cover 10 classes"),
        ({"min_classes": 11, "clients": 5}, "only 10"),
    ],
)
def test_what_cannot_be_done_is_said(settings_: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drawn, "tries", 20)
    with pytest.raises(UserError, match=words.replace("(", r"\(").replace(")", r"\)")):
        split(CIFAR_LIKE, PartitionConfig(**settings_), 0)


def test_a_partition_declares_its_settings_once() -> None:
    """The config has exactly the settings that some kind declares, with the kind's range and default."""
    assert set(PartitionConfig.model_fields) == {"name", *all_settings()}
    assert PartitionConfig(name="quantity", beta=0.7, clients=5).kind == PARTITIONS["quantity"](clients=5, beta=0.7)
    with pytest.raises(ValidationError, match="greater than 0"):
        PartitionConfig(beta=0.0)
    assert uses("dirichlet", "beta")
    assert not uses("iid", "beta")
    assert not uses("site", "clients")


@pytest.mark.parametrize(
    ("name", "column", "words", "slug"),
    [
        ("dirichlet", "Dir(0.3)", "Dirichlet(0.3)", "dirichlet0.3"),
        ("iid", "IID", "iid", "iid"),
        ("classes", "2 classes", "classes", "classes"),
        ("shards", "2 shards", "shards", "shards"),
        ("quantity", "Dir sizes(0.3)", "Dirichlet sizes(0.3)", "quantity0.3"),
        ("site", "sites", "natural sites", "site"),
    ],
)
def test_how_a_partition_is_called(name: str, column: str, words: str, slug: str) -> None:
    kind = PARTITIONS[name]()
    assert (kind.column(), kind.words(), kind.slug()) == (column, words, slug)
