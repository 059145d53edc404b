"""A SuperExec that has imported everything already: it forks for every message instead of starting Python anew.

Flower starts a new process for every message that a site receives. Most of its time goes into importing PyTorch, and
sites that share a machine all do so at once. This process serves the SuperLink and all SuperNodes that were started
with `--isolation process`, which makes them leave the starting of apps to others. Flower's protocol is unchanged.

- It signs its requests with the secret that it shares with each of them, so nobody else can get a task.
- A task's token is never on a command line, where every user of the machine could read it.
- A site unpacks and runs only apps that are on its list.

It reads one line of JSON (commands.Job) for each from standard input, and stops at the end of the input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NoReturn

from flwr.supercore.constant import TASK_TYPE_TO_APPIO_API_ADDRESS_ARG, TASK_TYPE_TO_COMMAND, TaskType
from flwr.supercore.superexec import run_superexec as superexec
from flwr.supercore.superexec.executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult
from flwr.supernode.runtime import run_clientapp as clientapp

import fednh.flower.client_app  # noqa: F401  imported before the fork, for ClientApps
from fednh.config import flat
from fednh.errors import UserError
from fednh.flower import audit
from fednh.flower.deploy import approval
from fednh.flower.deploy.commands import Job
from fednh.flower.parcels import take_order
from fednh.flower.site import read_place
from fednh.words import one_line


class Forking(SubprocessExecutor):
    """Runs a ClientApp in a fork of this process, and a ServerApp as a new process; there are no other tasks."""

    def __init__(self, site: bool):
        self.kinds = {TaskType.CLIENT_APP} if site else {TaskType.SERVER_APP}

    def get_eligible_capacity(self, *_: Any, **__: Any) -> tuple[set[TaskType], set[str]]:
        return self.kinds, set()

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        if spec.task_type not in self.kinds:
            return LaunchResult.failed(f"{spec.task_type} is not run here")
        if spec.task_type == TaskType.SERVER_APP:
            if not hasattr(os, "memfd_create"):  # only Linux has it
                return super().launch(spec)
            _server_app(spec)
        elif os.fork() == 0:
            _leave(lambda: _client_app(spec))
        return LaunchResult.accepted()


def _client_app(spec: ExecutionSpec) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    setattr(clientapp, "pull_and_inflate_object_from_tree", take_order)  # noqa: B010  Flower has no option for it
    clientapp.run_clientapp(spec.runtime_api_address, spec.token, spec.insecure, parent_pid=spec.parent_pid)


def _server_app(spec: ExecutionSpec) -> None:
    """Start a ServerApp; its token is in an anonymous file that only this user can open."""
    token = os.memfd_create("token")
    os.write(token, spec.token.encode())
    command = [TASK_TYPE_TO_COMMAND[spec.task_type], TASK_TYPE_TO_APPIO_API_ADDRESS_ARG[spec.task_type]]
    command += [spec.runtime_api_address, "--token-file", f"/proc/self/fd/{token}"]
    command += ["--insecure"] if spec.insecure else ["--root-certificates", str(spec.root_certificates_path)]
    command += ["--parent-pid", str(spec.parent_pid)]
    subprocess.Popen(command, pass_fds=[token], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(token)


def _serve(job: Job) -> None:
    """Act as the SuperExec of one SuperLink or SuperNode until it ends."""
    os.setsid()
    os.chdir(job.folder)
    files = [(0, os.devnull, os.O_RDONLY)]
    files += [] if job.log is None else [(1, job.log, os.O_WRONLY | os.O_APPEND)]
    for number, path, flags in files:
        os.dup2(os.open(path, flags), number)
    os.dup2(1, 2)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children that have ended
    # Flower has no option for these two.
    setattr(superexec, "get_executor", lambda *_, **__: Forking(site=job.approved is not None))  # noqa: B010
    if job.approved is not None:
        assert hasattr(clientapp, "install_from_fab"), "this Flower does not unpack apps where we check them"
        assert job.told is not None
        setattr(clientapp, "install_from_fab", _only_approved(Path(job.approved), Path(job.told)))  # noqa: B010
    superexec.run_superexec(
        job.address,
        insecure=job.root is None,
        root_certificates_path=job.root,
        superexec_auth_secret=Path(job.secret).read_bytes(),
        parent_pid=job.pid,
    )


def _only_approved(file: Path, told: Path) -> Any:
    """Flower's installation of an app, for approved apps only; a refusal goes to the audit log."""
    from flwr.cli.install import install_from_fab as install

    def check_and_install(content: bytes, *args: Any, **kwargs: Any) -> Any:
        try:
            approval.check(file, content)
        except UserError as error:
            place = read_place(flat(tomllib.loads(told.read_text(encoding="utf-8"))))
            by = "whoever started an app at the server"
            audit.append(place.audit, "refused", own=place.site, by=by, why=one_line(str(error)))
            raise
        return install(content, *args, **kwargs)

    return check_and_install


def _leave(work: Any) -> NoReturn:
    """Do the work of a forked child, then exit: the child must not return into the parent's code."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            _leave(lambda line=line: _serve(Job(**json.loads(line))))


if __name__ == "__main__":
    main()
