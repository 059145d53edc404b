"""The layout of a run folder: where everything in it lies, and its name. Nothing is read or written here.

config.toml        complete and re-runnable            metrics.jsonl   a line per round
environment.json   versions, commit, CPU, threads      summary.json    the final metrics
partition.json     how many samples of each class every client holds
fingerprint.json   what the run depends on             weights.safetensors   those that it started from, or weights.onnx
models/            global and personal, safetensors    checkpoints/, clients/   to go on from
kept/              a copy of the checkpoint of the best round so far, with stop_when
outcomes/          what the models make of every held-out sample, a file a client
failure.json       why the last attempt ended, if an error ended it            .lock   who works in it
federation.log, audit.jsonl   of a federation: what the server had to say, and who was sent what
tensorboard/, wandb/          of trackers, where they were asked for

These names are spelled here and nowhere else. Other modules ask: `RunLayout(folder).summary_file`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from fednh.errors import UserError

if TYPE_CHECKING:
    from fednh.config import Config

MODEL = "model.safetensors"  # in a folder that holds one personal model: what `fednh personalize` writes
_CLIENT = "client-{:06d}"
_ROUND = "round-{:06d}"


class FolderLayout:
    """A folder whose layout a class describes."""

    def __init__(self, path: Path):
        self.path = path


class Inside:
    """A place below the `path` of a FolderLayout; asked of the class, the place as seen from the folder."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, folder: FolderLayout | None, kind: type) -> Path:
        return Path(self.name) if folder is None else folder.path / self.name


class SharedModels(FolderLayout):
    """The models that clients share, in the folder of all models or of those of one network."""

    global_model = Inside("global.safetensors")
    broadcast_model = Inside("broadcast.safetensors")  # what a newcomer would be sent


class RunLayout(FolderLayout):
    """The places in one run folder."""

    config_file = Inside("config.toml")
    metrics_file = Inside("metrics.jsonl")
    summary_file = Inside("summary.json")
    environment_file = Inside("environment.json")
    partition_file = Inside("partition.json")
    fingerprint_file = Inside("fingerprint.json")
    weights_file = Inside("weights.safetensors")
    onnx_file = Inside("weights.onnx")
    failure_file = Inside("failure.json")
    lock_file = Inside(".lock")
    log_file = Inside("federation.log")
    audit_file = Inside("audit.jsonl")
    models = Inside("models")
    global_model = Inside(f"models/{SharedModels.global_model}")
    broadcast_model = Inside(f"models/{SharedModels.broadcast_model}")
    personal_models = Inside("models/personal")
    outcomes = Inside("outcomes")
    checkpoints = Inside("checkpoints")
    clients = Inside("clients")
    kept_rounds = Inside("kept")
    tensorboard = Inside("tensorboard")
    wandb = Inside("wandb")

    @property
    def started(self) -> bool:
        return self.config_file.exists()

    @property
    def finished(self) -> bool:
        """The summary is the last thing that a run writes."""
        return self.summary_file.exists()

    def kept_round(self, round_: int) -> RunLayout:
        """Where a copy of the checkpoint of a round lies, to which the run may go back."""
        return RunLayout(self.kept_rounds / _ROUND.format(round_))

    def shared(self, network: str = "") -> SharedModels:
        """Where the models that clients share lie; those of one network, where clients have different ones."""
        return SharedModels(self.models / _safe(network) if network else self.models)

    def shared_models(self) -> list[SharedModels]:
        """Those that are there."""
        folders = [self.models, *sorted(path.parent for path in self.models.glob(f"*/{SharedModels.broadcast_model}"))]
        models = map(SharedModels, folders)
        return [each for each in models if each.broadcast_model.exists() or each.global_model.exists()]

    def personal_model(self, client: int) -> Path:
        return _of_client(self.personal_models, client)

    def clients_with_models(self) -> dict[int, Path]:
        """The files of the personal models that are there, by client."""
        return _by_client(self.personal_models)

    def outcomes_of(self, client: int) -> Path:
        """What became of the client's held-out samples: see outcomes.py."""
        return _of_client(self.outcomes, client)

    def clients_with_outcomes(self) -> dict[int, Path]:
        return _by_client(self.outcomes)


