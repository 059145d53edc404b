"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) as published: binary or python version, as an archive or unpacked.

A pickle can run any code, so a file is read only if its SHA-256 is the published one. An archive is read member by
member in memory; no name from it is used as a path.
"""

from __future__ import annotations

import hashlib
import pickle
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from fednh.data.dataset import Arrays
from fednh.data.published import PublishedImages, RemoteFile
from fednh.errors import DataError

PIXELS = 3 * 32 * 32  # an image is a row: all red, then all green, then all blue values


@dataclass(frozen=True)
class Layout:
    """One of the two versions in which a CIFAR set is published."""

    archive: str
    folder: str
    classes: int
    files: dict[str, str]  # the SHA-256 of each, the test part last

    @property
    def binary(self) -> bool:
        return self.archive.endswith("-binary.tar.gz")


LAYOUTS = (
    Layout(
        "cifar-10-binary.tar.gz",
        "cifar-10-batches-bin",
        10,
        {
            "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        },
    ),
    Layout(
        "cifar-10-python.tar.gz",
        "cifar-10-batches-py",
        10,
        {
            "data_batch_1": "54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd",
            "data_batch_2": "766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8",
            "data_batch_3": "0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9",
            "data_batch_4": "3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b",
            "data_batch_5": "d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154",
            "test_batch": "f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831",
        },
    ),
    Layout(
        "cifar-100-binary.tar.gz",
        "cifar-100-binary",
        100,
        {
            "train.bin": "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
            "test.bin": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
        },
    ),
    Layout(
        "cifar-100-python.tar.gz",
        "cifar-100-python",
        100,
        {
            "train": "735e79b04f092ca3d2e6d07f368c0a7d70d48c48d28865950cc24454cf45129b",
            "test": "4b67687d9933c4db8f0831104447f15b93774f4f464bd0516f0f0f2ac83b7864",
        },
    ),
)

HOSTS = ("https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/")

Part = tuple[NDArray[np.uint8], NDArray[np.int64]]  # images (N, 32, 32, 3) and labels (N,)


def places(classes: int) -> tuple[str, ...]:
    """The archives and folders of the set with this many classes."""
    return tuple(name for each in LAYOUTS if each.classes == classes for name in (each.archive, each.folder))


def remote(archive: str, sha256: str) -> tuple[RemoteFile, ...]:
    """The archive to download."""
    return (RemoteFile(archive, sha256, tuple(host + archive for host in HOSTS)),)


def read_place(path: Path) -> Arrays:
    """The set at one of its places."""
    return read(path, next(layout for layout in LAYOUTS if path.name in (layout.archive, layout.folder)))


def read(path: Path, layout: Layout) -> Arrays:
    """The set at `path`, which is the layout's folder or its archive."""
    parts: dict[str, Part] = {}
    for name, content in _files(path, layout):
        if hashlib.sha256(content).hexdigest() != layout.files[name]:
            raise DataError(
                f"{path}: {name} is damaged or another file (its SHA-256 is not the published one); "
                f"move {path.name} away and run `fednh data get cifar{layout.classes}`"
            )
        parts[name] = _parsed(content, layout)
    if missing := [name for name in layout.files if name not in parts]:
        raise DataError(f"{path} lacks {', '.join(missing)}; it is incomplete, download or unpack it again")
    *train, test = (parts[name] for name in layout.files)
    x_train, y_train = (np.concatenate(arrays) for arrays in zip(*train, strict=True))
    return Arrays(x_train, y_train, *test)


def _files(path: Path, layout: Layout) -> Iterator[tuple[str, bytes]]:
    """The names and contents of the layout's files that are there."""
    if path.is_dir():
        yield from ((name, (path / name).read_bytes()) for name in layout.files if (path / name).is_file())
        return
    with tarfile.open(path) as archive:
        for member in archive:
            place = PurePosixPath(member.name)
            if str(place.parent) == layout.folder and place.name in layout.files and member.isreg():
                file = archive.extractfile(member)
                assert file is not None  # a regular file
                yield place.name, file.read()


def _parsed(content: bytes, layout: Layout) -> Part:
    if layout.binary:  # each image behind its label; of CIFAR-100 behind the coarse label and the fine one
        records = np.frombuffer(content, np.uint8).reshape(-1, PIXELS + (1 if layout.classes == 10 else 2))
        rows, labels = records[:, -PIXELS:], records[:, -PIXELS - 1]
    else:
        batch = pickle.loads(content, encoding="latin1")  # written by Python 2, whose strings are bytes
        rows, labels = batch["data"], batch["labels" if layout.classes == 10 else "fine_labels"]
    images = np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return images, np.asarray(labels, np.int64)


CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

CIFAR10 = PublishedImages(
    name="cifar10",
    description="photos, 32x32 colour, 10 classes, 50,000 + 10,000 images",
    shape=(32, 32, 3),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2023, 0.1994, 0.2010),
    classes=CIFAR10_CLASSES,
    accepts="cifar10.npz, cifar-10-binary.tar.gz, cifar-10-python.tar.gz, cifar-10-batches-bin/ or "
    "cifar-10-batches-py/",
    places=places(10),
    read=read_place,
    files=remote("cifar-10-python.tar.gz", "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"),
    augment="crop_flip",
)


CIFAR100_CLASSES = tuple(
    """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
    lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
    pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark
    shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone
    television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
    """.split()  # noqa: SIM905 (a list literal would fill a hundred lines)
)

CIFAR100 = PublishedImages(
    name="cifar100",
    description="photos, 32x32 colour, 100 classes, 50,000 + 10,000 images",
    shape=(32, 32, 3),
    mean=(0.507, 0.487, 0.441),
    std=(0.267, 0.256, 0.276),
    classes=CIFAR100_CLASSES,
    accepts="cifar100.npz, cifar-100-binary.tar.gz, cifar-100-python.tar.gz, cifar-100-binary/ or cifar-100-python/",
    places=places(100),
    read=read_place,
    files=remote("cifar-100-python.tar.gz", "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"),
    augment="crop_flip",
)
