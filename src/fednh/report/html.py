"""The report: one HTML file with everything in it, from run folders only.

The template escapes all values; only the three files of this package and matplotlib's SVG (whose text is escaped
already) are inserted unescaped. The data for the script is JSON in which no tag can begin.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

import fednh
from fednh.config import dump
from fednh.errors import UserError
from fednh.io.files import write_bytes
from fednh.metric_names import GM, HELD_GM_SHARE, HELD_MACRO, HELD_OUT, HELD_SHARE, PM_L, PM_V, TEST_SET
from fednh.report import tables
from fednh.report.figures import FIGURES, Choice, FigureUnavailable, Kind, scopes, style, to_csv
from fednh.report.figures.base import variant_looks
from fednh.report.figures.curves import AXES
from fednh.report.first_screen import and_words, answer
from fednh.report.groups import by_setting, by_variant, seeds, show
from fednh.report.load import Run, rounds_of
from fednh.report.sheet import Sheet, number, spread_sample, word
from fednh.report.site_tables import explored, site_sections
from fednh.runs.run_folder import display_name
from fednh.text import csv_text, duration, size

EXPLORED = {
    PM_L: "Personal models, its own mix of classes",
    PM_V: "Personal models, its classes all alike",
    HELD_SHARE: "Personal models on its held-out samples",
    HELD_MACRO: "The same, classes alike",
    HELD_GM_SHARE: "Global models on its held-out samples",
}
MOST_SETTINGS = 6  # with figures on one page; the tables have the others
MOST_VARIANTS = 12  # in one figure: more cannot be told apart
MOST_CONFIGS = 48  # shown on one page; every run's folder has its own
MOST_ROWS = 20_000  # of one CSV file inside the page; `fednh figure` and `table` write longer ones
MOST_CLIENTS = 5000  # in the explorer, over all settings and seeds
FEWEST_CLIENTS = 20  # of each of them
TABS = {"round": "by round", "bytes": "by bytes", "seconds": "by seconds"}


def write_report(
    runs: Sequence[Run],
    out: Path,
    title: str | None = None,
    paper: bool = False,
    groups: Path | None = None,
    first: Sequence[Sheet] = (),
) -> int:
    """Write the report, with these tables before its own, and return its size in bytes.

    Without a title, it is the question that the page answers.
    """
    content = render(runs, title, paper, groups, first).encode()
    try:
        write_bytes(out, content)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}") from error
    return len(content)


def render(
    runs: Sequence[Run],
    title: str | None = None,
    paper: bool = False,
    groups: Path | None = None,
    first: Sequence[Sheet] = (),
) -> str:
    """The report as text."""
    sheets = [*first, *tables.result_sheets(runs, paper), tables.cost_sheet(runs)]
    paired = tables.paired_sheet(runs)
    sheets += [paired] if paired.rows else []
    sites = site_sections(runs)
    listing = _runs_sheet(runs)
    figures, lacking, files = _figures(runs, Choice(groups=groups))
    files |= {sheet.name: sheet_csv(sheet) for sheet in [*sheets, *(e["classes_file"] for e in sites), listing]}
    files |= {entry["id"]: entry["file"] for entry in sites}
    if sum(len(run.records) for run in runs) <= MOST_ROWS:
        files["rounds"] = rounds_csv(runs)
    shared, configs = _settings(runs)
    explorer, where = _explorer(runs)
    template = _environment().get_template("report.html.j2")
    shown = answer(runs)
    return template.render(
        title=title or shown.title,
        answer=shown,
        version=fednh.__version__,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        one=_one(runs),
        lead=_lead(runs),
        facts=_facts(runs),
        sites=[entry | {"classes": _shown(entry["classes"])} for entry in sites],
        sheets=[_shown(sheet) for sheet in sheets],
        figures=figures,
        more=max(len(by_setting(runs)) - MOST_SETTINGS, 0),
        lacking=lacking,
        environment=_made_with(runs),
        shared=shared,
        configs=configs,
        runs=_shown(listing),
        every_round="rounds" in files,
        where=where,
        data=_json({"csv": files, "explorer": explorer}),
        css=Markup(_file("report.css")),
        js=Markup(_file("report.js")),
    )


def sheet_csv(sheet: Sheet) -> str:
    """A sheet as it is shown: the text of the cells, without the values that they are sorted by."""
    return csv_text([sheet.columns, *([cell.text for cell in row] for row in sheet.rows)])


def rounds_csv(runs: Sequence[Run]) -> str:
    """Every line of every metrics.jsonl, without lists."""
    keys = dict.fromkeys(k for run in runs for r in run.records for k, v in r.items() if not isinstance(v, list))
    rows = [
        [run.path.name, run.method, run.config.seed, *(r.get(k) for k in keys)] for run in runs for r in run.records
    ]
    return csv_text([["run", "method", "seed", *keys], *rows])


# --- figures -------------------------------------------------------------------------------------------------------


def _figures(runs: Sequence[Run], choice: Choice) -> tuple[list[dict[str, Any]], list[tuple[str, str]], dict[str, str]]:
    """The figures by setting, those that cannot be drawn with the reason, and the CSV data of each figure.

    Of many settings the first ones have figures, and of many variants in one of them the best ones are drawn.
    """
    drawn: dict[str, list[dict[str, Any]]] = {}
    lacking: dict[tuple[str, str], None] = {}
    files: dict[str, str] = {}
    for kind in FIGURES.values():
        for at, (label, group) in enumerate(list(scopes(kind, runs).items())[:MOST_SETTINGS]):
            name = f"{kind.name}-{at}" if at else kind.name
            try:
                chosen, words = (group, "") if kind.whole else _best_variants(group)
                panes = _panes(kind, name, chosen, choice, files, words)
            except FigureUnavailable as error:
                lacking[kind.title, str(error)] = None
                continue
            entry = {"id": name, "title": kind.title, "explanation": panes[0]["explanation"], "panes": panes}
            drawn.setdefault(label, []).append(entry)
    return [{"label": label, "drawn": entries} for label, entries in drawn.items()], list(lacking), files


def _best_variants(runs: Sequence[Run]) -> tuple[Sequence[Run], str]:
    """The runs of the variants that can be told apart in one figure, and a sentence if there are more."""
    variants = by_variant(runs)
    if len(variants) <= MOST_VARIANTS:
        return runs, ""

    def quality(label: str) -> float:
        same = variants[label]
        metric = next((key for key in (PM_L, HELD_SHARE, GM) if any(run.has(key) for run in same)), GM)
        known = [float(run.summary[metric]) for run in same if run.has(metric)]
        return sum(known) / len(known) if known else -1.0

    best = set(sorted(variants, key=quality, reverse=True)[:MOST_VARIANTS])
    words = f" Drawn are the best {MOST_VARIANTS} of {len(variants)} in their personal models; the tables have all."
    return [run for label, same in variants.items() if label in best for run in same], words


def _panes(
    kind: Kind, name: str, runs: Sequence[Run], choice: Choice, files: dict[str, str], more: str = ""
) -> list[dict[str, Any]]:
    """The panes of a figure; curves have three: over rounds, bytes and seconds."""
    panes = []
    for x in AXES if kind.name == "curves" else [choice.x]:
        pane = f"{name}-{x}" if kind.name == "curves" else name
        with style.theme(web=True):
            drawing = kind.draw(runs, replace(choice, x=x))
            svg = style.inline_svg(drawing.figure, pane)
        if whole := len(drawing.rows) <= MOST_ROWS:
            files[pane] = to_csv(drawing)
        caption = drawing.caption + more
        caption += "" if whole else f" `fednh figure {kind.name}` writes its {len(drawing.rows):,} numbers."
        words = {"caption": caption, "explanation": drawing.explanation or kind.explanation}
        panes.append({"id": pane, "tab": TABS[x], "svg": Markup(svg), "csv": whole, **words})
    return panes


# --- what was run --------------------------------------------------------------------------------------------------


def _lead(runs: Sequence[Run]) -> str:
    """For example: FedNH and Local on hospitals, 4 sites, 3 seeds."""
    names = and_words(list(dict.fromkeys(display_name(run.method) for run in runs)))
    data = and_words(list(dict.fromkeys(display_name(run.summary["data"]) for run in runs)))
    clients, many = _range(sorted({run.clients for run in runs})), len(seeds(runs))
    return f"{names} on {data}; {clients} {_one(runs)}s, {many} {'seed' if many == 1 else 'seeds'}."


def _one(runs: Sequence[Run]) -> str:
    """What the page calls a participant."""
    return "site" if all(run.names for run in runs) else "client"


def _facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    moved = sum(run.summary["bytes_up"] + run.summary["bytes_down"] for run in runs)
    rounds = sorted({run.summary["rounds"] for run in runs})
    clients = sorted({run.clients for run in runs})
    return [
        ("runs", str(len(runs))),
        ("methods", str(len({run.method for run in runs}))),
        ("settings", str(len(by_setting(runs)))),
        ("seeds", str(len(seeds(runs)))),
        (f"{_one(runs)}s", _range(clients)),
        ("rounds", _range(rounds)),
        ("time in all", duration(sum(run.summary["seconds"] for run in runs))),
        ("sent in all", size(moved)),
    ]


def _made_with(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Versions and machines; all values where the runs differ."""

    def all_of(*path: str) -> str:
        values = []
        for run in runs:
            value: Any = run.environment
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            values.append("unknown" if value is None else str(value))
        return ", ".join(dict.fromkeys(values))

    names = dict.fromkeys(name for run in runs for name in run.environment.get("packages", {}))
    rows = [("fednh", all_of("fednh")), ("commit", all_of("commit")), ("Python", all_of("python"))]
    rows += [(name, all_of("packages", name)) for name in names]
    rows += [("platform", all_of("platform")), ("CPU", all_of("cpu")), ("cores", all_of("cores"))]
    return [*rows, ("clients at once", all_of("workers")), ("seeds", ", ".join(map(str, seeds(runs))))]


