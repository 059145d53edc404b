"""nginx in front of a SuperLink: its configuration, and the command that runs it."""

from __future__ import annotations

import os
import pwd
import shutil
from pathlib import Path

from fednh.errors import UserError
from fednh.flower.deploy import templates
from fednh.storage.files import private_folder, write_bytes


def write(folder: Path, certs: Path, listen: str, port: int) -> Path:
    """The configuration of a proxy that listens at `listen` for a SuperLink at a port of the loopback."""
    private_folder(folder)
    private_folder(folder / "temporary")
    paths = {"certificate": certs / "server.crt", "key": certs / "server.key", "ca": certs / "ca.crt"}
    quoted = {name: _quoted(path) for name, path in paths.items()}
    # The workers of a nginx that root starts belong to another user, who could not write in this folder.
    user = f"user {pwd.getpwuid(0).pw_name};" if os.geteuid() == 0 else ""
    for name, words in {
        "fednh.conf": {**quoted, "listen": listen, "port": str(port)},
        "nginx.conf": {"user": user},
    }.items():
        write_bytes(folder / name, templates.fill(name, **words).encode())
    return folder / "fednh.conf"


def command(folder: Path) -> list[str]:
    """nginx as a process of its own in this folder, in the foreground."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", "/sbin"])
    program = shutil.which("nginx", path=path)
    if program is None:
        raise UserError("--proxy needs nginx, which is not installed here (Debian: apt install nginx-light)")
    return [program, "-p", f"{folder}{os.sep}", "-c", "nginx.conf", "-e", "stderr"]


def _quoted(path: Path) -> str:
    """A path between nginx's quotation marks; a dollar sign would begin a variable, and cannot be written."""
    text = str(path)
    if "$" in text or "\n" in text:
        raise UserError(f"{text} has a sign that nginx does not take in a path; choose another folder")
    return text.replace("\\", "\\\\").replace('"', '\\"')
