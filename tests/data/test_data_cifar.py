"""CIFAR in its four published forms, packed and unpacked, and damaged ones."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fednh.data.published import cifar
from fednh.data.published.cifar import LAYOUTS, Layout
from fednh.errors import UserError

BY_NAME = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.folder)
PER_FILE = 4


def contents(layout: Layout) -> tuple[dict[str, bytes], np.ndarray, np.ndarray]:
    """The files of a tiny set in the true format, and the images (N, 32, 32, 3) and labels they hold, in order."""
    rng = np.random.default_rng(layout.classes)
    names = (*layout.train, layout.test)
    images = rng.integers(0, 256, (PER_FILE * len(names), 32, 32, 3), dtype=np.uint8)
    labels = rng.integers(0, layout.classes, len(images))
    files = {}
    for i, name in enumerate(names):
        part = slice(i * PER_FILE, (i + 1) * PER_FILE)
        rows = images[part].transpose(0, 3, 1, 2).reshape(PER_FILE, -1)
        fine = labels[part]
        if layout.binary:
            head = [fine] if layout.classes == 10 else [np.full(PER_FILE, 19), fine]
            files[name] = np.column_stack([*head, rows]).astype(np.uint8).tobytes()
        elif layout.classes == 10:
            files[name] = pickle.dumps({b"data": rows, b"labels": fine.tolist(), b"filenames": [b"a.png"]}, protocol=2)
        else:
            coarse = [19] * PER_FILE
            files[name] = pickle.dumps({"data": rows, "coarse_labels": coarse, "fine_labels": fine.tolist()})
    return files, images, labels


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
    found = cifar.read(write(tmp_path, layout, files), layout)
    np.testing.assert_array_equal(found.x_train, images[:-PER_FILE])
    np.testing.assert_array_equal(found.y_train, labels[:-PER_FILE])
    np.testing.assert_array_equal(found.x_test, images[-PER_FILE:])
    np.testing.assert_array_equal(found.y_test, labels[-PER_FILE:])
    assert found.x_train.flags.c_contiguous


@BY_NAME
@pytest.mark.parametrize("write", [write_folder, write_archive])
def test_a_missing_file_is_named(tmp_path: Path, layout: Layout, write: Callable[..., Path]) -> None:
    files, _, _ = contents(layout)
    del files[layout.train[-1]]
    with pytest.raises(UserError, match=f"lacks {layout.train[-1]};"):
        cifar.read(write(tmp_path, layout, files), layout)


@BY_NAME
@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-7], lambda data: b"\x93" * 50])
def test_damaged_files(tmp_path: Path, layout: Layout, damage: Callable[[bytes], bytes]) -> None:
    files, _, _ = contents(layout)
    files[layout.test] = damage(files[layout.test])
    with pytest.raises(UserError, match=layout.test):
        cifar.read(write_folder(tmp_path, layout, files), layout)


@BY_NAME
def test_label_out_of_range(tmp_path: Path, layout: Layout) -> None:
    files, _, _ = contents(layout)
    if layout.binary:
        data = bytearray(files[layout.test])
        data[layout.label_bytes - 1] = layout.classes
        files[layout.test] = bytes(data)
    else:
        rows = np.zeros((1, 3072), np.uint8)
        files[layout.test] = pickle.dumps({"data": rows, layout.labels_key: [layout.classes]})
    with pytest.raises(UserError, match=f"label {layout.classes}, outside 0 to {layout.classes - 1}"):
        cifar.read(write_folder(tmp_path, layout, files), layout)


ROWS = np.zeros((2, 3072), np.uint8)
WRONG_BATCHES = {
    "no data": ({"labels": [1, 2]}, "lacks the entry 'data'"),
    "no labels": ({"data": ROWS}, "lacks the entry 'labels'"),
    "too few columns": ({"data": ROWS[:, :-1], "labels": [1, 2]}, "3072 columns"),
    "floats": ({"data": ROWS.astype(float), "labels": [1, 2]}, "3072 columns"),
    "data a list": ({"data": [1, 2], "labels": [1, 2]}, "3072 columns"),
    "no images": ({"data": ROWS[:0], "labels": []}, "holds no image"),
    "lengths differ": ({"data": ROWS, "labels": [1]}, "2 images but 1 labels"),
    "text labels": ({"data": ROWS, "labels": ["a", "b"]}, "whole numbers"),
    "nested labels": ({"data": ROWS, "labels": [[1], [2]]}, "whole numbers"),
    "negative label": ({"data": ROWS, "labels": [1, -1]}, "label -1"),
    "immense label": ({"data": ROWS, "labels": [1, 2**70]}, "whole numbers"),
}


@pytest.mark.parametrize(("batch", "says"), WRONG_BATCHES.values(), ids=WRONG_BATCHES.keys())
def test_wrong_batches(tmp_path: Path, batch: dict[str, object], says: str) -> None:
    layout = LAYOUTS[1]
    files, _, _ = contents(layout)
    files["data_batch_3"] = pickle.dumps(batch)
    with pytest.raises(UserError, match=says) as caught:
        cifar.read(write_folder(tmp_path, layout, files), layout)
    assert "data_batch_3" in str(caught.value)


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


def test_an_oversized_member_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS[0]
    files, _, _ = contents(layout)
    monkeypatch.setattr(cifar, "LARGEST_FILE", 1000)
    for write in (write_archive, write_folder):
        with pytest.raises(UserError, match="too large"):
            cifar.read(write(tmp_path, layout, files), layout)


def test_damaged_archives(tmp_path: Path) -> None:
    layout = LAYOUTS[0]
    path = write_archive(tmp_path, layout, contents(layout)[0])
    whole = path.read_bytes()
    for data in (b"", b"no archive", whole[:20], whole[: len(whole) // 2], whole[:5000] + bytes(99) + whole[5099:]):
        path.write_bytes(data)
        with pytest.raises(UserError, match=layout.archive):
            cifar.read(path, layout)
