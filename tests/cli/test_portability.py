"""`fednh run` in a process that lacks what only Linux has, or what Windows lacks as well.

This is no replacement for trying those systems: it finds imports and calls of what they do not have.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LINUX = ("sched_getaffinity", "memfd_create", "posix_fadvise")  # functions of `os` that macOS lacks
POSIX = ("fork", "setsid", "getuid", "geteuid", "pread", "fchmod", "O_DIRECTORY")
MODULES = ("fcntl", "grp", "pwd", "resource", "termios")  # that Windows lacks

# Other people's packages are imported first: they have a version for each system, and this one's needs its modules.
CHILD = """
import os, platform, sys
import filelock, platformdirs, psutil, rich.progress, safetensors.torch, scipy.optimize, torch.export, typer
platformdirs.user_cache_dir("fednh")
SYSTEM, FUNCTIONS, MODULES = {0!r}, {1!r}, {2!r}

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

def callers():
    frame = sys._getframe(2)
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back

def without_proc(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc", "/sys")):
        if not any("site-packages" in file for file in callers()):
            raise FileNotFoundError(2, "No such file or directory", arguments[0])

for name in FUNCTIONS:
    delattr(os, name)
for name in MODULES:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Lacking())
sys.addaudithook(without_proc)
sys.platform = SYSTEM.lower()
platform.system = lambda: SYSTEM

from fednh.cli import main
main()
"""


@pytest.mark.parametrize(
    ("system", "functions", "modules"),
    [("Win32", LINUX + POSIX, MODULES), pytest.param("Darwin", LINUX, (), marks=pytest.mark.soak)],
)
def test_a_run_needs_nothing_that_other_systems_lack(
    system: str, functions: tuple[str, ...], modules: tuple[str, ...], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", CHILD.format(system, functions, modules)]
    words = ["run", "--rounds", "1", "--clients", "4", "--epochs", "1", "--out", "run"]
    done = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "summary.json").exists()
