"""`make results`: go on with the campaign of long runs, and write docs/results.md from what `results/` holds.

results/campaign.toml lists the runs in order of priority. Their run folders are kept beside the data sets, outside of
the repository; what can be read of them is copied to results/NAME: config, metrics by round, summary, environment,
partition. The page is made of results/ alone. A stopped run goes on where it was; so does one whose `rounds` grew.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from fednh.io.cache import data_folder
from fednh.io.files import read_tree, write_tree
from fednh.metric_names import GM, PERSONAL, PM_L, TEST_SET
from fednh.report import tables
from fednh.report.figures import FIGURES, Choice, write_figure
from fednh.report.groups import PAPER_METHODS, group_runs
from fednh.report.load import Run, load_run
from fednh.report.sheet import to_markdown
from fednh.runs.layout import RunLayout
from fednh.runs.run_folder import display_name
from fednh.tree import select
from tools import leaderboard
from tools.claims import HEAD, claims_table

ROOT = Path(__file__).parents[1]
RESULTS, IMAGES = ROOT / "results", ROOT / "docs/images"
PAGE, SETTINGS_PAGE = ROOT / "docs/results.md", ROOT / "docs/results-settings.md"
LEADERBOARD_PAGE = ROOT / "docs/leaderboard.md"
FULL = 200  # rounds of the paper's runs
TAUS = ("-1", "-0.5", "0.5", "1")  # of runs that measured what other priors would achieve
KEPT = (
    RunLayout.config_file,
    RunLayout.metrics_file,
    RunLayout.summary_file,
    RunLayout.environment_file,
    RunLayout.partition_file,
)
WIDE = "---\nhide: [toc]\n---\n"  # the tables take the whole width
INTRO = f"""{WIDE}# Results

The paper's Table 1 on real data, ours beside the published numbers: CIFAR-10 and CIFAR-100, Dir(0.3), 100 clients of
which 10% train in a round, 200 rounds. `make results` writes this page from the folder `results/` and continues the
campaign (`results/campaign.toml`). Other settings and ablations have [their own page](results-settings.md).

Not run: TinyImageNet. With ResNet-18 two cores train about 24 images of 64x64 a second, and 200 rounds of 10 clients
with 1,000 images and 5 epochs are 10 million: 116 hours a run, 12 hours for 20 rounds.
"""
SETTINGS_INTRO = f"""{WIDE}# Results: settings and ablations

What other settings of the methods give, from the same folder `results/` as [the main page](results.md).
"""
MARKS = {
    "near": "✓",
    "off": "~",
    "far": "✗",
}  # within one published standard deviation, within two, further: site.css has colours
OURS = {"method.scale": 1, "method.aggregation": "count", "method.head_init": "orthogonal"}  # FedPrior's row


@dataclass(frozen=True)
class Entry:
    """A run of the campaign."""

    name: str
    preset: str
    method: str
    rounds: int
    about: str  # the section of the page that it belongs to
    seed: int = 0
    set: dict[str, Any] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        words = ["run", self.preset, "--method", self.method, "--seed", str(self.seed), "--rounds", str(self.rounds)]
        usual = {"eval.every": 20, "checkpoint.every": 5}
        for key, value in {**usual, **self.set}.items():
            words += ["--set", f"{key}={value}"]
        return words

    @property
    def sampled(self) -> bool:
        """Whether the rounds' personal models are those of a few clients alone, which say little."""
        return "eval.clients" in self.set

    @property
    def label(self) -> str:
        shown = {key: value for key, value in self.set.items() if not key.startswith(("eval.", "checkpoint."))}
        return " ".join([self.method, *(f"{key.removeprefix('method.')}={value}" for key, value in shown.items())])


def campaign(path: Path = RESULTS / "campaign.toml") -> list[Entry]:
    """The runs in order: all combinations of each entry's lists."""
    entries = []
    for each in tomllib.loads(path.read_text(encoding="utf-8"))["runs"]:
        lists = {key: value for key, value in each.items() if isinstance(value, list)}
        rest = {key: value for key, value in each.items() if key not in lists}
        entries += [entry(**rest, **dict(zip(lists, chosen, strict=True))) for chosen in product(*lists.values())]
    return entries


def entry(preset: str, method: str, called: str = "", seed: int = 0, **more: Any) -> Entry:
    """A run; its name is made of what it is."""
    parts = [preset, method, called, f"seed{seed}" if seed else ""]
    return Entry("-".join(filter(None, parts)), preset, method, seed=seed, **more)


def sections(path: Path = RESULTS / "campaign.toml") -> dict[str, str]:
    """The sections of the page, each with its words."""
    listed: dict[str, str] = tomllib.loads(path.read_text(encoding="utf-8"))["sections"]
    return listed


# --- running -------------------------------------------------------------------------------------------------------


