"""What became of every sample that a client holds out, after the last round: its class, and what the models predict.

A file a client, small: three numbers a sample, in the order of the held-out samples. Accuracy, precision, recall and
confusion of a site follow from it, and so does the comparison of two models on the same samples. It stays where the
samples are: in the run folder of a simulation, on a real site's own disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from fednh.errors import UserError
from fednh.storage.files import write_bytes

Classes = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Outcomes:
    """One client's held-out samples: the class of each, and the classes that its models take it for."""

    label: Classes  # (N,)
    personal: Classes  # (N,)
    shared: Classes | None = None  # (N,), by the global model; None: the method makes none

    def __len__(self) -> int:
        return len(self.label)


def write_outcomes(file: Path, found: Outcomes, sync: bool = True) -> None:
    columns = {"label": found.label, "personal": found.personal, "global": found.shared}
    held = {name: np.ascontiguousarray(column, np.int32) for name, column in columns.items() if column is not None}
    write_bytes(file, safetensors.numpy.save(held), sync)


def read_outcomes(file: Path) -> Outcomes:
    try:
        held = safetensors.numpy.load(file.read_bytes())
        found = Outcomes(held["label"], held["personal"], held.get("global"))
        if any(column.shape != found.label.shape or column.ndim != 1 for column in held.values()):
            raise ValueError("its columns differ in length")
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); restore it from a copy, or run again") from error
    return found
