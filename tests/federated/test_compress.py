"""Packed uploads: computed by hand, what is owed is sent later, what has a meaning to the bit is left alone, and no
packed upload from outside can do harm."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fednh.config import load
from fednh.errors import ConfigError
from fednh.federated.checks import declared_upload, form_of
from fednh.federated.compress import Compression, largest, packed_bits, read, unpacked_bits, written
from fednh.io.files import read_tree
from fednh.methods import METHODS
from fednh.methods.base import UploadSpec
from fednh.models import build_net
from fednh.tree import Tree, is_statistic
from tests.helpers.compare import lines, same
from tests.helpers.simulator import simulate

INT8, TOP = Compression("int8", 0.05), Compression("top-k", 0.25)
LOSSLESS = Compression("lossless", 0.05)
PLAIN = UploadSpec()


def through(how: Compression, upload: Tree, received: Tree, owed: Tree, spec: UploadSpec = PLAIN) -> tuple[Tree, Tree]:
    """What the server gets, and what the client owes then; the packed form is the declared one."""
    packed, left = how.pack(upload, received, owed, spec)
    form = how.packed_form(form_of(upload), form_of(received), spec)
    assert form_of(packed) == form
    return how.unpack(packed, form_of(upload), received, spec), left


def test_int8_by_hand() -> None:
    """Rows of the step [2.54, 0.015, -0.01, 0] and [0, 0, 0, 0]: the first one's levels are 0.02 apart."""
    received = {"w": torch.tensor([[1.0, 1.0, 1.0, 1.0], [5.0, 6.0, 7.0, 8.0]])}
    step = torch.tensor([[2.54, 0.016, -0.006, 0.0], [0.0] * 4])
    packed, left = INT8.pack({"w": received["w"] + step}, received, {}, PLAIN)
    assert packed["codes.w"].tolist() == [[127, 1, 0, 0], [0, 0, 0, 0]]
    torch.testing.assert_close(packed["scales.w"], torch.tensor([0.02, 0.0]))
    got = INT8.unpack(packed, form_of(received), received, PLAIN)["w"]
    torch.testing.assert_close(got, received["w"] + torch.tensor([[2.54, 0.02, 0, 0], [0.0] * 4]))
    torch.testing.assert_close(left["w"], torch.tensor([[0.0, -0.004, -0.006, 0.0], [0.0] * 4]), atol=1e-6, rtol=0)
    # The third number, lost twice, is sent in the second round: -0.012 is nearer to -0.02 than to 0.
    packed, left = INT8.pack({"w": received["w"] + step}, received, left, PLAIN)
    assert packed["codes.w"].tolist() == [[127, 1, -1, 0], [0, 0, 0, 0]]
    torch.testing.assert_close(left["w"][0], torch.tensor([0.0, -0.008, 0.008, 0.0]), atol=1e-6, rtol=0)


def test_top_k_by_hand() -> None:
    """A quarter of eight numbers is two; -0.9, left out at first, is sent with the second round's."""
    received = {"w": torch.zeros(2, 40)}
    step = torch.zeros(80)
    step[[3, 7, 60]] = torch.tensor([1.0, -0.9, 5.0])
    how = Compression("top-k", 2 / 80)
    got, left = through(how, {"w": step.reshape(2, 40)}, received, {})
    assert got["w"].reshape(-1).nonzero().flatten().tolist() == [3, 60]
    assert left["w"].reshape(-1).nonzero().flatten().tolist() == [7]
    step = torch.zeros(80)
    step[[7, 9, 10]] = torch.tensor([-0.9, 1.0, 2.0])
    got, left = through(how, {"w": step.reshape(2, 40)}, received, left)
    assert got["w"].reshape(-1)[[7, 10]].tolist() == pytest.approx([-1.8, 2.0])
    assert left["w"].reshape(-1).nonzero().flatten().tolist() == [9]


