"""The status of a federation's sites: `fednh federation status`.

It comes from the server's run folder: members from the newest checkpoint, times from the audit log. If a SuperLink
answers at the address in the federation's folder, Flower's list of nodes is joined to them by key.
"""

from __future__ import annotations

import json
import os
import socket
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

from fednh.errors import UserError
from fednh.flower.audit_report import spent_of, time_of
from fednh.flower.layout import FederationFolder, FlowerHome
from fednh.flower.signing import fingerprint_of_pem, ssh_fingerprint
from fednh.io.chain import read
from fednh.runs.layout import CheckpointLayout, RunLayout

HEADER = ("site", "key", "node", "state", "last answer", "rounds", "last round", "privacy spent")


@dataclass
class SiteStatus:
    """One site, or a node whose key is of no known site."""

    site: str
    key: str = ""  # its fingerprint, as `ssh-keygen -l` shows it
    node: int | None = None
    state: str = "unknown"  # Flower's word: registered, online, offline
    last_answer: str = ""  # when it came
    rounds: list[int] = field(default_factory=list)
    spent: str = ""  # what its samples have cost in all, as it says
    refused: str = ""  # the reason of the newest refusal

    def cells(self) -> tuple[str, ...]:
        last = str(self.rounds[-1]) if self.rounds else "-"
        node = "-" if self.node is None else str(self.node)
        answered, rounds = self.last_answer or "never", str(len(self.rounds))
        return self.site, self.key or "-", node, self.state, answered, rounds, last, self.spent or "-"


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
    nodes, remarks = _listed(folder)
    for node in nodes:
        whose = [row for row in rows.values() if node.key and row.key == node.key]
        row = whose[0] if whose else rows.setdefault(f"node {node.number}", SiteStatus("(unknown)", node.key))
        row.node, row.state = node.number, node.state
    ordered = sorted(rows.values(), key=lambda row: (row.site.startswith("("), row.site))
    return ordered, [*remarks, *(f"{row.site}: last refused: {row.refused}" for row in ordered if row.refused)]


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
    for line in read(log).lines:
        site = line.get("site")
        if not isinstance(site, str):
            continue
        row = rows.setdefault(site, SiteStatus(site))
        row.node = line.get("node") or row.node
        row.key = row.key or str(line.get("key") or "")
        if line["event"] in ("joined", "took"):
            row.last_answer, row.refused = f"{time_of(line)} UTC", ""
            row.spent = spent_of(line) or row.spent
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
