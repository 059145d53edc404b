"""Held-out samples, natural sites and their scaling: nothing may pass from what is measured to what is trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednh.config import Config, load
from fednh.data.dataset import Dataset, one_site
from fednh.data.inspection import Division, effective, gini, inspect
from fednh.data.partitions.kinds import BySite
from fednh.data.scaling import Scaling, agreed, measure, statistics
from fednh.data.splits import hold_out, hold_out_fold
from fednh.errors import UserError
from fednh.federated.setup import build_federation, divide, load_data
from fednh.seeding import numpy_rng


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=60).map(np.array),
    share=st.floats(0, 0.99),
    seed=st.integers(0, 9),
)
def test_a_held_out_split_is_stratified_disjoint_and_seeded(labels: np.ndarray, share: float, seed: int) -> None:
    part = np.flatnonzero(np.arange(len(labels)) % 3 != 1)
    train, held = hold_out(labels, part, share, numpy_rng(seed, "x"))
    again = hold_out(labels, part, share, numpy_rng(seed, "x"))
    assert np.array_equal(train, again[0])
    assert np.array_equal(held, again[1])
    assert sorted([*train, *held]) == sorted(part)
    for label in set(labels[part]):
        n, h = (labels[part] == label).sum(), (labels[held] == label).sum()
        assert (labels[train] == label).any()
        assert h == min(int(share * n + 0.5), n - 1)


@given(
    labels=st.lists(st.integers(0, 4), min_size=2, max_size=60).map(np.array),
    folds=st.integers(2, 6),
    grouped=st.booleans(),
)
def test_every_sample_is_held_out_once_over_the_folds(labels: np.ndarray, folds: int, grouped: bool) -> None:
    part = np.flatnonzero(np.arange(len(labels)) % 3 != 1)
    groups = np.arange(len(labels)) // 4 if grouped else None
    divided = [hold_out_fold(labels, part, folds, k, numpy_rng(0, "x"), groups) for k in range(folds)]
    assert sorted(np.concatenate([held for _, held in divided])) == sorted(part)
    for train, held in divided:
        assert sorted([*train, *held]) == sorted(part)
        if groups is not None:
            assert not set(groups[train]) & set(groups[held])
        else:
            for label in set(labels[part]):
                assert abs((labels[held] == label).sum() - (labels[part] == label).sum() / folds) < 1


def test_folds_do_not_depend_on_the_seed_and_leave_something_to_train_on() -> None:
    data = vectors(np.arange(40.0)[:, None], [0, 1] * 20, [0] * 30 + [1] * 10)
    one, other = (divide(data, settings(data__holdout=None, data__folds=5, data__fold=2, seed=seed)) for seed in (0, 9))
    assert [held.tolist() for held in one[1]] == [held.tolist() for held in other[1]]
    assert [len(held) for held in one[1]] == [6, 2]
    patient = replace(data, group_train=np.repeat([0, 1, 2, 3], 10))
    with pytest.raises(UserError, match=r"data\.folds: s has a single group of samples"):
        [divide(patient, settings(data__holdout=None, data__folds=2, data__fold=k)) for k in range(2)]
    with pytest.raises(UserError, match=r"has no fold 5: with data\.folds = 5 they count from 0"):
        settings(data__holdout=None, data__folds=5, data__fold=5)
    with pytest.raises(UserError, match=r"data\.folds or data\.holdout, not both"):
        settings(data__folds=5)


def vectors(x: np.ndarray, y: list[int], site: list[int] | None = None, **more: object) -> Dataset:
    x = x.astype(np.float32)
    facts = {"sites": ("n", "s"), "site_train": np.array(site)} if site else {}
    empty = (x[:0], np.array([], np.int64))
    given_ = {"mean": (0.0,) * x.shape[1], "std": (1.0,) * x.shape[1], "scale": 1.0, "fitted": True, **facts, **more}
    return Dataset("v", x, np.array(y), *empty, ("a", "b"), **given_)  # type: ignore[arg-type]


def settings(**more: object) -> Config:
    small = {"partition.name": "site", "partition.min_samples": 1, "model.name": "mlp", "data.holdout": 0.0}
    return load(None, {"data.name": "npz:x", **small, **{k.replace("__", "."): v for k, v in more.items()}})


def test_sites_measure_their_own_rows_and_agree_on_one_scaling() -> None:
    """Means 2 and 200, deviations 1 and 100: the mean is 101, and either site is 99 and its own deviation away."""
    data = vectors(np.array([[1.0], [3.0], [100.0], [300.0]]), [0, 1, 0, 1], [0, 0, 1, 1])
    fed = build_federation(settings(), data)
    assert fed.statistics == (Scaling((2.0,), (1.0,)), Scaling((200.0,), (100.0,)))
    assert fed.dataset.mean == (101.0,)
    assert fed.dataset.std == (pytest.approx((np.hypot(1, 99) + np.hypot(100, 99)) / 2),)
    cards = [fed.card(settings(), client)["preprocessing"] for client in (None, 0, 1)]
    assert cards[0] == cards[1] == cards[2]  # the global model's, and the personal ones'
    assert (cards[0]["mean"], cards[0]["std"], cards[0]["scale"]) == (fed.dataset.mean, fed.dataset.std, 1.0)


def test_all_rows_are_scaled_alike_wherever_they_come_from() -> None:
    data = vectors(np.array([[1.0], [3.0], [100.0], [300.0]]), [0, 1, 0, 1], [0, 0, 1, 1])
    x = np.array([[3.0], [3.0], [3.0]], np.float32)
    data = replace(data, x_test=x, y_test=np.array([0, 1, 0]), site_test=np.array([0, 1, -1]))
    fed = build_federation(settings(), data)
    seen = {*fed.test.floats(fed.test.x.clone())[:, 0].tolist(), fed.train.floats(fed.train.x.clone())[1, 0].item()}
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("means", "stds", "mean", "std"),
    [
        ((4.0,), (2.0,), 4.0, 2.0),
        ((4.0, 4.0, 4.0), (2.0, 2.0, 2.0), 4.0, 2.0),  # exactly what all say
        ((1.0, 2.0, 9.0), (3.0, 3.0, 3.0), 2.0, np.hypot(3, 1)),
        ((0.0, 7.0, 9.0), (-1.0, 2.0, 2.0), 8.0, np.hypot(2, 1)),  # the first has no value: it does not count
        ((0.0, 0.0), (-1.0, -1.0), 0.0, 1.0),  # nobody has one
        ((5.0, 5.0), (0.0, 0.0), 5.0, 1.0),  # constant, everywhere the same
        ((0.0, 1.0), (0.0, 0.0), 0.5, 0.5),  # constant, but not the same
        ((0.0, 0.0, 0.0, 200.0), (0.0, 0.0, 0.0, 50.0), 0.0, np.hypot(50, 200)),  # it varies at one site alone
        ((5.0, 5.0, 1e29), (0.0, 0.0, 1e-29), 5.0, 1e29),  # a lie about a constant makes it vanish: (5 - 5) / 1e29
        ((1e9, 1e9), (1e-3, 1e-3), 1e9, 1e9 * np.finfo(np.float32).eps),  # float32 does not tell such values apart
    ],
)
def test_what_sites_agree_on_by_hand(
    means: tuple[float, ...], stds: tuple[float, ...], mean: float, std: float
) -> None:
    found = agreed([Scaling((m,), (s,)) for m, s in zip(means, stds, strict=True)])
    assert found == Scaling((mean,), (pytest.approx(std, rel=1e-15),))


@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(1, 1e6)), min_size=2, max_size=6),
    st.tuples(st.floats(-1e29, 1e29), st.sampled_from([-1.0, 0.0, 1e-29, 1.0, 1e29])),
)
def test_one_site_of_three_and_more_moves_the_agreement_within_what_the_others_say(
    honest: list[tuple[float, float]], lie: tuple[float, float]
) -> None:
    (mean,), (std,) = agreed([Scaling((m,), (s,)) for m, s in [*honest, lie]])
    means, stds = zip(*honest, strict=True)
    assert min(means) <= mean <= max(means)
    assert min(stds) <= std * (1 + 1e-12)
    assert std <= np.hypot(max(stds), max(means) - min(means)) * (1 + 1e-12)


def test_a_feature_that_is_missing_or_constant_at_a_site_is_told_so() -> None:
    x = np.array([[np.nan, 2.0, 1.0], [np.nan, 2.0, 3.0]], np.float32)
    assert statistics(x, 1.0) == Scaling((0.0, 2.0, 2.0), (-1.0, 0.0, 1.0))
    assert measure(x, 1.0) == Scaling((0.0, 2.0, 2.0), (1.0, 1.0, 1.0))


HEAD = "a,b,label,site,split\n"
NORTH = [f"{k},{k * k},{k % 2},north,train" for k in range(12)]
SOUTH = [f"{k + 50},{k},{k % 2},south,train" for k in range(12)]


def standardised(path: Path, rows: list[str], partition: str, holdout: float = 0.25) -> tuple[np.ndarray, ...]:
    """Everybody's training samples as the model sees them, and what was held out, for rows north then south."""
    path.write_text(HEAD + "\n".join(rows))
    many = {} if partition == "site" else {"partition.clients": 2}
    config = load(
        None,
        {
            "data.name": f"csv:{path}",
            **many,
            "partition.name": partition,
            "data.holdout": holdout,
            "partition.min_samples": 1,
        },
    )
    fed = build_federation(config)
    seen = fed.train.floats(fed.train.x.clone()).numpy()
    return tuple(seen[part] for part in (*fed.parts, *fed.held_out)) + tuple(fed.held_out)


