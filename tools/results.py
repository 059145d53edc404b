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
from fednh.report import sheet as render
from fednh.report import tables
from fednh.report.figures import FIGURES, Choice
from fednh.report.figures.write import write_figure
from fednh.report.load import Run, load_run
from fednh.runs.layout import RunLayout

ROOT = Path(__file__).parents[1]
RESULTS, PAGE, IMAGES = ROOT / "results", ROOT / "docs/results.md", ROOT / "docs/images"
FULL = 200  # rounds of the paper's runs
TAUS = ("-1", "-0.5", "0.5", "1")  # `eval.prior` of all runs
KEPT = (
    RunLayout.config_file,
    RunLayout.metrics_file,
    RunLayout.summary_file,
    RunLayout.environment_file,
    RunLayout.partition_file,
)
METRICS = {"gm": "GM", "pm_v": "PM(V)", "pm_l": "PM(L)"}
INTRO = """# Results

Runs on real data at full length. `make results` writes this page from the folder `results/` in the repository. That
folder has the config, the metrics of every evaluated round, the summary and the environment of each run, but no
models. The same command continues the campaign (`results/campaign.toml`, in order of priority), on any machine. The
tests do not run it: they compare this page with `results/`.
"""


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
        usual = {"eval.every": 20, "checkpoint.every": 5, "eval.prior": f"[{','.join(TAUS)}]"}
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
    if whole.finished and rounds_of(source) == entry.rounds < FULL:
        found = json.loads(whole.summary_file.read_text(encoding="utf-8"))
        means = {key: value for key, value in found.items() if key not in ("clients", "per_class")}
        stage_file(target, entry.rounds).write_text(json.dumps(means, indent=1) + "\n", encoding="utf-8")


def stage_file(folder: Path, rounds: int) -> Path:
    """The means of a run's summary after so many rounds; they stay when the run goes on."""
    return folder / f"summary-{rounds}.json"


# --- the page ------------------------------------------------------------------------------------------------------


def page(results: Path = RESULTS) -> str:
    parts, entries = [INTRO], campaign(results / "campaign.toml")
    for about, words in sections(results / "campaign.toml").items():
        there = list({e.name: e for e in entries if e.about == about and begun(e, entries, results)}.values())
        if not there:
            continue
        title, _, text = words.partition("\n")
        parts.append(f"## {title}\n\n{text.strip()}\n")
        if about == "ablation":
            parts.append(with_and_without_prior(there, results))
            continue
        if full := full_length(there, results):
            sheets = [*tables.result_sheets(full, paper=True), tables.cost_sheet(full)]
            parts += [render.to_markdown(sheet) for sheet in sheets]
            parts += [
                f"![Accuracy by round, {preset}]({image(preset).relative_to(PAGE.parent)})\n"
                for preset in presets(full)
            ]
        parts.append(by_round(there, results))
    return "\n".join(parts)


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
        list(write_figure(FIGURES["curves"], runs, Choice(), image(preset, folder)))


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
        prior = found["prior"]
        cells = [f"{entry.preset}, {entry.label}", _percent(found["gm"]), pair(found)]
        cells += [pair(prior[t]) if t in prior else "" for t in TAUS]
        cells += [pair(prior[t], "shared_") if t in prior else "" for t in ("0.5", "1")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(["GM, then PM(V) / PM(L) in percent.", "", *lines]) + "\n"


def pair(record: dict[str, Any], prefix: str = "") -> str:
    return " / ".join(_percent(record.get(f"{prefix}{key}")) for key in ("pm_v", "pm_l"))


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def by_round(entries: list[Entry], results: Path) -> str:
    """GM / PM(V) / PM(L) of every run at the tens, and the mean of its last evaluations."""
    by_data = sorted(entries, key=lambda entry: entry.preset)
    rows = [(entry, evaluated(results / entry.name, entry.rounds)) for entry in by_data]
    tens = sorted({round_ for _, found in rows for round_ in found if round_ % 10 == 0})
    shown = tens if len(tens) <= 8 else [t for t in tens if t % 40 == 0 or t == 20]
    lines = ["By round: GM / PM(V) / PM(L) in percent. PM is a mean over the clients that took part in the round.", ""]
    if any(entry.sampled for entry in entries):
        lines[0] += " Runs with GM alone did not evaluate personal models."
    lines.append(
        "| run | " + " | ".join(f"round {t}" for t in shown) + " | mean of the last three evaluations | rounds done |"
    )
    lines.append("|---|" + "---|" * (len(shown) + 2))
    for entry, found in rows:
        metrics = ["gm"] if entry.sampled else list(METRICS)
        cells = [together([found[t]], metrics) if t in found else "" for t in shown]
        last = together([found[t] for t in sorted(found)[-3:]], metrics)
        count = min(rounds_of(results / entry.name), entry.rounds)
        name = f"{entry.preset}, {entry.label}" + (f", seed {entry.seed}" if entry.seed else "")
        lines.append("| " + " | ".join([name, *cells, last, str(count)]) + " |")
    return "\n".join(lines) + "\n"


def evaluated(folder: Path, rounds: int) -> dict[int, dict[str, Any]]:
    """The evaluated rounds of a run, up to this one."""
    records = map(json.loads, RunLayout(folder).metrics_file.read_text(encoding="utf-8").splitlines())
    return {each["round"]: each for each in records if each.get("pm_l") is not None and each["round"] <= rounds}


def together(records: list[dict[str, Any]], metrics: list[str]) -> str:
    """The means of these metrics over the records."""
    means = [
        None if any(r.get(key) is None for r in records) or not records else sum(r[key] for r in records) / len(records)
        for key in metrics
    ]
    return " / ".join(map(_percent, means))


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/results.py", description=__doc__)
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
    PAGE.write_text(page(), encoding="utf-8")
    return ended


if __name__ == "__main__":
    sys.exit(main())
