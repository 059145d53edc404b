"""docs/settings.md: every setting with its default, what it takes and what it means, from the schema.

The meaning is the comment beside a setting where it is declared, or above the type that it has. The tables of site.toml
in docs/federation-reference.md are written, too. `python tools/settings_page.py` writes both; tests compare them.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import sys
import tokenize
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from fednh.config import schema
from fednh.config.schema import Config, Section
from fednh.data.partitions.kinds import PARTITIONS
from fednh.data.sources.registry import SOURCES
from fednh.flower.site_config import Allow, Policy, SiteConfig

PAGE = Path(__file__).parents[1] / "docs/settings.md"
REFERENCE = PAGE.with_name("federation-reference.md")
INTRO = """# Settings

Every setting of a run, from the schema that checks them (`python -m tools.settings_page` writes this page). Give them
in a TOML file, as `--set key=value`, or in Python as `fednh.run(**{"train.lr": 0.1})`; the command line has options for
the most common. Settings below `[method]` are hyper-parameters: [Methods](methods.md) has them.
"""
TITLES = {"": "The run", "data": "data: what is read", "partition": "partition: who holds what"}
MORE = {
    "privacy": "[Privacy](privacy.md) explains them. The extra `privacy` keeps the account.",
    "data": "[Data formats](data-formats.md) shows them at work.",
    "federation": "Of [deployments](deployment.md) alone.",
}


def page() -> str:
    """The whole page as Markdown."""
    sections = {"": {name: info for name, info in Config.model_fields.items() if not _is_section(info)}}
    sections |= {name: info.annotation.model_fields for name, info in Config.model_fields.items() if _is_section(info)}  # type: ignore[union-attr]
    sections[""].pop("method")
    parts = [INTRO]
    for section, settings in sections.items():
        title = TITLES.get(section, section)
        owner = Config if not section else Config.model_fields[section].annotation
        rows = [_row(section, name, info, owner) for name, info in settings.items()]
        table = "\n".join(["| setting | default | takes | meaning |", "|---|---|---|---|", *rows])
        parts.append(f"\n## {title}\n\n{MORE[section] + chr(10) * 2 if section in MORE else ''}{table}\n")
    return "".join(parts)


def _is_section(info: FieldInfo) -> bool:
    return isinstance(info.annotation, type) and issubclass(info.annotation, Section)


def _row(section: str, name: str, info: FieldInfo, owner: Any) -> str:
    key = f"{section}.{name}" if section else name
    kinds: dict[str, Any] = {"data": SOURCES, "partition": PARTITIONS}.get(section, {})  # type: ignore[assignment]
    users = [kind for kind in kinds.values() if name in {field.name for field in fields(kind)}]
    meaning = next((text for each in (owner, *users) for cls in each.__mro__ if (text := _comment(cls, name))), "")
    if not meaning:
        raise SystemExit(f"{key} has no comment where it is declared")
    meaning = (meaning[0].lower() if meaning[1:2].islower() else meaning[0]) + meaning[1:].rstrip(".")
    if users and len(users) < len(kinds):
        meaning += f" ({', '.join(getattr(kind, 'prefix', '') or kind.name for kind in users)})"
    cells = [
        f"`{key}`",
        _value(info.get_default(call_default_factory=True)),
        _takes(info),
        meaning.replace("None:", "none:").replace("|", "\\|"),
    ]
    return f"| {' | '.join(cells)} |"


def _value(default: Any) -> str:
    return "" if default is None or default == {} or default == [] else f"`{json.dumps(default)}`"


def _takes(info: FieldInfo) -> str:
    """What values there are, in words."""
    text = _type(info.annotation)
    bounds = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = [
        f"{sign} {getattr(rule, name):g}"
        for rule in info.metadata
        for name, sign in bounds.items()
        if getattr(rule, name, None) is not None and getattr(rule, name) < schema.MANY
    ]
    return " ".join([text, *limits])


def _type(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _type(args[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin in (Union, UnionType):
        return " or ".join(_type(arg) for arg in args if arg is not NoneType)
    if origin in (list, dict):
        return "list" if origin is list else "table"
    names = {bool: "`true`, `false`", int: "whole number", float: "number", str: "text", dict: "table", list: "list"}
    return names.get(hint, str(hint))


def _comment(cls: Any, name: str) -> str:
    """The comment beside a class's field, or above the type alias that it is annotated with."""
    if cls is object or not cls.__module__.startswith("fednh."):
        return ""
    module = sys.modules[cls.__module__]
    notes, tree = _notes(module)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and getattr(field.target, "id", "") == name:
                    return _beside(notes, field) or _alias(module, field.annotation)
    return ""


def _alias(module: ModuleType, annotation: ast.expr) -> str:
    """The comment of a type alias, where it is defined."""
    alias = getattr(annotation, "id", "")
    for each in [module, *(m for n, m in sorted(sys.modules.items()) if n.startswith("fednh.data.") and m)]:
        notes, tree = _notes(each)
        for node in tree.body:
            if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == alias for target in node.targets):
                return _beside(notes, node)
    return ""


def _beside(notes: dict[int, tuple[str, bool]], node: ast.stmt) -> str:
    """The comment at the end of a statement's lines; else the lines of comment above it."""
    beside = [notes[line][0] for line in range(node.lineno, (node.end_lineno or node.lineno) + 1) if line in notes]
    above, line = list[str](), node.lineno - 1
    while line in notes and notes[line][1]:
        above.insert(0, notes[line][0])
        line -= 1
    return " ".join(beside or above)


@cache
def _notes(module: ModuleType) -> tuple[dict[int, tuple[str, bool]], ast.Module]:
    """A module's comments by line, each with whether it stands alone on it; and its syntax tree."""
    try:
        source = inspect.getsource(module)
    except OSError:  # an empty file
        source = ""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    notes = {
        t.start[0]: (t.string.lstrip("# "), not t.line[: t.start[1]].strip())
        for t in tokens
        if t.type == tokenize.COMMENT
    }
    return notes, ast.parse(source)


def site_tables() -> str:
    """The tables of site.toml: its keys, and its rules below [allow] with what holds without them."""
    fields_of = [*SiteConfig.model_fields.items(), *Policy.model_fields.items()]
    keys = [(info.alias or name, info) for name, info in fields_of if name not in ("policy", "allow")]
    lines = ["| key | meaning |", "|---|---|", *(f"| `{key}` | {info.description} |" for key, info in keys)]
    lines += ["", "Rules below `[allow]`:", "", "| rule | limit | without it |", "|---|---|---|"]
    named = {"methods": "the built-in ones", "models": "the built-in ones", "metrics": "all"}
    for name, info in Allow.model_fields.items():
        default = "no limit" if info.default is None else json.dumps(info.default) if name == "counts" else info.default
        number = f"{default:,}" if type(default) is int else default
        lines.append(f"| `{name}` | {info.description} | {named.get(name, number)} |")
    return "\n".join(lines)


def reference() -> str:
    """docs/federation-reference.md with the tables of site.toml as they are now."""
    text = REFERENCE.read_text(encoding="utf-8")
    begin, end = "<!-- site.toml: tools/settings_page.py -->\n\n", "\n\n<!-- end -->"
    before, _, rest = text.partition(begin)
    return f"{before}{begin}{site_tables()}{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    REFERENCE.write_text(reference(), encoding="utf-8")
