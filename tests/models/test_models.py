from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fednh.errors import UserError
from fednh.models import build_net, default_model
from fednh.tree import Tree, prefix, select
from tests.helpers.compare import identical


@pytest.mark.parametrize(
    ("shape", "name", "dim"),
    [((2,), "mlp", 64), ((1, 8, 8), "mlp", 64), ((1, 28, 28), "conv2", 192), ((3, 64, 64), "resnet18", 512)],
)
def test_chosen_by_shape(shape: tuple[int, ...], name: str, dim: int) -> None:
    assert default_model(shape) == name
    net = build_net("auto", shape, 5)
    assert (net.name, net.dim) == (name, dim)


@pytest.mark.parametrize("shape", [(6,), (1, 2, 3)])
def test_linear_classifies_its_inputs_as_they_are(shape: tuple[int, ...]) -> None:
    net = build_net("linear", shape, 4)
    params = net.init(torch.Generator().manual_seed(0))
    x = torch.randn(5, *shape)
    assert [(name, tuple(value.shape)) for name, value in params.items()] == [("head.weight", (4, 6))]
    assert torch.equal(net.features(params, x), x.reshape(5, 6))
    assert torch.equal(net.logits(params, x), F.linear(x.reshape(5, 6), params["head.weight"]))


def test_conv2_is_the_papers_network() -> None:
    """The same values as Listing 1 of the paper, where ReLU stands before pooling."""
    net = build_net("conv2", (3, 32, 32), 10)
    p = net.init(torch.Generator().manual_seed(0))
    assert sum(v.numel() for v in p.values()) == 4864 + 102464 + 614784 + 73920 + 1920
    x = torch.randn(3, 3, 32, 32)
    h = F.max_pool2d(F.relu(F.conv2d(x, p["body.conv1.weight"], p["body.conv1.bias"])), 2)
    h = F.max_pool2d(F.relu(F.conv2d(h, p["body.conv2.weight"], p["body.conv2.bias"])), 2).reshape(3, 1600)
    h = F.relu(F.linear(h, p["body.linear1.weight"], p["body.linear1.bias"]))
    h = F.relu(F.linear(h, p["body.linear2.weight"], p["body.linear2.bias"]))
    torch.testing.assert_close(net.logits(p, x), h @ p["head.weight"].T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "flat", "classes"), [((3, 32, 32), 1600, 10), ((1, 28, 28), 1024, 10), ((3, 64, 64), 10816, 200)]
)
def test_cnn_is_pfllibs_network(shape: tuple[int, int, int], flat: int, classes: int) -> None:
    """Its layers and the widths behind them for CIFAR, (Fashion-)MNIST and TinyImageNet; ReLU before pooling."""
    net = build_net("cnn", shape, classes)
    p = net.init(torch.Generator().manual_seed(0))
    sizes = [(25 * shape[0] + 1) * 32, (25 * 32 + 1) * 64, (flat + 1) * 512, 513 * classes]
    assert sum(v.numel() for v in p.values()) == sum(sizes)
    assert sum(v.numel() for v in select(p, "head").values()) == sizes[3]
    assert sum(sizes) == 878_538 or shape != (3, 32, 32)
    x = torch.randn(2, *shape)
    h = F.max_pool2d(F.relu(F.conv2d(x, p["body.conv1.weight"], p["body.conv1.bias"])), 2)
    h = F.max_pool2d(F.relu(F.conv2d(h, p["body.conv2.weight"], p["body.conv2.bias"])), 2).reshape(2, flat)
    h = F.relu(F.linear(h, p["body.linear1.weight"], p["body.linear1.bias"]))
    torch.testing.assert_close(net.features(p, x), h, rtol=1e-4, atol=1e-5)
    logits = F.linear(h, p["head.weight"], p["head.bias"])
    torch.testing.assert_close(net.logits(p, x), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["conv2", "cnn"])
