"""A federation's folder: the Flower app with its settings, a folder for every site, nginx, a README with commands.

Its layout is in flower/layout.py.

An app is code, sent by whoever starts it at the server, so a site runs only those on its list, `approved` beside
site.toml. Each line has the SHA-256 of an app's bundle and, after a blank, a comment.

Settings are Flower's run-config, which takes nested tables of numbers, booleans and text. Every other value is written
as JSON text: a list, a table whose keys Flower would split, and text that would be mistaken for one of these. Also
read is `-c model.args.hidden=...` of `flwr run`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import shutil
import tomllib
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from io import BytesIO
from pathlib import Path
from string import Template
from typing import Any, get_args, get_origin

import tomli_w

from fednh import config as settings
from fednh.config import Config, Section, flat, load, parse_value
from fednh.config.schema import DEFAULT_METHOD
from fednh.data.sources.images import KEPT
from fednh.data.sources.registry import absolute
from fednh.errors import UserError
from fednh.federated.checks import check_secure
from fednh.flower.layout import FederationFolder, SiteFolder
from fednh.flower.site_config import METRICS, Allow, for_sites, missing_values
from fednh.io.files import expanded, private_folder, write_bytes
from fednh.methods.registry import find_method
from fednh.models.backbone import ONNX
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


def approve(file: Path, app_hash: str, comment: str = "") -> bool:
    """Put an app on a list; returns whether it was new there."""
    if not re.fullmatch(r"[0-9a-f]{64}", app_hash):
        raise UserError(f"{app_hash!r} is not the hash of an app: that has 64 digits, 0 to 9 and a to f")
    if app_hash in approved(file):
        return False
    before = file.read_bytes() if file.exists() else b""
    newline = b"" if not before or before.endswith(b"\n") else b"\n"
    write_bytes(file, before + newline + f"{app_hash} {comment}".rstrip().encode() + b"\n")
    return True


def check_approved(file: Path, content: bytes) -> None:
    """Refuse a bundle that is not on the list, before it is unpacked."""
    app_hash = hash_of(content)
    if app_hash not in approved(file):
        raise UserError(
            f"this site has not approved the app {app_hash}, so nothing of it was run; its owner can do so with "
            f"`fednh federation approve SITE {app_hash}`"
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
    count, per_site = _site_sources(sites, sources)
    name = project_name(folder.name)
    federation: dict[str, Any] = {"federation.name": name, "federation.folder": str(fed.run)}
    if "federation.min_clients" not in overrides:  # a user's min_clients also applies to the first round
        fewest = count // 2 + 1 if overrides.get("federation.secure") else 2  # a secure sum ends with as many anyway
        federation |= {"federation.start": count, "federation.min_clients": min(fewest, count)}
    federation["federation.key"] = str(fed.orders_key)
    chosen = _absolute_weights(
        settings.load(None, {**_defaults(overrides), **_data(sources, count), **federation, **overrides})
    )
    check_secure(chosen, chosen.build_method())
    _privacy(chosen)  # refused before anything is written
    called = site_names(count) if names is None else names
    made = [fed.site(each) for each in (called if _own(sources) else sorted(called))]  # the k-th has part k
    write_bytes(fed.app_file, app(name, chosen).encode())
    private = (fed.home.path, fed.certs, fed.logs, fed.proxy, fed.run, fed.sites, fed.trial)
    write_bytes(fed.ignore_file, "".join(f"/{each.name}/\n" for each in private).encode() + b"*.db\n")
    private_folder(folder)
    write_bytes(fed.home.connections_file, connection(folder).encode())
    write_proxy_config(fed.proxy, fed, str(PROXY_PORT), PORT)
    write_bytes(fed.unit, fill_template(fed.unit.name, name=name).encode())
    for site, facts in zip(made, per_site, strict=True):
        private_folder(site.path)
        write_bytes(site.unit, fill_template(site.unit.name, name=name, proxy_port=str(PROXY_PORT)).encode())
        says = {"site": site.name, "state": site.state.name, **facts}
        write_bytes(site.node_config, site_toml(says, chosen).encode())
    write_bytes(fed.readme, readme(name, fed, made).encode())
    return made


def _defaults(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """DEFAULTS; how many rounds a method has that trains nothing is decided where configs are loaded."""
    free = find_method(str(overrides.get("method.name", DEFAULT_METHOD))).training_free
    return {key: value for key, value in DEFAULTS.items() if key != "rounds" or not free}


def _absolute_weights(config: Config) -> Config:
    """The config with absolute paths of a model's files: the server works in another folder."""
    model, places = config.model, {}
    if model.weights is not None:
        places["weights"] = str(expanded(model.weights).absolute())
    if model.network.startswith(ONNX):
        places["name"] = f"{ONNX}{expanded(model.network.removeprefix(ONNX)).absolute()}"
    return config.model_copy(update={"model": model.model_copy(update=places)})


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


