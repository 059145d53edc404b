"""Audit logs as text: whether their chains are intact, who asked, what left, what was refused.

Logs are searched for in a site's folder (beside its site.toml), in a state folder, in a run folder, and in a
federation's folder, where the server's log is compared with those of the sites.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fednh.errors import UserError
from fednh.flower.audit import Head, Log, read
from fednh.flower.layout import FederationFolder, SiteFolder, StateFolder
from fednh.storage.files import expanded
from fednh.storage.layout import RunLayout

MOST = 20  # refusals that are shown

RECORDS = {  # what a message's records contain, for readers
    "said": "who it is, and the form of its data or what went wrong",
    "facts": "round, number, training samples processed, loss",
    "upload": "the method's upload",
    "figures": "accuracies and the number of samples",
    "config": "settings and the agreed form of data",
    "order": "what to do",
    "down": "the global model",
    "global": "the rest of the global model",
}


def find(folder: Path) -> list[Path]:
    """The logs that belong to a folder, the server's first."""
    if folder.is_file():
        return [folder]
    fed, sites = FederationFolder(folder), [SiteFolder(folder)] if SiteFolder(folder).node_config.is_file() else []
    found = [RunLayout(folder).audit_file, *StateFolder(folder).audit_files()]
    if fed.app_file.is_file():
        from fednh.flower.deploy import scaffold

        config, here = scaffold.read(folder)
        found.append(RunLayout(Path(str(config.federation.folder))).audit_file)
        sites += [*here, *fed.trial_sites()]
    for site in sites:
        found += _state(site).audit_files()
    found = [path for path in dict.fromkeys(found) if path.is_file()]
    if not found:
        raise UserError(
            f"{folder} has no audit log: give a site's folder (with {SiteFolder.node_config}), a federation's folder, "
            "or a run folder of a federation that has begun"
        )
    return found


def _state(site: SiteFolder) -> StateFolder:
    """Where a site keeps its state, as its site.toml says."""
    file = site.node_config
    try:
        return StateFolder(site.path / expanded(str(tomllib.loads(file.read_text(encoding="utf-8"))["state"])))
    except KeyError:
        raise UserError(f"{file} does not say where the site keeps its state; add state = FOLDER") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as TOML: {error}") from error


def check(paths: Iterable[Path], known: Sequence[Head] = ()) -> list[tuple[Log, str | None]]:
    """Each log with its problem, or None.

    A site's log must have the lines whose hashes the server recorded; every log must have the lines in `known`.
    """
    try:
        logs = [read(path) for path in paths]
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror})") from error
    theirs = [row for log in logs for row in log.lines if "head" in row]
    return [(log, log.problem or log.lacks([*known, *_known_of(log, theirs)])) for log in logs]


def _known_of(log: Log, rows: Sequence[dict[str, Any]]) -> list[Head]:
    """The lines of a log whose hashes the server recorded; for a trial, only those of runs that the log contains."""
    runs = {row.get("run") for row in log.lines}
    trial = str(FederationFolder.trial) in log.path.parts
    mine = [row for row in rows if row["site"] == owner(log) and (not trial or row.get("run") in runs)]
    return [head for row in mine if (head := Head.read(row["head"]))]


def owner(log: Log) -> str | None:
    """The site that wrote the log; None: the server did."""
    return next((str(row["own"]) for row in log.lines if "own" in row), None)


def tell(log: Log, problem: str | None) -> Iterator[str]:
    """The report on one log, line by line."""
    site, count = owner(log), len(log.lines)
    yield f"{log.path}: the log of {'the server' if site is None else f'site {site}'}"
    if problem:
        yield f"  BROKEN: {problem}"
        yield f"  what follows is from the {count} lines whose chain holds"
    else:
        yield f"  the chain of its {count} lines holds; newest: {log.head}"
    for row in log.lines:
        if row["event"] == "torn":
            yield f"  line {row['line']}, {_when(row)}: a line before it was cut short ({row.get('bytes')} bytes)"
    yield from (_told_by_server(log.lines) if site is None else _told_by_site(log.lines))
    yield from _refused([row for row in log.lines if row["event"] == "refused"])


def _told_by_site(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    for row in lines:
        if row["event"] == "joined":
            yield f"  {_when(row)}: joined {row.get('federation')} as {row['own']}; sent {_greeting(row)}"
    if asked := [row for row in lines if row["event"] == "asked"]:
        kinds = Counter(str(row.get("kind")) for row in asked)
        yield f"  was asked {len(asked)} times ({', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))})"
        for by, number in sorted(Counter(str(row.get("by")) for row in asked).items()):
            yield f"    {number} times by {by}"
    left = [row for row in lines if row["event"] in ("joined", "left")]
    if not left:
        yield "  nothing has left this site"
        return
    yield f"  {len(left)} answers have left this site, {_when(left[0])} to {_when(left[-1])}:"
    yield from _sums(left)


def _told_by_server(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    for row in lines:
        if row["event"] == "joined":
            key = row.get("key") or "unknown"
            yield f"  {_when(row)}: {row.get('site')} joined (node {row.get('node')}, key {key})"
    for site in sorted({str(row["site"]) for row in lines if "head" in row}):
        newest = [row["head"] for row in lines if row.get("site") == site and "head" in row][-1]
        yield f"  newest line of the log of {site} that is known here: {newest}"
    if sent := [row for row in lines if row["event"] == "asked"]:
        yield f"  the server asked its sites {len(sent)} times, {_when(sent[0])} to {_when(sent[-1])}:"
        yield from _sums(sent)
    if took := [row for row in lines if row["event"] == "took"]:
        yield f"  {len(took)} answers were accepted, {_when(took[0])} to {_when(took[-1])}:"
        yield from _sums(took)


def _sums(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """For each kind of record: how often it was sent, in which rounds, its bytes, and its names with their shapes."""
    by_name: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for row in rows:
        for record in row.get("sent", []):
            by_name.setdefault(str(record["record"]), []).append((row, record))
    for name, pairs in sorted(by_name.items()):
        rounds = _rounds({row["round"] for row, _ in pairs if row.get("round")})
        size = sum(record["bytes"] for _, record in pairs)
        yield f"    {name} ({RECORDS.get(name, 'unknown')}): {len(pairs)} times{rounds}, {size:,} bytes"
        names = {f"{key} {_shape(shape)}".strip() for _, record in pairs for key, shape in record["names"].items()}
        yield f"      {', '.join(sorted(names))}"


def _refused(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not rows:
        return
    yield f"  {len(rows)} refused:"
    for row in rows[-MOST:]:
        who = row.get("site") or row.get("says") or row.get("by")
        yield f"    {_when(row)}: {f'{who}: ' if who else ''}{row.get('why')}"


def _greeting(row: dict[str, Any]) -> str:
    """What the site disclosed when it joined."""
    told = row.get("told", {})
    classes, columns = told.get("classes", []), told.get("columns", {})
    words = [f"its name, the names of {len(classes)} classes ({_some(classes)})"]
    if columns:
        text = sum(map(bool, columns.values()))
        words.append(f"the names of {len(columns)} columns ({_some(list(columns))}), the agreed values of {text}")
    return ", ".join([*words, f"{told.get('statistics', 0)} means and deviations"])


def _some(names: Sequence[str], most: int = 10) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _rounds(rounds: set[int]) -> str:
    if not rounds:
        return ""
    first, last = min(rounds), max(rounds)
    return f" in round {first}" if first == last else f" in rounds {first} to {last}"


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})" if shape else ""


def _when(row: dict[str, Any]) -> str:
    return str(row["time"])[:19].replace("T", " ")