@given(st.integers(1, 60), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_of_equal_numbers_the_first_are_the_largest(count: int, seed: int) -> None:
    flat = torch.randint(-3, 4, (60,), generator=torch.Generator().manual_seed(seed)).float()
    expected = sorted(range(60), key=lambda i: (-abs(float(flat[i])), i))[:count]
    assert largest(flat, count).nonzero().flatten().tolist() == sorted(expected)
    assert unpacked_bits(packed_bits(flat > 0), 60).tolist() == (flat > 0).tolist()


@pytest.mark.parametrize("how", [INT8, TOP], ids=lambda how: how.kind)
def test_all_that_was_sent_is_all_steps_but_the_newest_remainder(how: Compression) -> None:
    rng = torch.Generator().manual_seed(1)
    sent, steps, owed = torch.zeros(6, 50), torch.zeros(6, 50), {}
    for _ in range(20):
        received = {"w": torch.randn(6, 50, generator=rng)}
        step = torch.randn(6, 50, generator=rng) * 0.1
        got, owed = through(how, {"w": received["w"] + step}, received, owed)
        sent, steps = sent + got["w"] - received["w"], steps + step
    torch.testing.assert_close(sent + owed["w"], steps, atol=1e-4, rtol=0)
    assert float((sent - steps).abs().max()) > 1e-4, "nothing was lost, so nothing was shown"


def test_rows_by_class_keep_their_length_and_those_of_zeros_stay_zero() -> None:
    rng = torch.Generator().manual_seed(1)
    rows = torch.nn.functional.normalize(torch.randn(10, 192, generator=rng), dim=1) * torch.arange(10.0)[:, None]
    spec = UploadSpec(by_class=("prototypes",), counted=("prototypes",))
    got, left = through(INT8, {"prototypes": rows}, {}, {}, spec)
    torch.testing.assert_close(got["prototypes"].norm(dim=1), torch.arange(10.0), atol=1e-5, rtol=1e-5)
    assert not got["prototypes"][0].any()
    assert torch.cosine_similarity(got["prototypes"], rows)[1:].min() > 0.9999
    assert left == {}
    assert through(TOP, {"prototypes": rows}, {}, {}, spec)[0]["prototypes"].equal(rows)


@pytest.mark.parametrize("name", METHODS)
def test_only_trained_parameters_and_rows_by_class_are_rounded(name: str) -> None:
    method = load("digits", {"method.name": name}).build_method()
    net = build_net("mlp", (1, 8, 8), 10, {"hidden": [64]})
    initial = method.init(net, torch.Generator().manual_seed(0))
    upload, down = declared_upload(method, net, initial), form_of(method.broadcast(initial))
    spec = method.upload
    exact = {*spec.marks, *spec.summed, *spec.recorded, *spec.untrained, spec.weight}
    for how in (INT8, TOP):
        ways = how.ways(upload, down, spec)
        assert ways.keys() == upload.keys()
        for each, way in ways.items():
            assert way == "whole" or each not in exact
            assert way == "whole" or not is_statistic(each)
            assert way != "step" or (down[each] == upload[each] and each not in spec.by_class)
            assert way != "rows" or each in spec.by_class


def test_lossless_changes_no_bit() -> None:
    odd = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-45, -3.5])
    upload = {"w": odd, "scale": torch.tensor(2.5), "n": torch.tensor([1, 2]), "d": torch.ones(2, dtype=torch.float64)}
    got, left = through(LOSSLESS, upload, {"w": torch.randn(6), "scale": torch.tensor(1.0)}, {})
    assert left == {}
    for name, value in upload.items():
        assert got[name].numpy().tobytes() == value.numpy().tobytes()


# --- hostile --------------------------------------------------------------------------------------------------------


def packed_of(how: Compression) -> tuple[Tree, Tree]:
    received = {"w": torch.zeros(4, 21)}
    upload = {"w": torch.randn(4, 21, generator=torch.Generator().manual_seed(0))}
    return how.pack(upload, received, {}, PLAIN)[0], received


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_scale_that_cannot_be_is_refused(value: float) -> None:
    packed, received = packed_of(INT8)
    bad = {**packed, "scales.w": torch.full((4,), value)}
    with pytest.raises(ValueError, match="w: a scale is negative or not finite"):
        INT8.unpack(bad, form_of(received), received, PLAIN)


def test_a_mask_that_does_not_fit_its_numbers_is_refused() -> None:
    packed, received = packed_of(TOP)
    for number, words in ((255, "w: it marks 88 numbers"), (0, "w: it marks 0 numbers and sends 21")):
        bad = {**packed, "mask.w": torch.full((11,), number, dtype=torch.uint8)}
        with pytest.raises(ValueError, match="beyond the tensor's end" if number else words):
            TOP.unpack(bad, form_of(received), received, PLAIN)


def test_nothing_larger_than_expected_is_decompressed() -> None:
    bomb = zlib.compress(bytes(50_000_000), 9)
    assert len(bomb) < 60_000
    with pytest.raises(ValueError, match="more than the 1000 bytes"):
        read(bomb, 1000)
    whole = written({"whole.w": torch.zeros(3)})
    assert len(read(whole, 1000)) < 1000
    for broken in (whole[:-3], whole + b"x", b"no zlib", b""):
        with pytest.raises(ValueError, match="cannot be decompressed"):
            read(broken, 1000)


# --- runs -----------------------------------------------------------------------------------------------------------


def digits(**more: Any) -> Any:
    settings = {"rounds": 6, "partition.clients": 8, "participation.rate": 0.5, "eval.every": 6, "workers": 1, **more}
    return load("digits", {**settings, "train.epochs": 2, "engine": "loop"})


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "run"
    simulate(digits(), folder)
    return folder


@pytest.mark.parametrize(("kind", "points", "saved"), [("lossless", 0.0, 0.2), ("int8", 4.0, 0.7), ("top-k", 8.0, 0.9)])
def test_a_run_is_near_that_without_compression(
    kind: str, points: float, saved: float, plain: Path, tmp_path: Path
) -> None:
    simulate(digits(**{"federation.compress": kind}), tmp_path / "run")
    ours, theirs = lines(tmp_path / "run")[-2], lines(plain)[-2]
    assert abs(ours["gm"] - theirs["gm"]) <= points
    assert ours["bytes_up"] < (1 - saved) * theirs["bytes_up"]
    assert ours["bytes_down"] == theirs["bytes_down"]
    if kind == "lossless":
        name = "models/global.safetensors"
        same(read_tree(tmp_path / "run" / name), read_tree(plain / name), atol=0, rtol=0)


REFUSED = [
    ({"federation.secure": True}, r"federation\.compress = 'int8' makes single uploads smaller"),
    ({"privacy.level": "client", "privacy.epsilon": 8.0}, r"federation\.compress = 'int8' sends later"),
]


@pytest.mark.parametrize(("more", "words"), REFUSED)
def test_what_cannot_be_compressed_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        digits(**{"federation.compress": "int8"}, **more)


def test_a_method_that_uploads_no_trained_parameters_is_refused(tmp_path: Path) -> None:
    config = digits(**{"federation.compress": "top-k", "method.name": "afl", "model.name": "linear", "model.args": {}})
    with pytest.raises(ConfigError, match="method afl uploads none; leave it at 'none'"):
        simulate(config, tmp_path / "run")
