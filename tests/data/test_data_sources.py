"""The registry: names, places, messages; and the real sets where this computer has them."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fednh.data.published import PublishedImages, cifar, mnist
from fednh.data.sources import registry
from fednh.data.sources.builtin import BUILTIN
from fednh.data.sources.registry import PUBLISHED
from fednh.errors import UserError

IMAGES = {"cifar10": (32, 32, 3), "cifar100": (32, 32, 3), "fashion_mnist": (28, 28), "mnist": (28, 28)}
CLASSES = {"cifar10": 10, "cifar100": 100, "fashion_mnist": 10, "mnist": 10}


@pytest.fixture(autouse=True)
def _no_debian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fashion = PUBLISHED["fashion_mnist"]
    places = [tmp_path / "debian" / "fashion-mnist" if place == mnist.DEBIAN else place for place in fashion.places]
    monkeypatch.setitem(PUBLISHED, "fashion_mnist", replace(fashion, places=tuple(places)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.mkdir()
    return path


def write_npz(path: Path, shape: tuple[int, ...], classes: int, shade: int = 5, **more: np.ndarray) -> None:
    y = np.arange(2 * classes, dtype=np.uint8) % classes
    x = np.full((len(y), *shape), shade, np.uint8)
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y, **more)


def write_idx(path: Path, shade: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for part in ("train", "t10k"):
        head = b"\0\0\x08\x03" + np.array([10, 28, 28], ">u4").tobytes()
        (path / f"{part}-images-idx3-ubyte").write_bytes(head + bytes([shade]) * (10 * 28 * 28))
        (path / f"{part}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\x0a" + bytes(range(10)))


@pytest.mark.parametrize("name", IMAGES)
def test_a_named_npz(folder: Path, name: str) -> None:
    write_npz(folder / f"{name}.npz", IMAGES[name], CLASSES[name], y_train_coarse=np.zeros(3))
    found = registry.load(name, folder)
    known = PUBLISHED[name]
    assert found.name == name
    assert found.num_classes == CLASSES[name]
    assert len(set(found.classes)) == CLASSES[name]
    assert (found.mean, found.std, found.scale) == (known.mean, known.std, 255.0)
    assert found.augment == ("crop_flip" if name.startswith("cifar") else "none")


def test_class_names_in_label_order(folder: Path) -> None:
    for name, some in {
        "cifar10": {0: "airplane", 9: "truck"},
        "cifar100": {0: "apple", 1: "aquarium_fish", 99: "worm"},
        "fashion_mnist": {0: "T-shirt/top", 9: "Ankle boot"},
        "mnist": {0: "0", 9: "9"},
    }.items():
        write_npz(folder / f"{name}.npz", IMAGES[name], CLASSES[name])
        classes = registry.load(name, folder).classes
        assert {label: classes[label] for label in some} == some


def test_an_npz_of_another_shape_or_with_foreign_labels_is_refused(folder: Path) -> None:
    write_npz(folder / "cifar10.npz", (28, 28), 10)
    with pytest.raises(UserError, match=r"shape \(28, 28, 1\), but cifar10 has \(32, 32, 3\)"):
        registry.load("cifar10", folder)
    write_npz(folder / "cifar10.npz", (32, 32, 3), 11)
    with pytest.raises(UserError, match="label 10 lies outside the 10 classes"):
        registry.load("cifar10", folder)


def test_tinyimagenet_npz_must_name_its_classes(folder: Path) -> None:
    write_npz(folder / "tinyimagenet.npz", (64, 64, 3), 5)
    with pytest.raises(UserError, match="lacks the array 'classes'"):
        registry.load("tinyimagenet", folder)


PLACES = {
    "mnist": ["mnist", "MNIST/raw", "."],
    "fashion_mnist": ["fashion_mnist", "fashion-mnist", "FashionMNIST/raw", "../debian/fashion-mnist"],
}


@pytest.mark.parametrize(("name", "place"), [(name, place) for name, all_ in PLACES.items() for place in all_])
def test_idx_files_are_found_in_each_place(folder: Path, name: str, place: str) -> None:
    write_idx(folder / place, shade=3)
    assert registry.load(name, folder).x_train[0, 0, 0, 0] == 3
    line = next(line for line in registry.available(folder) if line.name == name)
    assert line.present
    assert Path(line.where).resolve() == (folder / place).resolve()


def test_fashion_mnist_is_never_taken_from_mnists_place(folder: Path) -> None:
    write_idx(folder, shade=3)
    with pytest.raises(UserError, match="fashion_mnist is not in the data folder"):
        registry.load("fashion_mnist", folder)


def test_debians_files_do_without_a_data_folder(tmp_path: Path) -> None:
    write_idx(tmp_path / "debian" / "fashion-mnist", shade=3)
    assert registry.load("fashion_mnist", tmp_path / "nowhere").shape == (1, 28, 28)


def test_the_npz_comes_first(folder: Path) -> None:
    write_idx(folder / "mnist", shade=3)
    write_npz(folder / "mnist.npz", (28, 28), 10, shade=7)
    assert registry.load("mnist", folder).x_train[0, 0, 0, 0] == 7


def cifar_batches(shade: int) -> dict[str, bytes]:
    batch = {"data": np.full((2, 3072), shade, np.uint8), "labels": [0, 9]}
    return {name: pickle.dumps(batch) for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")}


def test_cifar_as_archive_and_as_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def published(shade: int) -> None:
        """Let these batches be the published ones."""
        sums = {name: hashlib.sha256(content).hexdigest() for name, content in cifar_batches(shade).items()}
        python = replace(cifar.LAYOUTS[1], files=sums)
        monkeypatch.setattr(cifar, "LAYOUTS", (cifar.LAYOUTS[0], python))

    unpacked = folder / "cifar-10-batches-py"
    unpacked.mkdir()
    for name, content in cifar_batches(shade=1).items():
        (unpacked / name).write_bytes(content)
    published(shade=1)
    assert registry.load("cifar10", folder).x_train.max() == 1
    with tarfile.open(folder / "cifar-10-python.tar.gz", "w:gz") as archive:
        for name, content in cifar_batches(shade=2).items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    published(shade=2)
    found = registry.load("cifar10", folder)
    assert found.x_train.max() == 2
    assert found.classes[9] == "truck"


def test_own_npz_by_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_npz(folder / "own.npz", (9, 9), 4)
    assert registry.load(f"npz:{folder / 'own.npz'}", Path("unused")).num_classes == 4
    monkeypatch.chdir(folder)
    assert registry.load("npz:own.npz", Path("unused")).shape == (1, 9, 9)
    with pytest.raises(UserError, match="lacks what comes behind it"):
        registry.load("npz:", folder)


@pytest.mark.parametrize("name", BUILTIN)
def test_built_in_sets_need_no_folder(name: str, tmp_path: Path) -> None:
    assert registry.load(name, tmp_path / "nowhere").name == name


def test_unknown_names(folder: Path) -> None:
    with pytest.raises(UserError, match=r"no data set 'cifar-10'; did you mean 'cifar10'\?"):
        registry.load("cifar-10", folder)
    with pytest.raises(UserError, match=r"choose from .*cifar10.*digits.*npz:FILE"):
        registry.load("zzzz", folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_missing_data_says_where_what_and_how(folder: Path, name: str) -> None:
    with pytest.raises(UserError) as caught:
        registry.load(name, folder)
    text = str(caught.value)
    assert str(folder) in text
    assert f"`fednh data get {name}`" in text or PUBLISHED[name].by_hand in text
    assert f"{name}.npz" in text or not isinstance(PUBLISHED[name], PublishedImages)
    assert "does not exist" not in text
    with pytest.raises(UserError, match="which does not exist yet"):
        registry.load(name, folder / "nowhere")


def test_the_message_names_every_place_that_is_looked_at(folder: Path) -> None:
    for published in PUBLISHED.values():
        inside = [path for path in published.paths(folder) if folder in path.parents]
        assert len(inside) >= 3
        for path in inside:
            assert path.relative_to(folder).as_posix() in published.accepts


def test_an_unknown_home(folder: Path) -> None:
    with pytest.raises(UserError, match="~no-such-person"):
        registry.load("npz:~no-such-person/a.npz", folder)


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    for ask in (lambda path: registry.load("cifar10", path), registry.available):
        with pytest.raises(UserError, match="is a file"):
            ask(tmp_path / "data")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_folder(folder: Path) -> None:
    folder.chmod(0)
    try:
        with pytest.raises(UserError, match="check its permissions"):
            registry.load("cifar10", folder)
    finally:
        folder.chmod(0o700)


def test_available_tells_present_from_absent(folder: Path) -> None:
    write_npz(folder / "cifar10.npz", (32, 32, 3), 10)
    lines = {line.name: line for line in registry.available(folder)}
    assert set(lines) == {*BUILTIN, *PUBLISHED}
    assert {name for name, line in lines.items() if line.present} == {*BUILTIN, "cifar10"}
    assert lines["cifar10"].where == str(folder / "cifar10.npz")
    assert "cifar-100-python.tar.gz" in lines["cifar100"].where


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "fashion_mnist"])
def test_the_real_set(name: str) -> None:
    home = Path.home() / ".cache" / "fednh"
    if not (home / f"{name}.npz").exists():
        pytest.skip(f"{home} has no {name}.npz")
    found = registry.load(name, home)
    assert found.shape == ((1, 28, 28) if name == "fashion_mnist" else (3, 32, 32))
    for labels, size in ((found.y_train, 60_000 if name == "fashion_mnist" else 50_000), (found.y_test, 10_000)):
        assert np.bincount(labels).tolist() == [size // CLASSES[name]] * CLASSES[name]
    some = found.x_train[::50].reshape(-1, found.shape[0]) / found.scale
    np.testing.assert_allclose(some.mean(axis=0), found.mean, atol=0.02)