def rounds_of(folder: Path) -> int:
    """How many rounds a run folder has recorded."""
    metrics = RunLayout(folder).metrics_file
    return len(metrics.read_text(encoding="utf-8").splitlines()) if metrics.exists() else 0


def done(entry: Entry, results: Path = RESULTS) -> bool:
    folder = RunLayout(results / entry.name)
    return folder.finished and rounds_of(folder.path) >= entry.rounds


def go_on(entry: Entry, work: Path, workers: int = 0) -> int:
    """Start the run, or go on with it, unless it has gone far enough; returns how the command ended."""
    folder = work / entry.name
    started = RunLayout(folder).started
    if RunLayout(folder).finished and rounds_of(folder) >= entry.rounds:
        return 0
    words = (
        ["resume", str(folder), "--rounds", str(entry.rounds)] if started else [*entry.command, "--out", str(folder)]
    )
    return subprocess.run([sys.executable, "-m", "fednh", *words, "--workers", str(workers)]).returncode


def go_on_with_all(entries: list[Entry], work: Path, jobs: int) -> int:
    """Go on with all runs in their order, some at a time; after a failure none is started. Returns the worst end."""
    workers = max(1, (os.cpu_count() or 1) // jobs) if jobs > 1 else 0
    waiting, busy, ends = list(entries), set[str](), [0]
    change = threading.Condition()

    def take() -> Entry | None:
        """The next run that no other job is working on; None when there is nothing left."""
        with change:
            while waiting and not max(ends):
                for each in waiting:
                    if each.name not in busy:
                        waiting.remove(each)
                        busy.add(each.name)
                        return each
                change.wait()
        return None

    def job(_: int) -> None:
        while each := take():
            end = go_on(each, work, workers)
            collect(each, work)
            with change:
                busy.remove(each.name)
                ends.append(end)
                change.notify_all()

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(job, range(jobs)))
    return max(ends, key=abs)


def collect(entry: Entry, work: Path, results: Path = RESULTS) -> None:
    """Copy what can be read of the run, unless what is kept has gone further: on a new machine a run starts anew."""
    source, target = work / entry.name, results / entry.name
    if rounds_of(source) == 0 or rounds_of(source) < rounds_of(target):
        return
    target.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
        else:
            (target / name).unlink(missing_ok=True)
    whole = RunLayout(source)
    if whole.finished and whole.global_model.exists():  # its prototypes: 77 kB on CIFAR-100
        head = select(read_tree(whole.global_model), "head.weight")
        write_tree(target / HEAD, head) if head else None
    if whole.finished and rounds_of(source) == entry.rounds < FULL:
        found = json.loads(whole.summary_file.read_text(encoding="utf-8"))
        means = {key: value for key, value in found.items() if key not in ("clients", "per_class")}
        stage_file(target, entry.rounds).write_text(json.dumps(means, indent=1) + "\n", encoding="utf-8")


def stage_file(folder: Path, rounds: int) -> Path:
    """The means of a run's summary after so many rounds; they stay when the run goes on."""
    return folder / f"summary-{rounds}.json"


# --- the page ------------------------------------------------------------------------------------------------------


def pages(results: Path = RESULTS) -> dict[Path, str]:
    """All pages, by the file that they are written to."""
    entries, main, other = campaign(results / "campaign.toml"), [INTRO], [SETTINGS_INTRO]
    for about, words in sections(results / "campaign.toml").items():
        there = list({e.name: e for e in entries if e.about == about and begun(e, entries, results)}.values())
        if not there:
            continue
        title, _, text = words.partition("\n")
        head = f"## {title}\n\n{text.strip()}\n"
        if about == "paper":
            full = full_length(there, results)
            lead, _, notes = text.strip().partition("\n\n")
            main += [f"## {title}\n\n{lead}\n", *table_1(full), f"{notes}\n", *fairness_and_cost(full)]
            main += ["## Claims of the paper's text\n", claims_table(paper_runs(full))]
            other += ["## Full-length runs by round\n", by_round(there, results)]
            if departing := [run for run in full if run not in main_runs(full)]:
                other += [to_markdown(sheet) for sheet in tables.result_sheets(departing, paper=True)]
        else:
            other += [head, with_and_without_prior(there, results) if about == "ablation" else by_round(there, results)]
    return {
        PAGE: "\n".join(main),
        SETTINGS_PAGE: "\n".join(other),
        LEADERBOARD_PAGE: leaderboard.page(*board_runs(entries, results)),
    }


