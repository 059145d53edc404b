"""What a source of data is: a prefix, settings, and a way to read samples. One file a kind beside this one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray

from fednh.data.dataset import Dataset, Inputs
from fednh.data.sources.settings import Classes, Group, Names, TestShare
from fednh.errors import UserError
from fednh.storage.files import expanded


@dataclass(frozen=True)
class Source(ABC):
    """A kind of user data, `prefix:address`. Its fields are the settings below [data] that it uses, with ranges."""

    prefix: ClassVar[str]
    address: ClassVar[str]  # what follows the colon, in a word for people
    example: ClassVar[str]  # such an address
    help: ClassVar[str]  # one line for people
    extra: ClassVar[str | None] = None  # of this package, that it needs
    suffixes: ClassVar[tuple[str, ...]] = ()  # of files that are of this kind where no prefix is given
    named: ClassVar[bool] = False  # its labels are names, so they can be matched with a model's classes
    runs_code: ClassVar[bool] = False  # the address decides which code is run on this machine
    chooses: ClassVar[bool] = False  # `read` leaves out what data.sites and data.without do; else it is done afterwards

    classes: Classes = None
    test_share: TestShare = 0.0
    sites: Names = None
    without: Names = None
    group: Group = None

    @abstractmethod
    def read(self, name: str, address: str) -> Dataset:
        """The samples at an address; `name` is all of it, with the prefix, and the name of the data set."""

    def inputs(self, name: str, address: str, preprocessing: Mapping[str, Any]) -> Inputs:
        """The samples, whatever their labels, as inputs for a model with this preprocessing."""
        data = self.read(name, address)
        return data.x_test if len(data.x_test) else data.x_train

    @classmethod
    def applicable(cls, address: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Those settings that a run was `known` by which hold for this address, too, beside those `given` for it."""
        return dict(known)

    def unlabelled(
        self, path: Path, shape: tuple[int, ...], preprocessing: Mapping[str, Any]
    ) -> Iterator[NDArray[Any]]:
        """Inputs in a file, in their order, for a model that takes samples of this shape and preprocessing."""
        raise UserError(f"{path}: inputs for predictions are not read from {self.prefix}:")

    @classmethod
    def file(cls, address: str) -> Path | None:
        """The file or folder that is read; None where the address is no path."""
        return expanded(address)

    @classmethod
    def absolute(cls, address: str) -> str:
        """The address as it holds from any folder."""
        file = cls.file(address)
        return address if file is None else str(file.absolute())

    @classmethod
    def form(cls) -> str:
        return f"{cls.prefix}:{cls.address}"
