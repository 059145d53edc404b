"""The systemd units that `federation init` writes: systemd takes them, and they leave little open."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from fednh.flower.deploy import scaffold

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
NEEDED = ("User=fednh", "ProtectSystem=strict", "NoNewPrivileges=yes", "MemoryMax=", "UMask=0077", "Restart=")


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """As written, but with a program that exists: systemd looks for it."""
    folder = tmp_path_factory.mktemp("units")
    scaffold.write(folder / "fed", 1, [], {})
    program = folder / "fednh"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    found = []
    for name in ("systemd/fednh-server.service", "sites/site-1/fednh-site.service"):
        text = (folder / "fed" / name).read_text()
        assert all(word in text for word in NEEDED), name
        assert "/opt/fednh/bin/fednh federation " in text
        found.append(folder / Path(name).name)
        found[-1].write_text(text.replace("/opt/fednh/bin/fednh", str(program)))
    return found


@needs_systemd
def test_systemd_finds_nothing_wrong(units: list[Path]) -> None:
    environment = {**os.environ, "SYSTEMD_LOG_LEVEL": "warning"}
    ended = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *map(str, units)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    ours = [line for line in ended.stderr.splitlines() if "fednh" in line]
    assert ours == []
    assert ended.returncode == 0, ended.stderr


@needs_systemd
def test_systemd_judges_them_safe(units: list[Path]) -> None:
    """Its exposure is between 0 (nothing open) and 10; a unit without such lines has 9.6."""
    for unit in units:
        words = ["systemd-analyze", "security", "--offline=yes", "--no-pager", str(unit)]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
        level = re.search(r"Overall exposure level for \S+: ([\d.]+)", ended.stdout)
        assert level is not None, ended.stdout + ended.stderr
        assert float(level[1]) <= 2.0, ended.stdout


def test_the_compose_files_commands_are_ours() -> None:
    """It is untried, but it is YAML, it says that it is untried, and its commands exist."""
    from tests.helpers.process import parse

    folder = Path(__file__).parents[2] / "docs/examples/container"
    assert all("Untried" in (folder / name).read_text() for name in ("compose.yaml", "Containerfile"))
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    for name in ("server", "site"):
        parse([str(word) for word in services[name]["command"]])
        assert services[name]["cap_drop"] == ["ALL"]
    assert services["server"]["ports"] == ["8443:8443"], "the SuperLink's own port is not published"
