"""nginx in front of a SuperLink: its configuration, and the command that runs it."""

from __future__ import annotations

import os
import pwd
import shutil
from pathlib import Path

from fednh.errors import UserError
from fednh.flower.deploy import templates
from fednh.flower.layout import FederationFolder
from fednh.storage.files import private_folder, write_bytes


def write(folder: Path, fed: FederationFolder, listen: str, port: int) -> Path:
    """Write the configuration of a proxy that listens at `listen` for a SuperLink at a port of the loopback."""
    private_folder(folder)
    private_folder(folder / "temporary")
    paths = {"certificate": fed.server_certificate, "key": fed.server_key, "ca": fed.ca}
    quoted = {name: _quoted(path, folder) for name, path in paths.items()}
    # If root starts nginx, its workers run as another user, who could not write in this folder.
    user = f"user {pwd.getpwuid(0).pw_name};" if os.geteuid() == 0 else ""
    for name, words in {
        "fednh.conf": {**quoted, "listen": listen, "port": str(port)},
        "nginx.conf": {"user": user},
    }.items():
        write_bytes(folder / name, templates.fill(name, **words).encode())
    return folder / "fednh.conf"


def command(folder: Path) -> list[str]:
    """The command that runs nginx in the foreground with this folder's configuration."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", "/sbin"])
    program = shutil.which("nginx", path=path)
    if program is None:
        raise UserError("--proxy needs nginx, which is not installed here (Debian: apt install nginx-light)")
    return [program, "-p", f"{folder}{os.sep}", "-c", "nginx.conf", "-e", "stderr"]


def _quoted(path: Path, folder: Path) -> str:
    """A path for nginx's quotation marks, in which a dollar sign would begin a variable.

    A path with one is written relative to the configuration's folder; then only the nginx.conf there can include it.
    """
    text = str(path)
    if any(sign in text for sign in "$\n"):
        text = os.path.relpath(path, folder)
    return text.replace("\\", "\\\\").replace('"', '\\"')
