"""What a run depends on, in fingerprint.json: written when it begins, compared when it is resumed.

settings   every setting by dotted name
data       what was read (data/dataset.py), and from which file; absent where sites have data of their own
weights    the file of pretrained weights (`model.weights`, `onnx:FILE`): path, size and SHA-256; the folder has a copy
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fednh.config import Config, flat
from fednh.data import dataset
from fednh.errors import UserError
from fednh.io.files import sha256, write_bytes, write_json
from fednh.models.backbone import ONNX
from fednh.runs.layout import RunLayout

FORMAT = 1
NOT_COMPARED = {  # settings that say where things lie, how the work is done or when it ends: no round depends on them
    "rounds",
    *("workers", "store.memory", "checkpoint.every", "on_error"),
    *("data.name", "data.dir", "model.weights"),  # files may move: their contents are compared
    *("federation.folder", "federation.timeout", "federation.slack", "federation.late"),
    "ray",  # the whole section
}


def of_settings(config: Config) -> dict[str, Any]:
    """Every setting that is set, by dotted name."""
    return {key: value for key, value in flat(config.model_dump(mode="json")).items() if value is not None}


def write(run: Path, config: Config, data: Mapping[str, Any] | None) -> None:
    """Record what the run in this folder depends on; a copy of its pretrained weights is for those who join later."""
    record: dict[str, Any] = {"format": FORMAT, "settings": of_settings(config)}
    if data is not None:
        record["data"] = dict(data)
    if (path := config.model.weights_file) is not None:
        content = Path(path).read_bytes()
        checksum = write_bytes(_copy(run, config), content)
        record["weights"] = {"path": path, "bytes": len(content), "sha256": checksum}
    write_json(RunLayout(run).fingerprint_file, record)


def rewrite_settings(run: Path, config: Config) -> None:
    """Record other settings of a run that has begun."""
    write_json(RunLayout(run).fingerprint_file, {"format": FORMAT, **required(run), "settings": of_settings(config)})


def read(run: Path) -> dict[str, Any] | None:
    """What a run recorded; None if its folder has no fingerprint.json."""
    file = RunLayout(run).fingerprint_file
    try:
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if record["format"] > FORMAT:
            raise UserError(f"{file} has the format {record['format']}, newer than this version's; upgrade fednh")
        return {"settings": {}, **record}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read ({error}); restore it from a copy, or start another run") from error


def required(run: Path) -> dict[str, Any]:
    """What a run recorded, for a command that cannot do without it."""
    if (record := read(run)) is None:
        name = RunLayout(run).fingerprint_file.name
        raise UserError(
            f"{run} has no {name}, which says what the run began with; restore it from a copy, or start another run"
        )
    return record


def check_settings(run: Path, config: Config) -> None:
    """Refuse a run whose own config.toml, read as `config`, was edited after it began."""
    recorded, words = read(run), "{key} was {was} and is {now}"
    if recorded is None:
        return
    before, now = recorded["settings"], of_settings(config)
    came_or_went = ("model.weights" in before) != ("model.weights" in now)
    free = NOT_COMPARED - {"model.weights"} if came_or_went else NOT_COMPARED
    if changes := settings_changed(before, now, words, free):
        file = RunLayout(run).config_file
        raise UserError(f"{file} was edited after the run began: {changes}; put it back, or start another run")


def check(run: Path, config: Config, data: Mapping[str, Any] | None) -> None:
    """Refuse data or pretrained weights that are not those that the run in this folder began with, if it has begun."""
    if not RunLayout(run).started:
        return
    if data is not None:
        check_data(run, data)
    recorded = required(run).get("weights")
    if config.model.weights_file is not None and recorded is not None:
        check_weights(Path(config.model.weights_file), _copy(run, config), recorded)


def check_data(run: Path, data: Mapping[str, Any]) -> None:
    """Refuse data that are not those that the run began with."""
    recorded = required(run).get("data")
    if recorded is not None and (changes := dataset.changed(recorded, data)):
        raise UserError(
            f"the data are not those that the run in {run} began with: {changes}; restore them, or start another run"
        )


def _copy(run: Path, config: Config) -> Path:
    """Where a run has its copy of the weights."""
    return RunLayout(run).onnx_file if config.model.network.startswith(ONNX) else RunLayout(run).weights_file


def check_weights(file: Path, copy: Path, recorded: Mapping[str, Any]) -> None:
    """Refuse a file of weights that is not the one that a run began with, which has the `copy` in its folder."""
    if not file.exists() or sha256(file) != recorded["sha256"]:
        raise UserError(
            f"the weights in {file} are not those that the run in {copy.parent} began with; restore them from "
            f"{copy if file.name != copy.name else recorded['path']}, or start another run"
        )


def changed_since(file: Path, data: Mapping[str, Any], anew: bool) -> str | None:
    """How data differ from those recorded in `file`, or None; from now on they are the ones recorded.

    With `anew` a run begins: whatever was recorded for one before it does not count.
    """
    before = None
    if not anew and file.exists():
        with suppress(ValueError):  # a damaged record is ignored
            before = json.loads(file.read_text(encoding="utf-8"))
    changes = None if before is None else dataset.changed(before, data)
    if before is None or changes:
        write_json(file, dict(data))
    return changes


def weights_of(run: Path, config: Config) -> Path | None:
    """The pretrained weights that a run started from: its own copy, or the file that its config names; None if none."""
    if config.model.weights is None:
        return None
    copy = _copy(run, config)
    file = copy if copy.exists() else Path(config.model.weights)
    check_weights(file, copy, required(run)["weights"])
    return file


def settings_changed(
    before: Mapping[str, Any], now: Mapping[str, Any], words: str, free: Iterable[str] = ()
) -> str | None:
    """Which settings differ, each in these words with {key}, {was} and {now}; None if none does.

    A setting that was added to fednh after `before` was written had its default; one that is gone since, and was empty,
    changed nothing.
    """
    defaults, changes = of_settings(Config()), []
    for key in sorted(before.keys() | now.keys()):
        if key in free or key.partition(".")[0] in free:
            continue
        if key not in before and key.startswith("method.") and key != "method.name":
            continue
        was, here = before.get(key, defaults.get(key)), now.get(key)
        if key == "model.name" and str(was).startswith(ONNX) and str(here).startswith(ONNX):
            continue  # a file may move: its content is compared
        gone = key not in now and key not in defaults and not key.startswith("method.")
        if was != here and (was or not gone):
            changes.append(words.format(key=key, was=_value(was), now=_value(here)))
    more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
    return ", ".join(changes[:3]) + more if changes else None


def _value(value: Any) -> str:
    return "not set" if value is None else repr(value)
