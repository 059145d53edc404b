"""MNIST's IDX files."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fednh.data.published import idx
from fednh.errors import UserError

IN_TMP_PATH = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def encode(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_set(folder: Path, zipped: bool = False, classes: int = 10) -> dict[str, np.ndarray]:
    """A tiny set in the true format: 20 training and 10 test images."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for part, size in (("train", 20), ("t10k", 10)):
        arrays[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (size, 28, 28), dtype=np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = (np.arange(size) % classes).astype(np.uint8)
    for name, array in arrays.items():
        data = encode(array)
        (folder / (f"{name}.gz" if zipped else name)).write_bytes(gzip.compress(data) if zipped else data)
    return arrays


@pytest.mark.parametrize("zipped", [False, True])
def test_a_set_is_read(tmp_path: Path, zipped: bool) -> None:
    arrays = write_set(tmp_path, zipped)
    found = idx.read(tmp_path, 10)
    np.testing.assert_array_equal(found.x_train[..., 0], arrays["train-images-idx3-ubyte"])
    np.testing.assert_array_equal(found.y_train, arrays["train-labels-idx1-ubyte"])
    np.testing.assert_array_equal(found.x_test[..., 0], arrays["t10k-images-idx3-ubyte"])
    np.testing.assert_array_equal(found.y_test, arrays["t10k-labels-idx1-ubyte"])
    assert found.y_train.dtype == np.int64


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write_set(tmp_path)
    assert idx.present(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(UserError, match="lacks t10k-labels-idx1-ubyte"):
        idx.read(tmp_path, 10)


def test_an_empty_folder_is_not_a_set(tmp_path: Path) -> None:
    assert not idx.present(tmp_path)


def test_label_out_of_range(tmp_path: Path) -> None:
    write_set(tmp_path, classes=11)
    with pytest.raises(UserError, match="train labels hold 10, outside 0 to 9"):
        idx.read(tmp_path, 10)


def test_images_and_labels_mixed_up(tmp_path: Path) -> None:
    write_set(tmp_path)
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    first, second = images.read_bytes(), labels.read_bytes()
    images.write_bytes(second)
    labels.write_bytes(first)
    with pytest.raises(UserError, match="mixed up"):
        idx.read(tmp_path, 10)


def test_images_and_labels_of_different_number(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(encode(np.zeros(19, np.uint8)))
    with pytest.raises(UserError, match="20 images but 19 labels"):
        idx.read(tmp_path, 10)


SMALL = encode(np.arange(6, dtype=np.uint8).reshape(2, 3))
BROKEN = {
    "empty": (b"", "starts with nothing"),
    "wrong magic": (b"\x89PNG" + SMALL, "not an IDX file"),
    "another type": (SMALL[:2] + b"\x0d" + SMALL[3:], "IDX type 13"),
    "no axes": (b"\0\0\x08\0", "0 axes"),
    "header cut": (SMALL[:9], "within its header"),
    "content cut": (SMALL[:-1], "can hold|should hold 6 bytes"),
    "content too long": (SMALL + b"!", "holds more"),
    "declares 16 EB": (b"\0\0\x08\x02" + b"\xff" * 8 + b"abc", "more than the file can hold"),
    "255 axes": (b"\0\0\x08\xff" + b"\0\0\0\x01" * 255 + b"x", "255 axes"),
}


@pytest.mark.parametrize(("data", "says"), BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("zipped", [False, True])
def test_broken_files(tmp_path: Path, data: bytes, says: str, zipped: bool) -> None:
    path = tmp_path / ("a.gz" if zipped else "a")
    path.write_bytes(gzip.compress(data) if zipped else data)
    with pytest.raises(UserError, match=says) as caught:
        idx.read_array(path)
    assert str(path) in str(caught.value)


def test_broken_gzip(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    whole = gzip.compress(encode(np.random.default_rng(0).integers(0, 256, (50, 50), dtype=np.uint8)))
    for data in (b"", b"no gzip", SMALL, whole[:1000], whole[:-4], whole[:1000] + b"\0" * 400 + whole[1400:]):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"a\.gz"):
            idx.read_array(path)


@IN_TMP_PATH
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_an_array_or_refused_politely(tmp_path: Path, data: bytes, zipped: bool) -> None:
    path = tmp_path / ("a.gz" if zipped else "a")
    for start in (b"", b"\0\0\x08"):
        content = start + data
        path.write_bytes(gzip.compress(content) if zipped else content)
        try:
            found = idx.read_array(path)
        except UserError:
            continue
        assert encode(found) == content


@IN_TMP_PATH
@given(st.binary(max_size=100))
def test_any_bytes_named_gz_are_refused_politely(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.gz"
    for start in (b"", b"\x1f\x8b\x08\0"):
        path.write_bytes(start + data)
        with pytest.raises(UserError):
            idx.read_array(path)


@IN_TMP_PATH
@given(hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=4, max_side=7)), st.booleans())
def test_round_trip(tmp_path: Path, array: np.ndarray, zipped: bool) -> None:
    path = tmp_path / ("a.gz" if zipped else "a")
    path.write_bytes(gzip.compress(encode(array)) if zipped else encode(array))
    np.testing.assert_array_equal(idx.read_array(path), array)
