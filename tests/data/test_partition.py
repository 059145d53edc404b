from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fednh.config import PartitionConfig
from fednh.config import load as load_config
from fednh.data.inspection import Division, inspect
from fednh.data.partitions import Drawn
from fednh.data.partitions.kinds import PARTITIONS, Dirichlet, LongTail, uses
from fednh.data.partitions.kinds import settings as all_settings
from fednh.errors import UserError
from fednh.federated.setup import build_federation
from fednh.seeding import numpy_rng


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
    imbalance=st.sampled_from([1.0, 2.0, 10.0, 50.0]),
)


@given(labels_of, how, st.integers(0, 2**31 - 1))
@settings(max_examples=150, deadline=None)
def test_every_partition_is_sound_or_refused(labels: np.ndarray, config: PartitionConfig, seed: int) -> None:
    """Each sample in exactly one client, the minimum respected, the same seed the same parts; or a clear refusal.

    A long tail leaves samples out; no other partition does.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drawn, "tries", 20)
        try:
            parts = split(labels, config, seed)
        except UserError:
            return
        again = split(labels, config, seed)
    assert len(parts) == config.clients
    dealt = sorted(np.concatenate(parts).tolist())
    assert len(set(dealt)) == len(dealt)
    assert set(dealt) <= set(range(len(labels)))
    assert len(dealt) == len(labels) or config.name == "longtail"
    assert min(map(len, parts)) >= config.min_samples
    if config.name in ("dirichlet", "longtail"):
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


def test_the_long_tail_of_cifar() -> None:
    """The class sizes of CIFAR-10-LT and CIFAR-100-LT with an imbalance factor of 100, as the literature has them."""
    ten = LongTail(imbalance=100.0).sizes(np.full(10, 5000))
    assert ten.tolist() == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    assert LongTail(imbalance=100.0).sizes(np.full(100, 500)).sum() == 10847


@given(
    st.lists(st.integers(1, 300), min_size=2, max_size=12),
    st.floats(1, 80),
    st.integers(0, 2**31 - 1),
)
@settings(max_examples=150, deadline=None)
def test_the_sizes_of_a_long_tail(there: list[int], imbalance: float, seed: int) -> None:
    """Each kept class has n_max * IF^(-c / (C - 1)) samples, none more than it has, and n_max cannot be larger."""
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(there)), there))
    kind, last = LongTail(imbalance=imbalance), len(there) - 1
    try:
        kept = kind.subset(labels, numpy_rng(seed, "partition"))
    except UserError as error:
        assert "partition.imbalance" in str(error)  # noqa: PT017
        assert any(n < imbalance ** (1 - c / last) for c, n in enumerate(there))
        return
    counts = np.bincount(labels[kept], minlength=len(there))
    n_max = min(n * imbalance ** (c / last) for c, n in enumerate(there))
    for c, n in enumerate(counts):
        assert n <= there[c]
        assert abs(n - (n_max * imbalance ** (-c / last) - 0.5)) < 0.5 + 1e-6
    assert any(n == there[c] for c, n in enumerate(counts))
    assert (np.diff(counts) <= 0).all()
    assert (np.diff(kept) > 0).all()
    assert np.array_equal(kept, kind.subset(labels, numpy_rng(seed, "partition")))


def test_a_long_tail_is_drawn_by_the_seed_and_dealt_by_dirichlet() -> None:
    config = PartitionConfig(name="longtail", clients=5, imbalance=10.0, beta=0.5)
    one, other = (np.sort(np.concatenate(split(CIFAR_LIKE, config, seed))) for seed in (0, 1))
    assert len(one) == len(other) == LongTail(imbalance=10.0).sizes(np.full(10, 500)).sum()
    assert not np.array_equal(one, other)
    whole = PartitionConfig(name="longtail", clients=5, imbalance=1.0, beta=0.5)
    assert len(np.concatenate(split(CIFAR_LIKE, whole, 0))) == len(CIFAR_LIKE)


def test_a_long_tail_keeps_groups_together() -> None:
    groups = np.arange(len(CIFAR_LIKE)) // 4
    kind = LongTail(clients=5, imbalance=10.0, beta=5.0)
    parts = kind.draw(CIFAR_LIKE, numpy_rng(0, "partition"), groups)
    owners = [set(groups[part].tolist()) for part in parts]
    assert sum(map(len, owners)) == len(set.union(*owners))


def test_what_a_long_tail_leaves_out_is_told() -> None:
    """When a run starts, and by `fednh inspect`, with the number that is kept of every class."""
    config = load_config("digits", {"partition.name": "longtail", "partition.imbalance": 10.0, "partition.clients": 4})
    fed = build_federation(config)
    used = sum(map(len, fed.parts))
    words = (
        f"{1442 - used:,} of 1,442 training samples are left out by the partition, long tail (IF 10), Dirichlet(0.3)"
    )
    assert any(words in note for note in fed.server_side(config).notes)
    division = Division(config.partition.kind, tuple("0123"), fed.parts, fed.held_out)
    facts = inspect(fed.dataset, division)
    assert any(words in note for note in facts["notes"])
    assert [row["used"] for row in facts["classes"]] == np.sum(fed.class_counts(), axis=0).tolist()
    whole = load_config("digits", {"partition.clients": 4})
    assert not build_federation(whole).server_side(whole).notes


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"clients": 1000}, "cannot give 1000 clients at least 10 each"),
        ({"clients": 400, "beta": 0.01}, "no Dirichlet(0.01) draw in"),
        ({"name": "classes", "classes_per_client": 11}, "only 10 classes"),
        ({"name": "classes", "clients": 2, "classes_per_client": 2}, "cannot cover 10 classes"),
        ({"min_classes": 11, "clients": 5}, "only 10"),
        ({"name": "longtail", "imbalance": 501.0}, "since the largest has 500; lower it to 500 or less"),
        ({"name": "longtail", "clients": 200}, "keeps 1,236 of 5,000 training samples"),
    ],
)
def test_what_cannot_be_done_is_said(settings_: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drawn, "tries", 20)
    with pytest.raises(UserError, match=words.replace("(", r"\(").replace(")", r"\)")):
        split(CIFAR_LIKE, PartitionConfig(**settings_), 0)


def test_a_long_tail_needs_two_classes() -> None:
    with pytest.raises(UserError, match="needs at least 2 classes, but the data has 1"):
        split(np.zeros(50, np.int64), PartitionConfig(name="longtail", clients=2), 0)


def test_a_partition_declares_its_settings_once() -> None:
    """The config has exactly the settings that some kind declares, with the kind's range and default."""
    assert set(PartitionConfig.model_fields) == {"name", *all_settings()}
    assert PartitionConfig(name="quantity", beta=0.7, clients=5).kind == PARTITIONS["quantity"](clients=5, beta=0.7)
    with pytest.raises(ValidationError, match="greater than 0"):
        PartitionConfig(beta=0.0)
    assert uses("dirichlet", "beta")
    assert not uses("iid", "beta")
    assert not uses("site", "clients")
    assert uses("longtail", "imbalance")
    assert not uses("dirichlet", "imbalance")
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        PartitionConfig(name="longtail", imbalance=0.9)


@pytest.mark.parametrize(
    ("name", "column", "words", "slug"),
    [
        ("dirichlet", "Dir(0.3)", "Dirichlet(0.3)", "dirichlet0.3"),
        ("longtail", "Dir(0.3), IF 100", "long tail (IF 100), Dirichlet(0.3)", "longtail100-dir0.3"),
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
