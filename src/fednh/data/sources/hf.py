"""Reads Hugging Face data sets: by name, saved with save_to_disk, or a folder (or file) of Parquet.

With a local path nothing is asked of the network.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fednh import extras
from fednh.data.dataset import Dataset
from fednh.data.sources import columns
from fednh.data.sources.csv import joined
from fednh.data.sources.folder import walk
from fednh.data.sources.images import ImageFile, Pictures
from fednh.data.sources.table import Tabular, find_column, from_table
from fednh.errors import DataError, UserError
from fednh.io.files import expanded


@dataclass(frozen=True)
class HuggingFace(Tabular, Pictures):
    prefix = "hf"
    address = "NAME"
    example = "saved/folder"
    help = "Hugging Face, by name or a local path"
    extra = "hf"

    def read(self, name: str, address: str) -> Dataset:
        """The samples, of an image column or of columns of numbers and text; the splits train and test are used."""
        path = expanded(address)
        local = path.exists()
        if not local and address.startswith(("/", ".", "~")):
            raise DataError(
                f"{path} does not exist; give a folder written by save_to_disk, a folder of Parquet, or a name"
            )
        if local:
            os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the library is imported
            os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
        extras.need("hf", "hf:")
        import datasets

        datasets.disable_progress_bars()
        with TemporaryDirectory() as scratch:
            try:
                splits = _local(datasets, path, scratch) if local else datasets.load_dataset(address)
                return _assembled(datasets, name, splits, address, self)
            except UserError:
                raise
            except Exception as error:  # the library raises many kinds, also for what is not there
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise DataError(f"{name} cannot be loaded: {reason}") from error

    @classmethod
    def file(cls, address: str) -> Path | None:
        return None

    @classmethod
    def absolute(cls, address: str) -> str:
        path = expanded(address)
        return str(path.absolute()) if path.exists() else address


def _local(datasets: Any, path: Path, scratch: str) -> dict[str, Any]:
    if (path / "dataset_dict.json").exists():
        return dict(datasets.load_from_disk(str(path)))
    if (path / "state.json").exists():
        return {"train": datasets.load_from_disk(str(path))}
    files = [path] if path.suffix == ".parquet" else [file for file in walk(path) if file.suffix == ".parquet"]
    if not files:
        raise DataError(f"{path} holds neither a saved data set nor Parquet files")
    groups: dict[str, list[str]] = {}
    for file in files:
        split = next((s for s in ("test", "valid", "train") if file.name.startswith(s)), "train")
        groups.setdefault(split, []).append(str(file))
    return {s: datasets.Dataset.from_parquet(names, cache_dir=scratch) for s, names in groups.items()}


def _assembled(datasets: Any, name: str, splits: Any, where: str, options: HuggingFace) -> Dataset:
    if "train" not in splits:
        raise DataError(f"{where} has the splits {', '.join(splits)}, but no train")
    used = {split: splits[split] for split in ("train", "test") if split in splits}
    features = used["train"].features
    pictures = [column for column, kind in features.items() if isinstance(kind, datasets.Image)]
    label = find_column(where, list(features), options.label, "label", needed=True)
    names = features[label].names if isinstance(features[label], datasets.ClassLabel) else None
    if not pictures:
        return _tabular(name, used, label, names, where, options)
    group = find_column(where, list(features), options.group, "group", needed=False) if options.group else ""
    site = find_column(where, list(features), options.site, "site", needed=False)
    read: list[tuple[ImageFile, str, str | None, bool, str]] = []  # of every row: image, class, site, is test, group
    for split, rows in used.items():
        for row in rows.cast_column(pictures[0], datasets.Image(decode=False)):
            image = row[pictures[0]]
            source = image["bytes"] if image["bytes"] is not None else Path(image["path"])
            class_name = names[row[label]] if names else columns.spelling(row[label])
            site_group = [columns.spelling(row[column]) if column else None for column in (site, group)]
            read.append((source, class_name, site_group[0], split == "test", site_group[1] or ""))
    if options.chooses_sites():
        read = list(compress(read, options.chosen_rows([str(row[2]) for row in read] if site else [], where)))
    images, labels, sites, test, groups = map(list, zip(*read, strict=True))
    decoded = options.decoded(images, [f"image {k}" for k in range(len(images))], where)
    agreed = options.classes or tuple(names or ())
    # A test set here is everybody's, also where its rows name sites: runs that began so can be resumed.
    return replace(
        options.labelled(name, where, decoded, labels, sites, test, agreed, groups if group else []), site_test=None
    )


def _tabular(
    name: str, used: dict[str, Any], label: str, names: list[str] | None, where: str, options: HuggingFace
) -> Dataset:
    import pyarrow as pa

    tables = []
    for split, rows in used.items():
        table = pa.table(rows.with_format("arrow")[:])
        if names:
            words = pa.array([names[k] for k in table.column(label).to_pylist()], pa.string())
            table = table.set_column(table.column_names.index(label), label, words)
        if "split" not in table.column_names:
            table = table.append_column("split", pa.array([split] * len(table), pa.string()))
        tables.append(table)
    return from_table(name, joined(tables, where), where, options)
