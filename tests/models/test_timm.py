"""Architectures of timm, as an optional extra. Its dependency torchvision is a stand-in here: see stand_in.py."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import fednh
from fednh import extras
from fednh.errors import UserError
from fednh.models import build_net
from tests.helpers import stand_in
from tests.helpers.compare import outcome
from tests.helpers.process import fednh as command

DOMAINS = ("photo", "art", "cartoon", "sketch")
CLASSES = ("dog", "house", "horse")


def test_without_the_extra_and_without_torchvision_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import itself fails here, as it does wherever torchvision is missing."""
    name, shape = "timm:mobilenetv3_small_050", (3, 32, 32)
    with pytest.raises(UserError, match="needs images, but the data are vectors of 4 values"):
        build_net(name, (4,), 3)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(UserError, match=r"timm, which cannot be imported here \(.*torchvision.*built for torch 2"):
        build_net(name, shape, 3)
    monkeypatch.setitem(extras.MODULES, "timm", ("a_module_that_nobody_has",))
    with pytest.raises(UserError, match="mobilenetv3_small_050' needs the extra `timm`: pip install"):
        build_net(name, shape, 3)


def paint(folder: Path, each: int = 6) -> Path:
    """Four domains with the same classes: the shape says the class, colours and strokes say the domain."""
    rng = np.random.default_rng(4)
    for d, domain in enumerate(DOMAINS):
        for c, name in enumerate(CLASSES):
            for number in range(each):
                pixels = np.full((32, 32, 3), 250 - 50 * d, np.uint8)
                pixels[4 : 12 + 8 * c, 6 + 4 * c : 26] = rng.integers(0, 60, 3) + 40 * d
                pixels = (pixels * rng.uniform(0.9, 1, pixels.shape)).astype(np.uint8)
                file = folder / domain / name / f"{number}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(file)
    return folder


@pytest.fixture
def timm() -> object:
    with stand_in.torchvision():
        import timm
    return timm


@pytest.mark.soak
def test_a_mobile_net_on_four_domains(timm: object, tmp_path: Path) -> None:
    """From weights in a file; with dropout and stochastic depth, and batch normalisation that stays with the sites."""
    paint(tmp_path / "pacs")
    start = timm.create_model("mobilenetv3_small_050", num_classes=1000)  # type: ignore[attr-defined]
    save_file(start.state_dict(), tmp_path / "start.safetensors")
    settings = {
        "data": f"folder:{tmp_path}/pacs",
        "partition": "site",
        "rounds": "2",
        "epochs": "1",
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    for key, value in {
        "data.size": 32,
        "model.name": "timm:mobilenetv3_small_050",
        "model.norm": "local",
        "model.args.drop_rate": 0.2,
        "model.args.drop_path_rate": 0.1,
        "model.weights": tmp_path / "start.safetensors",
    }.items():
        words += ["--set", f"{key}={value}"]
    for workers in ("1", "2"):
        ended = command(["run", *words, "--workers", workers, "--out", str(tmp_path / workers)], tmp_path / "io", True)
        assert ended.code == 0, ended.stderr
    assert "has a head of another size, which is left out" in ended.stderr
    one, two = (outcome(tmp_path / workers) for workers in ("1", "2"))
    del one["files"]["config.toml"], two["files"]["config.toml"]
    assert one == two
    result = fednh.load_run(tmp_path / "1")
    assert result.metrics[-1]["held_share"] is not None
    assert result.model(client=2).predict([tmp_path / "pacs/cartoon/dog/0.png"])[0] in CLASSES


@pytest.mark.soak
def test_body_and_head_compute_what_the_whole_does(timm: object) -> None:
    net = build_net("timm:mobilenetv3_small_050", (1, 32, 32), 5, norm="local")
    assert (net.head, net.dim, net.random) == ("classifier", 1024, False)
    whole = timm.create_model("mobilenetv3_small_050", in_chans=1, num_classes=5).eval()  # type: ignore[attr-defined]
    state = {f"head.{n[11:]}" if n.startswith("classifier.") else f"body.{n}": v for n, v in whole.state_dict().items()}
    x = torch.randn(2, 1, 32, 32)
    net.bind_norm({name: state[name] for name in net.norm})
    with torch.no_grad():
        torch.testing.assert_close(net.logits({n: v for n, v in state.items() if n not in net.norm}, x), whole(x))
    assert build_net("timm:convnext_atto", (3, 32, 32), 5).head == "head.fc"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("mobilenet_v3_small_050", {}, r"is no architecture of timm; did you mean 'timm:mobilenetv3_small_050'\?"),
        ("hf-hub:someone/something", {}, "is no architecture of timm"),
        ("mobilenetv3_small_050", {"pretrained": True}, r"model\.args\.pretrained cannot be used: weights come from a"),
        ("mobilenetv3_small_050", {"checkpoint_path": "x.pth"}, r"checkpoint_path cannot be used"),
        ("mobilenetv3_small_050", {}, 'batch normalisation, .* set model.norm = "local"'),
        ("vit_tiny_patch16_224", {}, r"does not accept inputs of shape \(3, 32, 32\): .*224"),
        ("deit_tiny_distilled_patch16_224", {"img_size": 32}, "has several classifiers, not one linear layer"),
    ],
)
def test_what_cannot_be_used(name: str, args: dict[str, object], words: str, timm: object) -> None:
    with pytest.raises(UserError, match=words):
        build_net(f"timm:{name}", (3, 32, 32), 3, args)
