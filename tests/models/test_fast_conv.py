"""The convolution with fewer products equals the ordinary one, forward and backward, and is taken only where it may."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fednh.models import build_net, fast_conv
from fednh.models.fast_conv import FastConv2d, fast_conv2d, matrices, use_fast_conv

SHAPES = [(64, 64, 14, 5, 0), (20, 32, 17, 5, 2), (16, 32, 30, 5, 0), (16, 64, 9, 3, 1), (5, 128, 16, 3, 1)]


def both(
    n: int, channels: int, size: int, side: int, padding: int, dtype: torch.dtype = torch.float32
) -> list[tuple[Tensor, Tensor]]:
    """What this convolution and the ordinary one in float64 give: the result, and the three gradients."""
    rng = torch.Generator().manual_seed(n + size)
    x = torch.randn(n, channels, size, size, generator=rng, dtype=dtype).relu()
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    w = (torch.randn(channels, channels, side, side, generator=rng, dtype=dtype) / 40).requires_grad_()
    b = torch.randn(channels, generator=rng, dtype=dtype).requires_grad_()
    y = fast_conv2d(x, w, b, padding)
    wanted = F.conv2d(x.double(), w.double(), b.double(), padding=padding)
    dy = torch.randn(wanted.shape, generator=rng, dtype=dtype)
    made = torch.autograd.grad(y, (x, w, b), dy)
    right = torch.autograd.grad(wanted, (x, w, b), dy.double())
    assert y.is_contiguous(memory_format=torch.channels_last)
    return [(y, wanted), *zip(made, right, strict=True)]


@pytest.mark.parametrize("shape", SHAPES)
def test_it_equals_the_ordinary_convolution(shape: tuple[int, int, int, int, int]) -> None:
    for made, wanted in both(*shape):
        assert (made - wanted).norm() < 3e-6 * wanted.norm()


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(5, 30), st.sampled_from([3, 5]), st.integers(0, 2))
def test_in_float64_it_is_exact(n: int, channels: int, size: int, side: int, padding: int) -> None:
    """Any size, one tile or many: gradients included, to rounding."""
    for made, wanted in both(n, channels, size, side, padding, torch.float64):
        torch.testing.assert_close(made, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("tile", "side", "products"), [(10, 5, 17), (4, 3, 6), (8, 5, 14), (9, 5, 16)])
def test_one_line_by_hand(tile: int, side: int, products: int) -> None:
    """x = 1, 2, 3, ... and w = 1, 0, ..., 0, 1: y_j = x_j + x_(j + r - 1) = 2 j + r + 1, counted from 0."""
    a, b, g = matrices(tile, side, torch.float64)
    assert len(a) == products < tile * side
    x = torch.arange(1.0, tile + side, dtype=torch.float64)
    w = torch.zeros(side, dtype=torch.float64)
    w[0] = w[-1] = 1
    y = a.T @ ((b @ x) * (g @ w))
    torch.testing.assert_close(y, 2.0 * torch.arange(tile, dtype=torch.float64) + side + 1, rtol=1e-12, atol=1e-10)


def test_chunks_of_a_batch_change_nothing_but_the_last_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = both(20, 32, 14, 5, 0)
    monkeypatch.setattr(fast_conv, "BYTES", 1 << 20)
    for (one, _), (many, wanted) in zip(whole, both(20, 32, 14, 5, 0), strict=True):
        assert (one - many).norm() < 3e-6 * wanted.norm()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch sizes that were computed with fewer products."""
    seen: list[int] = []
    real = fast_conv.fast_conv2d

    def counted(x: Tensor, *rest: object) -> Tensor:
        seen.append(len(x))
        return real(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(fast_conv, "fast_conv2d", counted)
    return seen


def step(net: object, n: int) -> dict[str, Tensor]:
    params = net.init(torch.Generator().manual_seed(1))  # type: ignore[attr-defined]
    for value in params.values():
        value.requires_grad_()
    x = torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    loss = net.logits(params, x).square().mean()  # type: ignore[attr-defined]
    return dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))


def test_where_it_is_taken(calls: list[int]) -> None:
    net = build_net("conv2", (3, 32, 32), 4)
    step(net, 16)
    assert calls == [16], "the second of the two convolutions"
    params, x = net.init(torch.Generator().manual_seed(1)), torch.zeros(64, 3, 32, 32)
    with torch.no_grad():
        net.logits(params, x)
    assert calls == [16, 64]
    step(net, 15)
    torch.func.grad(lambda p: net.logits({**params, **p}, x).sum())({"head.weight": params["head.weight"]})
    torch.vmap(lambda one: net.logits(params, one), randomness="error")(x[None])
    step(build_net("conv2", (3, 32, 32), 4, convolution="ordinary"), 64)
    assert calls == [16, 64], "too small a batch, torch.func, vmap, or switched off"


def test_bfloat16_takes_the_ordinary_convolution() -> None:
    """Only asked, not computed: on some machines a convolution in bfloat16 ends the process."""
    x, weight = torch.zeros(64, 64, 14, 14), torch.zeros(64, 64, 5, 5)
    assert fast_conv.is_plain(x, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not fast_conv.is_plain(x, weight)
    assert not fast_conv.is_plain(x.bfloat16(), weight.bfloat16())


@pytest.mark.usefixtures("bf16")
def test_it_is_not_taken_in_bfloat16(calls: list[int]) -> None:
    net = build_net("conv2", (3, 32, 32), 4)
    net.precision = "bf16"
    step(net, 64)
    assert calls == []


def test_training_with_either_convolution_agrees(calls: list[int]) -> None:
    fast, ordinary = (step(build_net("conv2", (3, 32, 32), 4, convolution=c), 20) for c in ("fast", "ordinary"))
    assert calls
    for name, value in ordinary.items():
        assert (fast[name] - value).norm() <= 1e-5 * value.norm(), name


def test_what_it_cannot_compute_stays_as_it_is() -> None:
    layers = [
        nn.Conv2d(64, 64, 3, padding=1),
        nn.Conv2d(64, 64, 5),
        nn.Conv2d(64, 64, 3, stride=2),
        nn.Conv2d(64, 64, 3, dilation=2),
        nn.Conv2d(64, 64, 3, groups=2),
        nn.Conv2d(64, 64, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(64, 64, 3, padding="same"),
        nn.Conv2d(64, 64, (3, 5)),
        nn.Conv2d(64, 64, 7),
        nn.Conv2d(64, 64, 1),
        nn.Conv2d(64, 64, 3, padding=(1, 0)),
        nn.Conv2d(3, 64, 5),
        nn.ConvTranspose2d(64, 64, 3),
    ]
    module = nn.Sequential(*layers)
    use_fast_conv(module)
    assert [type(layer) is FastConv2d for layer in layers] == [True, True] + [False] * 11


def test_images_that_are_not_square_take_the_ordinary_way(calls: list[int]) -> None:
    layer = nn.Conv2d(64, 64, 3, padding=1)
    use_fast_conv(layer)
    layer(torch.zeros(64, 64, 8, 12))
    assert not calls
    layer(torch.zeros(64, 64, 8, 8))
    assert calls == [64]