def test_nothing_leaks_from_test_rows_into_training_rows(tmp_path: Path) -> None:
    test = ["1,2,0,north,test", "3,4,1,south,test"]
    north, south, *_ = standardised(tmp_path / "a.csv", [*NORTH, *SOUTH, *test], "site")
    changed = standardised(tmp_path / "b.csv", [*NORTH, *SOUTH, "900,-7,0,north,test"], "site")
    assert np.array_equal(changed[0], north)
    assert np.array_equal(changed[1], south)


@pytest.mark.parametrize("key", ["data.holdout", "seed"])
def test_what_a_site_holds_out_does_not_change_what_it_says(key: str) -> None:
    """Or two greetings would tell the rows apart that are in one and not in the other."""
    rng = np.random.default_rng(0)
    data = vectors(rng.normal(size=(40, 2)), [0, 1] * 20, [0] * 20 + [1] * 20)
    values = {"data.holdout": (0.0, 0.3, 0.95), "seed": (0, 1, 2)}[key]
    said = [build_federation(settings(**{"data.holdout": 0.5, key: value}), data).statistics for value in values]
    assert said[0] == said[1] == said[2]
    assert said[0][1] == statistics(data.x_train[20:], 1.0)


def test_nothing_leaks_from_held_out_rows_without_sites(tmp_path: Path) -> None:
    rows = [*NORTH, *SOUTH]
    first = standardised(tmp_path / "a.csv", rows, "iid")
    held = {*first[4].tolist(), *first[5].tolist()}
    wild = [",".join(["1000000", *row.split(",")[1:]]) if k in held else row for k, row in enumerate(rows)]
    second = standardised(tmp_path / "b.csv", wild, "iid")
    assert np.array_equal(first[0], second[0])
    assert np.array_equal(first[1], second[1])
    assert not np.array_equal(first[2], second[2])


