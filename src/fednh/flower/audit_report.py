"""What a federation's owner asks of audit logs: whether they hold, and what has left.

Whose log a file is comes from its place, never from the log itself: the server's lies in its run folder, a site's where
its site.toml says. In a federation's folder, or with several folders, the logs of server and sites are compared: every
site that the server's log names must have a log, with every line whose hash the server has seen.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fednh.errors import UserError
from fednh.flower.audit import LEDGER
from fednh.flower.layout import FederationFolder, SiteFolder, StateFolder
from fednh.io.chain import Head, Log, read
from fednh.io.files import expanded
from fednh.privacy.ledger import accounts, spent
from fednh.runs.layout import RunLayout
from fednh.text import plural, some

MOST = 20  # refusals that are shown

RECORDS = {  # what a message's records contain, for readers
    "said": "who it is, and the form of its data or what went wrong",
    "facts": "round, number, training samples processed, loss",
    "upload": "the method's upload",
    "masked": "the method's upload under masks, of a secure sum",
    "secure": "keys, sealed shares and signatures of a secure sum",
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
    ledger: Path | None = None  # where this site has its ledger of privacy


@dataclass(frozen=True)
class Checked:
    """A log, whose it is, and what is wrong with it."""

    log: Log
    site: str | None
    problem: str | None
    ledger: Log | None = None  # the site's ledger of privacy, if there is one


def find(*folders: Path) -> list[LogFile]:
    """The places of the logs that belong to these folders, the server's first; a log may be missing there."""
    by_folder = {folder: _places(folder) for folder in folders}
    places = list(dict.fromkeys(place for each in by_folder.values() for place in each))
    some = any(place.path.is_file() for place in places)
    if lacking := [folder for folder, each in by_folder.items() if not (each and some)]:
        raise UserError(
            f"{lacking[0]} has no audit log: give a site's folder (with {SiteFolder.node_config}), a federation's "
            "folder, or a run folder of a federation that has begun"
        )
    return sorted(places, key=lambda place: place.site is not None)


def _places(folder: Path) -> list[LogFile]:
    if folder.is_file():
        return [LogFile(folder, alone=True)]
    fed = FederationFolder(folder)
    logs = [LogFile(path, alone=True) for path in StateFolder(folder).audit_files()]
    logs += [LogFile(RunLayout(folder).audit_file)] if RunLayout(folder).audit_file.is_file() else []
    logs += [_of_site(SiteFolder(folder))] if SiteFolder(folder).node_config.is_file() else []
    if fed.app_file.is_file():
        from fednh.flower.deploy import scaffold

        config, sites = scaffold.read(folder)
        logs.append(LogFile(RunLayout(Path(str(config.federation.folder))).audit_file))
        logs += [_of_site(site) for site in [*sites, *fed.trial_sites()]]
    return logs


def _of_site(site: SiteFolder) -> LogFile:
    """The place of a site's log, as its site.toml says."""
    file = site.node_config
    try:
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
        name = str(settings["site"])
        state = StateFolder(site.path / expanded(str(settings["state"])))
        ledger = site.path / expanded(str(settings["ledger"])) if "ledger" in settings else state.ledger_file
        return LogFile(state.audit_file(name), name, ledger=ledger)
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
    log, site, ledger = read(place.path), place.site, place.ledger
    if place.alone:
        ledger = StateFolder(place.path.parent.parent).ledger_file
        site = next((str(row["own"]) for row in log.lines if "own" in row), None)
        state = StateFolder(place.path.parent.parent)
        if place.path in state.audit_files() and (site is None or state.audit_file(site) != place.path):
            return Checked(log, site, f"its name is not that of the log of {_whose(site)}")
    for row in log.lines:
        if row.get("own") != site and row["event"] != "torn":
            says = f"line {row['line']} is of {_whose(row.get('own'))}"
            return Checked(log, site, log.problem or f"{says}, and this is the place of the log of {_whose(site)}")
    found = Checked(log, site, log.problem or (None if log.lines else "it is empty"))
    return found if site is None else _with_ledger(found, ledger)


def _with_ledger(row: Checked, file: Path | None) -> Checked:
    """With the site's ledger, which must have the lines that the site's log names."""
    heads = [head for line in row.log.lines if (head := Head.read(line.get(LEDGER)))]
    if file is None or not file.is_file():
        why = f"the ledger of privacy that it names is not at {file}" if heads else None
        return replace(row, problem=row.problem or why)
    ledger = read(file)
    problem = (None if ledger.torn else ledger.problem) or ledger.lacks(heads)
    return replace(row, problem=row.problem or (f"its ledger {file}: {problem}" if problem else None), ledger=ledger)


