"""A person's own .npz file: what is accepted, and that everything else is refused in a sentence."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fednh.data.scaling import measure
from fednh.data.sources import npz
from fednh.errors import UserError


def good(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 256, (6, 4, 5, 3), dtype=np.uint8),
        "y_train": np.array([0, 1, 2, 0, 1, 2], dtype=np.uint8),
        "x_test": rng.integers(0, 256, (3, 4, 5, 3), dtype=np.uint8),
        "y_test": np.array([2, 1, 0], dtype=np.uint8),
    }
    arrays.update(changes)
    return {key: value for key, value in arrays.items() if value is not None}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "own.npz"
    np.savez(path, **good(**changes))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        npz.dataset("own", path)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    return text


def test_images_keep_their_bytes_and_are_normalised_by_the_training_part(tmp_path: Path) -> None:
    found = npz.dataset("own", write(tmp_path))
    np.testing.assert_array_equal(found.x_train, good()["x_train"])
    np.testing.assert_array_equal(found.x_test, good()["x_test"])
    assert found.y_train.tolist() == [0, 1, 2, 0, 1, 2]
    assert found.y_train.dtype == np.int64
    assert found.classes == ("0", "1", "2")
    assert found.scale == 255.0
    train = good()["x_train"].reshape(-1, 3) / 255
    np.testing.assert_allclose(found.mean, train.mean(axis=0))
    np.testing.assert_allclose(found.std, train.std(axis=0))


def test_grey_images_get_a_channel(tmp_path: Path) -> None:
    grey = {key: good()[key][..., 0] for key in ("x_train", "x_test")}
    assert npz.dataset("own", write(tmp_path, **grey)).shape == (1, 4, 5)


def test_vectors_become_float32_and_a_constant_feature_gets_deviation_one(tmp_path: Path) -> None:
    x = np.array([[1.0, 7.0], [3.0, 7.0], [5.0, 7.0], [1.0, 7.0], [3.0, 7.0], [5.0, 7.0]])
    found = npz.dataset("own", write(tmp_path, x_train=x, x_test=x[:3]))
    assert found.x_train.dtype == np.float32
    assert found.scale == 1.0
    assert found.mean == (3.0, 7.0)
    np.testing.assert_allclose(found.std, [np.sqrt(8 / 3), 1.0])


def test_statistics_do_not_depend_on_the_block_size() -> None:
    x = np.random.default_rng(1).normal(3, 2, (10_000, 2)).astype(np.float32)
    mean, std = measure(x, 1.0)
    np.testing.assert_allclose(mean, x.mean(axis=0, dtype=np.float64))
    np.testing.assert_allclose(std, x.std(axis=0, dtype=np.float64))


@pytest.mark.parametrize("dtype", [np.int8, np.uint64, np.int32, np.float64])
def test_labels_of_any_whole_number_type_and_of_shape_n_by_1(tmp_path: Path, dtype: type) -> None:
    y = np.array([[0], [1], [2], [0], [1], [2]], dtype=dtype)
    assert npz.dataset("own", write(tmp_path, y_train=y)).y_train.tolist() == [0, 1, 2, 0, 1, 2]


def test_medmnist_keys(tmp_path: Path) -> None:
    arrays = good()
    np.savez(
        tmp_path / "med.npz",
        train_images=arrays["x_train"],
        train_labels=arrays["y_train"][:, np.newaxis],
        val_images=arrays["x_test"],
        test_images=arrays["x_test"],
        test_labels=arrays["y_test"][:, np.newaxis],
    )
    found = npz.dataset("med", tmp_path / "med.npz")
    np.testing.assert_array_equal(found.x_test, arrays["x_test"])
    assert found.num_classes == 3


def test_compressed_files_and_fortran_order(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    np.savez_compressed(path, **good(x_train=np.asfortranarray(good()["x_train"])))
    np.testing.assert_array_equal(npz.dataset("own", path).x_train, good()["x_train"])


def test_class_names_come_from_the_file(tmp_path: Path) -> None:
    names = np.array(["cat", "dog", "cow", "never seen"])
    assert npz.dataset("own", write(tmp_path, classes=names)).classes == ("cat", "dog", "cow", "never seen")


def test_the_largest_label_of_either_part_gives_the_number_of_classes(tmp_path: Path) -> None:
    assert npz.dataset("own", write(tmp_path, y_test=np.array([4, 1, 0]))).num_classes == 5


NAN = np.full((6, 2), np.nan)
REFUSED = {
    "missing key": ({"y_test": None}, "lacks y_test"),
    "float images": ({"x_train": np.zeros((6, 4, 5, 3)), "x_test": np.zeros((3, 4, 5, 3))}, "as uint8"),
    "channels first": (
        {"x_train": np.zeros((6, 3, 32, 32), np.uint8), "x_test": np.zeros((3, 3, 32, 32), np.uint8)},
        "transpose(0, 2, 3, 1)",
    ),
    "text inputs": ({"x_train": np.array([["a"]] * 6)}, "x_train is of type <U1"),
    "five axes": ({"x_train": np.zeros((6, 1, 1, 1, 1), np.uint8)}, "has shape (6, 1, 1, 1, 1)"),
    "no samples": ({"x_test": np.zeros((0, 4, 5, 3), np.uint8), "y_test": np.zeros(0, int)}, "x_test is empty"),
    "no labels": ({"y_train": np.zeros(0, int)}, "y_train is empty"),
    "NaN": ({"x_train": NAN, "x_test": np.zeros((3, 2))}, "x_train holds NaN"),
    "float32 overflow": ({"x_train": np.full((6, 2), 1e300), "x_test": np.zeros((3, 2))}, "infinite"),
    "negative label": ({"y_train": np.array([0, 1, -7, 0, 1, 2])}, "negative label -7"),
    "label with a fraction": ({"y_train": np.array([0, 1, 0.5, 0, 1, 2])}, "fractions"),
    "NaN label": ({"y_train": np.array([0, 1, np.nan, 0, 1, 2])}, "fractions or NaN"),
    "complex labels": ({"y_train": np.ones(6, complex)}, "whole numbers"),
    "several labels a sample": ({"y_train": np.zeros((6, 14), int)}, "one label a sample"),
    "huge label": ({"y_train": np.array([0, 1, 2**40, 0, 1, 2])}, "number the classes"),
    "more classes than samples": ({"y_train": np.array([0, 1, 1_000_000, 0, 1, 2])}, "more classes than samples"),
    "one class": ({"y_train": np.full(6, 2)}, "only class 2"),
    "lengths differ": ({"y_train": np.array([0, 1, 2])}, "6 samples but y_train has 3 labels"),
    "parts differ": ({"x_test": np.zeros((3, 9, 9, 3), np.uint8)}, "both parts must be alike"),
    "too few names": ({"classes": np.array(["a", "b"])}, "names 2 classes, but the labels go up to 2"),
    "names not strings": ({"classes": np.array([1, 2, 3])}, "list of strings"),
    "pickled objects": ({"x_train": np.array([{}] * 6, dtype=object)}, "Object arrays cannot be loaded"),
}


@pytest.mark.parametrize(("changes", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    assert says in refusal(write(tmp_path, **changes))


def test_missing_keys_are_named_with_those_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    np.savez(path, images=np.zeros(3), labels=np.zeros(3))
    assert "holds images, labels" in refusal(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nothing.npz")
    assert "is a folder" in refusal(tmp_path)
    assert "too long" in refusal(tmp_path / ("x" * 5000))


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 nor this"])
def test_not_an_npz(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "own.npz"
    path.write_bytes(content)
    assert "cannot be read as an .npz file" in refusal(path)


def test_truncated(tmp_path: Path) -> None:
    path = write(tmp_path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        refusal(path)


def test_a_flipped_byte_in_the_pixels_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path)
    data = bytearray(path.read_bytes())
    at = bytes(data).index(good()["x_train"].tobytes())
    data[at + 10] ^= 0xFF
    path.write_bytes(data)
    assert "cannot be read" in refusal(path)


def npy(shape: str, content: bytes, descr: str = "'|u1'") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


def with_member(folder: Path, content: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    """A good file but for x_train, whose bytes are given."""
    path = folder / "own.npz"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("x_train.npy", content)
        for key, array in good(x_train=None).items():
            buffer = io.BytesIO()
            np.save(buffer, array)
            archive.writestr(f"{key}.npy", buffer.getvalue())
    return path


@pytest.mark.parametrize("shape", ["(1000000000000, 4, 5, 3)", f"({2**62}, 4)", "(7, 4, 5, 3)", "(5, 4, 5, 3)"])
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_header_that_does_not_fit_the_content(tmp_path: Path, shape: str, compression: int) -> None:
    refusal(with_member(tmp_path, npy(shape, bytes(6 * 60)), compression))


@pytest.mark.parametrize("shape", ["(2**62, 4)", "(-1, 4)", "6", "('a',)", "(6.0, 60)"])
def test_a_header_that_makes_no_sense(tmp_path: Path, shape: str) -> None:
    refusal(with_member(tmp_path, npy(shape, bytes(6 * 60))))


def test_the_hand_written_header_itself_is_fine(tmp_path: Path) -> None:
    """So the refusals above are due to the shape alone."""
    found = npz.dataset("own", with_member(tmp_path, npy("(6, 4, 5, 3)", bytes(range(60)) * 6)))
    assert found.x_train[0].tobytes() == bytes(range(60))


@pytest.mark.parametrize("descr", ["'|O'", "[('a', '|O')]", "'nonsense'", "'|u1', 'descr': 'x'", "((((", "'|V8'"])
def test_strange_types(tmp_path: Path, descr: str) -> None:
    refusal(with_member(tmp_path, npy("(6, 4, 5, 3)", bytes(360), descr)))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300))
def test_any_bytes_as_a_member_are_refused_politely(tmp_path: Path, content: bytes) -> None:
    for data in (content, b"\x93NUMPY\x01\x00" + content, npy("(6, 4, 5, 3)", content)):
        if len(content) != 360:
            refusal(with_member(tmp_path, data))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 10**6), value=st.integers(0, 255), compressed=st.booleans())
def test_any_changed_byte_is_read_or_refused_politely(tmp_path: Path, at: int, value: int, compressed: bool) -> None:
    buffer = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(buffer, **good())
    data = bytearray(buffer.getvalue())
    data[at % len(data)] = value
    path = tmp_path / "own.npz"
    path.write_bytes(data)
    try:
        found = npz.dataset("own", path)
    except UserError:
        return
    np.testing.assert_array_equal(found.x_train, good()["x_train"])  # the change hit something without meaning


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    x=hnp.arrays(np.uint8, st.tuples(*[st.integers(lo, 6) for lo in (2, 1, 1)], st.integers(1, 4))),
    labels=st.data(),
)
def test_round_trip(tmp_path: Path, x: np.ndarray, labels: st.DataObject) -> None:
    y = labels.draw(hnp.arrays(np.int16, len(x), elements=st.integers(0, len(x) - 1)))
    y[:2] = (0, 1)
    path = tmp_path / "own.npz"
    np.savez(path, x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])
    found = npz.dataset("own", path)
    np.testing.assert_array_equal(found.x_train, x)
    np.testing.assert_array_equal(found.y_train, y)
    np.testing.assert_array_equal(found.x_test, x[:1])


def test_labels_may_be_names(tmp_path: Path) -> None:
    x = np.arange(8, dtype=float).reshape(4, 2)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=np.array(["b", "a", "b", "c"]), x_test=x[:1], y_test=["d"])
    data = npz.dataset("x", tmp_path / "a.npz")
    assert (data.classes, data.y_train.tolist(), data.y_test.tolist()) == (("a", "b", "c", "d"), [1, 0, 1, 2], [3])
    np.savez(tmp_path / "a.npz", x_train=x, y_train=np.array([b"b", b"a", b"b", b"a"]), classes=["b", "a", "z"])
    data = npz.dataset("x", tmp_path / "a.npz")  # the file's own order
    assert (data.classes, data.y_train.tolist()) == (("b", "a", "z"), [0, 1, 0, 1])
    with pytest.raises(UserError, match="holds the class 'b', which is not one of data"):
        npz.dataset("x", tmp_path / "a.npz", ["a", "c"])
