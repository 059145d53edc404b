"""Shell completion, by the protocol that a shell's script speaks, and once through a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from click.testing import CliRunner

from fednh.callbacks.trackers import TRACKERS
from fednh.cli import app
from fednh.config import PRESETS
from fednh.data.partitions.kinds import PARTITIONS
from fednh.data.sources.builtin import BUILTIN
from fednh.data.sources.registry import PUBLISHED
from fednh.methods import METHODS
from fednh.models import MODELS
from fednh.report.figures import FIGURES

COMMAND = typer.main.get_command(app)


def offered(line: str) -> list[str]:
    """What a shell is told when TAB is pressed at the end of a line."""
    asked = {"_FEDNH_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    ended = CliRunner().invoke(COMMAND, [], env=asked, prog_name="fednh")
    assert ended.exit_code == 0, ended.output
    return ended.stdout.split()


@pytest.mark.parametrize("command", ["run", "federation init fed"])
def test_methods(command: str) -> None:
    assert set(offered(f"fednh {command} --method ")) >= set(METHODS)
    assert set(offered(f"fednh {command} --method fedp")) == {"fedpac", "fedper", "fedprior", "fedproto", "fedprox"}


def test_several_methods() -> None:
    assert offered("fednh sweep --method fednh,fedp") == [
        "fednh,fedper",
        "fednh,fedproto",
        "fednh,fedprox",
        "fednh,fedprior",
        "fednh,fedpac",
    ]
    assert offered("fednh sweep --method al") == ["all"]


@pytest.mark.parametrize("command", ["run", "sweep", "inspect --data digits"])
def test_partitions(command: str) -> None:
    assert set(offered(f"fednh {command} --partition ")) == set(PARTITIONS)
    assert offered(f"fednh {command} --partition dir") == ["dirichlet"]


@pytest.mark.parametrize("command", ["run", "sweep", "inspect", "evaluate runs", "personalize runs"])
def test_data(command: str) -> None:
    assert set(offered(f"fednh {command} --data ")) >= {
        *BUILTIN,
        *PUBLISHED,
        "npz:",
        "folder:",
        "csv:",
        "parquet:",
        "hf:",
    }
    assert set(offered(f"fednh {command} --data f")) == {"fashion_mnist", "femnist", "folder:"}


def test_presets_and_config_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").touch()
    for command in ("run", "sweep"):
        assert set(offered(f"fednh {command} ")) >= {*PRESETS, "mine.toml"}
        assert offered(f"fednh {command} mi") == ["mine.toml"]


def test_the_rest() -> None:
    assert set(offered("fednh run --set model.")) == {f"model.name={name}" for name in MODELS}
    assert set(offered("fednh run --track ")) == set(TRACKERS)
    assert set(offered("fednh run --engine ")) == {"auto", "loop", "vmap"}
    assert set(offered("fednh data get ")) == set(PUBLISHED)
    assert set(offered("fednh figure ")) == {"list", "all", *FIGURES}
    assert "new-method" in offered("fednh n")
    assert offered("fednh table ru") == [], "so that the shell offers its own files"


def test_a_registry_that_breaks_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from fednh.methods import registry

    monkeypatch.setattr(registry, "listed", lambda: 1 / 0)
    assert offered("fednh run --method f") == []


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_installed_into_a_real_bash(tmp_path: Path) -> None:
    """`fednh --install-completion` writes what a new bash reads; there TAB completes a command."""
    home = tmp_path / "home"
    (tmp_path / "bin").mkdir()
    home.mkdir()
    command = tmp_path / "bin/fednh"
    command.write_text(f"#!{sys.executable}\nfrom fednh.cli import main\nmain()\n")
    command.chmod(0o755)
    source = str(Path(__file__).parents[2] / "src")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    env = {**os.environ, "HOME": str(home), "PATH": path, "PYTHONPATH": source}
    program = """
        fednh --install-completion || exit 1
        source ~/.bashrc
        complete -p fednh | grep -o -- '-F [a-z_]*' | { read -r _ function
          COMP_WORDS=(fednh re) COMP_CWORD=1
          $function fednh && printf '%s\\n' "${COMPREPLY[@]}"; }
    """
    ended = subprocess.run(["bash", "-c", program], env=env, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split()[-2:] == ["resume", "report"]
    assert (home / ".bash_completions/fednh.sh").exists()