def _recorded(logs: Sequence[Log]) -> dict[str, list[Head]]:
    """The lines of sites' logs that the server has recorded, by site."""
    heads: dict[str, list[Head]] = {}
    for row in (row for log in logs for row in log.lines if row["event"] in ("joined", "took")):
        head = Head.read(row.get("head"))
        heads.setdefault(str(row.get("site")), []).extend([head] if head else [])
    return heads


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
            yield f"  line {row['line']}, {time_of(row)}: a line before it was cut short ({row.get('bytes')} bytes)"
    yield from (_server_lines(log.lines) if site is None else _site_lines(log.lines))
    if checked.ledger is not None:
        yield from _ledger_lines(checked.ledger, log.lines)
    yield from _refused([row for row in log.lines if row["event"] == "refused"])


def _site_lines(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    for row in lines:
        if row["event"] == "joined":
            yield f"  {time_of(row)}: joined {row.get('federation')} as {row.get('own')}; sent {_greeting(row)}"
    if asked := [row for row in lines if row["event"] == "asked"]:
        kinds, askers = _counts(asked, "kind"), _counts(asked, "by")
        yield f"  was asked {kinds.total()} times ({', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))})"
        yield from (f"    {number} times by {by}" for by, number in sorted(askers.items()))
    left = [row for row in lines if row["event"] in ("joined", "left")]
    if not left:
        yield "  nothing has left this site"
        return
    yield f"  {len(left)} answers have left this site, {time_of(left[0])} to {time_of(left[-1])}:"
    yield from _sums(left)


def _ledger_lines(ledger: Log, lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What was released of the site's samples, account by account, and what no account knows of."""
    yield f"  its ledger of privacy, {ledger.path}; newest: {ledger.head}"
    for account in accounts(ledger):
        names = sorted({str(row.get("federation")) for row in account.payments})
        many = plural(len(account.payments), "answer")
        yield f"    {many} about the same samples, to {some(names)}: {account.words}"
    plain = [row for row in lines if row["event"] == "left" and LEDGER not in row and _has_upload(row)]
    if plain:
        yield f"    {plural(len(plain), 'answer')} with an upload had no noise, and epsilon says nothing of them"


def _has_upload(row: dict[str, Any]) -> bool:
    return any(record["record"] in ("upload", "masked") for record in row.get("sent", []))


def _server_lines(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    for row in lines:
        if row["event"] == "joined":
            key = row.get("key") or "unknown"
            yield f"  {time_of(row)}: {row.get('site')} joined (node {row.get('node')}, key {key})"
    for site in sorted({str(row["site"]) for row in lines if "head" in row}):
        newest = [row["head"] for row in lines if row.get("site") == site and "head" in row][-1]
        yield f"  newest line of the log of {site} that is known here: {newest}"
        if spent := [words for row in lines if row.get("site") == site and (words := spent_of(row))]:
            yield f"  privacy that {site} says it has spent: {spent[-1]}"
    if sent := [row for row in lines if row["event"] == "asked"]:
        yield f"  the server asked its sites {len(sent)} times, {time_of(sent[0])} to {time_of(sent[-1])}:"
        yield from _sums(sent)
    if took := [row for row in lines if row["event"] == "took"]:
        yield f"  {len(took)} answers were accepted, {time_of(took[0])} to {time_of(took[-1])}:"
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
        yield f"    {time_of(row)}: {f'{who}: ' if who else ''}{row.get('why')}{times}"


def _counts(rows: Sequence[dict[str, Any]], key: str) -> Counter[str]:
    """How many messages have each value of a key; a line may stand for several."""
    counts = Counter[str]()
    for row in rows:
        counts[str(row.get(key))] += times if type(times := row.get("times")) is int else 1
    return counts


def _greeting(row: dict[str, Any]) -> str:
    """What the site disclosed when it joined."""
    greeting = row.get("told", {})
    classes, columns = greeting.get("classes", []), greeting.get("columns", {})
    parts = [f"its name, the names of {len(classes)} classes ({some(classes, 10)})"]
    if columns:
        text = sum(map(bool, columns.values()))
        parts.append(f"the names of {len(columns)} columns ({some(list(columns), 10)}), the agreed values of {text}")
    return ", ".join([*parts, f"{greeting.get('statistics', 0)} means and deviations"])


def _rounds(rounds: set[int]) -> str:
    if not rounds:
        return ""
    first, last = min(rounds), max(rounds)
    return f" in round {first}" if first == last else f" in rounds {first} to {last}"


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})" if shape else ""


def spent_of(row: dict[str, Any]) -> str:
    """What a line of the server's log says of a site's ledger of privacy; empty if it says nothing."""
    epsilon, delta = row.get("epsilon"), row.get("delta")
    return spent(math.inf if epsilon is None else float(epsilon), float(delta)) if delta is not None else ""


def time_of(row: dict[str, Any]) -> str:
    return str(row["time"])[:19].replace("T", " ")
