"""From a name to samples. BUILTIN and PUBLISHED sets have names; SOURCES are the kinds of data of one's own.

load("digits", data_folder())
load("cifar10", data_folder("~/data"))
load("folder:photos", data_folder(), {"size": [64, 64]})

Settings, their ranges, the command line, listings, messages, sites' policies and tests derive from SOURCES. To add a
kind: a file with a frozen dataclass beside this one, and a line in the registry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fednh.data import declared_settings
from fednh.data.dataset import Dataset
from fednh.data.inspection import vector_identifiers
from fednh.data.published import DownloadProgress, PublishedImages, PublishedSites, PublishedTable
from fednh.data.published import download as download_files
from fednh.data.published.camelyon17 import CAMELYON17
from fednh.data.published.cifar import CIFAR10, CIFAR100
from fednh.data.published.femnist import FEMNIST
from fednh.data.published.har import HAR
from fednh.data.published.heart import HEART, HEART_FLAMBY
from fednh.data.published.mnist import FASHION_MNIST, MNIST
from fednh.data.published.tinyimagenet import TINYIMAGENET
from fednh.data.sources import AGREED, Source
from fednh.data.sources.builtin import BUILTIN
from fednh.data.sources.columns import alike
from fednh.data.sources.folder import Folder
from fednh.data.sources.hf import HuggingFace
from fednh.data.sources.memory import Memory, Python
from fednh.data.sources.npz import Npz
from fednh.data.sources.table import Csv, Parquet, Table
from fednh.data.splits import merged, with_test_set
from fednh.errors import DataError, did_you_mean
from fednh.io.files import expanded

S = TypeVar("S", bound=Source)

PUBLISHED: dict[str, PublishedImages | PublishedTable | PublishedSites] = {
    each.name: each
    for each in (
        *(CIFAR10, CIFAR100, TINYIMAGENET, FASHION_MNIST, MNIST),
        *(HEART, HEART_FLAMBY, HAR, FEMNIST, CAMELYON17),
    )
}
SOURCES: dict[str, type[Source]] = {
    kind.prefix: kind for kind in (Npz, Folder, Csv, Parquet, HuggingFace, Python, Memory)
}


class Available(NamedTuple):
    """One line of `fednh datasets`."""

    name: str
    description: str
    present: bool
    where: str  # where it was found, or where it would be looked for
    sites: str = ""  # its natural sites


def load(name: str, folder: Path, settings: Mapping[str, Any] | None = None) -> Dataset:
    """The data set of that name; `folder` is where published ones are looked for, `settings` are those below [data]."""
    given, published, source_kind = settings or {}, PUBLISHED.get(name), find(name)
    source: Source
    if isinstance(published, PublishedTable):
        usual = {key: value for key, value in published.settings.items() if given.get(key) is None}
        source = table = build(Csv, {**given, **usual})
        data = published.load(folder, table)
    elif isinstance(published, PublishedSites):
        source = build(published.source, given)
        data = published.load(folder, source)
        source = replace(source, classes=list(data.classes))  # the published ones, however alike: A and a are two
    elif name in BUILTIN or published is not None:
        _names_no_sites(name, given)
        data = BUILTIN[name].make() if published is None else published.load(folder)
        return merged(data) if given.get("merge_test") else data
    elif source_kind is not None:
        kind, address = source_kind
        source = build(kind, given)
        data = source.read(name, address)
        data = data if kind.chooses else source.restricted(data, name)
    else:
        known = (*BUILTIN, *PUBLISHED, *(kind.form() for kind in SOURCES.values()))
        raise DataError(f"there is no data set {name!r}{did_you_mean(name, known)}")
    return _finished(data, source, name, given)


def load_texts(name: str, column: str, settings: Mapping[str, Any]) -> tuple[Dataset, list[str]]:
    """The texts of a table's column, and a data set of which the only feature is the number of a sample's text."""
    source_kind = find(name)
    if source_kind is None or not issubclass(source_kind[0], Table):
        raise DataError(f"{name}: texts are read from tables: csv:FILE or parquet:FILE")
    source = build(source_kind[0], settings)
    rows, texts = source.texts(name, source_kind[1], column)
    return _finished(rows, source, name, settings), texts


def taken(data: Any, settings: Mapping[str, Any]) -> Dataset:
    """What a program gives instead of a name, read by the settings below [data]."""
    source = build(Memory, settings)
    return _finished(source.taken(data), source, "data", settings)


def _finished(data: Dataset, source: Source, where: str, settings: Mapping[str, Any]) -> Dataset:
    """What was read, with the test part that the settings leave it, and with warnings of what nobody can want."""
    if source.group and data.group_train is None:
        raise DataError(f"data.group = {source.group!r}, but {where} does not say which samples belong together")
    same_names = [*([] if source.classes else alike(data.classes, "classes")), *alike(data.sites, "sites")]
    warnings = [f"{where}: {words}" for words in same_names]
    if data.preprocessing["kind"] == "vector":
        warnings += vector_identifiers(data.x_train, where, data.site_train)
    data = with_test_set(replace(data, warnings=(*data.warnings, *warnings)), source.test_share)
    return merged(data, source.test_share) if settings.get("merge_test") else data


def _names_no_sites(name: str, settings: Mapping[str, Any]) -> None:
    """Refuse settings that a data set by name cannot heed: what they should keep apart would be mixed in silence."""
    if settings.get("group"):
        raise DataError(f"data.group = {settings['group']!r}, but {name} does not say which samples belong together")
    for key in ("sites", "without"):
        if settings.get(key) is not None:
            raise DataError(f"data.{key} chooses sites, but {name} does not say which site a sample comes from")


def find(name: str) -> tuple[type[Source], str] | None:
    """The kind of source that a name begins with, and the address behind it; None for a name without a kind."""
    prefix, colon, address = name.partition(":")
    kind = SOURCES.get(prefix) if colon else None
    if kind is not None and not address:
        raise DataError(f"'{prefix}:' lacks what comes behind it; write for example {prefix}:{kind.example}")
    return None if kind is None else (kind, address)


def build(kind: type[S], settings: Mapping[str, Any]) -> S:
    """A source with those of the settings that it uses."""
    return kind(**{field.name: settings[field.name] for field in fields(kind) if field.name in settings})


def settings() -> dict[str, tuple[Any, Any]]:
    """The settings of all kinds: name -> type with its range, and default."""
    return declared_settings(SOURCES.values(), "source")


def agreed() -> tuple[str, ...]:
    """The settings that a federation's config decides for all sites."""
    return tuple(name for name, (hint, _) in settings().items() if AGREED in getattr(hint, "__metadata__", ()))


