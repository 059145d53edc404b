"""What the FedNH paper's text claims, each claim looked for in results/: seen, not seen, or not tested.

A claim is tested on the full-length runs that docs/results.md shows (mean over seeds), on each data set alone; the
words beside the verdict say with which numbers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import spearmanr

from fednh.io.files import read_tree
from fednh.metric_names import GM, PM_L, PM_V
from fednh.report.figures.similarity import cosines, load_groups, semantics
from fednh.report.groups import PAPER_METHODS
from fednh.report.load import Run
from fednh.runs.run_folder import display_name

HEAD = "head.safetensors"  # of the global model, kept in results/
PERSONAL_METHODS = ("fedper", "fedrep", "fedbabu", "ditto", "fedproto", "fedrod")
CLOSE = 1.0  # points: seeds differ by about as much, so a smaller difference decides nothing
FEWEST = 5  # methods that a claim about "most" or a correlation needs

Runs = Mapping[str, list[Run]]  # method -> its runs on one data set, a run a seed
Check = Callable[["Evidence"], Iterator[tuple[str, bool | None, str]]]  # (data set, seen or None, numbers)


@dataclass(frozen=True)
class Evidence:
    """All full-length runs with the paper's settings: by data set and method, with Dir(0.3) unless said otherwise."""

    runs: list[Run]

    def of(self, preset: str, beta: float = 0.3, rate: float = 0.1) -> Runs:
        chosen = [
            run
            for run in self.runs
            if (run.config.data.name, run.config.partition.beta, run.config.participation.rate) == (preset, beta, rate)
        ]
        return {method: [r for r in chosen if r.method == method] for method in dict.fromkeys(r.method for r in chosen)}

    @property
    def presets(self) -> list[str]:
        return sorted({run.config.data.name for run in self.runs})


def mean(runs: list[Run], metric: str) -> float | None:
    values = [run.summary[metric] for run in runs if run.summary.get(metric) is not None]
    return statistics.mean(values) if values else None


def scores(runs: Runs, metric: str) -> dict[str, float]:
    """method -> mean over seeds, of the paper's methods that have the metric."""
    found = {method: mean(same, metric) for method, same in runs.items() if method in PAPER_METHODS}
    return {method: value for method, value in found.items() if value is not None}


def _best(metric: str, lowest: bool = False) -> Check:
    def check(evidence: Evidence) -> Iterator[tuple[str, bool | None, str]]:
        for preset in evidence.presets:
            values = scores(evidence.of(preset), metric)
            others = {method: value for method, value in values.items() if method != "fednh"}
            if "fednh" not in values or not others:
                yield preset, None, ""
                continue
            rival = (min if lowest else max)(others, key=lambda method: others[method])
            ahead = values["fednh"] < others[rival] if lowest else values["fednh"] > others[rival]
            best = f"{display_name(rival)} {others[rival]:.1f}"
            text = f"FedNH {values['fednh']:.1f}, the best of {len(others)} others {best}"
            close = abs(values["fednh"] - others[rival]) < CLOSE
            decided = not close and (not ahead or len(others) == len(PAPER_METHODS) - 1)
            yield preset, ahead if decided else None, text + ("; too close to tell" if close else _lacking(values))

    return check


def _lacking(values: Mapping[str, float]) -> str:
    missing = len([m for m in PAPER_METHODS if m not in values])
    return f"; {missing} methods are not run or have none" if missing else ""


def fedavg_is_strong(evidence: Evidence) -> Iterator[tuple[str, bool | None, str]]:
    for preset in evidence.presets:
        values = scores(evidence.of(preset), PM_L)
        rivals = {method: values[method] for method in PERSONAL_METHODS if method in values}
        if "fedavg" not in values or not rivals:
            yield preset, None, ""
            continue
        behind = [display_name(method) for method, value in rivals.items() if value < values["fedavg"]]
        text = f"PM(L) {values['fedavg']:.1f}; behind it: {', '.join(behind) or 'none'} of {len(rivals)} run"
        yield preset, 2 * len(behind) > len(rivals) if len(rivals) >= FEWEST else None, text


def global_and_personal_go_together(evidence: Evidence) -> Iterator[tuple[str, bool | None, str]]:
    for preset in evidence.presets:
        runs = evidence.of(preset)
        global_, personal = scores(runs, GM), scores(runs, PM_V)
        both = [method for method in global_ if method in personal]
        if len(both) < FEWEST:
            yield preset, None, f"{len(both)} methods have both"
            continue
        rho = float(spearmanr([global_[m] for m in both], [personal[m] for m in both]).statistic)
        yield preset, rho > 0.5, f"rank correlation of GM and PM(V) over {len(both)} methods: {rho:.2f}"


