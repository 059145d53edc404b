"""MNIST (LeCun et al. 1998): handwritten digits, 28x28 grey."""

from __future__ import annotations

from pathlib import Path

from fednh.data.published import idx
from fednh.data.published.base import DataPath, Published


def _places(folder: Path) -> list[DataPath]:
    return idx.places([folder / "mnist", folder / "MNIST" / "raw", folder])


MNIST = Published(
    name="mnist",
    description="handwritten digits, 28x28 grey, 10 classes, 60,000 + 10,000 images",
    shape=(28, 28, 1),
    mean=(0.1307,),
    std=(0.3081,),
    classes=tuple("0123456789"),
    accepts="mnist.npz, or the four IDX files (plain or .gz) in mnist/, MNIST/raw/ or directly",
    places=_places,
    files=idx.remote(
        "mnist",
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        (
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
)