@pytest.mark.parametrize("side", [4, 8, 15, 16, 17, 28, 64])
def test_small_networks_take_any_size(side: int, name: str) -> None:
    net = build_net(name, (1, side, side), 3)
    assert net.logits(net.init(torch.Generator()), torch.zeros(2, 1, side, side)).shape == (2, 3)


def test_resnet18_has_group_norm_and_the_known_size() -> None:
    net = build_net("resnet18", (3, 64, 64), 200)
    params = net.init(torch.Generator().manual_seed(0))
    assert sum(v.numel() for v in select(params, "body").values()) == 11_168_832
    assert params["body.conv.weight"].shape == (64, 3, 3, 3)
    assert sum("norm" in name for name in params) == 2 * 20


def test_spiral_network() -> None:
    net = build_net("mlp", (2,), 6, {"hidden": [16, 8, 4, 2], "linear_output": True})
    params = net.init(torch.Generator().manual_seed(0))
    out = net.features(params, torch.randn(200, 2))
    assert out.shape == (200, 2)
    assert (out < 0).any(), "a linear output is not cut off at zero"


def test_init_depends_on_the_generator_only() -> None:
    net = build_net("mlp", (4,), 3)
    torch.manual_seed(1)
    first = net.init(torch.Generator().manual_seed(8))
    torch.manual_seed(2)
    untouched = torch.rand(1)
    torch.manual_seed(2)
    identical(net.init(torch.Generator().manual_seed(8)), first)
    assert torch.equal(torch.rand(1), untouched), "the global generator is left as it was"


def test_threads_do_not_disturb_each_other() -> None:
    """functional_call swaps parameters in place: with a shared module this test fails."""
    net = build_net("mlp", (16,), 4, {"hidden": [32, 32]})
    trees = [net.init(torch.Generator().manual_seed(i)) for i in range(4)]
    x = torch.randn(64, 16)
    expected = [net.logits(t, x) for t in trees]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(300):
            if not torch.equal(net.logits(trees[i], x), expected[i]):
                wrong.append(i)
                return

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_model_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mynets.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, num_classes, width=7):\n"
        "        super().__init__()\n"
        "        self.body = nn.Sequential(nn.Flatten(), nn.Linear(12, width), nn.Tanh())\n"
        "        self.head = nn.Linear(width, num_classes)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    net = build_net("mynets:Net", (3, 2, 2), 5, {"width": 9})
    assert (net.dim, net.num_classes) == (9, 5)
    assert "head.bias" in net.init(torch.Generator())


class Holder(nn.Module):
    def __init__(self, body: nn.Module, head: nn.Module):
        super().__init__()
        self.body, self.head = body, head


def flat(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *layers)


class Bodyless(nn.Module):
    pass


CASES = {
    "no_body": (lambda: Bodyless(), "has no .body"),
    "wrong_classes": (lambda: Holder(flat(nn.Linear(12, 4)), nn.Linear(4, 3)), "head of 3 classes, but the data has 5"),
    "wrong_input": (lambda: Holder(flat(nn.Linear(99, 4)), nn.Linear(4, 5)), "does not accept inputs of shape"),
    "not_flat": (lambda: Holder(nn.Conv2d(3, 4, 1), nn.Linear(2, 5)), r"must return \(batch, features\)"),
    "batch_norm": (lambda: Holder(flat(nn.Linear(12, 4), nn.BatchNorm1d(4)), nn.Linear(4, 5)), "use GroupNorm"),
    "odd_head": (lambda: Holder(flat(nn.Linear(12, 5)), nn.ReLU()), "must be a linear layer"),
    "not_a_module": (lambda: 3, "not a torch.nn.Module"),
}


