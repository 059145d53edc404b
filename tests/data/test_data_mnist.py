"""MNIST's IDX files."""

from __future__ import annotations

import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fednh.data.published import mnist
from fednh.data.sources import registry
from fednh.errors import UserError

IN_TMP_PATH = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


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
    found = mnist.read(tmp_path)
    np.testing.assert_array_equal(found.x_train[..., 0], arrays["train-images-idx3-ubyte"])
    np.testing.assert_array_equal(found.y_train, arrays["train-labels-idx1-ubyte"])
    np.testing.assert_array_equal(found.x_test[..., 0], arrays["t10k-images-idx3-ubyte"])
    np.testing.assert_array_equal(found.y_test, arrays["t10k-labels-idx1-ubyte"])
    assert found.y_train.dtype == np.int64


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write_set(tmp_path)
    assert mnist.present(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(UserError, match="lacks t10k-labels-idx1-ubyte"):
        mnist.read(tmp_path)


def test_an_empty_folder_is_not_a_set(tmp_path: Path) -> None:
    assert not mnist.present(tmp_path)


def refusal(folder: Path) -> str:
    """What `mnist` in this data folder is refused with."""
    with pytest.raises(UserError) as caught:
        registry.load("mnist", folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_label_out_of_range(tmp_path: Path) -> None:
    write_set(tmp_path, classes=11)
    assert refusal(tmp_path) == "mnist: train label 10 lies outside the 10 classes (0 to 9)"


def test_images_and_labels_mixed_up(tmp_path: Path) -> None:
    write_set(tmp_path)
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    first, second = images.read_bytes(), labels.read_bytes()
    images.write_bytes(second)
    labels.write_bytes(first)
    assert "but mnist has (28, 28, 1)" in refusal(tmp_path)


def test_images_and_labels_of_different_number(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(encode(np.zeros(19, np.uint8)))
    assert refusal(tmp_path) == "mnist: train has 20 inputs but 19 labels"


SMALL = encode(np.arange(6, dtype=np.uint8).reshape(2, 3))
BROKEN = {
    "empty": b"",
    "wrong magic": b"\x89PNG" + SMALL,
    "another type": SMALL[:2] + b"\x0d" + SMALL[3:],
    "header cut": SMALL[:9],
    "content cut": SMALL[:-1],
    "content too long": SMALL + b"!",
    "declares 16 EB": b"\0\0\x08\x02" + b"\xff" * 8 + b"abc",
    "255 axes": b"\0\0\x08\xff" + b"\0\0\0\x01" * 255 + b"x",
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_broken_files(tmp_path: Path, data: bytes) -> None:
    write_set(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(data)
    text = refusal(tmp_path)
    assert text.startswith(f"{tmp_path} cannot be read (")
    assert text.endswith("it is damaged or incomplete: move it away and run `fednh data get mnist`")


def test_a_gzipped_file_with_another_checksum_is_named(tmp_path: Path) -> None:
    write_set(tmp_path, zipped=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    for data in (b"", b"no gzip", SMALL, whole[:1000], whole[:-4], whole[:1000] + b"\0" * 400 + whole[1400:]):
        path.write_bytes(data)
        assert refusal(tmp_path) == (
            f"{path} is damaged (its SHA-256 is not the published one); move it away and run `fednh data get mnist`"
        )


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").chmod(0)
    assert "check its permissions" in refusal(tmp_path)


@IN_TMP_PATH
@given(st.binary(max_size=200), st.sampled_from([b"", b"\0\0\x08"]), st.booleans())
def test_any_bytes_are_refused_politely(tmp_path: Path, data: bytes, start: bytes, zipped: bool) -> None:
    write_set(tmp_path)
    name = "t10k-images-idx3-ubyte"
    (tmp_path / name).unlink()
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(start + data) if zipped else start + data)
    refusal(tmp_path)
