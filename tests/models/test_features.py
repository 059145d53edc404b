"""Features of frozen networks: the same bits everywhere, computed once, whatever happens to the cache."""

from __future__ import annotations

import multiprocessing
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednh.backends.vmap import choose_engine
from fednh.config import load
from fednh.data.batches import ClientData, samples_of
from fednh.data.dataset import Dataset
from fednh.errors import DataError, Notice, UserError
from fednh.federated.architectures import initial_state
from fednh.federated.setup import build_federation
from fednh.io import cache
from fednh.models import features as module
from fednh.models.backbone import Backbone, Recipe, build_backbone
from fednh.models.features import CHECK, DIGEST, FeatureCache, compute, features, with_features
from tests.helpers.pictures import TOY, images, toy_weights


@pytest.fixture
def body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backbone:
    """A network with a cache of its own."""
    monkeypatch.setenv("FEDNH_CACHE", str(tmp_path / "cache"))
    return build_backbone(Recipe(name=TOY, size=8), 2, toy_weights(tmp_path / "toy.safetensors"))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images are computed, call by call."""
    counts: list[int] = []

    def counting(stored: Any, backbone: Backbone) -> Any:
        counts.append(len(stored))
        return compute(stored, backbone)

    monkeypatch.setattr(module, "compute", counting)
    return counts


def store_of(body: Backbone) -> FeatureCache:
    return FeatureCache(cache.folder("features") / body.recipe.key, body.recipe.dim)


def test_an_image_is_computed_once_by_its_content(body: Backbone, computed: list[int]) -> None:
    first = features(images(5), body)
    assert np.array_equal(features(images(5)[::-1], body), first[::-1])  # in another order, and as another view
    assert computed == [5]
    more = np.concatenate([images(5), images(2, seed=1)])
    assert np.array_equal(features(more, body)[:5], first)
    assert computed == [5, 2]
    changed = images(5)
    changed[3, 0, 0, 0] ^= 1
    features(changed, body)
    assert computed == [5, 2, 1]
    features(images(5).reshape(5, 4, 16, 3), body)  # the same bytes, another image
    assert computed[-1] == 5


def test_another_recipe_has_another_cache(body: Backbone, computed: list[int], tmp_path: Path) -> None:
    features(images(3), body)
    other = build_backbone(Recipe(name=TOY, size=8), 2, toy_weights(tmp_path / "other.safetensors", seed=1))
    assert not np.array_equal(features(images(3), other), features(images(3), body))
    assert computed == [3, 3]


@pytest.mark.parametrize("file", ["keys", "vectors"])
@pytest.mark.parametrize("lost", [1, 7, 40])
def test_a_killed_writer_costs_what_it_had_not_finished(
    file: str, lost: int, body: Backbone, computed: list[int]
) -> None:
    """Cut off at any byte: the vectors before are read, the others are computed again and written over the rest."""
    wanted = features(images(5), body)
    store = store_of(body)
    path = store.folder / file
    width = DIGEST + CHECK if file == "keys" else 4 * body.recipe.dim
    with path.open("r+b") as opened:
        opened.truncate(path.stat().st_size - lost)
    missing = -(-lost // width)
    for _ in range(2):
        assert np.array_equal(features(images(5), body), wanted)
    assert computed == [5, missing]
    assert store.keys_file.stat().st_size == 5 * (DIGEST + CHECK)
    assert store.vectors_file.stat().st_size == 5 * 4 * body.recipe.dim


def test_a_damaged_vector_is_computed_again(body: Backbone, computed: list[int]) -> None:
    wanted = features(images(4), body)
    store = store_of(body)
    content = bytearray(store.vectors_file.read_bytes())
    content[4 * body.recipe.dim * 2 + 1] ^= 0xFF  # in the third vector
    store.vectors_file.write_bytes(content)
    assert np.array_equal(features(images(4), body), wanted)
    assert computed == [4, 1]
    assert np.array_equal(features(images(4), body), wanted)  # what was appended counts from now on
    assert computed == [4, 1]


def test_an_empty_or_unwritable_cache_costs_time_alone(
    body: Backbone, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = features(images(3), body)
    shutil.rmtree(cache.folder("features"))
    assert np.array_equal(features(images(3), body), wanted)
    monkeypatch.setenv("FEDNH_CACHE", "/proc/nowhere")
    assert np.array_equal(features(images(3), body), wanted)
    assert computed == [3, 3, 3]


def _append(folder: Path, first: int) -> None:
    store = FeatureCache(folder, 3)
    for number in range(first, first + 40):
        store.append([number.to_bytes(DIGEST, "big")], np.full((1, 3), number, np.float32))


def test_two_processes_append_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=_append, args=(tmp_path, first)) for first in (0, 1000)]
    for each in both:
        each.start()
    for each in both:
        each.join(60)
    numbers = [*range(40), *range(1000, 1040)]
    read = np.empty((80, 3), np.float32)
    assert FeatureCache(tmp_path, 3).read([n.to_bytes(DIGEST, "big") for n in numbers], read) == []
    assert np.array_equal(read[:, 0], numbers)


@given(st.lists(st.integers(0, 39), min_size=1, max_size=40, unique=True))
def test_a_feature_does_not_depend_on_its_neighbours(rows: list[int]) -> None:
    body = _shared_body()
    everything = images(40)
    assert np.array_equal(compute(everything[rows], body), _shared_features()[rows])


_SHARED: dict[str, Any] = {}


def _shared_body() -> Backbone:
    return _SHARED["body"]


def _shared_features() -> Any:
    return _SHARED["features"]


@pytest.fixture(autouse=True, scope="module")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = toy_weights(tmp_path_factory.mktemp("shared") / "toy.safetensors")
    _SHARED["body"] = build_backbone(Recipe(name=TOY, size=8), 2, file)
    _SHARED["features"] = compute(images(40), _SHARED["body"])


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_feature_does_not_depend_on_the_number_of_threads(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cores", lambda: number)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(number)
        assert np.array_equal(compute(images(40), _shared_body()), _shared_features())
    finally:
        torch.set_num_threads(before)


def data_of(number: int = 12, **fields: Any) -> Dataset:
    y = np.arange(number) % 2
    whole = Dataset(
        *("noise", images(number), y, images(4, seed=1), y[:4], ("even", "odd")),
        mean=(0.5,) * 3,
        std=(0.2,) * 3,
        site_train=np.arange(number) // (number // 2),
        sites=("a", "b"),
        site_test=np.array([0, 0, 1, 1]),
        group_train=np.arange(number) // 2,
    )
    return replace(whole, **fields)


def test_a_data_set_of_features_is_the_same_data_set(body: Backbone) -> None:
    data = data_of()
    made = with_features(data, body)
    assert np.array_equal(made.x_train, compute(data.x_train, body))
    assert np.array_equal(made.x_test, compute(data.x_test, body))
    for name in ("y_train", "y_test", "site_train", "site_test", "group_train"):
        assert np.array_equal(getattr(made, name), getattr(data, name)), name
    assert (made.sites, made.classes, made.shape) == (data.sites, data.classes, (4,))
    assert (made.mean, made.std, made.scale, made.fitted, made.views) == ((0.0,), (1.0,), 1.0, False, None)
    assert made.fingerprint == data.fingerprint
    assert with_features(made, body) is made


def test_views_are_nested_and_drawn_in_training(body: Backbone) -> None:
    """More views keep those that there were; training meets all of them, evaluation the images themselves."""
    data = data_of()
    two, four = (with_features(data, body, views) for views in (2, 4))
    assert two.views is not None
    assert four.views is not None
    assert two.views.shape == (1, 12, 4)
    assert np.array_equal(four.views[:1], two.views)
    assert np.array_equal(four.x_train, compute(data.x_train, body))
    assert not np.array_equal(four.views[0], four.x_train)
    samples = samples_of(four, "train")
    drawn = [x for seed in range(30) for x, _ in ClientData(samples, np.array([5]), seed).shuffled(8)]
    met = {row.tobytes() for x in drawn for row in x.numpy()}
    assert met == {row.tobytes() for row in (four.x_train[5], *four.views[:, 5])}
    assert samples_of(four, "test").views == 1


def test_views_are_refused_by_vmap_in_a_sentence(body: Backbone, tmp_path: Path) -> None:
    settings = {"model.name": TOY, "model.frozen": "body", "model.weights": str(tmp_path / "toy.safetensors")}
    settings |= {"features.size": 8, "features.views": 3, "partition.name": "site", "partition.min_samples": 1}
    config = load(None, {**settings, "engine": "vmap"})
    fed = build_federation(config, data_of())
    with pytest.raises(UserError, match=r"each client draws views .*features.views = 1 turns it off"):
        choose_engine(config, fed, initial_state(fed.method, fed.net, 0))


def test_vectors_and_other_pixels_are_refused(body: Backbone) -> None:
    vectors = replace(data_of(), x_train=np.zeros((12, 3), np.float32), x_test=np.zeros((4, 3), np.float32))
    with pytest.raises(DataError, match=r"needs images, but noise holds vectors"):
        with_features(replace(vectors, preprocessing={"kind": "vector"}), body)
    with pytest.raises(DataError, match=r"needs pixels from 0 to 255; those of noise end at 16"):
        with_features(data_of(scale=16.0), body)


def test_features_that_are_not_finite_are_refused(body: Backbone) -> None:
    broken = Backbone(body.recipe, lambda x: body.function(x) * float("inf"))
    with pytest.raises(DataError, match=r"features that are not finite"):
        compute(images(2), broken)


def test_many_images_are_announced(body: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MANY", 3)
    with pytest.warns(Notice, match=r"computing the features of 3 images, once: they are kept in "):
        features(images(3), body)