@pytest.mark.parametrize("case", CASES)
def test_models_that_do_not_fit(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, words = CASES[case]

    class Made(nn.Module):
        def __new__(cls) -> object:  # type: ignore[misc]
            return make()

    monkeypatch.setattr(sys.modules[__name__], "Made", Made, raising=False)
    with pytest.raises(UserError, match=words):
        build_net(f"{__name__}:Made", (3, 2, 2), 5)


@pytest.mark.parametrize(
    ("name", "shape", "args", "words"),
    [
        ("conv3", (3, 8, 8), {}, "did you mean 'conv2'"),
        ("nowhere.nets:Net", (3, 8, 8), {}, "cannot be imported"),
        ("torch.nn:Nothing", (3, 8, 8), {}, "cannot be imported"),
        ("conv2", (12,), {}, "needs images"),
        ("conv2", (3, 3, 3), {}, "at least 4x4"),
        ("cnn", (3, 3, 3), {}, "cnn needs images of at least 4x4"),
        ("cnn", (12,), {}, "needs images"),
        ("mlp", (4,), {"depth": 3}, "model.args.depth is not an argument"),
        ("mlp", (4,), {"hidden": []}, "at least one width"),
        ("mlp", (4,), {"hidden": "wide"}, "cannot be built"),
    ],
)
def test_bad_names_and_arguments(name: str, shape: tuple[int, ...], args: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_net(name, shape, 5, args)


class Ordered(nn.Module):
    """The head is defined first, and the body has a parameter of its own and more than ten layers."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(3, num_classes)
        self.body = nn.Sequential(*(nn.Linear(3, 3, bias=k < 2) for k in range(12)))
        self.body.shift = nn.Parameter(torch.zeros(3))


def test_layers_in_the_order_of_the_module() -> None:
    layers = build_net(f"{__name__}:Ordered", (3,), 2).layers
    assert layers[:3] == (("body.shift",), ("body.0.weight", "body.0.bias"), ("body.1.weight", "body.1.bias"))
    assert layers[3:-1] == tuple((f"body.{k}.weight",) for k in range(2, 12))
    assert layers[-1] == ("head.weight", "head.bias")
    assert [layer[0] for layer in build_net("conv2", (3, 8, 8), 4).layers] == [
        "body.conv1.weight",
        "body.conv2.weight",
        "body.linear1.weight",
        "body.linear2.weight",
        "head.weight",
    ]


def without(tree: Tree, *names: str) -> Tree:
    return {name: value for name, value in tree.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tree: {}, "lacks body.linear1.bias, body.linear1.weight"),
        (lambda tree: without(tree, "body.linear1.bias"), "lacks body.linear1.bias$"),
        (lambda tree: without(tree, "head.weight"), "lacks head.weight$"),
        (lambda tree: prefix("teacher", tree), "lacks body.linear1.bias, body.linear1.weight"),
        (lambda tree: {**tree, "body.linear3.weight": tree["head.weight"]}, "does not have: body.linear3.weight$"),
        (lambda tree: {**tree, "head.bias": torch.zeros(3)}, "does not have: head.bias$"),
    ],
)
def test_a_tree_has_the_names_of_the_model(change: Callable[[Tree], Tree], words: str) -> None:
    """Otherwise the skeleton's own weights would be computed with, or a tensor left out, without a word."""
    net = build_net("mlp", (4,), 3, {"hidden": [5]})
    tree, x = net.init(torch.Generator().manual_seed(1)), torch.ones(2, 4)
    assert net.logits({**tree, "scale": torch.ones(())}, x).shape == (2, 3), "names of a method's own are left alone"
    with pytest.raises(ValueError, match=f"model mlp is given a tree that .*{words}"):
        net.logits(change(tree), x)


class WithBuffer(nn.Module):
    def __init__(self, num_classes: int):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU())
        self.body.register_buffer("shift", torch.ones(5))
        self.head = nn.Linear(5, num_classes)


def test_a_clients_normalisation_may_be_in_the_tree_and_buffers_need_not() -> None:
    net = build_net(f"{__name__}:WithBuffer", (4,), 3, norm="local")
    tree, x = net.init(torch.Generator().manual_seed(1)), torch.ones(2, 4)
    assert not tree.keys() & net.norm.keys()
    identical({"y": net.logits(tree, x)}, {"y": net.logits({**tree, **net.norm}, x)})
    with pytest.raises(ValueError, match=r"lacks body\.0\.bias$"):
        net.logits(without(tree, "body.0.bias"), x)
