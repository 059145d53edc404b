"""UCI Heart Disease: patients of four hospitals, which are its natural sites. Needs the extra `tables`.

Janosi, Steinbrunn, Pfisterer, Detrano (1989), UCI Machine Learning Repository, https://doi.org/10.24432/C52P4X,
licence CC BY 4.0. Four files of 14 values a line, without a heading: 13 features and the diagnosis `num`, 0 (no
narrowed vessel) to 4; the Hungarian file has 0 and 1 only. Missing values are "?". Seven features are categories by
UCI's description; `ca` counts vessels.

`heart_flamby` is the benchmark of FLamby (du Terrail et al., NeurIPS 2022, https://arxiv.org/abs/2210.04620): without
slope, ca and thal, and without the records that then lack a value, 740 are left, labelled num > 0. Each site holds out
34%, by scikit-learn's split with random_state = 43, stratified where each class has three records or more (Switzerland
has one without disease). Train and test: 199/104, 172/89, 30/16, 85/45. FLamby normalises at each site by its own
numbers; here all sites have one scaling (data/scaling.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fednh import extras
from fednh.data.published import PublishedTable, RemoteFile
from fednh.data.sources.csv import EXTRA, FROM_CSV
from fednh.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

HOST = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"
SITES = {  # site -> its file and the SHA-256 of that
    "cleveland": ("processed.cleveland.data", "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8"),
    "hungary": ("processed.hungarian.data", "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796"),
    "switzerland": ("processed.switzerland.data", "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314"),
    "va": ("processed.va.data", "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f"),
}
COLUMNS: dict[str, str | list[str]] = {
    "age": "number",
    "sex": ["0", "1"],  # female, male
    "cp": ["1", "2", "3", "4"],  # chest pain: typical angina, atypical angina, other, none
    "trestbps": "number",  # blood pressure at rest, mm Hg
    "chol": "number",  # cholesterol, mg/dl
    "fbs": ["0", "1"],  # fasting blood sugar above 120 mg/dl
    "restecg": ["0", "1", "2"],  # electrocardiogram at rest: normal, ST-T abnormal, hypertrophy
    "thalach": "number",  # highest heart rate
    "exang": ["0", "1"],  # angina by exercise
    "oldpeak": "number",  # ST depression by exercise
    "slope": ["1", "2", "3"],  # of the peak exercise ST segment: up, flat, down
    "ca": "number",  # major vessels coloured by fluoroscopy, 0 to 3
    "thal": ["3", "6", "7"],  # normal, fixed defect, reversible defect
}
FOLDERS = ("heart", "heart-disease", "heart+disease", "")  # below the data folder
FLAMBY_WITHOUT = ("slope", "ca", "thal")
FLAMBY_TEST, FLAMBY_SEED = 0.34, 43


def present(folder: Path) -> bool:
    """Whether any of the four files is there; `rows` then says which ones are not."""
    return any((folder / file).is_file() for file, _ in SITES.values())


def rows(folder: Path) -> dict[str, list[list[str]]]:
    """Site -> its records in the order of its file; a heading, which some copies have, is passed over."""
    if missing := [file for file, _ in SITES.values() if not (folder / file).is_file()]:
        raise DataError(f"{folder} lacks {', '.join(missing)}; put all four files there")
    records = {}
    for site, (file, _) in SITES.items():
        lines = [line.split(",") for line in (folder / file).read_text(encoding="utf-8").split()]
        records[site] = lines[1:] if lines and lines[0][0] == "age" else lines
        if wrong := [line for line in records[site] if len(line) != len(COLUMNS) + 1]:
            raise DataError(
                f"{folder / file} has a line of {len(wrong[0])} values instead of {len(COLUMNS) + 1}; move it away and "
                "run `fednh data get heart`"
            )
    return records


def read(folder: Path) -> pa.Table:
    """All records, with their sites."""
    sites = [(site, record) for site, records in rows(folder).items() for record in records]
    named = {name: [record[at] for _, record in sites] for at, name in enumerate([*COLUMNS, "num"])}
    return _table({**named, "site": [site for site, _ in sites]})


def read_flamby(folder: Path) -> pa.Table:
    """FLamby's records, with their sites and its split."""
    columns = [at for at, name in enumerate([*COLUMNS, "num"]) if name not in FLAMBY_WITHOUT]
    names = [*(name for name in COLUMNS if name not in FLAMBY_WITHOUT), "disease", "site", "split"]
    lines = []
    for site, records in rows(folder).items():
        kept = [[record[at] for at in columns] for record in records]
        kept = [record for record in kept if not {"?", ""} & set(record)]
        ill = [str(int(float(record[-1]) > 0)) for record in kept]
        split = flamby_split(ill)
        lines += [[*record[:-1], *rest] for record, *rest in zip(kept, ill, [site] * len(kept), split, strict=True)]
    return _table({name: [line[at] for line in lines] for at, name in enumerate(names)})


def flamby_split(labels: Sequence[str]) -> list[str]:
    """FLamby's part, train or test, of each record of one site."""
    from sklearn.model_selection import train_test_split

    counts = [labels.count(label) for label in set(labels)]
    _, test = train_test_split(
        np.arange(len(labels)),
        train_size=1 - FLAMBY_TEST,
        test_size=FLAMBY_TEST,
        random_state=FLAMBY_SEED,
        stratify=list(labels) if len(counts) > 1 and min(counts) > 2 else None,
    )
    return ["test" if at in set(test.tolist()) else "train" for at in range(len(labels))]


def _table(columns: dict[str, list[str]]) -> pa.Table:
    """A table of text, as that of a CSV file."""
    extras.need(EXTRA, "a table")
    import pyarrow as pa

    return pa.table(columns).replace_schema_metadata(FROM_CSV)


FACTS: dict[str, Any] = {
    "places": FOLDERS,
    "present": present,
    "accepts": "the four files processed.*.data of the UCI repository in heart/, heart-disease/, heart+disease/ or ./",
    "files": tuple(RemoteFile(f"heart/{file}", sha256, (HOST + file,)) for file, sha256 in SITES.values()),
    "sites": ", ".join(SITES),
}

HEART = PublishedTable(
    name="heart",
    description="heart disease of 920 patients, a table of 13 features, 5 grades",
    read=read,
    settings={
        "label": "num",
        "classes": list("01234"),
        "columns": COLUMNS,
        "missing": {"trestbps": ["0"], "chol": ["0"]},  # no living patient has these; Switzerland has no chol at all
    },
    **FACTS,
)

HEART_FLAMBY = PublishedTable(
    name="heart_flamby",
    description="the same as FLamby has it: 740 patients, 10 features, ill or not, its train and test records",
    read=read_flamby,
    settings={
        "label": "disease",
        "classes": list("01"),
        "columns": {
            name: kind if name in ("cp", "restecg") else "number"
            for name, kind in COLUMNS.items()
            if name not in FLAMBY_WITHOUT
        },
    },
    **FACTS,
)
