"""The command that looks at data before anything is trained."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fednh.cli.app import app, console_for_people, print_sheets
from fednh.cli.options import Given, Short, set_option, set_values, short, with_short_options

if TYPE_CHECKING:
    from fednh.report.sheet import Sheet

ROWS, COLUMNS, SITES = 20, 12, 5  # of a table; more clients, classes or sites are summed up


@app.command()
@with_short_options
def inspect(
    *,
    given: Annotated[
        Given,
        Short(
            short("data", required=True),
            "data_dir",
            short("partition", help="See `fednh partitions`; default: the natural sites, if there are."),
            short("clients", help="How many clients there would be."),
            short("beta", help="Of the Dirichlet distribution."),
            short("seed", help="Of the partition."),
        ),
    ],
    settings: Annotated[list[str] | None, set_option("Any setting, e.g. data.label=diagnosis.")] = None,
    form: Annotated[
        Literal["text", "json"], typer.Option("--format", help="For people, or everything as JSON.")
    ] = "text",
) -> None:
    """Show what data hold and how they would be divided, and warn of problems. Nothing is written."""
    from fednh.config import load
    from fednh.data.disclosure import not_agreed
    from fednh.data.inspection import Division
    from fednh.data.inspection import inspect as look
    from fednh.data.sources.registry import find
    from fednh.federated.setup import divide, load_data

    given |= set_values(settings)
    config = load(None, given)
    dataset = load_data(config)
    asked = any(key.startswith("partition.") for key in given)
    if not asked and dataset.sites:
        config = load(None, {**given, "partition.name": "site"})
    division = None
    if asked or dataset.sites:
        parts, held_out = divide(dataset, config)
        natural = config.partition.kind.natural
        names = dataset.sites if natural else tuple(str(k) for k in range(len(parts)))
        division = Division(config.partition.kind, names, parts, held_out)
    facts = look(dataset, division)
    public = find(config.data.name) is None  # a set by name: sites disclose nothing by naming its values
    if dataset.sites and not public and (words := not_agreed(dataset, config.data.classes, config.data.columns)):
        facts["warnings"].append(f"sites of a deployed federation would refuse to take part: {words}")
    if form == "json":
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    _show(facts)


def _show(facts: dict[str, Any]) -> None:
    clients, gaps = [_clients(facts)] if "clients" in facts else [], [_missing(facts)] if facts["missing"] else []
    print_sheets(_classes(facts), *clients, *gaps)
    console = console_for_people()
    for note in facts["notes"]:
        typer.echo(note)
    for warning in facts["warnings"]:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    if not facts["warnings"]:
        typer.echo("no problems found")


def _classes(facts: dict[str, Any]) -> Sheet:
    from fednh.report.sheet import Sheet, word

    shape = "x".join(map(str, facts["shape"]))
    kind = f"images of {shape}" if facts["kind"] == "images" else f"vectors of {shape} features"
    samples, imbalance = facts["samples"], facts["imbalance"]
    shown = facts["classes"] if len(facts["classes"]) <= 2 * ROWS else _ends(facts["classes"])
    columns = [key for key in ("class", "train", "used", "test") if key in facts["classes"][0]]
    rows = [[word(row[key]) for key in columns] for row in shown]
    note = (
        f"Gini {imbalance['gini']:.2f} (0: classes alike); effective number of classes "
        f"{imbalance['effective_classes']:.1f} of {len(facts['classes'])}."
    )
    if len(shown) < len(facts["classes"]):
        note = f"The {ROWS} largest and {ROWS} smallest of {len(facts['classes'])} classes. {note}"
    title = f"{facts['data']}: {samples['train']:,} training and {samples['test']:,} test {kind}"
    return Sheet("classes", title, columns, rows, note)


def _ends(classes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ordered = sorted(classes, key=lambda row: -row["train"])
    return [*ordered[:ROWS], *ordered[-ROWS:]]


def _missing(facts: dict[str, Any]) -> Sheet:
    """Missing values: a row a column, and a column a site, or the sites that lack most where there are many."""
    from fednh.report.sheet import Sheet, word

    def share(count: dict[str, Any]) -> str:
        return f"{count['missing']:,} of {count['rows']:,}" if count["missing"] else ""

    columns = sorted(facts["missing"], key=lambda row: -row["missing"])
    narrow = len(facts["sites"]) <= SITES
    rows = []
    for row in columns[:ROWS]:
        worst = sorted(row["sites"].items(), key=lambda item: -item[1]["missing"] / max(item[1]["rows"], 1))[:3]
        by_site = map(share, row["sites"].values()) if narrow else [", ".join(f"{s} {share(n)}" for s, n in worst)]
        rows.append([word(row["column"]), word(share(row)), *map(word, by_site)])
    heads = ["column", "missing", *(facts["sites"] if narrow else ["most at"])]
    note = (
        "Of the training rows. Numbers take the mean, categories count as unknown; data.missing_indicator marks them."
    )
    if len(columns) > ROWS:
        note = f"The first {ROWS} of {len(columns)} columns. {note}"
    return Sheet("missing", "Missing values", heads, rows, note)


def _clients(facts: dict[str, Any]) -> Sheet:
    from fednh.report.sheet import Sheet, percent, word

    here, classes = facts["clients"], [row["class"] for row in facts["classes"]]
    narrow = len(classes) <= COLUMNS
    rows = []
    for name, counts, held in list(zip(here["names"], here["counts"], here["held_out"], strict=True))[:ROWS]:
        owned = sorted(((n, c) for n, c in zip(counts, classes, strict=True) if n), reverse=True)
        cells = [word(name), word(sum(counts)), word(held), word(len(owned))]
        largest = ", ".join(f"{c} {n}" for n, c in owned[:3]) + (", ..." if len(owned) > 3 else "")
        rows.append(cells + ([word(n) for n in counts] if narrow else [word(largest)]))
    heads = ["client", "samples", "held out", "classes", *(classes if narrow else ["largest"])]
    samples, owned = here["samples"], here["owned_classes"]
    note = (
        f"{samples['least']:,} to {samples['most']:,} samples each (median {samples['median']:g}), of {owned['least']} "
        f"to {owned['most']} classes (median {owned['median']:g}). Mean over clients: Gini {here['gini']:.2f}, "
        f"effective number of classes {here['effective_classes']:.1f}. Missing: {percent(here['missing_share'])} of "
        "all pairs of client and class."
    )
    if len(here["names"]) > ROWS:
        note = f"The first {ROWS} of {len(here['names'])} clients. {note}"
    return Sheet("clients", f"Who would hold what: {here['partition']}", heads, rows, note)
