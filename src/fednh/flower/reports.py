"""What a federation's owner asks for: whether audit logs hold and what has left, and the status of the sites.

Whose log a file is comes from its place, never from the log itself: the server's lies in its run folder, a site's where
its site.toml says. In a federation's folder, or with several folders, the logs of server and sites are compared: every
site that the server's log names must have a log, with every line whose hash the server has seen.

The status of a site comes from the server's run folder: members from the newest checkpoint, times from the audit log.
If a SuperLink answers at the address in the federation's folder, Flower's list of nodes is joined to them by key.
"""

from __future__ import annotations

import json
import os
import socket
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

from fednh.errors import UserError
from fednh.flower import audit
from fednh.flower.audit import Head, Log, read
from fednh.flower.layout import FederationFolder, FlowerHome, SiteFolder, StateFolder
from fednh.flower.signing import fingerprint_of_pem, ssh_fingerprint
from fednh.io.files import expanded
from fednh.runs.layout import CheckpointLayout, RunLayout
from fednh.text import some

# --- audit logs -----------------------------------------------------------------------------------------------------


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
        return LogFile(StateFolder(site.path / expanded(str(settings["state"]))).audit_file(name), name)
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
            yield f"  line {row['line']}, {_when(row)}: a line before it was cut short ({row.get('bytes')} bytes)"
    yield from (_server_lines(log.lines) if site is None else _site_lines(log.lines))
    yield from _refused([row for row in log.lines if row["event"] == "refused"])


def _site_lines(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
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


def _server_lines(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
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


def _when(row: dict[str, Any]) -> str:
    return str(row["time"])[:19].replace("T", " ")


# --- status of sites ------------------------------------------------------------------------------------------------


HEADER = ("site", "key", "node", "state", "last answer", "rounds", "last round")


@dataclass
class SiteStatus:
    """One site, or a node whose key is of no known site."""

    site: str
    key: str = ""  # its fingerprint, as `ssh-keygen -l` shows it
    node: int | None = None
    state: str = "unknown"  # Flower's word: registered, online, offline
    last_answer: str = ""  # when it came
    rounds: list[int] = field(default_factory=list)
    refused: str = ""  # the reason of the newest refusal

    def cells(self) -> tuple[str, ...]:
        last = str(self.rounds[-1]) if self.rounds else "-"
        node = "-" if self.node is None else str(self.node)
        return self.site, self.key or "-", node, self.state, self.last_answer or "never", str(len(self.rounds)), last


@dataclass(frozen=True)
class Node:
    """A node as Flower lists it."""

    number: int
    state: str
    key: str  # fingerprint; empty: the node has no key


def read_status(folder: Path) -> tuple[list[SiteStatus], list[str]]:
    """The sites of a federation's folder or a run folder, and further remarks."""
    run, files = _run_and_keys(folder)
    rows = {site: SiteStatus(site, ssh_fingerprint(_text_of(path))) for site, path in files.items()}
    took_part = _took_part(run)
    for member in _membership(run):
        row = rows.setdefault(str(member["site"]), SiteStatus(str(member["site"])))
        row.rounds = took_part.get(member["number"], [])
        row.key = row.key or ssh_fingerprint(str(member.get("key", "")))
    _add_times(rows, run)
    if not rows:
        raise UserError(f"{folder} knows of no site: give a federation's folder, or the run folder of a federation")
    nodes, said = _listed(folder)
    for node in nodes:
        whose = [row for row in rows.values() if node.key and row.key == node.key]
        row = whose[0] if whose else rows.setdefault(f"node {node.number}", SiteStatus("(unknown)", node.key))
        row.node, row.state = node.number, node.state
    ordered = sorted(rows.values(), key=lambda row: (row.site.startswith("("), row.site))
    return ordered, [*said, *(f"{row.site}: last refused: {row.refused}" for row in ordered if row.refused)]


def lines(rows: Sequence[SiteStatus]) -> Iterator[str]:
    """A plain table."""
    cells = [HEADER, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADER))]
    for line in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