def ditto_is_behind_fedavg(evidence: Evidence) -> Iterator[tuple[str, bool | None, str]]:
    for preset in evidence.presets:
        values = scores(evidence.of(preset), PM_L)
        if "ditto" not in values or "fedavg" not in values:
            yield preset, None, ""
            continue
        text = f"PM(L) of Ditto {values['ditto']:.1f}, of FedAvg {values['fedavg']:.1f}"
        yield preset, values["ditto"] < values["fedavg"], text


def pm_v_depends_less_on_beta(evidence: Evidence) -> Iterator[tuple[str, bool | None, str]]:
    for preset in evidence.presets:
        few, many = evidence.of(preset), evidence.of(preset, beta=1.0)
        moves = {
            metric: [
                abs(scores(few, metric)[m] - scores(many, metric)[m])
                for m in scores(many, metric)
                if m in scores(few, metric)
            ]
            for metric in (PM_V, PM_L)
        }
        if not moves[PM_V]:
            yield preset, None, ""
            continue
        own, local = (statistics.mean(moves[metric]) for metric in (PM_V, PM_L))
        yield (
            preset,
            own < local,
            f"from Dir(0.3) to Dir(1.0) PM(V) moves by {own:.1f}, PM(L) by {local:.1f} ({len(moves[PM_V])} methods)",
        )


def overhead_is_small(evidence: Evidence) -> Iterator[tuple[str, bool | None, str]]:
    for preset in evidence.presets:
        runs = evidence.of(preset)
        sent = {m: mean(runs[m], "bytes_up") for m in ("fednh", "fedavg", "fedrod") if m in runs}
        if len(sent) < 3:
            yield preset, None, ""
            continue
        base = sent["fedavg"] or 1.0
        more = {m: 100 * ((value or 0.0) / base - 1) for m, value in sent.items()}
        yield (
            preset,
            more["fednh"] < more["fedrod"],
            f"bytes beyond FedAvg's: FedNH {more['fednh']:+.1f}%, FedROD {more['fedrod']:+.1f}%",
        )


def more_clients_help_slightly(evidence: Evidence) -> Iterator[tuple[str, bool | None, str]]:
    for preset in evidence.presets:
        tenth, third = scores(evidence.of(preset), GM), scores(evidence.of(preset, rate=0.3), GM)
        gains = {m: third[m] - tenth[m] for m in third if m in tenth}
        text = ", ".join(f"{display_name(m)} {gain:+.1f}" for m, gain in gains.items())
        yield preset, all(gain > 0 for gain in gains.values()) if gains else None, text and f"GM: {text}"


def prototypes_know_kinship(evidence: Evidence) -> Iterator[tuple[str, bool | None, str]]:
    """CIFAR-100's twenty super-classes: cosine within one minus cosine between two (report/figures/similarity.py)."""
    kinship = {}
    for run in evidence.runs:
        groups = load_groups(run.config.data.name, run.partition["classes"])
        if groups and (file := run.path / HEAD).exists():
            kinship.setdefault(run.method, []).append(semantics(cosines(_head(file)), groups))
    means = {method: statistics.mean(values) for method, values in kinship.items()}
    text = ", ".join(f"{display_name(m)} {value:.3f}" for m, value in sorted(means.items(), key=lambda item: -item[1]))
    known = "fednh" in means and "fedavg" in means
    yield "cifar100", means["fednh"] > means["fedavg"] if known else None, text and f"excess of cosine: {text}"


def _head(file: Path):  # type: ignore[no-untyped-def]
    return read_tree(file)["head.weight"].double().numpy()


CLAIMS: dict[str, Check] = {
    "FedNH has the best global model": _best(GM),
    "FedNH has the best PM(V) in almost all cases": _best(PM_V),
    "FedNH's personal models gain most consistently (best PM(L))": _best(PM_L),
    "FedNH improves all clients more equally (lowest spread of PM(L))": _best("pm_l_std", lowest=True),
    "FedAvg's local models are a strong baseline, better than many personalised methods": fedavg_is_strong,
    "Ditto's personal models are behind FedAvg's": ditto_is_behind_fedavg,
    "A strong global model often leads to strong personal models": global_and_personal_go_together,
    "PM(V) is less sensitive to the class imbalance than PM(L)": pm_v_depends_less_on_beta,
    "FedNH adds less than FedROD to the cost of FedAvg": overhead_is_small,
    "Prototypes of FedNH know super-classes, the head of FedAvg does not": prototypes_know_kinship,
    "With 30% of the clients a round, accuracies improve slightly": more_clients_help_slightly,
}


def claims_table(runs: list[Run]) -> str:
    """A row a claim and data set."""
    lines = ["| claim of the paper | data | here | numbers |", "|---|---|---|---|"]
    for claim, check in CLAIMS.items():
        for preset, seen, numbers in check(Evidence(runs)):
            verdict = "not tested" if seen is None else "seen" if seen else "**not seen**"
            lines.append(f"| {claim} | {preset.upper().replace('CIFAR', 'CIFAR-')} | {verdict} | {numbers} |")
    return "\n".join(lines) + "\n"