def site_toml(facts: Mapping[str, Any], config: Config) -> str:
    """A new site's site.toml: the facts, what the config says about its data, and rules that allow just this config."""
    data, own, method, allow = config.data, "data" in facts, config.build_method(), Allow()
    reading = {
        "label": data.label,
        "site-column": data.site,
        "columns": ", ".join(data.columns or ()),
        "layout": data.layout,
        "on-bad": None if data.on_bad == "refuse" else data.on_bad,
        "group": data.group,
        "ignore": ", ".join(data.ignore or ()),
        "separator": data.separator,
        "decimal": data.decimal,
        "missing": ", ".join(missing_values(data.missing)),
    }
    known = {"federation": config.federation.name, **(reading if own else {"set": data.name})}
    frozen, networks = config.model.frozen != "none", for_sites(config).model.names
    if networks[0].startswith(ONNX):  # a program: a site has its own copy
        known["weights"] = config.model.network.removeprefix(ONNX)
    sent = {"gradient_norm": config.diagnostics.gradient_norm, "per_class": not own, "novelty": method.cosine}
    rules = {
        "methods": config.method["name"],
        "models": ", ".join(networks),
        "rounds": config.rounds,
        "epochs": math.ceil(max(config.passes().values())),
        "sites": config.federation.min_clients,
        "samples": allow.samples,
        "parameters": allow.parameters,
        "pixels": max(math.prod(data.size or (KEPT, KEPT)), config.features.size**2 if frozen else 0),
        "views": config.features.views,
        "weights": Path(config.model.weights).stat().st_size if frozen and config.model.weights else 0,
        "counts": method.upload.tells_counts,
        "secure": config.federation.secure,
        "metrics": ", ".join(name for name in METRICS if sent.get(name, True)),
    }
    facts = {**facts, **{key: value for key, value in known.items() if value}}
    values = {key: tomli_w.dumps({"x": value}).strip().removeprefix("x = ") for key, value in rules.items()}
    more = {"facts": tomli_w.dumps(dict(facts)), "privacy": tomli_w.dumps(_privacy(config))}
    return fill_template(SiteFolder.node_config.name, **more, **values)


def _privacy(config: Config) -> dict[str, Any]:
    """What a site asks for of privacy, and its budget: that of the config."""
    asked = config.privacy
    if asked.level == "none":
        return {}
    if asked.level == "client":
        raise UserError("privacy.level = 'client' is of simulations: sites add noise themselves, with level 'sample'")
    if asked.epsilon is None:
        raise UserError("privacy.noise does not say what sites are to spend; give privacy.epsilon in its place")
    return {"privacy": asked.level, "epsilon": asked.epsilon, "delta": asked.delta}


