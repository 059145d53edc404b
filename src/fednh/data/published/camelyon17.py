"""Camelyon17 as WILDS cuts it: patches of lymph node slides from five hospitals, which are its natural sites.

Bandi et al., "From Detection of Individual Metastases to Classification of Lymph Node Status at the Patient Level",
IEEE TMI 2018; Koh et al., "WILDS", ICML 2021, https://wilds.stanford.edu, CC0. 455,954 patches of 96x96 pixels; a patch
has a tumour or not. `metadata.csv` names patient, node, place, label and hospital of each. WILDS' own split keeps
hospitals apart; here all patches are read, and each hospital holds out some of its own.

Patches of one slide are much alike, so those of a slide stay together (`data.group`: another column of metadata.csv,
such as patient). Images are brought to 32x32 unless data.size says otherwise: at 96x96 they take 12.6 GB of memory.
"""

from __future__ import annotations

import csv
from pathlib import Path

from fednh.data.dataset import Dataset
from fednh.data.published import PublishedSites
from fednh.data.sources.folder import Folder, Listed, decoded_images
from fednh.errors import DataError

TABLE = "metadata.csv"
FOLDERS = ("camelyon17", "camelyon17_v1.0", "wilds/camelyon17_v1.0")
CLASSES = ("normal", "tumor")  # labels 0 and 1
SLIDE = "slide"
COLUMNS = ("patient", "node", "x_coord", "y_coord", "tumor", "center", SLIDE)

Rows = list[dict[str, str]]  # of metadata.csv


def read(folder: Path) -> Rows:
    """The lines of metadata.csv, as text: patients are numbered 004, not 4."""
    with (folder / TABLE).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or (missing := [name for name in COLUMNS if name not in rows[0]]):
        raise DataError(f"{folder / TABLE} lacks {', '.join(missing) if rows else 'any row'}; unpack the archive again")
    return rows


def dataset(name: str, where: str, rows: Rows, options: Folder) -> Dataset:
    """The patches as a data set, each hospital a site."""
    column = options.group or SLIDE
    if column not in rows[0]:
        raise DataError(f"data.group = {column!r} is no column of {TABLE}; choose from {', '.join(rows[0])}")
    wanted = options.chosen_sites(sorted({row["center"] for row in rows}), name)
    kept = [row for row in rows if row["center"] in wanted]
    listed = [_listed(Path(where), row) for row in kept]
    images = decoded_images(Path(where), listed, options)
    labels, sites = [image.label for image in listed], [image.site for image in listed]
    groups = [f"{row['center']}/{row[column]}" for row in kept]
    classes = options.classes or CLASSES
    return options.labelled(name, where, images, labels, sites, [False] * len(listed), classes, groups)


def _listed(root: Path, row: dict[str, str]) -> Listed:
    slide = f"patient_{row['patient']}_node_{row['node']}"
    file = f"patches/{slide}/patch_{slide}_x_{row['x_coord']}_y_{row['y_coord']}.png"
    return Listed(root / file, file, CLASSES[int(row["tumor"])], row["center"], False)


CAMELYON17 = PublishedSites(
    name="camelyon17",
    description="patches of lymph nodes from five hospitals, 96x96 colour, tumour or not, 455,954 images",
    accepts=f"the unpacked archive of WILDS ({TABLE} and patches/) in {', '.join(FOLDERS)}",
    places=FOLDERS,
    read=read,
    present=lambda folder: (folder / TABLE).is_file(),
    files=(),
    by_hand="WILDS publishes its archive of 10.7 GB without a checksum: `pip install wilds` and `wilds.get_dataset("
    "'camelyon17', root_dir=..., download=True)` fetch and unpack it",
    sites="five hospitals, 0 to 4",
    source=Folder,
    dataset=dataset,
)