def test_missing_numbers_take_the_agreed_mean(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,label,site\n1,x,n\n3,y,n\n,x,n\n10,x,s\n,y,s\n")
    given = {"data.name": f"csv:{tmp_path / 't.csv'}", "partition.name": "site", "partition.min_samples": 1}
    fed = build_federation(load(None, {**given, "data.holdout": 0.0}))
    assert fed.statistics == (Scaling((2.0,), (1.0,)), Scaling((10.0,), (0.0,)))
    assert fed.train.x[:, 0].tolist() == [1, 3, 6, 10, 6]
    together = build_federation(load(None, {**given, "partition.name": "iid", "partition.clients": 1}))
    assert not together.train.x.isnan().any()


def test_a_site_alone_holds_out_what_it_does_among_others() -> None:
    rng = np.random.default_rng(0)
    data = vectors(rng.normal(size=(40, 2)), [0, 1] * 20, [0] * 20 + [1] * 20)
    config = settings(data__holdout=0.3)
    parts, held = divide(data, config)
    alone = one_site(data, "s")
    own_parts, own_held = divide(alone, config)
    assert (held[1] - 20).tolist() == own_held[0].tolist()
    assert (parts[1] - 20).tolist() == own_parts[0].tolist()
    assert one_site(replace(data, sites=(), site_train=None), "west").sites == ("west",)
    with pytest.raises(UserError, match="no site 'x'; it has n, s"):
        one_site(data, "x")


def test_sites_that_are_too_small_or_not_known_are_refused() -> None:
    data = vectors(np.zeros((3, 1)), [0, 1, 0], [0, 0, 1])
    with pytest.raises(UserError, match="the site 's' has only 1 training samples, fewer than 2"):
        divide(data, settings(partition__min_samples=2))
    with pytest.raises(UserError, match="does not say which site"):
        divide(replace(data, sites=(), site_train=None), settings())


# --- inspect -------------------------------------------------------------------------------------------------------


def test_figures_of_imbalance_by_hand() -> None:
    assert gini(np.array([5, 5, 5])) == 0
    assert gini(np.array([0, 0, 0, 8])) == pytest.approx(0.75)  # (n - 1) / n
    assert effective(np.array([4, 4, 0])) == pytest.approx(2)
    assert effective(np.array([9, 0, 0])) == pytest.approx(1)


def test_what_will_hurt_is_said() -> None:
    x = np.arange(30, dtype=np.float32)[:, None]
    y = [0] * 27 + [1] * 3
    x[1] = x[0]
    x[29] = x[2]
    x_test = np.array([[2.0], [500.0]], np.float32)
    data = replace(vectors(x, y), x_test=x_test, y_test=np.array([0, 0]))
    how = Division(BySite(), ("n", "s"), [np.arange(27), np.arange(27, 30)], [np.array([], np.int64)] * 2)
    found = inspect(data, how)
    said = "\n".join(found["warnings"])
    for words in (
        "fewer than 10 training samples, too few to learn: b (3)",
        "classes missing in the test set, which are left out of GM, PM(V) and PM(L): b",
        "2 training samples are exact copies of others",
        "1 training samples occur under more than one class",
        "1 test samples are exact copies of training samples",
        "clients with one class only, whose own model has nothing to decide: n, s",
        "clients that share no class with any other: n, s",
        "1 of 1 pairs of clients have no class in common",
        "classes that one client alone has: a, b",
    ):
        assert words in said
    assert found["clients"]["missing_share"] == 0.5
    assert found["clients"]["counts"] == [[27, 0], [0, 3]]


def test_a_clean_set_gets_no_warning() -> None:
    data = load_data(load(None, {"data.name": "digits"}))
    assert inspect(data)["warnings"] == []