def board_runs(entries: list[Entry], results: Path) -> tuple[list[Run], list[Run]]:
    """The finished runs of the leaderboard: by the paper's protocol, 40 rounds or more, and by PFLlib's."""
    named = {each.name: each for each in entries if RunLayout(results / each.name).finished}
    runs = {name: load_run(results / name) for name in named}
    usual = [n for n, e in named.items() if not any(k.startswith(("partition.", "participation.")) for k in e.set)]
    paper = [runs[n] for n in usual if named[n].preset in ("cifar10", "cifar100") and _counts(runs[n])]
    return paper, [run for name, run in runs.items() if named[name].preset == "pfllib"]


def _counts(run: Run) -> bool:
    """Whether a run has what the leaderboard shows: the models of all clients of a round, at round 40 or 200."""
    evaluated = {record["round"] for record in run.records if record.get(PM_L) is not None}
    return run.config.eval.clients == "active" and bool(evaluated & {leaderboard.EARLY, FULL})


def paper_runs(full: list[Run]) -> list[Run]:
    """The runs of the paper's methods with the preset's settings, at any beta and participation."""
    groups = [g for g in group_runs(full) if g.method in PAPER_METHODS and not tables.departures(g)]
    return [run for group in groups for run in group.runs]


def main_runs(full: list[Run]) -> list[Run]:
    """The runs of Table 1: the paper's methods with the preset's settings, and FedPrior with the same."""
    groups = [g for g in group_runs(full) if g.runs[0].config.partition.beta == 0.3 and g.rate == 0.1]
    paper = [g for g in groups if g.method in PAPER_METHODS and not tables.departures(g)]
    ours = [g for g in groups if g.method == "fedprior" and all(g.settings[key] == v for key, v in OURS.items())]
    return [run for group in (*paper, *ours) for run in group.runs]


def table_1(full: list[Run]) -> list[str]:
    """Accuracy beside the paper's, a table for each data set."""
    runs = main_runs(full)
    parts = [accuracy_table(preset, [r for r in runs if r.config.data.name == preset]) for preset in presets(full)]
    parts.append(
        "In percent; mean ± sample standard deviation over n seeds. Differences from the paper's mean: "
        f"{MARKS['near']} within one of its standard deviations, {MARKS['off']} within two, {MARKS['far']} further.\n"
    )
    return parts


def fairness_and_cost(full: list[Run]) -> list[str]:
    """The tables of fairness and cost of the same runs, and the curves of all full-length runs."""
    runs = main_runs(full)
    sheets = (tables.fairness_sheet(runs, paper=True), tables.cost_sheet(runs)) if runs else ()
    pictures = [f"![Accuracy by round, {p}]({image(p).relative_to(PAGE.parent)})\n" for p in presets(full)]
    return [*(to_markdown(sheet) for sheet in sheets), *pictures]


