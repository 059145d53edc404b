"""MNIST (LeCun et al. 1998) and Fashion-MNIST (Xiao et al. 2017): IDX files, plain or gzipped.

Layout: two zero bytes, a type code (8 is unsigned byte, the only one these sets use), the number of axes, each axis'
length as a big-endian 32-bit integer, then the bytes.
"""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fednh.data.dataset import Arrays
from fednh.data.published import PublishedImages, RemoteFile
from fednh.errors import DataError

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package puts its files
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def remote(folder: str, hosts: tuple[str, ...], sums: tuple[str, str, str, str]) -> tuple[RemoteFile, ...]:
    """The four files to download, gzipped, into a folder."""
    names = [f"{name}.gz" for name in FILES]
    return tuple(
        RemoteFile(f"{folder}/{name}", sha256, tuple(host + name for host in hosts))
        for name, sha256 in zip(names, sums, strict=True)
    )


def present(folder: Path) -> bool:
    """Whether any of the four files is there; `read` then says which ones are not."""
    return any(_find(folder, name) for name in FILES)


def read(folder: Path) -> Arrays:
    """The four files of one set; what is damaged raises any exception (see `Published.load`)."""
    if missing := [name for name in FILES if not _find(folder, name)]:
        raise DataError(f"{folder} lacks {', '.join(missing)} (plain or .gz); put all four files there")
    x_train, y_train, x_test, y_test = (_array(_find(folder, name) or folder) for name in FILES)
    return Arrays(x_train[..., np.newaxis], y_train.astype(np.int64), x_test[..., np.newaxis], y_test.astype(np.int64))


def _array(path: Path) -> NDArray[np.uint8]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    zeros, kind, axes = struct.unpack_from(">HBB", content)
    if (zeros, kind) != (0, 8):
        raise ValueError(f"{path.name} is not an IDX file of bytes")
    shape = struct.unpack_from(f">{axes}I", content, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


MNIST = PublishedImages(
    name="mnist",
    description="handwritten digits, 28x28 grey, 10 classes, 60,000 + 10,000 images",
    shape=(28, 28, 1),
    mean=(0.1307,),
    std=(0.3081,),
    classes=tuple("0123456789"),
    accepts="mnist.npz, or the four IDX files (plain or .gz) in mnist/, MNIST/raw/ or directly",
    places=("mnist", "MNIST/raw", ""),
    read=read,
    present=present,
    files=remote(
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


FASHION_MNIST = PublishedImages(
    name="fashion_mnist",
    description="clothes, 28x28 grey, 10 classes, 60,000 + 10,000 images",
    shape=(28, 28, 1),
    mean=(0.2860,),
    std=(0.3530,),
    classes=("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    accepts="fashion_mnist.npz, or the four IDX files (plain or .gz) in fashion_mnist/, fashion-mnist/ or "
    "FashionMNIST/raw/",
    places=("fashion_mnist", "fashion-mnist", "FashionMNIST/raw", DEBIAN),
    read=read,
    present=present,
    files=remote(
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
