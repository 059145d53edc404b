"""Small images, and small frozen networks of images and texts, for tests of features."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn


class Toy(nn.Module):
    """A convolution and a mean over space: features that a test can compute by hand."""

    def __init__(self, num_classes: int = 2, width: int = 4):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


class SlowLayer(nn.Module):
    """Takes its time, and writes how many images it was given to the file $FEDNH_TEST_LOG."""

    def forward(self, x: Tensor) -> Tensor:
        with Path(os.environ["FEDNH_TEST_LOG"]).open("a") as log:
            log.write(f"{len(x)}\n")
        time.sleep(0.02)
        return x


class SlowToy(Toy):
    """A Toy whose work can be counted, and interrupted."""

    def __init__(self, num_classes: int = 2):
        super().__init__(num_classes)
        self.body.append(SlowLayer())


TOY, SLOW = "tests.helpers.pictures:Toy", "tests.helpers.pictures:SlowToy"


def toy_weights(file: Path, seed: int = 0, width: int = 4) -> Path:
    """Weights of a Toy."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        save_file(Toy(width=width).state_dict(), file)
    return file


def toy_onnx(file: Path, seed: int = 0, width: int = 4, size: int = 8, pooled: bool = True) -> Path:
    """The body of a Toy as an ONNX network with a free number of images, pooled or as maps (N, D, h, w)."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        body = Toy(width=width).body
    body = body if pooled else body[:2]
    batch = torch.export.Dim("batch")
    program = torch.export.export(body.eval(), (torch.zeros(2, 3, size, size),), dynamic_shapes=({0: batch},))
    made = torch.onnx.export(program, (), dynamo=True, input_names=["x"], output_names=["features"], verbose=False)
    assert made is not None
    made.save(file, external_data=False)
    return file


def images(number: int, size: int = 8, channels: int = 3, seed: int = 0) -> NDArray[np.uint8]:
    """Noise."""
    return np.random.default_rng(seed).integers(0, 256, (number, size, size, channels), dtype=np.uint8)


def paint(folder: Path, sites: tuple[str, ...] = ("north", "south"), each: int = 8, size: int = 12) -> Path:
    """A folder of images: two classes, dark and bright, at every site."""
    rng = np.random.default_rng(3)
    for site in sites:
        for name, level in (("dark", 60), ("bright", 190)):
            (folder / site / name).mkdir(parents=True, exist_ok=True)
            for number in range(each):
                pixels = np.clip(rng.normal(level, 30, (size, size, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / site / name / f"{number}.png")
    return folder


def sentence_encoder(folder: Path) -> Path:
    """A sentence encoder of one layer, as sentence-transformers saves it: it knows six words."""
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "goal", "match", "team", "soup", "bread", "salt"]
    bert = folder.with_name("bert")
    bert.mkdir(parents=True)
    (bert / "vocab.txt").write_text("\n".join(words))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(bert)
    BertTokenizerFast(str(bert / "vocab.txt")).save_pretrained(bert)
    SentenceTransformer(modules=[models.Transformer(str(bert)), models.Pooling(16)], device="cpu").save(str(folder))
    return folder