def accuracy_table(preset: str, runs: list[Run]) -> str:
    """One row a method, also for those of the paper that are not run yet."""
    groups = {group.method: group for group in group_runs(runs)}
    lines = [f"### {preset.upper().replace('CIFAR', 'CIFAR-')}", ""]
    lines.append("| method | n | " + " | ".join(f"{label} | paper | difference" for label in TEST_SET.values()) + " |")
    lines.append("| :-- | --: |" + " --: | --: | :-- |" * len(TEST_SET))
    for method in (*PAPER_METHODS, "fedprior"):
        group = groups.get(method)
        cells = [display_name(method) + (" (ours)" if method == "fedprior" else ""), str(group.n) if group else "–"]
        for key, label in TEST_SET.items():
            ours = [run.summary[key] for run in group.runs if run.summary.get(key) is not None] if group else []
            paper = tables.published_number(preset, method, 0.3, 0.1, label)
            cells += [spread(ours), f"{paper.mean:.2f} ± {paper.std:.2f}" if paper else "", difference(ours, paper)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def spread(values: list[float]) -> str:
    if len(values) > 1:
        return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
    return f"{values[0]:.2f}" if values else "–"


def difference(values: list[float], paper: tables.PaperNumber | None) -> str:
    if not values or paper is None:
        return ""
    away = statistics.mean(values) - paper.mean
    kind = "near" if abs(away) <= paper.std else "off" if abs(away) <= 2 * paper.std else "far"
    return f'<span class="{kind}">{away:+.2f} {MARKS[kind]}</span>'


def full_length(entries: list[Entry], results: Path) -> list[Run]:
    """The finished runs of as many rounds as the paper's, of entries that ask for so many."""
    finished = [e for e in entries if e.rounds >= FULL and RunLayout(results / e.name).finished]
    return [run for run in (load_run(results / e.name) for e in finished) if run.config.rounds >= FULL]


def presets(runs: list[Run]) -> list[str]:
    return sorted({run.config.data.name for run in runs})


def image(preset: str, folder: Path = IMAGES) -> Path:
    """The picture of a data set's full-length runs; the numbers are beside it, as CSV."""
    return folder / f"results-{preset}.svg"


def draw_curves(results: Path = RESULTS, folder: Path = IMAGES) -> None:
    """Accuracy by round of the full-length runs with the paper's first partition, a picture for each data set."""
    entries = {
        e.name: e
        for e in campaign(results / "campaign.toml")
        if e.about == "paper" and not e.seed and not any(key.startswith("partition.") for key in e.set)
    }
    full = full_length(list(entries.values()), results)
    for preset in presets(full):
        runs = [run for run in full if run.config.data.name == preset]
        write_figure(FIGURES["curves"], runs, Choice(), image(preset, folder))


def begun(entry: Entry, entries: list[Entry], results: Path) -> bool:
    """Whether the run has gone beyond what shorter entries of the same name asked for."""
    before = max((e.rounds for e in entries if e.name == entry.name and e.rounds < entry.rounds), default=0)
    return rounds_of(results / entry.name) > before


def with_and_without_prior(entries: list[Entry], results: Path) -> str:
    """GM, and PM(V) / PM(L) by what is added to the logits, of personal models and of the newest global one."""
    heads = ["run", "GM", "personal, as it is", *(f"tau {'+' * (t[0] != '-')}{t}" for t in TAUS)]
    heads += [f"global, tau {t}" for t in ("0.5", "1")]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---|" * (len(heads) - 1)]
    for entry in entries:
        file = stage_file(results / entry.name, entry.rounds)
        if not file.exists():
            continue
        found = json.loads(file.read_text(encoding="utf-8"))
        prior = found.get("prior", {})
        cells = [f"{entry.preset}, {entry.label}", _percent(found[GM]), pair(found)]
        cells += [pair(prior[t]) if t in prior else "" for t in TAUS]
        cells += [pair(prior[t], "shared_") if t in prior else "" for t in ("0.5", "1")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(["GM, then PM(V) / PM(L) in percent.", "", *lines]) + "\n"


def pair(record: dict[str, Any], prefix: str = "") -> str:
    return " / ".join(_percent(record.get(f"{prefix}{key}")) for key in PERSONAL)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def by_round(entries: list[Entry], results: Path) -> str:
    """GM of every run at the tens, the mean of its last evaluations, and its last personal models."""
    by_data = sorted(entries, key=lambda entry: entry.preset)
    rows = [(entry, evaluated(results / entry.name, entry.rounds)) for entry in by_data]
    tens = sorted({round_ for _, found in rows for round_ in found if round_ % 10 == 0})
    shown = tens if len(tens) <= 8 else [t for t in tens if t % 40 == 0 or t == 20]
    heads = ["run", *(f"{t}" for t in shown), "mean of the last three", "PM(V)", "PM(L)", "rounds done"]
    lines = [
        "GM in percent by round. PM(V) and PM(L) are of the last evaluated round, means over the clients that took "
        "part in it; a dash: not evaluated.",
        "",
        "| " + " | ".join(heads) + " |",
        "|---|" + "--:|" * (len(heads) - 1),
    ]
    for entry, found in rows:
        last = [found[t] for t in sorted(found)[-3:]]
        personal = [_percent(None if entry.sampled or not last else last[-1].get(key)) for key in PERSONAL]
        count = min(rounds_of(results / entry.name), entry.rounds)
        name = f"{entry.preset}, {entry.label}" + (f", seed {entry.seed}" if entry.seed else "")
        cells = [_percent(found[t].get(GM)) if t in found else "" for t in shown]
        lines.append("| " + " | ".join([name, *cells, mean_of(last, GM), *personal, str(count)]) + " |")
    return "\n".join(lines) + "\n"


def evaluated(folder: Path, rounds: int) -> dict[int, dict[str, Any]]:
    """The evaluated rounds of a run, up to this one."""
    records = map(json.loads, RunLayout(folder).metrics_file.read_text(encoding="utf-8").splitlines())
    return {each["round"]: each for each in records if each.get(PM_L) is not None and each["round"] <= rounds}


def mean_of(records: list[dict[str, Any]], metric: str) -> str:
    values = [record.get(metric) for record in records]
    return _percent(None if not values or None in values else statistics.mean(v for v in values if v is not None))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.results", description=__doc__)
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument(
        "--collect", action="store_true", help="only copy what the runs have so far, and write the page"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, which share the cores")
    parser.add_argument("--work", type=Path, default=data_folder() / "campaign", help="where the run folders are")
    asked = parser.parse_args()
    ended, entries = 0, campaign()
    if asked.collect:
        for each in entries:
            collect(each, asked.work)
    elif not asked.page:
        ended = go_on_with_all([each for each in entries if not done(each)], asked.work, asked.jobs)
    draw_curves()
    for file, text in pages().items():
        file.write_text(text, encoding="utf-8")
    return ended


if __name__ == "__main__":
    sys.exit(main())
