"""What a published data set is: facts, places where its files may lie, addresses to download from. One file a set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fednh.data.dataset import Arrays, Dataset
from fednh.data.sources import npz
from fednh.errors import UserError
from fednh.io.files import sha256


@dataclass(frozen=True)
class RemoteFile:
    """One published file; `name` is its place below the data folder."""

    name: str
    sha256: str
    addresses: tuple[str, ...]  # tried in this order


@dataclass(frozen=True)
class DataPath:
    """One path at which a set may lie, and how to read it there."""

    path: Path
    read: Callable[[], Arrays]
    present: Callable[[], bool]


@dataclass(frozen=True)
class Published:
    """All that is known about a set before its files are opened."""

    name: str
    description: str
    shape: tuple[int, int, int]  # of an image, (H, W, C)
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...] | None  # None: the files name them
    accepts: str  # the accepted files, for people
    places: Callable[
        [Path], list[DataPath]
    ]  # in a data folder, in the order in which they are looked at after NAME.npz
    files: tuple[RemoteFile, ...]  # what a download brings
    augment: str = "none"  # what the literature does to training images

    def find(self, folder: Path) -> DataPath | None:
        """Where the set lies, in the data folder or in a place that all users share."""
        try:
            if folder.exists() and not folder.is_dir():
                raise UserError(f"{folder} is a file, but the data folder must be a folder; set FEDNH_DATA to one")
            return next((place for place in self.all_places(folder) if place.present()), None)
        except OSError as error:
            words = f"the data folder {folder} cannot be read ({error.strerror}); check its permissions"
            raise UserError(words) from error

    def all_places(self, folder: Path) -> list[DataPath]:
        single = folder / f"{self.name}.npz"
        return [DataPath(single, partial(npz.read, single), single.is_file), *self.places(folder)]

    def load(self, folder: Path) -> Dataset:
        """The set, from wherever it lies."""
        place = self.find(folder)
        if place is None:
            raise UserError(self._not_found(folder))
        try:
            found = place.read()
        except UserError:
            raise
        except PermissionError as error:
            raise UserError(f"{error.filename} cannot be read ({error.strerror}); check its permissions") from error
        except Exception as error:  # damage shows in almost any exception
            raise UserError(self._damaged(place.path, error)) from error
        if found.x_train.shape[1:] != self.shape:
            raise UserError(
                f"{place.path} holds samples of shape {found.x_train.shape[1:]}, but {self.name} has {self.shape}; "
                f"use npz:PATH for data of your own"
            )
        classes = self.classes or found.classes
        if classes is None:
            raise UserError(
                f"{place.path} lacks the array 'classes' with the class names; remove it to have it made anew"
            )
        x_train, y_train, x_test, y_test, _ = found
        return Dataset(self.name, x_train, y_train, x_test, y_test, classes, self.mean, self.std, augment=self.augment)

    def _damaged(self, path: Path, error: Exception) -> str:
        """What is wrong with the files at `path` that could not be read, and what to do."""
        again = f"run `fednh data get {self.name}`"
        for file in self.files:
            name = Path(file.name).name
            found = path / name if path.is_dir() else path
            if found.name == name and found.is_file() and sha256(found) != file.sha256:
                return f"{found} is damaged (its SHA-256 is not the published one); move it away and {again}"
        reason = str(error).partition("\n")[0] or type(error).__name__
        return f"{path} cannot be read ({reason}); it is damaged or incomplete: move it away and {again}"

    def _not_found(self, folder: Path) -> str:
        state = "" if folder.exists() else ", which does not exist yet"
        return (
            f"{self.name} is not in the data folder {folder}{state}: run `fednh data get {self.name}`, or put there "
            f"{self.accepts}"
        )
