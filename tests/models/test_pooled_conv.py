"""A convolution, its pooling and its ReLU as one layer equal the three of them, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fednh.models import build_net, fast_conv, native
from fednh.models.fast_conv import FastConv2d, PooledConv2d, fuse, use_fast_conv

needs_kernels = pytest.mark.skipif(native._compiler() is None, reason="no C compiler on this machine")


def three_layers(conv: nn.Conv2d) -> nn.Sequential:
    return nn.Sequential(conv, nn.MaxPool2d(2), nn.ReLU())


def one_layer(conv: nn.Conv2d) -> nn.Sequential:
    """The same weights, as one layer."""
    copied = type(conv)(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,
        padding=conv.padding,
        stride=conv.stride,
        bias=conv.bias is not None,
    )
    copied.load_state_dict(conv.state_dict())
    module = three_layers(copied)
    use_fast_conv(module)
    fuse(module)
    assert type(module[0]) is PooledConv2d
    return module


def gradients(module: nn.Sequential, x: Tensor, *, of_x: bool = False) -> list[Tensor]:
    """The result, and the gradients of a fixed random sum of it."""
    x = x.clone().requires_grad_(of_x)
    y = module(x)
    rng = torch.Generator().manual_seed(3)
    d = torch.randn(y.shape, generator=rng).to(y.dtype)
    wanted = [*module.parameters(), *([x] if of_x else [])]
    return [y, *torch.autograd.grad(y, wanted, d)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were called."""
    seen: list[str] = []
    real = native.call

    def counted(name: str, *rest: object) -> None:
        seen.append(name)
        real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(native, "call", counted)
    return seen


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 6),
    st.sampled_from([16, 32, 48, 64, 112]),
    st.sampled_from([(3, 0), (5, 0), (5, 2), (1, 0), (2, 1)]),
    st.tuples(st.integers(6, 17), st.integers(6, 17)),
    st.booleans(),
    st.booleans(),
)
def test_it_equals_the_three_layers(
    n: int, channels: int, kernels: int, sides: tuple[int, int], size: tuple[int, int], bias: bool, of_x: bool
) -> None:
    torch.manual_seed(n + channels + kernels + sum(size))
    conv = nn.Conv2d(channels, kernels, sides[0], padding=sides[1], bias=bias)
    x = torch.randn(n, channels, *size).contiguous(memory_format=torch.channels_last)
    # In float64, and with no two values so close that rounding changes which one pooling takes.
    wanted = gradients(three_layers(conv).double(), x.double(), of_x=of_x)
    conv = conv.float()
    for made, right, plain in zip(
        gradients(one_layer(conv), x, of_x=of_x), wanted, gradients(three_layers(conv), x, of_x=of_x), strict=True
    ):
        error, usual = (made - right).norm(), (plain - right).norm()
        assert error <= 2 * usual + 2e-6 * right.norm() + 1e-6


@needs_kernels
def test_by_hand(calls: list[str]) -> None:
    """Weights of 1, one pixel each: pooling takes 7 of (1, 7, 3, 5), bias -6.5 leaves 0.5; -8 leaves nothing."""
    conv = nn.Conv2d(1, native.width(), 1)
    nn.init.ones_(conv.weight)
    module = one_layer(conv)
    x = torch.tensor([[[[1.0, 7.0], [3.0, 5.0]]]])
    for bias, out, dw in ((-6.5, 0.5, 7.0), (-8.0, 0.0, 0.0)):
        nn.init.constant_(module[0].bias, bias)
        y = module(x)
        weight, shift = torch.autograd.grad(y.sum(), (module[0].weight, module[0].bias))
        assert y.unique().tolist() == [out]
        assert weight.unique().tolist() == [dw]
        assert shift.unique().tolist() == [1.0 if out else 0.0]
    assert calls == ["conv_pool", "conv_pool_gradient"] * 2


@needs_kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_comes_out_as_torch_has_it(value: float) -> None:
    """A run that goes wrong is stopped for it, so it must not be hidden."""
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    x[1, 2, 3, 3] = value
    conv = nn.Conv2d(3, 64, 3)
    plain, made = three_layers(conv)(x), one_layer(conv)(x)
    assert torch.equal(plain.isnan(), made.isnan())
    assert torch.equal(plain.isinf(), made.isinf())


