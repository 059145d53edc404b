"""A federation's folder: the Flower app with its settings, a folder for every site, and a README with the commands.

pyproject.toml   the app and all settings          sites/NAME/site.toml   what a site is told when it starts
README.md        how to run it on many machines    certs/                 made by `fednh federation certs`
proxy/           nginx before the server           systemd/               the server's unit; a site has its own
trial/           what `up --local` keeps           run/                   the server's run folder
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fednh import config as settings
from fednh.config import Config
from fednh.errors import UserError
from fednh.flower.deploy import proxy, templates
from fednh.flower.policy import site_toml
from fednh.flower.runconfig import read_config, run_config
from fednh.storage.files import expanded, private_folder, write_bytes
from fednh.words import name_problem

PORT = 8000  # of the SuperLink on the server's loopback, Flower's own choice
DOOR = 8443  # of the proxy, where sites come in
# What a federation differs in from a simulation: few sites that all take part, and nothing lost by an interruption.
USUAL = {"rounds": 10, "participation.rate": 1.0, "checkpoint.every": 1, "eval.every": 1, "eval.clients": "all"}


# What of the folder Flower sends to the sites beside pyproject.toml: documents (.md) and modules (.py), not in folders.
# One pattern, because Flower refuses one that no file fits.
BUNDLE = ["/*.[mp][dy]"]


@dataclass(frozen=True)
class Site:
    """One site as the folder describes it."""

    name: str
    folder: Path

    node_config = property(lambda self: self.folder / "site.toml")


def write(folder: Path, sites: int | None, sources: Sequence[str], overrides: Mapping[str, Any]) -> list[Site]:
    """Write a new federation; nothing is written when something is wrong with what is asked for."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty; choose another folder for the new federation")
    folder = folder.absolute()
    count, told = _what_sites_are_told(sites, sources)
    name = project_name(folder.name)
    federation: dict[str, Any] = {"federation.name": name, "federation.folder": str(folder / "run")}
    if "federation.min_clients" not in overrides:  # who says how few may train says so for the first round too
        federation |= {"federation.start": count, "federation.min_clients": min(2, count)}
    federation["federation.key"] = str(folder / "certs" / "orders.key")
    chosen = settings.load(None, {**USUAL, **_data(sources, count), **federation, **overrides})
    names = site_names(count)
    write_bytes(folder / "pyproject.toml", app(name, chosen).encode())
    hidden = ("/.flwr/", "/certs/", "/logs/", "/proxy/", "/run/", "/sites/", "/trial/", "*.db")
    write_bytes(folder / ".gitignore", "".join(f"{each}\n" for each in hidden).encode())
    private_folder(folder)
    write_bytes(folder / ".flwr" / "config.toml", connection(folder).encode())
    proxy.write(folder / "proxy", folder / "certs", str(DOOR), PORT)
    unit = "fednh-server.service"
    write_bytes(folder / "systemd" / unit, templates.fill(unit, name=name).encode())
    made = [Site(each, folder / "sites" / each) for each in names]
    for site, facts in zip(made, told, strict=True):
        private_folder(site.folder)
        unit = "fednh-site.service"
        write_bytes(site.folder / unit, templates.fill(unit, name=name, door=str(DOOR)).encode())
        write_bytes(site.node_config, site_toml({"site": site.name, "state": "state", **facts}, chosen).encode())
    write_bytes(folder / "README.md", readme(name, folder, made).encode())
    return made


def project_name(word: str) -> str:
    """A name that Flower takes, made from a folder's."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", word).strip("-")[:32].rstrip("-")
    return plain if plain[:1].isalpha() else f"fed-{plain}"[:32].rstrip("-")


def site_names(count: int) -> list[str]:
    """Numbered so that their order by name is their order by number: the k-th is client k."""
    width = len(str(count))
    return [f"site-{number:0{width}d}" for number in range(1, count + 1)]


def _what_sites_are_told(sites: int | None, sources: Sequence[str]) -> tuple[int, list[dict[str, Any]]]:
    """How many sites there are, and where each finds its data: its part of a set by name, or a source of its own."""
    if _own(sources):
        if sites not in (None, len(sources)):
            raise UserError(f"--sites {sites} does not fit {len(sources)} sources of --data; give one source a site")
        return len(sources), [{"data": _absolute(source)} for source in sources]
    count = sites or 3
    return count, [{"partition-id": k, "num-partitions": count} for k in range(count)]


def _own(sources: Sequence[str]) -> bool:
    """Whether these are sources of the sites' own, and not one set by name that is divided."""
    return len(sources) > 1 or any(":" in source or "/" in source for source in sources)


def _data(sources: Sequence[str], count: int) -> dict[str, Any]:
    """The server's part: the set that is divided, or a word that says that every site has its own."""
    return {"data.name": "own" if _own(sources) else (sources or ["digits"])[0], "partition.clients": count}


def _absolute(source: str) -> str:
    kind, colon, path = source.partition(":")
    return f"{kind}:{expanded(path).absolute()}" if colon and kind not in ("hf", "py") else source


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
    ca = folder / "certs" / "ca.crt"
    return connections("server", {"address": f"127.0.0.1:{port}", "root-certificates": str(ca)})


def readme(name: str, folder: Path, sites: Sequence[Site]) -> str:
    register = "\n".join(f"flwr supernode register sites/{s.name}/key.pub server" for s in sites)
    authority = shlex.quote(f"../{folder.name}-authority")
    words = {"name": name, "authority": authority, "first": sites[0].name, "register": register}
    return templates.fill("README.md", **words, count=str(len(sites)), port=str(PORT), door=str(DOOR))


def read(folder: Path) -> tuple[Config, list[Site]]:
    """The settings and the sites of a federation's folder."""
    file = folder / "pyproject.toml"
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    except OSError as error:
        raise UserError(
            f"{folder} is not a federation: its pyproject.toml cannot be read ({error.strerror}); "
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


def sites_of(folder: Path) -> list[Site]:
    found = [Site(path.parent.name, path.parent) for path in sorted((folder / "sites").glob("*/site.toml"))]
    if not found:
        raise UserError(f"{folder} has no sites: there is no sites/NAME/site.toml; `fednh federation init` writes them")
    for site in found:
        if problem := name_problem(site.name):
            raise UserError(f"{str(site.folder)!r} cannot be a site's folder, which has the site's name: {problem}")
    return found
