"""Fuzzing, the long way: whatever bytes or settings come, the answer is a result or one sentence."""

from __future__ import annotations

import io
import tarfile
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fednh.config import dump, load, parse_value, validate
from fednh.data.sources import registry
from fednh.data.sources.npz import dataset
from fednh.errors import UserError
from tests.helpers.config import keys, leaf
from tests.helpers.counts import count

pytestmark = pytest.mark.soak
long = settings(max_examples=800, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(st.dictionaries(keys, leaf | st.dictionaries(keys, leaf, max_size=6), max_size=6))
@long
def test_settings(tree: dict[str, object]) -> None:
    count("bad inputs tried")
    try:
        config = validate(tree)
    except UserError:
        return
    assert validate(tomllib.loads(dump(config))) == config


@given(st.text(max_size=40), st.text(max_size=20))
@long
def test_words_of_the_command_line(key: str, value: str) -> None:
    count("bad inputs tried")
    try:
        load("digits", {key: parse_value(value)})
    except UserError:
        return


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("fuzz") / "good.npz"
    y = np.arange(30) % 3
    x = np.random.default_rng(0).integers(0, 255, (30, 4, 4), dtype=np.uint8)
    np.savez(file, x_train=x, y_train=y, x_test=x, y_test=y)
    return file.read_bytes()


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8), st.integers(0, 10**6))
@long
def test_damaged_npz(good: bytes, tmp_path: Path, changes: list[tuple[int, int]], cut: int) -> None:
    """A sound file with some bytes changed, and cut off somewhere."""
    count("bad inputs tried")
    content = bytearray(good)
    for place, byte in changes:
        content[place % len(content)] = byte
    file = tmp_path / "d.npz"
    file.write_bytes(bytes(content[: cut % (2 * len(content))]))
    try:
        data = dataset("fuzzed", file)
    except UserError:
        return
    assert len(data.x_train) == len(data.y_train)


@given(st.binary(max_size=400), st.sampled_from(["cifar-10-batches-py", "cifar-10-batches-bin"]), st.booleans())
@long
def test_damaged_cifar(tmp_path: Path, content: bytes, folder: str, compressed: bool) -> None:
    """Arbitrary bytes as a member of the archive, or as the archive itself."""
    count("bad inputs tried")
    kind = "python" if folder.endswith("py") else "binary"
    name = "data_batch_1" if kind == "python" else "data_batch_1.bin"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        info = tarfile.TarInfo(f"{folder}/{name}")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    (tmp_path / f"cifar-10-{kind}.tar.gz").write_bytes(buffer.getvalue() if compressed else content)
    with pytest.raises(UserError):
        registry.load("cifar10", tmp_path)
    (tmp_path / f"cifar-10-{kind}.tar.gz").unlink()