@needs_kernels
def test_the_first_of_equal_values_has_the_gradient() -> None:
    conv = nn.Conv2d(1, 16 * native.width(), 1)
    x = torch.tensor([[[[2.0, 2.0, 1.0], [2.0, 2.0, 1.0], [9.0, 9.0, 9.0]]]])
    ours, torchs = (gradients(module(conv), x, of_x=True) for module in (one_layer, three_layers))
    for made, right in zip(ours, torchs, strict=True):
        torch.testing.assert_close(made, right)
    assert ours[-1][0, 0, 2].tolist() == [0, 0, 0], "an odd last row has no part in any result"


@needs_kernels
def test_where_kernels_are_called(calls: list[str]) -> None:
    net = build_net("conv2", (3, 32, 32), 4)
    params, x = net.init(torch.Generator().manual_seed(1)), torch.randn(20, 3, 32, 32)
    calls.clear()
    with torch.no_grad():
        net.logits(params, x)
    assert [call for call in calls if call != "transform"] == ["conv_pool", "pool_relu"]
    calls.clear()
    torch.vmap(lambda one: net.logits(params, one), randomness="error")(x[None])
    ordinary = build_net("conv2", (3, 32, 32), 4, convolution="ordinary")
    ordinary.logits(params, x)
    assert calls == [], "vmap, or switched off"


def test_only_2x2_pooling_and_relu_right_behind_a_convolution_are_taken() -> None:
    def kinds(*layers: nn.Module) -> list[type]:
        module = nn.Sequential(*layers)
        fuse(module)
        return [type(layer) for layer in module]

    conv = lambda: nn.Conv2d(3, 16, 3)  # noqa: E731
    left = [PooledConv2d, nn.Identity, nn.Identity]
    assert kinds(conv(), nn.MaxPool2d(2), nn.ReLU(), conv()) == [*left, nn.Conv2d]
    assert kinds(conv(), nn.MaxPool2d((2, 2), (2, 2)), nn.ReLU()) == left
    for pool in (
        nn.MaxPool2d(3),
        nn.MaxPool2d(2, 1),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(2, return_indices=True),
        nn.AvgPool2d(2),
    ):
        assert kinds(conv(), pool, nn.ReLU()) == [nn.Conv2d, type(pool), nn.ReLU]
    assert kinds(conv(), nn.MaxPool2d(2), nn.GELU()) == [nn.Conv2d, nn.MaxPool2d, nn.GELU]
    assert kinds(conv(), nn.ReLU(), nn.MaxPool2d(2)) == [nn.Conv2d, nn.ReLU, nn.MaxPool2d]


@pytest.mark.parametrize("size", [(3, 3), (4, 9), (5, 6)])
def test_too_small_an_image_is_told_as_torch_tells_it(size: tuple[int, int]) -> None:
    conv = nn.Conv2d(3, 64, 5)
    module = one_layer(conv)
    with pytest.raises(RuntimeError) as plain:
        three_layers(conv)(torch.zeros(2, 3, *size))
    with pytest.raises(RuntimeError) as ours:
        module(torch.zeros(2, 3, *size))
    assert str(ours.value) == str(plain.value)


def test_without_kernels_results_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(20, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    module = one_layer(nn.Conv2d(3, 64, 5))
    with_them = gradients(module, x)
    monkeypatch.setattr(native, "library", lambda: None)
    for made, plain in zip(with_them, gradients(module, x), strict=True):
        assert (made - plain).norm() <= 1e-5 * plain.norm()


def test_a_layer_that_computes_otherwise_keeps_its_class() -> None:
    class Mine(nn.Conv2d):
        pass

    module = three_layers(Mine(3, 16, 3))
    fuse(module)
    assert type(module[0]) is Mine
    assert issubclass(PooledConv2d, FastConv2d)
    assert fast_conv.FEW < 16, "the kernel of the gradient loads 16 inputs at a time"