class SweepLayout(FolderLayout):
    """The places in a sweep's folder: its runs, and what it notes about them while they are made."""

    notes = Inside(".sweep")
    lock_file = Inside(".sweep/lock")

    def config_file(self, run: str) -> Path:
        return self.notes / f"{run}.toml"

    def log_file(self, run: str) -> Path:
        return self.notes / f"{run}.log"

    def started(self) -> list[str]:
        """The runs that were ever started, by name."""
        return sorted(path.stem for path in self.notes.glob("*.toml"))


class AnswerLayout(FolderLayout):
    """The places in the folder of a recommendation."""

    runs = Inside("runs")
    models = Inside("models")
    answer_file = Inside("answer.json")

    @property
    def report_file(self) -> Path:
        return self.path / "report.html"

    def model_files(self, sites: Sequence[str]) -> dict[str, Path]:
        """Where the model of every site lies, by the site's name: a name that every file system accepts."""
        names = unlike([re.sub(r"[^\w.+=-]+", "_", site).strip("._") or "site" for site in sites], sites)
        return {site: self.models / f"{name}.safetensors" for site, name in zip(sites, names, strict=True)}


class CurveLayout(FolderLayout):
    """The places in the folder of a learning curve."""

    runs = Inside("runs")
    answer_file = Inside("learning-curve.json")
    figure = Inside("learning-curve.svg")
    picture = Inside("learning-curve.png")
    numbers = Inside("learning-curve.csv")


class CheckpointLayout(FolderLayout):
    """The places in a run's folder of checkpoints: see checkpoint.py."""

    journal_file = Inside("journal.jsonl")

    def manifest(self, round_: int) -> Path:
        return self.path / f"{_ROUND.format(round_)}.json"

    def manifests(self) -> list[Path]:
        """Newest first."""
        return sorted(self.path.glob("round-*.json"), reverse=True)

    def server_of(self, manifest: Path) -> Path:
        """The file of the server's state that belongs to a manifest."""
        return self.path / f"server.{manifest.stem}.safetensors"

    def servers(self) -> list[Path]:
        return sorted(self.path.glob("server.round-*.safetensors"))


def _of_client(folder: Path, client: int) -> Path:
    """A client's file in a folder that has one for each."""
    return folder / f"{_CLIENT.format(client)}.safetensors"


def _by_client(folder: Path) -> dict[int, Path]:
    """The files of such a folder, by client."""
    return {int(path.stem.partition("-")[2]): path for path in sorted(folder.glob("client-*.safetensors"))}


def client_state(folder: Path, client: int, round_: int) -> Path:
    """Where the state of a client after a round is, once it is on disk."""
    return folder / f"{_CLIENT.format(client)}.{_ROUND.format(round_)}.safetensors"


# --- names of run folders: the settings that matter at a glance, in characters that every file system accepts ---------

_LONGEST = 150


def run_name(config: Config, swept: Mapping[str, Any] | None = None) -> str:
    """<data>-<method>-<partition>[-<setting><value>...]-seed<n>; `swept` are settings that the rest does not show."""
    data = config.data.name
    stem = Path(data.rpartition(":")[2]).stem if ":" in data else data
    settings = swept or {}
    words = [f"{_short(key, settings)}{_value(value)}" for key, value in settings.items()]
    return _safe("-".join([stem, config.method["name"], config.partition.kind.slug(), *words, f"seed{config.seed}"]))


def new_folder(config: Config) -> Path:
    """runs/<name>, with a number behind it if that is taken."""
    name = run_name(config)
    for number in range(1, 100_000):
        path = Path("runs") / (name if number == 1 else f"{name}-{number}")
        if not path.exists():
            return path
    raise UserError("runs/ is full; choose a folder with out = ...")


def unlike(names: Sequence[str], meanings: Sequence[str]) -> list[str]:
    """The names; where different meanings share a name, a checksum of the meaning is appended."""
    return [
        f"{name}-{crc32(meaning.encode()):08x}" if names.count(name) > 1 else name
        for name, meaning in zip(names, meanings, strict=True)
    ]


def _short(key: str, keys: Mapping[str, Any]) -> str:
    """The last part of a dotted key, unless another key ends the same."""
    last = key.rpartition(".")[2]
    return key if sum(other.rpartition(".")[2] == last for other in keys) > 1 else last


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return f"={str(value).lower()}"
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return f"={value}"


def _safe(name: str) -> str:
    safe = re.sub(r"[^A-Za-z0-9._+=-]+", "_", name).strip("._") or "run"
    return safe if len(safe) <= _LONGEST else f"{safe[:_LONGEST]}-{crc32(name.encode()):08x}"
