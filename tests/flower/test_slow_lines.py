"""A federation over slow lines: 2 Mbit/s, 300 ms and 2% loss for all, and 256 kbit/s for one site."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fednh.flower.deploy import scaffold
from fednh.flower.layout import note_text
from tests.helpers.compare import lines
from tests.helpers.deployment import SMALL
from tests.helpers.namespaces import SERVER, World, commands_of, has_namespaces, until

pytestmark = pytest.mark.soak

SITES = ("site-1", "site-2", "site-3")
SLOW = SITES[-1]
RATES = {"site-1": 2e6, "site-2": 2e6, SLOW: 256e3}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    if not has_namespaces() or not os.access("/dev/net/tun", os.W_OK):
        pytest.skip("needs root, ip, /dev/net/tun and nginx")
    made = World(tmp_path, SITES, RATES)
    try:
        made.build()
        yield made
    finally:
        made.end()


def started(world: World, settings: dict[str, Any]) -> tuple[Path, dict[str, Path], str]:
    """Server, proxy and sites at work; returns the federation's folder, the logs, and the command that trains."""
    fed, safe = world.folder / "fed", world.folder / "safe"
    safe.mkdir()
    scaffold.write(fed, len(SITES), [], {**SMALL, **settings})
    readme = (fed / "README.md").read_text().replace("/media/safe", f"'{safe}'")
    _, _, keys, serve, nginx, register, join, train = commands_of(readme)
    assert world.run(SERVER, keys, fed)[0] == 0
    logs = {name: world.folder / f"{name}.log" for name in (*world.machines, "nginx")}
    world.start(SERVER, serve, fed, logs[SERVER])
    until(lambda: "the server is ready" in logs[SERVER].read_text(), logs[SERVER], 300)
    world.start(SERVER, nginx, fed, logs["nginx"])
    assert world.run(SERVER, register, fed)[0] == 0
    for site in SITES:
        home = world.folder / f"disk of {site}" / site
        shutil.copytree(fed / "sites" / site, home)
        world.start(site, join, home, logs[site])
    return fed, logs, train


@pytest.mark.parametrize("late", ["use", "drop"])
def test_a_site_on_a_slow_line_is_not_waited_for(late: str, world: World) -> None:
    """A model of 0.7 MB takes 21 s at 256 kbit/s, down and up again."""
    rounds = 6
    wide = {"model.args": {"hidden": [512, 256]}, "rounds": rounds, "eval.every": rounds, "method.name": "fedavg"}
    more = {"federation.late": late, "federation.slack": 1.3, "federation.start": 3, "federation.timeout": 300.0}
    fed, logs, train = started(world, {**wide, **more})
    start = time.monotonic()
    code, said = world.run(SERVER, train, fed, 1500)
    assert code == 0, said + logs[SLOW].read_text()[-2000:]
    seconds = time.monotonic() - start
    rows = lines(fed / "run")[:-1]
    notes = [note_text(line) for line in (fed / "run/federation.log").read_bytes().splitlines()]
    print(late, round(seconds), [(row["clients"], row["dropped"], row.get("late"), row["seconds"]) for row in rows])
    print("\n".join(notes))
    (slow,) = [
        each["client"] for each in json.loads((fed / "run/summary.json").read_text())["sites"] if each["site"] == SLOW
    ]
    fast = {0, 1, 2} - {slow}
    assert all(fast <= {*row["clients"]} for row in rows), "the others take part in every round"
    assert sum(slow in row["dropped"] for row in rows) >= 1
    waited = [row["seconds"] for row in rows if slow in row["dropped"]]
    assert max(row["seconds"] for row in rows if slow not in row["clients"] or "late" in row) < 300
    if late == "use":
        assert any("late" in row for row in rows), notes
    else:
        assert not any(slow in row["clients"] for row in rows if slow in row["dropped"])
    assert waited
