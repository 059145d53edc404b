"""Fashion-MNIST (Xiao et al. 2017): clothes, 28x28 grey."""

from __future__ import annotations

from pathlib import Path

from fednh.data.published import idx
from fednh.data.published.base import DataPath, Published

DEBIAN_ROOT = Path("/usr/share/datasets")  # where Debian's dataset-* packages put their files


def _places(folder: Path) -> list[DataPath]:
    inside = [folder / name for name in ("fashion_mnist", "fashion-mnist", "FashionMNIST/raw")]
    return idx.places([*inside, DEBIAN_ROOT / "fashion-mnist"])


FASHION_MNIST = Published(
    name="fashion_mnist",
    description="clothes, 28x28 grey, 10 classes, 60,000 + 10,000 images",
    shape=(28, 28, 1),
    mean=(0.2860,),
    std=(0.3530,),
    classes=("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    accepts="fashion_mnist.npz, or the four IDX files (plain or .gz) in fashion_mnist/, fashion-mnist/ or "
    "FashionMNIST/raw/",
    places=_places,
    files=idx.remote(
        "fashion_mnist",
        ("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",),
        (
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
)
