"""`make results`: go on with the campaign of long runs, and write docs/results.md from what `results/` holds.

results/campaign.toml lists the runs in order of priority. Their run folders are in campaign/, which is not under
version control; what can be read of them is copied to results/NAME: config, metrics by round, summary, environment,
partition. The page is made of results/ alone. A stopped run goes on where it was; so does one whose `rounds` grew.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fednh.report import render, tables
from fednh.report.load import load_run
from fednh.storage.layout import RunLayout

ROOT = Path(__file__).parents[1]
RESULTS, PAGE, WORK = ROOT / "results", ROOT / "docs/results.md", ROOT / "campaign"
KEPT = (
    RunLayout.config_file,
    RunLayout.metrics_file,
    RunLayout.summary_file,
    RunLayout.environment_file,
    RunLayout.partition_file,
)
METRICS = {"gm": "GM", "pm_v": "PM(V)", "pm_l": "PM(L)"}
INTRO = """# Results

Runs on real data at full length. This page is written by `make results` from the folder `results/` in the repository,
which has the config, the metrics of every evaluated round, the summary and the environment of each run; models are
not kept. The same command goes on with the campaign (`results/campaign.toml`, in order of priority) where it stands,
on any machine; it is not run by the tests, which only see to it that this page is what `results/` gives.
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
        for key, value in {"eval.every": 5, "checkpoint.every": 5, **self.set}.items():
            words += ["--set", f"{key}={value}"]
        return words

    @property
    def label(self) -> str:
        return " ".join([self.method, *(f"{key.removeprefix('method.')}={value}" for key, value in self.set.items())])


def campaign(path: Path = RESULTS / "campaign.toml") -> list[Entry]:
    listed = tomllib.loads(path.read_text(encoding="utf-8"))
    sections = listed["sections"]
    return [Entry(**each) for each in listed["run"] if each["about"] in sections]


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


def go_on(entry: Entry, work: Path) -> int:
    """Start the run, or go on with it; returns how the command ended."""
    folder = work / entry.name
    started = RunLayout(folder).started
    words = (
        ["resume", str(folder), "--rounds", str(entry.rounds)] if started else [*entry.command, "--out", str(folder)]
    )
    return subprocess.run([sys.executable, "-m", "fednh", *words]).returncode


def collect(entry: Entry, work: Path, results: Path = RESULTS) -> None:
    """Copy what can be read of the run."""
    source, target = work / entry.name, results / entry.name
    if rounds_of(source) == 0:
        return
    target.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
        else:
            (target / name).unlink(missing_ok=True)


# --- the page ------------------------------------------------------------------------------------------------------


def page(results: Path = RESULTS) -> str:
    parts, entries = [INTRO], campaign(results / "campaign.toml")
    for about, words in sections(results / "campaign.toml").items():
        there = list({e.name: e for e in entries if e.about == about and rounds_of(results / e.name)}.values())
        if not there:
            continue
        title, _, text = words.partition("\n")
        parts.append(f"## {title}\n\n{text.strip()}\n")
        finished = [load_run(results / e.name) for e in there if RunLayout(results / e.name).finished]
        full = [run for run in finished if run.config.rounds >= 200]
        if full:
            sheets = [*tables.result_sheets(full, paper=True), tables.cost_sheet(full)]
            parts += [render.to_markdown(sheet) for sheet in sheets]
        parts.append(by_round(there, results))
    return "\n".join(parts)


def by_round(entries: list[Entry], results: Path) -> str:
    """GM / PM(V) / PM(L) of every run at the tens, and the mean of its last evaluations."""
    rows = [(entry, evaluated(results / entry.name)) for entry in entries]
    tens = sorted({round_ for _, found in rows for round_ in found if round_ % 10 == 0})
    shown = tens if len(tens) <= 8 else [t for t in tens if t % 50 == 0 or t in (10, 20)]
    lines = ["By round: GM / PM(V) / PM(L) in percent, of the clients that took part in the round.", ""]
    lines.append(
        "| run | " + " | ".join(f"round {t}" for t in shown) + " | mean of the last three evaluations | rounds done |"
    )
    lines.append("|---|" + "---|" * (len(shown) + 2))
    for entry, found in rows:
        cells = [triple([found[t]]) if t in found else "" for t in shown]
        last = triple([found[t] for t in sorted(found)[-3:]])
        count = rounds_of(results / entry.name)
        name = f"{entry.preset}, {entry.label}" + (f", seed {entry.seed}" if entry.seed else "")
        lines.append("| " + " | ".join([name, *cells, last, str(count)]) + " |")
    return "\n".join(lines) + "\n"


def evaluated(folder: Path) -> dict[int, dict[str, float]]:
    """The evaluated rounds of a run."""
    lines = RunLayout(folder).metrics_file.read_text(encoding="utf-8").splitlines()
    return {record["round"]: record for record in map(json.loads, lines) if record.get("pm_l") is not None}


def triple(records: list[dict[str, Any]]) -> str:
    means = [
        None if any(r.get(key) is None for r in records) or not records else sum(r[key] for r in records) / len(records)
        for key in METRICS
    ]
    return " / ".join("–" if mean is None else f"{mean:.1f}" for mean in means)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/results.py", description=__doc__)
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--work", type=Path, default=WORK, help="where the run folders are")
    asked = parser.parse_args()
    ended = 0
    for entry in campaign():
        if asked.page:
            break
        if not done(entry):
            ended = go_on(entry, asked.work)
            collect(entry, asked.work)
        if ended:
            break
    PAGE.write_text(page(), encoding="utf-8")
    return ended


if __name__ == "__main__":
    sys.exit(main())
