"""Audit logs as text: whether they are the logs that they should be, who asked, what left, what was refused.

Whose log a file is comes from its place, never from the log itself: the server's lies in its run folder, a site's where
its site.toml says. In a federation's folder, or with several folders, the logs of server and sites are compared: every
site that the server's log names must have a log, with every line whose hash the server has seen.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fednh.errors import UserError
from fednh.flower.audit import Head, Log, read
from fednh.flower.layout import FederationFolder, SiteFolder, StateFolder
from fednh.io.files import expanded
from fednh.runs.layout import RunLayout

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


@dataclass(frozen=True)
class LogFile:
    """Where a log belongs."""

    path: Path
    site: str | None = None  # whose log it is; None: the server's
    alone: bool = False  # a single file, which may be anybody's


@dataclass(frozen=True)
class Checked:
    """A log, whose it is, and what is wrong with it."""

    log: Log
    site: str | None
    problem: str | None


def find(*folders: Path) -> list[LogFile]:
    """The places of the logs that belong to these folders, the server's first; a log may be missing there."""
    found = {folder: _places(folder) for folder in folders}
    places = list(dict.fromkeys(place for each in found.values() for place in each))
    some = any(place.path.is_file() for place in places)
    if lacking := [folder for folder, each in found.items() if not (each and some)]:
        raise UserError(
            f"{lacking[0]} has no audit log: give a site's folder (with {SiteFolder.node_config}), a federation's "
            "folder, or a run folder of a federation that has begun"
        )
    return sorted(places, key=lambda place: place.site is not None)


def _places(folder: Path) -> list[LogFile]:
    if folder.is_file():
        return [LogFile(folder, alone=True)]
    fed = FederationFolder(folder)
    found = [LogFile(path, alone=True) for path in StateFolder(folder).audit_files()]
    found += [LogFile(RunLayout(folder).audit_file)] if RunLayout(folder).audit_file.is_file() else []
    found += [_of_site(SiteFolder(folder))] if SiteFolder(folder).node_config.is_file() else []
    if fed.app_file.is_file():
        from fednh.flower.deploy import scaffold

        config, sites = scaffold.read(folder)
        found.append(LogFile(RunLayout(Path(str(config.federation.folder))).audit_file))
        found += [_of_site(site) for site in [*sites, *fed.trial_sites()]]
    return found


def _of_site(site: SiteFolder) -> LogFile:
    """The place of a site's log, as its site.toml says."""
    file = site.node_config
    try:
        told = tomllib.loads(file.read_text(encoding="utf-8"))
        name = str(told["site"])
        return LogFile(StateFolder(site.path / expanded(str(told["state"]))).audit_file(name), name)
    except KeyError as error:
        what = {"site": "what the site is called", "state": "where the site keeps its state"}[str(error.args[0])]
        raise UserError(f"{file} does not say {what}; add {error.args[0]} = ...") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as TOML: {error}") from error


def check(places: Sequence[LogFile], known: Sequence[Head] = ()) -> list[Checked]:
    """Each log with its problem, or None; every log must have the lines in `known`.

    With several places the logs are compared: there must be one of the server, and each site that it names must have
    one with the lines whose hashes the server recorded; after a trial a site may have two, which count together.
    """
    try:
        checked = [_checked(place) for place in places if place.path.is_file()]
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror})") from error
    recorded = _recorded([row.log for row in checked if row.site is None])
    if len(places) > 1:
        checked = [_compared(row, checked, recorded.get(row.site or "", [])) for row in checked]
        checked += [_missing(site, places) for site in sorted(recorded.keys() - {row.site for row in checked})]
        servers = [place.path for place in places if place.site is None and not place.path.is_file()]
        checked += [Checked(Log(path, []), None, "the server's log is missing") for path in servers]
    return [replace(row, problem=row.problem or row.log.lacks(known)) for row in checked]


def _checked(place: LogFile) -> Checked:
    """Read a log, and check its chain and that each of its lines is of the log's owner."""
    log, site = read(place.path), place.site
    if place.alone:
        site = next((str(row["own"]) for row in log.lines if "own" in row), None)
        state = StateFolder(place.path.parent.parent)
        if place.path in state.audit_files() and (site is None or state.audit_file(site) != place.path):
            return Checked(log, site, f"its name is not that of the log of {_whose(site)}")
    for row in log.lines:
        if row.get("own") != site and row["event"] != "torn":
            says = f"line {row['line']} is of {_whose(row.get('own'))}"
            return Checked(log, site, log.problem or f"{says}, and this is the place of the log of {_whose(site)}")
    return Checked(log, site, log.problem or (None if log.lines else "it is empty"))


def _recorded(logs: Sequence[Log]) -> dict[str, list[Head]]:
    """The lines of sites' logs that the server has recorded, by site."""
    found: dict[str, list[Head]] = {}
    for row in (row for log in logs for row in log.lines if row["event"] in ("joined", "took")):
        head = Head.read(row.get("head"))
        found.setdefault(str(row.get("site")), []).extend([head] if head else [])
    return found


def _compared(row: Checked, others: Sequence[Checked], recorded: Sequence[Head]) -> Checked:
    """The log of a site, compared with what the server has recorded of it."""
    mine = [other.log for other in others if other.site == row.site]
    nowhere = [head for head in recorded if all(log.lacks([head]) for log in mine)]
    return replace(row, problem=row.problem or row.log.lacks(nowhere))


def _missing(site: str, places: Sequence[LogFile]) -> Checked:
    """A site that the server's log names and that has no log."""
    path = next((place.path for place in places if place.site == site), Path(f"{site}.jsonl"))
    why = f"the log of site {site} is missing, which the server's log names; if it lies elsewhere, give its folder too"
    return Checked(Log(path, []), site, why)


def _whose(site: object) -> str:
    return "the server" if site is None else f"site {site}"


def tell(checked: Checked) -> Iterator[str]:
    """The report on one log, line by line."""
    log, site, problem = checked.log, checked.site, checked.problem
    count = len(log.lines)
    yield f"{log.path}: the log of {_whose(site)}"
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
            yield f"  {_when(row)}: joined {row.get('federation')} as {row.get('own')}; sent {_greeting(row)}"
    if asked := [row for row in lines if row["event"] == "asked"]:
        kinds, askers = _counts(asked, "kind"), _counts(asked, "by")
        yield f"  was asked {kinds.total()} times ({', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))})"
        yield from (f"    {number} times by {by}" for by, number in sorted(askers.items()))
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
    yield f"  {_counts(rows, 'event').total()} refused:"
    for row in rows[-MOST:]:
        who = row.get("site") or row.get("says") or row.get("by")
        times = f" (one of {row['times']} since the line before)" if "times" in row else ""
        yield f"    {_when(row)}: {f'{who}: ' if who else ''}{row.get('why')}{times}"


def _counts(rows: Sequence[dict[str, Any]], key: str) -> Counter[str]:
    """How many messages have each value of a key; a line may stand for several."""
    found = Counter[str]()
    for row in rows:
        found[str(row.get(key))] += times if type(times := row.get("times")) is int else 1
    return found


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