# --- what the server knows ------------------------------------------------------------------------------------------


def _run_and_keys(folder: Path) -> tuple[Path, dict[str, Path]]:
    """The run folder, and the sites' public keys by name."""
    if FederationFolder(folder).app_file.is_file():
        from fednh.flower.deploy import scaffold

        config, sites = scaffold.read(folder)
        return Path(str(config.federation.folder)), {site.name: site.public_key for site in sites}
    return folder, {}


def _membership(run: Path) -> list[dict[str, Any]]:
    """The sites of the newest checkpoint that can be read."""
    for path in CheckpointLayout(RunLayout(run).checkpoints).manifests():
        with suppress(OSError, ValueError, KeyError, TypeError):
            members: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["body"]["progress"]["sites"]
            return members
    return []


def _took_part(run: Path) -> dict[int, list[int]]:
    """The rounds in which each client's upload was used."""
    rounds: dict[int, list[int]] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):  # the last line may be half written
        for line in RunLayout(run).metrics_file.read_bytes().splitlines():
            record = json.loads(line)
            for client in record["clients"]:
                rounds.setdefault(client, []).append(record["round"])
    return rounds


def _add_times(rows: dict[str, SiteStatus], run: Path) -> None:
    """Add when each site last answered, from the server's audit log."""
    if not (log := RunLayout(run).audit_file).is_file():
        return
    for line in audit.read(log).lines:
        site = line.get("site")
        if not isinstance(site, str):
            continue
        row = rows.setdefault(site, SiteStatus(site))
        row.node = line.get("node") or row.node
        row.key = row.key or str(line.get("key") or "")
        if line["event"] in ("joined", "took"):
            row.last_answer, row.refused = f"{_when(line)} UTC", ""
        elif line["event"] == "refused":
            row.refused = str(line.get("why"))


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


# --- what Flower knows ----------------------------------------------------------------------------------------------


def _listed(folder: Path) -> tuple[list[Node], list[str]]:
    """Flower's list of nodes; if its server does not answer, a remark that says so."""
    tried, fed = [], FederationFolder(folder)
    for home in (fed.local_home, fed.home):
        address = _address(home)
        if address is None:
            continue
        if not _answers(address):
            tried.append(address)
            continue
        try:
            return _nodes(home.path), []
        except Exception as error:  # Flower's client raises many kinds
            return [], [f"the SuperLink at {address} does not list its nodes: {error}"]
    return [], [f"no SuperLink answers at {' or '.join(tried)}: states and nodes are not known"] if tried else []


def _address(home: FlowerHome) -> str | None:
    """The server's address in Flower's config."""
    try:
        links = tomllib.loads(home.connections_file.read_text(encoding="utf-8"))["superlink"]
        return str(links[links["default"]]["address"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError), socket.create_connection((host, int(port)), timeout=2):
        return True
    return False


def _nodes(home: Path) -> list[Node]:
    from fednh.flower import compat

    with _flower_home(home), redirect_stdout(StringIO()):  # Flower prints which connection it uses
        client = compat.init_http_client_from_connection(compat.read_superlink_connection(None))
        try:
            answer = client.ListNodes(compat.ListNodesRequest())
        finally:
            client.close()
    return [
        Node(info.node_id, _state(info), fingerprint_of_pem(info.public_key))
        for info in answer.nodes_info
        if info.status != "unregistered"
    ]


def _state(info: Any) -> str:
    since = info.last_activated_at if info.status == "online" else info.last_deactivated_at
    if not since:
        return str(info.status)
    return f"{info.status} since {datetime.fromisoformat(since).astimezone(UTC):%Y-%m-%d %H:%M:%S}"


@contextmanager
def _flower_home(home: Path) -> Iterator[None]:
    before = os.environ.get("FLWR_HOME")
    os.environ["FLWR_HOME"] = str(home)
    try:
        yield
    finally:
        os.environ.pop("FLWR_HOME")
        os.environ |= {} if before is None else {"FLWR_HOME": before}