def uses(kind: type[Source], setting: str) -> bool:
    """Whether a kind of source uses data.`setting`."""
    return setting in {field.name for field in fields(kind)}


def of_file(path: Path) -> type[Source] | None:
    """The kind that a file without a prefix is of, by its suffix."""
    return next((kind for kind in SOURCES.values() if path.suffix.lower() in kind.suffixes), None)


def with_prefix(text: str) -> str:
    """A source; a bare path stands for the kind of its file, or for a folder of images."""
    if ":" in text:
        return text
    path = expanded(text)
    kind = of_file(path) or (Folder if path.is_dir() else None)
    return text if kind is None else f"{kind.prefix}:{path.absolute()}"


def absolute(name: str) -> str:
    """The name as it holds from any folder."""
    prefix, _, address = name.partition(":")
    return f"{prefix}:{SOURCES[prefix].absolute(address)}" if prefix in SOURCES and address else name


def file_of(name: str, folder: Path) -> Path | None:
    """The file or folder that a data set is read from, where there is one."""
    if name in PUBLISHED:
        return PUBLISHED[name].find(folder)
    source_kind = find(name)
    return None if source_kind is None else source_kind[0].file(source_kind[1])


def available(folder: Path) -> list[Available]:
    """Every data set that has a name, and whether it could be loaded now."""
    lines = [Available(name, each.description, True, "built in") for name, each in BUILTIN.items()]
    for name, published in PUBLISHED.items():
        place = published.find(folder)
        where = str(place) if place else f"{folder}: {published.accepts}"
        lines.append(Available(name, published.description, place is not None, where, published.sites))
    return lines


def download(name: str, folder: Path, progress: DownloadProgress | None = None) -> str:
    """Put the files of a published data set below `folder`; returns a sentence that says what was done."""
    if name in BUILTIN:
        return f"{name} is built in: there is nothing to download"
    if find(name):
        raise DataError(f"{name} is data of your own: there is nothing to download")
    if name not in PUBLISHED:
        raise DataError(f"there is no data set {name!r} to download{did_you_mean(name, PUBLISHED)}")
    published = PUBLISHED[name]
    if not published.files:
        raise DataError(f"{name} cannot be downloaded here: {published.by_hand}; put there {published.accepts}")
    return download_files(name, published.files, folder, progress)


def listing() -> list[Available]:
    """One line for each kind of data of one's own."""
    lines = []
    for kind in SOURCES.values():
        more = f" (extra: {kind.extra})" if kind.extra else ""
        takes = ", ".join(field.name for field in fields(kind))
        where = f"your own, for example {kind.prefix}:{kind.example}; settings below data: {takes}"
        lines.append(Available(kind.form(), kind.help + more, True, where))
    return lines