def _settings(runs: Sequence[Run]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The settings that all runs share, and one complete config for each setting and method (of its lowest seed)."""
    every = [run.settings for run in runs]
    keys = dict.fromkeys(key for one in every for key in one)
    shared = [(key, show(every[0].get(key))) for key in keys if len({repr(one.get(key)) for one in every}) == 1]
    configs = list[tuple[str, str]]()
    for label, group in by_setting(runs).items():
        for variant, same in by_variant(group).items():
            if len(configs) < MOST_CONFIGS:
                configs.append((f"config.toml of {variant} ({label})", dump(same[0].config)))
    return shared, configs


def _runs_sheet(runs: Sequence[Run]) -> Sheet:
    metrics = {key: name for key, name in (TEST_SET | HELD_OUT).items() if any(run.has(key) for run in runs)}
    columns = ["run", "method", "data", "seed", "rounds", *metrics.values(), "seconds", "commit"]
    rows = []
    for run in runs:
        names = (run.path.name, display_name(run.method), display_name(run.summary["data"]))
        cells = [*map(word, names), word(run.config.seed), word(rounds_of(run))]
        cells += [*(number(run.summary.get(key)) for key in metrics), number(run.summary["seconds"], "{:.1f}")]
        rows.append([*cells, word(str(run.environment.get("commit") or "unknown")[:10])])
    note = "The name is that of the run's folder; its config can be run again."
    return Sheet("runs", "Every run", columns, rows, note)


def _explorer(runs: Sequence[Run]) -> tuple[list[dict[str, Any]], dict[Path, int]]:
    """What every client holds and how each method serves it, by setting; and where each run stands.

    Sites are the same with every seed, so their metrics are means over seeds; other clients are new ones with each.
    """
    by_label = dict[str, list[Run]]()
    for label, group in by_setting(runs).items():
        parts = {f"{label}, seed {seed}": [run for run in group if run.config.seed == seed] for seed in seeds(group)}
        by_label |= {label: group} if group[0].natural else parts
    most = max(MOST_CLIENTS // max(len(by_label), 1), FEWEST_CLIENTS)
    entries = [{"label": label, **_explored(same, most)} for label, same in by_label.items()]
    return entries, {run.path: at for at, same in enumerate(by_label.values()) for run in same}


def _explored(runs: Sequence[Run], most: int) -> dict[str, Any]:
    """At most so many clients of runs that share their clients."""
    variants = by_variant(runs)
    look = variant_looks(variants)
    shown = [key for key in EXPLORED if any(run.by_client(key) for run in runs)]
    values = {label: {key: _means(same, key) for key in shown} for label, same in variants.items()}
    counts = runs[0].counts  # no rows: only the sites of a federation know
    clients = sorted({*range(len(counts)), *(person["client"] for run in runs for person in run.summary["clients"])})
    here = clients if len(clients) <= most else _sample(clients, values.values(), most)
    return {
        "classes": runs[0].partition["classes"],
        "counts": {client: counts[client].tolist() for client in here if client < len(counts)},
        "clients": here,
        "all": len(clients),
        "sites": {client: runs[0].names[client] for client in here if client in runs[0].names},
        "figures": {key: EXPLORED[key] for key in shown},
        "methods": [
            {
                "label": label,
                "colour": look[label].colour,
                "values": {key: {k: of[k] for k in here if k in of} for key, of in by_metric.items()},
            }
            for label, by_metric in values.items()
        ],
        "held": explored(runs, here),
    }


def _sample(clients: Sequence[int], values: Iterable[Mapping[str, Mapping[int, float]]], most: int) -> list[int]:
    """So many of the clients, from the worst to the best served; those that no run measured come last."""
    means: dict[int, list[float]] = {}
    for by_metric in values:
        for client, value in next(iter(by_metric.values()), {}).items():
            means.setdefault(client, []).append(value)
    order = sorted(means, key=lambda client: (sum(means[client]) / len(means[client]), client))
    others = [client for client in clients if client not in means]
    measured = spread_sample(order, most)
    return sorted([*measured, *spread_sample(others, most - len(measured))])


def _means(runs: Sequence[Run], metric: str) -> dict[int, float]:
    """A metric of each client that has it, mean over runs."""
    values: dict[int, list[float]] = {}
    for run in runs:
        for client, value in run.by_client(metric).items():
            values.setdefault(client, []).append(value)
    return {client: round(sum(each) / len(each), 2) for client, each in values.items()}


# --- helpers -------------------------------------------------------------------------------------------------------


def _shown(sheet: Sheet) -> dict[str, Any]:
    """A sheet for the template; `words` marks the columns with text, which are aligned left."""
    words = [
        any(isinstance(row[at].value, str) for row in sheet.rows) or all(row[at].value is None for row in sheet.rows)
        for at in range(len(sheet.columns))
    ]
    return {**vars(sheet), "words": words}


def _environment() -> jinja2.Environment:
    loader = jinja2.FunctionLoader(_file)
    return jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)


def _file(name: str) -> str:
    return resources.files("fednh").joinpath("report", "web", name).read_text(encoding="utf-8")


def _json(value: Any) -> Markup:
    """JSON that is safe inside <script>: no tag can open or close in it."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _range(values: Sequence[int]) -> str:
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,}–{values[-1]:,}"
