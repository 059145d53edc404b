"""Which method for these sites? What was found by a search (search.py), and what that means for each of them.

What a site is told was measured on samples that took no part in the choice: for every fold the method, and the way to
train alone that it is compared with, were chosen on the other folds. The models that a site gets are those of the
method that is best over all folds, trained on all samples of the sites, nothing held out.
"""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fednh.callbacks import SearchWatcher
from fednh.config import Config, as_options, difference, with_settings
from fednh.data.dataset import Dataset
from fednh.data.dataset import changed as dataset_changed
from fednh.errors import UserError
from fednh.experiments.search import MEMORY, Budget, Search, candidates_for
from fednh.experiments.sweep import locked
from fednh.extras import data_frame
from fednh.federated.setup import build_federation, fingerprint_of, load_data
from fednh.interrupt import Stop
from fednh.io.files import write_bytes, write_json
from fednh.report.html import write_report
from fednh.report.sheet import Sheet
from fednh.report.sites import SiteTable, site_tables
from fednh.report.verdicts import SiteVerdict, headline, verdicts
from fednh.runs import fingerprint
from fednh.runs.layout import AnswerLayout
from fednh.runs.run_folder import RunFolder, display_name, read_config

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Recommendation:
    """What federating gives each site, and the models of what is best for all of them."""

    path: Path  # the folder of the answer
    winner: str  # what is best over all sites
    headline: str
    sites: list[SiteVerdict]
    table: SiteTable = field(repr=False)
    tried: Sheet = field(repr=False)
    command: str  # trains the winner's models again
    notes: list[str] = field(repr=False)  # how it was found, and what there was no time for

    @property
    def report(self) -> Path:
        return AnswerLayout(self.path).report_file

    @cached_property
    def models(self) -> dict[str, Path]:
        """The file of every site's model, by the site's name."""
        files = AnswerLayout(self.path).model_files([verdict.site for verdict in self.sites])
        return {site: file for site, file in files.items() if file.exists()}

    def to_frame(self) -> pd.DataFrame:
        """The table as a pandas data frame, a row a site."""
        return data_frame([_plain(one) for one in self.sites], "site", "sites")

    def __repr__(self) -> str:
        return f"<Recommendation: {self.winner}. {self.headline} {self.report}>"

    def _repr_html_(self) -> str:
        from html import escape

        rows = "".join(f"<tr><td>{escape(one.site)}</td><td>{escape(one.sentence)}</td></tr>" for one in self.sites)
        return f"<p><b>{escape(self.headline)}</b></p><table>{rows}</table><p><code>{escape(self.command)}</code></p>"


SHARED = {"partition.name": "site", "eval.every": 0, "checkpoint.every": 10}  # settings of all runs, unless given
ADAPTED = ("rounds", "train.batch_size")  # settings that follow from the time and the data, unless given


def find(
    config: Config,
    out: Path,
    minutes: float,
    methods: Sequence[str],
    seeds: int,
    given: Collection[str],
    samples: Dataset | None = None,
    watcher: SearchWatcher | None = None,
    stop: threading.Event | None = None,
) -> Recommendation:
    """Try what is worth trying for the sites of these data, and say what federating gives each of them.

    `config` has what all runs share, `given` names the settings that the user chose; `samples` are those that a
    program gave. See `fednh.recommend` for the rest.
    """
    if not minutes > 0:
        raise UserError(f"minutes = {minutes:g} should be more than 0")
    clock, watch = Budget(minutes), watcher or SearchWatcher()
    data = samples or load_data(config)
    _check_data(config, data)
    folds = config.data.folds or 0
    base = config.model_copy(update={"data": config.data.model_copy(update={"folds": None})})
    base = base if "train.batch_size" in given else with_settings(base, {"train.batch_size": _batch_size(data)})
    candidates = candidates_for(base, len(data.shape) == 1, methods)
    _check_folder(out, base, data)
    with locked(out):
        build_federation(base, data)  # tells what there is to know about the sites
        rounds = base.rounds if "rounds" in given else 0
        search = Search(base, data, out, candidates, clock, rounds, folds, seeds, stop or Stop(), watch)
        done = _is_answered(search)
        if not done:
            for words in (*data.notes, *data.warnings):
                watch.note(words)
            search.run()
        return _answer(search, keep=not done)


