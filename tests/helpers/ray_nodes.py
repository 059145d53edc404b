"""A Ray cluster of real processes on the loopback, one CPU a machine, for tests: `nodes` starts it, this file runs it.

It listens on 127.0.0.1 alone. Every machine is a raylet with a store of its own, in a folder that knows nothing of any
run. The process that holds the cluster takes commands on its standard input; when that ends, so does the cluster.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}


class Nodes:
    """The cluster, from outside."""

    def __init__(self, process: subprocess.Popen[str], home: Path):
        self.process, self.home = process, home
        self.address: str = self.told()["address"]

    def told(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"the cluster did not start: {(self.home / 'errors').read_text()[-2000:]}")

    def do(self, *command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.told()

    def busy(self) -> list[int]:
        """The processes that compute clients at this moment; Ray names them after what they do."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                titled = (path / "cmdline").read_bytes().startswith(b"ray::fednh_client")
                if titled and os.getsid(int(path.name)) == self.process.pid:
                    found.append(int(path.name))
        return found

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that joins it."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        return {
            **kept,
            **LOOPBACK,
            "PYTHONPATH": f"{SOURCE}{os.pathsep}{SOURCE.parent}",
            "FEDNH_CACHE": os.environ.get("FEDNH_CACHE", ""),
        }


@contextmanager
def nodes(*machines: dict[str, Any], source: Path = SOURCE) -> Iterator[Nodes]:
    """A cluster of these machines, the first of which is the head; each is what Ray's `add_node` takes.

    They import this package from `source`.
    """
    # A short path: the names of sockets below it have at most 107 characters.
    home = Path(tempfile.mkdtemp(prefix="fr-", dir="/tmp"))
    home.chmod(0o700)
    elsewhere = home / "elsewhere"
    elsewhere.mkdir()
    (home / "ray").mkdir()  # where the cluster notes its address; Ray's own folder for that need not exist
    around = {**os.environ, **LOOPBACK, "PYTHONPATH": str(source), "RAY_TMPDIR": str(home)}
    with (home / "errors").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, __file__, str(home), json.dumps(machines or [{}, {}])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=elsewhere,
            env=around,
            start_new_session=True,
        )
    try:
        yield Nodes(process, home)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):  # whatever of its session is left: helpers of a machine that was killed
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(home, ignore_errors=True)


SMALL = ["--clients", "8", "--rounds", "2", "--epochs", "1", "--set", "eval.every=1"]
SOME = ["--set", "participation.rate=0.5", "--workers", "2", "--quiet"]


def start(args: list[str], folder: Path, cluster: Nodes | None = None, **more: str) -> subprocess.Popen[str]:
    """`fednh ARGS` as a process of its own in `folder`, with the cluster's address."""
    around = {**os.environ, "FEDNH_TEST_MARK": str(folder), **(cluster.environment if cluster else {}), **more}
    command = [sys.executable, "-m", "fednh", *args]
    command += ["--backend", "ray", "--address", cluster.address] if cluster else []
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=around, start_new_session=True, **pipes)


def ended(process: subprocess.Popen[str], seconds: float = 240) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, err


def on_pool(args: list[str], folder: Path) -> None:
    from tests.helpers.process import fednh

    done = fednh(["run", *args, "--out", str(folder)], folder.parent / "log")
    assert done.code == 0, done.stderr


def until(met: Any, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def rounds_of(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def left_behind(folder: Path) -> list[str]:
    """Processes that a run in `folder` started and that are still there."""
    mark, found = f"FEDNH_TEST_MARK={folder}".encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (path / "environ").read_bytes().split(b"\0"):
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


def _main(home: str, machines: Sequence[dict[str, Any]]) -> None:
    from ray.cluster_utils import Cluster

    head = {"temp_dir": home, "include_dashboard": False, "include_log_monitor": False}
    cluster = Cluster(initialize_head=True, head_node_args={**head, **machines[0]})
    there = [cluster.head_node, *(cluster.add_node(wait=False, **machine) for machine in machines[1:])]
    cluster.wait_for_nodes(180)
    print(json.dumps({"address": cluster.address}), flush=True)
    for line in sys.stdin:
        what, *rest = json.loads(line)
        if what == "kill":  # as a machine that loses its power
            for processes in there[rest[0]].all_processes.values():
                for each in processes:
                    each.process.kill()
        elif what == "add":
            there.append(cluster.add_node(**rest[0]))
        print(json.dumps({"done": what}), flush=True)
    for node in reversed(there):
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


if __name__ == "__main__":
    _main(sys.argv[1], json.loads(sys.argv[2]))
