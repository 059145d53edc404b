"""The pickle reader: arrays, strings and numbers in, nothing else, and nothing ever runs."""

from __future__ import annotations

import os
import pickle
import subprocess
from collections import OrderedDict
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednh.data.published import pickles
from fednh.errors import UserError

# What Python 2's cPickle wrote: {'data': uint8 array [[1, 2], [3, 200]], 'labels': [3, 4]}
PYTHON_2 = (
    b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b"
    b"\x87Rq\x05(K\x01K\x02K\x02\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xff"
    b"J\xff\xff\xff\xffK\x00tb\x89U\x04\x01\x02\x03\xc8tbU\x06labelsq\x08]q\t(K\x03K\x04eu."
)


@pytest.mark.parametrize("protocol", range(5))
@pytest.mark.parametrize("dtype", ["u1", "<i8", ">f4", "?"])
def test_arrays_of_every_protocol(protocol: int, dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    content = {"data": array, "columns": np.asfortranarray(array), "labels": [1, 2], b"bytes": b"\xff", "none": None}
    found = pickles.load(pickle.dumps(content, protocol=protocol), "a file")
    for key in ("data", "columns"):
        assert found[key].dtype == array.dtype
        np.testing.assert_array_equal(found[key], array)
    assert found["labels"] == [1, 2]
    assert found["bytes"] == b"\xff"
    assert found["none"] is None


def test_numpy_1_and_numpy_2_name_their_module_differently() -> None:
    data = pickle.dumps({"a": np.arange(3)}, protocol=2)
    old, new = b"numpy.core.multiarray", b"numpy._core.multiarray"
    for version in (data.replace(new, old), data.replace(old, new)):
        assert pickles.load(version, "a file")["a"].tolist() == [0, 1, 2]


def test_a_python_2_pickle() -> None:
    found = pickles.load(PYTHON_2, "a file")
    assert found["data"].tolist() == [[1, 2], [3, 200]]
    assert found["data"].dtype == np.uint8
    assert found["labels"] == [3, 4]


class Run:
    """Unpickled by the standard module, this runs a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


class Subclass(np.ndarray):
    pass


def hostile(marker: Path) -> dict[str, tuple[Any, str]]:
    return {
        "os.system": (Run(os.system, f"touch {marker}"), "system"),
        "subprocess": (Run(subprocess.check_call, ["touch", str(marker)]), "subprocess.check_call"),
        "eval": (Run(eval, f"open({str(marker)!r}, 'w')"), "eval"),
        "getattr": (Run(getattr, "a", "upper"), "getattr"),
        "open": (Run(open, str(marker), "w"), "open"),
        "a numpy file reader": (Run(np.fromfile, str(marker)), "fromfile"),
        "object array": (np.array([Run(os.system, f"touch {marker}"), 1], dtype=object), "type 'O8'"),
        "harmless object array": (np.array([1, "a", None], dtype=object), "type 'O8'"),
        "structured array": (np.zeros(3, dtype=[("a", "u1")]), "type"),
        "text array": (np.array(["abc"]), "type 'U3'"),
        "foreign array class": (np.zeros(3).view(Subclass), "Subclass"),
        "numpy scalar": (np.float64(3), "scalar"),
        "set": ({1, 2}, "EMPTY_SET"),
        "date": (date(2024, 1, 1), "datetime.date"),
        "decimal": (Decimal(1), "decimal.Decimal"),
        "ordered dict": (OrderedDict(a=1), "collections.OrderedDict"),
    }


@pytest.mark.parametrize("case", hostile(Path("x")).keys())
def test_hostile_pickles_are_named_and_do_nothing(tmp_path: Path, case: str) -> None:
    marker = tmp_path / "was here"
    value, names = hostile(marker)[case]
    with pytest.raises(UserError, match="refused") as caught:
        pickles.load(pickle.dumps({"data": value}, protocol=4), "data_batch_1")
    assert names in str(caught.value)
    assert "data_batch_1" in str(caught.value)
    assert not marker.exists()


def global_(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


CODECS, NDARRAY = global_("_codecs", "encode"), global_("numpy", "ndarray")
HAND_WRITTEN = {
    "another encoding": b"}(X\x01\0\0\0a" + CODECS + b"X\x01\0\0\0aX\x05\0\0\0rot13\x86Ru.",
    "altering a function": b"}(X\x01\0\0\0a" + CODECS + b"N}X\x0c\0\0\0__defaults__K\x01s\x86bu.",
    "calling ndarray": b"}(X\x01\0\0\0a" + NDARRAY + b"K\x05\x85Ru.",
    "array of a foreign class": PYTHON_2.replace(b"cnumpy\nndarray\n", b"cnumpy\ndtype\n"),
    "huge memo index": b"}r\xff\xff\xff\x7f.",
    "new object": b"\x80\x02}(X\x01\0\0\0a" + NDARRAY + b")\x81u.",
    "persistent id": b"Pabc\n.",
    "instance": b"(ios\nsystem\n.",
    "array longer than its content": PYTHON_2.replace(b"K\x02K\x02\x86", b"K\x02K\x7f\x86"),
}


@pytest.mark.parametrize("data", HAND_WRITTEN.values(), ids=HAND_WRITTEN.keys())
def test_hand_written_attacks(data: bytes) -> None:
    with pytest.raises(UserError, match="refused"):
        pickles.load(data, "a file")


@pytest.mark.parametrize("data", [b"", b"garbage", PYTHON_2[:60], PYTHON_2[:-1]])
def test_damaged(data: bytes) -> None:
    with pytest.raises(UserError, match="a file"):
        pickles.load(data, "a file")


def test_not_a_dict_and_array_without_content() -> None:
    with pytest.raises(UserError, match="list instead of a dict"):
        pickles.load(pickle.dumps([1]), "a file")
    empty = b"}(X\x01\0\0\0a" + global_("numpy.core.multiarray", "_reconstruct") + NDARRAY + b"K\0\x85C\x01b\x87Ru."
    with pytest.raises(UserError, match="without content"):
        pickles.load(empty, "a file")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.integers(0, len(PYTHON_2)), st.integers(0, 20))
def test_any_bytes_are_read_or_refused_politely(noise: bytes, at: int, replaced: int) -> None:
    for data in (noise, PYTHON_2[:at] + noise + PYTHON_2[at + replaced :]):
        try:
            found = pickles.load(data, "a file")
        except UserError:
            continue
        assert isinstance(found, dict)