def _answer(search: Search, keep: bool) -> Recommendation:
    """What the runs of a search say; `keep` writes it, with its page and the models of the winner."""
    runs, notes = search.columns()
    table = site_tables(runs)[0]
    site_verdicts, final, out = verdicts(table), search.train_winner(), search.out
    answer = Recommendation(
        path=out,
        winner=search.title(search.winner()),
        headline=headline(site_verdicts),
        sites=site_verdicts,
        table=table,
        tried=search.tried_sheet(),
        command=command_of(final.config),
        notes=notes,
    )
    if keep or not answer.report.exists():
        files = AnswerLayout(out).model_files([verdict.site for verdict in site_verdicts])
        for client, file in final.layout.clients_with_models().items():
            write_bytes(files[final.client_name(client)], file.read_bytes())
        tried = replace(answer.tried, note=" ".join([answer.tried.note, *notes]))
        write_report(runs, answer.report, f"Which method for {display_name(search.data.name)}?", first=[tried])
        facts = {"winner": answer.winner, "headline": answer.headline, "command": answer.command, "notes": notes}
        write_json(
            AnswerLayout(out).answer_file,
            {**search.asked_for, **facts, "sites": [_plain(one) for one in site_verdicts]},
        )
    return answer


def _is_answered(search: Search) -> bool:
    """Whether the folder has the answer to the same question, found in as much time or more."""
    try:
        answer = json.loads(AnswerLayout(search.out).answer_file.read_text(encoding="utf-8"))
        return all(answer[key] == value for key, value in search.asked_for.items() if key != "minutes") and bool(
            answer["minutes"] >= search.clock.minutes
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _plain(verdict: SiteVerdict) -> dict[str, Any]:
    """A verdict as one row of plain values."""
    row: dict[str, Any] = {"site": verdict.site, "kind": verdict.kind, "n": verdict.n, "model": verdict.model}
    for name, gain in (("gain", verdict.gain), ("balanced_gain", verdict.balanced_gain)):
        row |= {name: gain and gain.points, f"{name}_low": gain and gain.low, f"{name}_high": gain and gain.high}
    return {**row, "sentence": verdict.sentence}


def _batch_size(data: Dataset) -> int:
    """A batch for small sites: at least two steps an epoch at the usual one; a power of two, as presets have it."""
    assert data.site_train is not None
    usual = float(np.median(np.bincount(data.site_train)))
    return int(np.clip(2 ** int(np.log2(max(usual / 2, 1))), 8, 64))


def _check_data(config: Config, data: Dataset) -> None:
    """Refuse data of which there is nothing to say."""
    if data.site_train is None:
        raise UserError(
            f"{data.name} does not say which site a sample comes from: give sites (SITE/CLASS/image folders, a column "
            "named by data.site, site_train in an npz file, a third array in Python)"
        )
    if len(data.sites) < 2:
        raise UserError(f"{data.name} has one site, {data.sites[0]}: there is nobody to federate with")
    if len(data.y_test):
        raise UserError(
            f"{data.name} has a test set, which no choice may look at, while sites are compared on folds of their own "
            "samples: --set data.merge_test=true adds it to them; otherwise leave it out"
        )
    classes = [len(np.unique(data.y_train[data.site_train == site])) for site in range(len(data.sites))]
    if max(classes) < 2:
        raise UserError(f"every site of {data.name} has a single class, which any model can name: nothing to compare")
    if config.data.holdout is not None:
        raise UserError("data.holdout: the search holds out folds; leave it out, or choose their number: data.folds")


def _check_folder(out: Path, base: Config, data: Dataset) -> None:
    """Refuse a folder that holds something else than this search."""
    if out.is_file():
        raise UserError(f"{out} is a file, not a folder; choose another --out")
    if not out.is_dir() or not any(out.iterdir()):
        return
    begun = [path for path in sorted(AnswerLayout(out).runs.glob("*-fold*")) if RunFolder(path).started]
    if not begun:
        if any(path.name not in (".sweep", "runs") for path in out.iterdir()):
            raise UserError(f"{out} is not empty and holds no answer; choose another --out")
        return
    alike = [path for path in begun if read_config(path).model.frozen == base.model.frozen]
    recorded = fingerprint.required((alike or begun)[0]).get("data") or {}
    if alike and (changes := dataset_changed(recorded, fingerprint_of(base, data))):
        raise UserError(f"{out} holds the answer for other data ({changes}); choose another --out")


def command_of(config: Config) -> str:
    """The command that trains these models again; in Python, where only a program has the data."""
    settings = difference(config)
    if config.data.name.startswith(MEMORY):
        del settings["data.name"]
        return f"fednh.run({settings!r}, data=data, out='runs/winner')"
    return shlex.join(["fednh", "run", *as_options(settings), "--out", "runs/winner"])