def project_name(word: str) -> str:
    """A valid name for a Flower app, made from a folder's name."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", word).strip("-")[:32].rstrip("-")
    return plain if plain[:1].isalpha() else f"fed-{plain}"[:32].rstrip("-")


def site_names(count: int) -> list[str]:
    """Numbered so that their order by name is their order by number: the k-th is client k."""
    width = len(str(count))
    return [f"site-{number:0{width}d}" for number in range(1, count + 1)]


def _site_sources(sites: int | None, sources: Sequence[str]) -> tuple[int, list[dict[str, Any]]]:
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
    values = {"name": name, "authority": authority, "first": sites[0].name, "register": register}
    return fill_template(fed.readme.name, **values, count=str(len(sites)), port=str(PORT), proxy_port=str(PROXY_PORT))


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
    sites = fed.all_sites()
    if not sites:
        missing = fed.site("NAME").node_config.relative_to(folder)
        raise UserError(f"{folder} has no sites: there is no {missing}; `fednh federation init` writes them")
    for site in sites:
        if problem := name_problem(site.name):
            raise UserError(f"{str(site.path)!r} cannot be a site's folder, which has the site's name: {problem}")
    return sites


# --- templates, and nginx in front of a SuperLink -------------------------------------------------------------------


def fill_template(template: str, /, **values: str) -> str:
    """A file that `fednh federation init` writes, with its $names filled in."""
    text = resources.files("fednh.flower.deploy").joinpath("templates", template).read_text(encoding="utf-8")
    return Template(text).substitute(values)


def write_proxy_config(folder: Path, fed: FederationFolder, listen: str, port: int) -> Path:
    """Write the configuration of a proxy that listens at `listen` for a SuperLink at a port of the loopback."""
    private_folder(folder)
    private_folder(folder / "temporary")
    paths = {"certificate": fed.server_certificate, "key": fed.server_key, "ca": fed.ca}
    quoted = {name: _quoted(path, folder) for name, path in paths.items()}
    # If root starts nginx, its workers run as another user, who could not write in this folder.
    user = f"user {Path('/').owner()};" if os.geteuid() == 0 else ""
    for name, values in {
        "fednh.conf": {**quoted, "listen": listen, "port": str(port)},
        "nginx.conf": {"user": user},
    }.items():
        write_bytes(folder / name, fill_template(name, **values).encode())
    return folder / "fednh.conf"


def proxy_command(folder: Path) -> list[str]:
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


# --- settings as Flower's run-config --------------------------------------------------------------------------------


def run_config(config: Config) -> dict[str, Any]:
    """Settings that read back as exactly this config; tables stay tables wherever that is possible."""
    tree = _tree(config, tables=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same = _same(_load(flat(tree)), config)
    return tree if same else _tree(config, tables=False)


def read_config(run_config: Mapping[str, Any]) -> Config:
    """The Config for a federation's flat settings."""
    config = _load(run_config)
    if config.federation.folder is None or not Path(config.federation.folder).is_absolute():
        raise UserError("federation.folder must be the absolute path of the server's run folder")
    if config.data.folds is not None:
        raise UserError(
            "data.folds is for simulations: answers about other folds of the same samples would tell about single "
            "ones, so a real site agrees to one division; use data.holdout"
        )
    if config.data.limit is not None:
        raise UserError("data.limit is for simulations: a real site trains on all of its samples; leave it out")
    check_secure(config, config.build_method())
    return config


def _load(run_config: Mapping[str, Any]) -> Config:
    keys = sorted(run_config, key=lambda key: key.count("."))  # a table before settings inside it
    return load(None, {key: _value(key, run_config[key]) for key in keys})


def _tree(config: Config, tables: bool) -> dict[str, Any]:
    def section(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: _text(f"{name}.{key}", each, tables) for key, each in values.items() if each is not None}

    tree: dict[str, Any] = {}
    for name, value in config:
        if isinstance(value, Section | dict):
            tree[name] = section(name, dict(value))
        elif value is not None:
            tree[name] = _text(name, value, tables)
    return tree


def _text(key: str, value: Any, tables: bool) -> Any:
    """A value as Flower takes it."""
    if isinstance(value, dict) and tables and value and all(name.isidentifier() for name in value):
        return {name: _text(f"{key}.{name}", each, tables) for name, each in value.items() if each is not None}
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, default=str)
    return json.dumps(value) if isinstance(value, str) and _value(key, value) != value else value


def _value(key: str, value: Any) -> Any:
    """The original value, from Flower's."""
    if not isinstance(value, str) or not _may_be_structured(key):
        return value
    if value.startswith(("[", "{", '"')):
        try:
            return json.loads(value)
        except ValueError:
            pass  # plain text, or a list as TOML writes it
    return parse_value(value) if key.startswith("model.args.") else value


def _may_be_structured(key: str) -> bool:
    """Whether this setting, or the one that it is a part of, can be a list or a table."""
    parts = key.split(".")
    return any(".".join(parts[:n]) in _structured() for n in range(1, len(parts) + 1)) and key != "method.name"


@cache
def _structured() -> frozenset[str]:
    keys = set()
    for name, field in Config.model_fields.items():
        section = field.annotation
        inner = section.model_fields if isinstance(section, type) and issubclass(section, Section) else None
        if inner is None:
            keys |= {name} if _has_list(section) else set()
        else:
            keys |= {f"{name}.{key}" for key, each in inner.items() if _has_list(each.annotation)}
    return frozenset(keys)


def _has_list(annotation: Any) -> bool:
    return get_origin(annotation) in (list, dict, tuple) or any(map(_has_list, get_args(annotation)))


def _same(one: Config, other: Config) -> bool:
    """Equal in types too: 1 is not True."""
    left, right = (json.dumps(each.model_dump(), default=repr, sort_keys=True) for each in (one, other))
    return left == right
