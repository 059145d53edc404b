"""A federation's folder: the Flower app with its settings, a folder for every site, and a README with the commands.

Its layout is in flower/layout.py.

An app is code, sent by whoever starts it at the server, so a site runs only those on its list, `approved` beside
site.toml. Each line has the SHA-256 of an app's bundle and, after a blank, a comment.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import tomli_w

from fednh import config as settings
from fednh.config import Config
from fednh.data.sources.registry import absolute
from fednh.errors import UserError
from fednh.flower.deploy import commands
from fednh.flower.layout import FederationFolder, SiteFolder
from fednh.flower.run_config import read_config, run_config
from fednh.flower.site_config import site_toml
from fednh.io.files import private_folder, write_bytes
from fednh.text import name_problem, plural

# --- apps that a site lets run --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class App:
    """A bundle as Flower builds and sends it."""

    hash: str
    files: tuple[str, ...]


def app_of(folder: Path) -> App:
    """The app that `flwr run` would send from this folder now."""
    from click import ClickException

    from fednh.flower.compat import build_fab_from_disk

    try:
        content = build_fab_from_disk(folder)
    except (ValueError, OSError, ClickException) as error:
        raise UserError(f"{folder} is not an app that Flower can build: {' '.join(str(error).split())}") from error
    with zipfile.ZipFile(BytesIO(content)) as bundle:
        files = tuple(sorted(name for name in bundle.namelist() if not name.startswith(".info/")))
    return App(hash_of(content), files)


def hash_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def approved(file: Path) -> list[str]:
    """The hashes in a list; empty if the file does not exist."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}, the list of apps that this site runs, cannot be read: {error}") from error
    return [line.split()[0].lower() for line in lines if line.strip() and not line.startswith("#")]


def approve(file: Path, app_hash: str, words: str = "") -> bool:
    """Put an app on a list; returns whether it was new there."""
    if not re.fullmatch(r"[0-9a-f]{64}", app_hash):
        raise UserError(f"{app_hash!r} is not the hash of an app: that has 64 digits, 0 to 9 and a to f")
    if app_hash in approved(file):
        return False
    before = file.read_bytes() if file.exists() else b""
    newline = b"" if not before or before.endswith(b"\n") else b"\n"
    write_bytes(file, before + newline + f"{app_hash} {words}".rstrip().encode() + b"\n")
    return True


def check_approved(file: Path, content: bytes) -> None:
    """Refuse a bundle that is not on the list, before it is unpacked."""
    found = hash_of(content)
    if found not in approved(file):
        raise UserError(
            f"this site has not approved the app {found}, so nothing of it was run; its owner can do so with "
            f"`fednh federation approve SITE {found}`"
        )


# --- the folder -----------------------------------------------------------------------------------------------------


PORT = 8000  # of the SuperLink on the server's loopback, Flower's default
PROXY_PORT = 8443  # of the proxy, which sites connect to
# Defaults that differ from a simulation's: few sites that all take part, and an interruption loses no round.
DEFAULTS = {"rounds": 10, "participation.rate": 1.0, "checkpoint.every": 1, "eval.every": 1, "eval.clients": "all"}


# Files that Flower sends to the sites beside pyproject.toml: documents (.md) and modules (.py) of the top folder.
# It is one pattern because Flower refuses a pattern that matches no file.
BUNDLE = ["/*.[mp][dy]"]


def write(
    folder: Path,
    sites: int | None,
    sources: Sequence[str],
    overrides: Mapping[str, Any],
    names: Sequence[str] | None = None,
) -> list[SiteFolder]:
    """Write a new federation; if the settings are wrong, nothing is written."""
    if names is not None:
        sites = _count_named(names, sites)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty; choose another folder for the new federation")
    folder = folder.absolute()
    fed = FederationFolder(folder)
    count, told = _what_sites_are_told(sites, sources)
    name = project_name(folder.name)
    federation: dict[str, Any] = {"federation.name": name, "federation.folder": str(fed.run)}
    if "federation.min_clients" not in overrides:  # a user's min_clients also applies to the first round
        federation |= {"federation.start": count, "federation.min_clients": min(2, count)}
    federation["federation.key"] = str(fed.orders_key)
    chosen = settings.load(None, {**DEFAULTS, **_data(sources, count), **federation, **overrides})
    called = site_names(count) if names is None else names
    made = [fed.site(each) for each in (called if _own(sources) else sorted(called))]  # the k-th has part k
    write_bytes(fed.app_file, app(name, chosen).encode())
    private = (fed.home.path, fed.certs, fed.logs, fed.proxy, fed.run, fed.sites, fed.trial)
    write_bytes(fed.ignore_file, "".join(f"/{each.name}/\n" for each in private).encode() + b"*.db\n")
    private_folder(folder)
    write_bytes(fed.home.connections_file, connection(folder).encode())
    commands.write_proxy_config(fed.proxy, fed, str(PROXY_PORT), PORT)
    write_bytes(fed.unit, commands.fill_template(fed.unit.name, name=name).encode())
    for site, facts in zip(made, told, strict=True):
        private_folder(site.path)
        write_bytes(site.unit, commands.fill_template(site.unit.name, name=name, door=str(PROXY_PORT)).encode())
        says = {"site": site.name, "state": site.state.name, **facts}
        write_bytes(site.node_config, site_toml(says, chosen).encode())
    write_bytes(fed.readme, readme(name, fed, made).encode())
    return made


