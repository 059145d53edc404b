"""CIFAR-10 (Krizhevsky 2009): photos, 32x32 colour."""

from __future__ import annotations

from fednh.data.published.base import Published
from fednh.data.published.cifar import places, remote

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

CIFAR10 = Published(
    name="cifar10",
    description="photos, 32x32 colour, 10 classes, 50,000 + 10,000 images",
    shape=(32, 32, 3),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2023, 0.1994, 0.2010),
    classes=CLASSES,
    accepts="cifar10.npz, cifar-10-binary.tar.gz, cifar-10-python.tar.gz, cifar-10-batches-bin/ or "
    "cifar-10-batches-py/",
    places=places(10),
    files=remote("cifar-10-python.tar.gz", "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"),
    augment="crop_flip",
)
