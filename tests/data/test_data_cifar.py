"""CIFAR in its four published forms, packed and unpacked, and damaged ones."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fednh.data.published import cifar
from fednh.data.published.cifar import LAYOUTS, Layout
from fednh.data.sources import registry
from fednh.errors import UserError

BY_NAME = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.folder)
PER_FILE = 4
PIXELS = bytes(range(256)) * 12
PYTHON_2 = (  # {"data": [PIXELS], "labels": [3]} as Python 2 and an old numpy wrote it
    b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b"
    b"\x87Rq\x05(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff"
    b"\xffJ\xff\xff\xff\xffK\x00tb\x89T\x00\x0c\x00\x00" + PIXELS + b"tbU\x06labelsq\x08]q\t(K\x03eu."
)


def contents(layout: Layout) -> tuple[dict[str, bytes], np.ndarray, np.ndarray]:
    """The files of a tiny set in the true format, and the images (N, 32, 32, 3) and labels they hold, in order."""
    rng = np.random.default_rng(layout.classes)
    images = rng.integers(0, 256, (PER_FILE * len(layout.files), 32, 32, 3), dtype=np.uint8)
    labels = rng.integers(0, layout.classes, len(images))
    files = {}
    for i, name in enumerate(layout.files):
        part = slice(i * PER_FILE, (i + 1) * PER_FILE)
        rows = images[part].transpose(0, 3, 1, 2).reshape(PER_FILE, -1)
        fine = labels[part]
        if layout.binary:
            head = [fine] if layout.classes == 10 else [np.full(PER_FILE, 19), fine]
            files[name] = np.column_stack([*head, rows]).astype(np.uint8).tobytes()
        elif layout.classes == 10:
            files[name] = pickle.dumps({"data": rows, "labels": fine.tolist(), "filenames": ["a.png"]}, protocol=2)
        else:
            coarse = [19] * PER_FILE
            files[name] = pickle.dumps({"data": rows, "coarse_labels": coarse, "fine_labels": fine.tolist()})
    return files, images, labels


def tiny(layout: Layout, files: dict[str, bytes]) -> Layout:
    """The layout, with the checksums of these files as the published ones."""
    return replace(layout, files={name: hashlib.sha256(files[name]).hexdigest() for name in layout.files})


def write_folder(folder: Path, layout: Layout, files: dict[str, bytes]) -> Path:
    path = folder / layout.folder
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def write_archive(folder: Path, layout: Layout, files: dict[str, bytes], prefix: str | None = None) -> Path:
    path = folder / layout.archive
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo((f"{layout.folder}/" if prefix is None else prefix) + name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@BY_NAME
@pytest.mark.parametrize("write", [write_folder, write_archive])
def test_every_published_form(tmp_path: Path, layout: Layout, write: Callable[..., Path]) -> None:
    files, images, labels = contents(layout)
    found = cifar.read(write(tmp_path, layout, files), tiny(layout, files))
    np.testing.assert_array_equal(found.x_train, images[:-PER_FILE])
    np.testing.assert_array_equal(found.y_train, labels[:-PER_FILE])
    np.testing.assert_array_equal(found.x_test, images[-PER_FILE:])
    np.testing.assert_array_equal(found.y_test, labels[-PER_FILE:])
    assert found.x_train.flags.c_contiguous
    assert found.y_train.dtype == np.int64


@BY_NAME
@pytest.mark.parametrize("write", [write_folder, write_archive])
def test_a_missing_file_is_named(tmp_path: Path, layout: Layout, write: Callable[..., Path]) -> None:
    files, _, _ = contents(layout)
    whole, missing = tiny(layout, files), next(iter(files))
    del files[missing]
    with pytest.raises(UserError, match=f"lacks {missing};"):
        cifar.read(write(tmp_path, layout, files), whole)


@BY_NAME
@pytest.mark.parametrize("write", [write_folder, write_archive])
@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-1], lambda data: data[:-1] + b"!"])
def test_damaged_files(
    tmp_path: Path, layout: Layout, write: Callable[..., Path], damage: Callable[[bytes], bytes]
) -> None:
    files, _, _ = contents(layout)
    whole, name = tiny(layout, files), list(files)[-1]
    files[name] = damage(files[name])
    path = write(tmp_path, layout, files)
    with pytest.raises(UserError) as caught:
        cifar.read(path, whole)
    assert str(caught.value) == (
        f"{path}: {name} is damaged or another file (its SHA-256 is not the published one); "
        f"move {path.name} away and run `fednh data get cifar{layout.classes}`"
    )


class Call:
    """Unpickled, this calls os.mkdir."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("write", [write_folder, write_archive])
def test_a_pickle_that_was_not_published_is_never_loaded(tmp_path: Path, write: Callable[..., Path]) -> None:
    layout = LAYOUTS[1]
    path = write(tmp_path, layout, dict.fromkeys(layout.files, pickle.dumps(Call(tmp_path / "called"))))
    with pytest.raises(UserError, match="data_batch_1 is damaged or another file"):
        registry.load("cifar10", tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_pickle_of_python_2_is_read(tmp_path: Path) -> None:
    files = dict.fromkeys(LAYOUTS[1].files, PYTHON_2)
    found = cifar.read(write_folder(tmp_path, LAYOUTS[1], files), tiny(LAYOUTS[1], files))
    assert found.y_train.tolist() == [3] * 5
    assert found.x_test.transpose(0, 3, 1, 2).tobytes() == PIXELS


@pytest.mark.parametrize("prefix", ["../", "../cifar-10-batches-bin/", "/tmp/", "cifar-10-batches-bin/../../"])
def test_members_that_point_outside_are_passed_over(tmp_path: Path, prefix: str) -> None:
    layout = LAYOUTS[0]
    inner = tmp_path / "inner"
    inner.mkdir()
    path = write_archive(inner, layout, contents(layout)[0], prefix)
    with pytest.raises(UserError, match=r"lacks data_batch_1\.bin"):
        cifar.read(path, layout)
    assert [p.name for p in tmp_path.rglob("*")] == ["inner", layout.archive]  # nothing was unpacked anywhere


def test_a_link_in_place_of_a_file_is_passed_over(tmp_path: Path) -> None:
    layout = LAYOUTS[2]
    path = tmp_path / layout.archive
    with tarfile.open(path, "w:gz") as archive:
        for name in ("train.bin", "test.bin"):
            member = tarfile.TarInfo(f"{layout.folder}/{name}")
            member.type = tarfile.SYMTYPE
            member.linkname = "/etc/passwd"
            archive.addfile(member)
    with pytest.raises(UserError, match=r"lacks train\.bin, test\.bin"):
        cifar.read(path, layout)


def test_damaged_archives(tmp_path: Path) -> None:
    layout = LAYOUTS[0]
    path = write_archive(tmp_path, layout, contents(layout)[0])
    whole = path.read_bytes()
    for data in (b"", b"no archive", whole[:20], whole[: len(whole) // 2], whole[:5000] + bytes(99) + whole[5099:]):
        path.write_bytes(data)
        with pytest.raises(UserError, match=f"{layout.archive}.*damaged.*`fednh data get cifar10`"):
            registry.load("cifar10", tmp_path)


def test_an_archive_whose_own_checksum_differs_is_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "cifar-10-python.tar.gz"
    path.write_bytes(b"no archive")
    with pytest.raises(UserError) as caught:
        registry.load("cifar10", tmp_path)
    assert str(caught.value) == (
        f"{path} is damaged (its SHA-256 is not the published one); move it away and run `fednh data get cifar10`"
    )