def _count_named(names: Sequence[str], sites: int | None) -> int:
    """How many sites the names are of; refuses names that are no folders of their own."""
    for name in names:
        if problem := name_problem(name) or ("it is no name of a folder" if Path(name).name != name else None):
            raise UserError(f"--names {name!r} cannot be a site's name, which its folder has: {problem}")
    if len(set(names)) < len(names):
        raise UserError(f"--names has {next(name for name in names if names.count(name) > 1)!r} twice")
    if sites not in (None, len(names)):
        raise UserError(f"--sites {sites} does not fit {plural(len(names), 'name')} of --names; leave --sites out")
    return len(names)


def project_name(word: str) -> str:
    """A valid name for a Flower app, made from a folder's name."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", word).strip("-")[:32].rstrip("-")
    return plain if plain[:1].isalpha() else f"fed-{plain}"[:32].rstrip("-")


def site_names(count: int) -> list[str]:
    """Numbered so that their order by name is their order by number: the k-th is client k."""
    width = len(str(count))
    return [f"site-{number:0{width}d}" for number in range(1, count + 1)]


def _what_sites_are_told(sites: int | None, sources: Sequence[str]) -> tuple[int, list[dict[str, Any]]]:
    """The number of sites, and each one's data settings: its part of a named set, or a source of its own."""
    if _own(sources):
        if sites not in (None, len(sources)):
            raise UserError(f"--sites {sites} does not fit {len(sources)} sources of --data; give one source a site")
        return len(sources), [{"data": absolute(source)} for source in sources]
    count = sites or 3
    return count, [{"partition-id": k, "num-partitions": count} for k in range(count)]


def _own(sources: Sequence[str]) -> bool:
    """Whether each site has its own source, rather than a part of one named set."""
    return len(sources) > 1 or any(":" in source or "/" in source for source in sources)


def _data(sources: Sequence[str], count: int) -> dict[str, Any]:
    """The server's data settings: the set that is divided, or `own` if every site has its own data."""
    return {"data.name": "own" if _own(sources) else (sources or ["digits"])[0], "partition.clients": count}


def app(name: str, config: Config) -> str:
    """The pyproject.toml of a Flower app that runs fednh's two apps with these settings."""
    return tomli_w.dumps(
        {
            "project": {
                "name": name,
                "version": "1.0.0",
                "description": "A federation of sites that keep their data, with fednh",
                "license": {"text": "not for distribution"},
                "dependencies": ["fednh[flower]"],
            },
            "tool": {
                "flwr": {
                    "app": {
                        "publisher": "fednh",
                        "fab-include": BUNDLE,
                        "components": {
                            "serverapp": "fednh.flower.server_app:app",
                            "clientapp": "fednh.flower.client_app:app",
                        },
                        "config": run_config(config),
                    }
                }
            },
        }
    )


def connections(name: str, connection: Mapping[str, Any]) -> str:
    """Flower's config.toml with one connection."""
    return tomli_w.dumps({"superlink": {"default": name, name: dict(connection)}})


def connection(folder: Path, port: int = PORT) -> str:
    """Flower's config.toml for commands at the server: the SuperLink on this machine."""
    ca = str(FederationFolder(folder).ca)
    return connections("server", {"address": f"127.0.0.1:{port}", "root-certificates": ca})


def readme(name: str, fed: FederationFolder, sites: Sequence[SiteFolder]) -> str:
    keys = (site.public_key.relative_to(fed.path) for site in sites)
    register = "\n".join(f"flwr supernode register {key} server" for key in keys)
    authority = shlex.quote(f"../{fed.authority.name}")
    words = {"name": name, "authority": authority, "first": sites[0].name, "register": register}
    return commands.fill_template(fed.readme.name, **words, count=str(len(sites)), port=str(PORT), door=str(PROXY_PORT))


def read(folder: Path) -> tuple[Config, list[SiteFolder]]:
    """The settings and the sites of a federation's folder."""
    file = FederationFolder(folder).app_file
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    except OSError as error:
        raise UserError(
            f"{folder} is not a federation: its {file.name} cannot be read ({error.strerror}); "
            f"`fednh federation init {folder}` makes one"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file} is not valid TOML: {error}") from error
    except (KeyError, TypeError):
        raise UserError(f"{file} has no [tool.flwr.app.config]; `fednh federation init` writes one") from None
    try:
        config = read_config(settings.flat(tree))
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    return config, sites_of(folder)


def sites_of(folder: Path) -> list[SiteFolder]:
    fed = FederationFolder(folder)
    found = fed.all_sites()
    if not found:
        missing = fed.site("NAME").node_config.relative_to(folder)
        raise UserError(f"{folder} has no sites: there is no {missing}; `fednh federation init` writes them")
    for site in found:
        if problem := name_problem(site.name):
            raise UserError(f"{str(site.path)!r} cannot be a site's folder, which has the site's name: {problem}")
    return found
