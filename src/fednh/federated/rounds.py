"""The round loop, the only one: pick clients, send, train, check, aggregate, evaluate, record, save.

An executor computes the clients (executor.py), so a simulation and a deployment run the same loop. A run of R rounds
is R + 1 exchanges. In each, clients evaluate the models of the last round, if an evaluation is due, and train the next
round; the line of an evaluated round is written once its metrics have arrived.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch

from fednh import machine
from fednh.config import Config
from fednh.errors import Interrupted, RunError, UserError
from fednh.federated import aggregate, checks, evaluate, similarity
from fednh.federated import checks as failures
from fednh.federated import checks as outliers
from fednh.federated import client as clients
from fednh.federated.aggregate import ClientOverrides, merge_overrides, split_overrides
from fednh.federated.client import Report
from fednh.federated.evaluate import Personal
from fednh.federated.plan import dropped_clients, picked_clients, sampled_clients
from fednh.federated.protocol import Answers, Exchange, Executor, Missing, Outcome, Progress, Round, Watcher, check_lost
from fednh.federated.setup import ServerSide, initial_state
from fednh.interrupt import Meter
from fednh.machine import one_thread
from fednh.methods.fit import is_frozen
from fednh.runs.checkpoint import Checkpoint, Checkpoints
from fednh.runs.run_folder import RunFolder
from fednh.tree import Tree, Uploads, select, size


class Rounds:
    """One run of one method, in one run folder, on one executor."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        executor: Executor,
        watcher: Watcher,
        stop: threading.Event | None = None,
    ):
        self.config, self.folder, self.executor, self.watcher = config, folder, executor, watcher
        self.stop = stop or threading.Event()
        self.meter = Meter(self.stop, watcher.evaluating)
        self.checkpoints = Checkpoints(folder.checkpoints, executor.store)
        self.progress = Progress()
        self.members: set[int] = set()  # the clients that took part so far
        self.summary: dict[str, Any] = {}

    side: ServerSide
    server: Tree
    records: ClientOverrides

    def run(self) -> dict[str, Any]:
        """Run all rounds that the folder does not have yet; returns the summary."""
        with one_thread(), machine.gc_frozen(), self.checkpoints, self.executor:
            self._prepare()
            while self.progress.closed < self.config.rounds:
                self._exchange()
            self.checkpoints.wait()
            self.summary |= self.executor.finished(self.progress.round)
            self._name_sites()
            self.folder.write_summary(self.summary)
        check_lost(self.summary)
        return self.summary

    # --- before the first round --------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Resume from the newest intact checkpoint, or begin; what cannot run is refused before anything is written."""
        saved = self._saved()
        books: dict[str, Any] = {}
        if saved is not None:
            self.progress, books = Progress.joined(saved.progress, saved.log)
        self._check_end()
        self.side = self.executor.open(books, self.progress.records)
        self.method, self.net, self.test = self.side.method, self.side.net, self.side.test
        self.total = None if self.test is None else evaluate.total_per_class(self.test)  # (C,)
        with failures.with_context(self.method, "the first try on blank samples failed, before any round"):
            initial = initial_state(self.method, self.net, self.config.seed, self.config.device)
            checks.check_personal(self.config.personal.model, self.method, self.config.method["name"], initial)
            self.upload_form = checks.declared_upload(self.method, self.net, initial)
            self.executor.begin(initial)
        self.form = checks.form_of(initial)
        state = initial if saved is None else saved.server
        self.server, self.records = split_overrides(state) if self.method.recorded else (state, {})
        self.members = {client for record in self.progress.records for client in record["clients"]}
        self._begin_folder(resumed=saved is not None)
        if self.progress.closed < self.progress.round and not self._evaluates(self.progress.round):
            self._write_line(self.progress.records[-1])  # it was the last round before the run was extended

    def _saved(self) -> Checkpoint | None:
        """The newest intact checkpoint; a finished run, which is to be extended, needs one."""
        try:
            saved = self.checkpoints.latest(self.executor.note, self.config.device)
        except UserError:
            if not self.folder.finished:
                raise
            saved = None
        if saved is None and self.folder.finished:
            raise UserError(
                f"{self.folder.path} holds a finished run without checkpoints that can be read, so it cannot go on; "
                f"start another run with rounds = {self.config.rounds}"
            )
        return saved

    def _check_end(self) -> None:
        """Refuse an end that the run has passed, and in a deployment weights that its sites would choose."""
        if self.executor.deployed and self.config.aggregator == "weighted_mean":
            raise UserError(
                "aggregator = 'weighted_mean' weighs sites by numbers of samples, which they report themselves and may "
                "keep to themselves; use 'mean' in a deployment"
            )
        path, rounds, done = self.folder.path, self.config.rounds, self.progress.round
        if self.progress.closed >= rounds:
            raise UserError(f"{path} has done {done} rounds, so it cannot end after {rounds}; give more with --rounds")

    def _begin_folder(self, resumed: bool) -> None:
        """Write the run's description; refuse to resume with other data than it began with, or without its state."""
        side, note = self.side, self.executor.note
        self.folder.begin(self.config, side.classes, side.counts, side.sites, self.executor.backend, side.as_read)
        for words in side.notes:
            note(words)
        if resumed:
            note(f"going on after round {self.progress.round}")
        elif recorded := self.folder.rounds_written():
            # The writer finishes one checkpoint before it starts the next: a kill can cost the first, not the second.
            if self.config.checkpoint.every and recorded > 2 * self.config.checkpoint.every:
                raise UserError(
                    f"{self.folder.path}: {recorded} rounds are recorded but there is no checkpoint; restore "
                    f"checkpoints/ and clients/ from a copy, or delete the folder to start from the beginning"
                )
            note("there is no checkpoint yet; starting again from the beginning")
        self.folder.write_metrics(self.progress.records[: self.progress.closed])  # later rounds will be repeated

    # --- one exchange ------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """Evaluate the last round, if that is due, and train the next, if there is one."""
        try:
            with failures.with_context(self.method, f"the server failed in round {self._at()}"):
                self._evaluate_and_train()
        except (Interrupted, RunError):
            self.executor.rollback()
            if self.config.checkpoint.every:
                self.checkpoints.save(self.progress.round, *self._to_save())
            raise

    def _at(self) -> int:
        return min(self.progress.round + 1, self.config.rounds)

    def _evaluate_and_train(self) -> None:
        if self.stop.is_set():
            raise Interrupted
        progress = self.progress
        closing, training = progress.closed < progress.round, progress.round < self.config.rounds
        here = self.executor.present()
        happened = self._plan(here)
        down = self.method.broadcast(self.server)
        happened.bytes_down = size(down) * len(happened.picked)
        evaluate = self._to_evaluate(here) if closing else []
        train = sorted(set(happened.picked) - set(happened.dropped))
        records = {client: self.records[client] for client in {*evaluate, *train} if client in self.records}
        started = time.perf_counter()
        answers = self.executor.exchange(
            Exchange(self.server, down, progress.round, evaluate, train, closing and not training, records)
        )
        waited = time.perf_counter() - started
        progress.client_seconds += waited
        if closing:
            self._close(answers)
        if training:
            started = time.perf_counter()
            if not happened.lost:
                self._train(happened, answers.reports())
            self._record(happened, waited + time.perf_counter() - started)

    def _plan(self, here: Sequence[int]) -> Round:
        """Pick clients for the next round from those present, and decide which of them drop out."""
        round_, least = self.progress.round + 1, self.executor.least
        happened = Round(round_, bytes_down=0, dropped=[])
        if self.progress.round == self.config.rounds:
            return happened
        if len(here) < least:
            self._give_up(happened, f"{len(here)} sites are there")
            return happened
        happened.picked = [here[k] for k in picked_clients(self.config, round_, len(here), least)]
        checks.check_picks(happened.picked, here, round_)
        happened.dropped = dropped_clients(self.config, round_, happened.picked)
        return happened

    def _train(self, happened: Round, outcomes: Iterator[Outcome]) -> None:
        """Check the clients' reports and aggregate them into the server's next state."""
        uploads = self._uploads(outcomes, happened)
        first = list(islice(uploads, self.executor.least))
        try:
            if len(first) < self.executor.least:
                self._check_refusals(happened)
                self._give_up(happened, f"{len(first)} uploads can be used")
            else:
                self._aggregate(happened, chain(first, uploads))
        except RunError as error:
            if not self.executor.deployed:
                raise
            happened.lose(str(error))
            self.executor.note(f"{error}; the server stays as it was")

    def _aggregate(self, happened: Round, uploads: Iterator[Tree]) -> None:
        """Compute the server's next state and the clients' records; what breaks an invariant is rejected."""
        parts: list[Tree] = []
        uploads = self._remembered(uploads, parts) if self.method.recorded else uploads
        weights = happened.weights
        rule = aggregate.rule(self.config.aggregator, self.server, self.config.trim, self.method, weights)
        with failures.with_context(self.method, f"the server failed in round {happened.round}"):
            server = self.method.aggregate(self.server, Uploads(uploads, rule))
        still = {name: self.server[name] for name in self.server if is_frozen(name, self.net.frozen)}
        server = {**server, **still}  # a mean of equal numbers may be rounded
        for _ in uploads:  # clients train as uploads are read: read those that the aggregate left
            pass
        self._check_refusals(happened)
        checks.check_server(self.method, server, self.form, happened.round)
        records = self._records(happened, server, parts) if self.method.recorded else {}
        if self.executor.deployed and self.upload_form and _equal(server, self.server):
            happened.lost = "the uploads change nothing"
            self.executor.note(f"round {happened.round}: {happened.lost}")
        self.server, self.records = server, {**self.records, **records}

    def _remembered(self, uploads: Iterator[Tree], parts: list[Tree]) -> Iterator[Tree]:
        """The uploads, whose recorded parts are kept."""
        for upload in uploads:
            parts.append(select(upload, *self.method.recorded))
            yield upload

    def _records(self, happened: Round, server: Tree, parts: Sequence[Tree]) -> ClientOverrides:
        """The records of the round's clients, made of the recorded parts of their uploads."""
        with failures.with_context(self.method, f"the server failed in round {happened.round}"):
            made, down = self.method.records(server, parts), self.method.broadcast(server)
        checks.check_records(self.method, made, checks.form_of(down), len(parts), happened.round)
        return dict(zip(happened.clients, made, strict=True))

    def _uploads(self, outcomes: Iterator[Outcome], happened: Round) -> Iterator[Tree]:
        """The uploads that can be used, one by one as they come."""
        bound = self.config.upload_bound(deployed=self.executor.deployed)
        reports = self._checked(self._timed(outcomes), happened)
        for client, report in self._bounded(list(reports), bound, happened) if bound else reports:
            happened.clients.append(client)
            happened.weights.append(report.samples or 0)
            happened.bytes_up += size(report.upload)
            if report.samples is not None and report.loss_sum is not None:
                happened.samples += report.samples
                happened.loss_sum += report.loss_sum
            if report.gradient_norm is not None and math.isfinite(report.gradient_norm):
                happened.gradient_norms[client] = report.gradient_norm
            yield report.upload

    def _timed(self, outcomes: Iterator[Outcome]) -> Iterator[Outcome]:
        """The same; the time until each arrives counts as the clients', what the server does with it does not."""
        while True:
            started = time.perf_counter()
            outcome = next(outcomes, None)
            self.progress.client_seconds += time.perf_counter() - started
            if outcome is None:
                return
            yield outcome

    def _checked(self, outcomes: Iterator[Outcome], happened: Round) -> Iterator[tuple[int, Report]]:
        """The reports that are finite and have the declared form; the others are reported and counted."""
        for client, report in outcomes:
            if isinstance(report, Missing):
                self._missing(client, report, happened)
                continue
            happened.processed += report.samples or 0
            if what := checks.not_finite(report):
                self._refuse(client, happened, f"{what} of {self.executor.name(client)} is not finite and was refused")
                continue
            checks.check_upload(self.method, report.upload, self.upload_form, client, happened.round)
            yield client, report

    def _bounded(
        self, reports: list[tuple[int, Report]], bound: float, happened: Round
    ) -> Iterator[tuple[int, Report]]:
        """Leave out uploads far longer than the others or than the client's earlier ones; needs all uploads at once."""
        lengths = {client: outliers.norms(report.upload, self.server) for client, report in reports}
        self.progress.usual = outliers.typical_norms(lengths, self.progress.usual)
        past = {client: self.progress.lengths.get(str(client), []) for client in lengths}
        found = outliers.norm_problems(lengths, past, self.progress.usual, bound)
        for client, report in reports:
            if problem := self.method.upload_problem(report.upload) or found.get(client):
                self._refuse(client, happened, f"the upload of {self.executor.name(client)} was refused: {problem}")
                continue
            happened.lengths[client] = lengths[client]
            yield client, report

    def _refuse(self, client: int, happened: Round, words: str) -> None:
        happened.refused.append(client)
        self.executor.note(f"round {happened.round}: {words}", client, happened.round)

    def _missing(self, client: int, report: Missing, happened: Round) -> None:
        """A client has no report: continue without it, or stop, depending on `on_error`."""
        if report.why == "failed" and not self.executor.deployed and self.config.on_error == "stop":
            raise RunError(report.words) from report.error
        rows = {"silent": happened.dropped, "failed": happened.failed, "refused": happened.refused}[report.why]
        rows.append(client)
        more = "" if report.why == "refused" else "; going on without it"
        self.executor.note(report.words + more, client, happened.round)

    def _check_refusals(self, happened: Round) -> None:
        """A round most of whose uploads are refused is not to be trusted: raise, which ends a simulation."""
        reported = len(happened.clients) + len(happened.refused)
        if 2 * len(happened.refused) > reported:
            raise RunError(
                f"round {happened.round}: {len(happened.refused)} of {reported} uploads were not finite or refused; "
                f"if training diverges, lower train.lr (now {self.config.train.lr:g}) or look for extreme values in "
                f"the data"
            )

    def _give_up(self, happened: Round, what: str) -> None:
        """Too few uploads: the round is lost in a deployment. In a simulation, dropouts are part of the experiment."""
        if not self.executor.deployed:
            told = f"no client of {len(happened.picked)} reported"
            self.executor.note(f"round {happened.round}: {told}; the server stays as it was")
            return
        happened.lose(f"{what}, and federation.min_clients = {self.executor.least}")
        self.executor.note(f"round {happened.round} is given up: {happened.lost}; the server stays as it was")

    def _record(self, happened: Round, seconds: float) -> None:
        """Count the round, close it unless it is still to be evaluated, and save a checkpoint if due."""
        progress, round_ = self.progress, happened.round
        self.executor.commit(round_, happened.clients)
        self.members |= set(happened.clients)
        progress.round = round_
        progress.samples += happened.processed
        progress.remember(happened)
        progress.records.append(happened.record(seconds))
        progress.seconds += seconds
        if not self._evaluates(round_):
            self._write_line(progress.records[-1])
        save = self.config.checkpoint.every
        if save and (round_ % save == 0 or round_ == self.config.rounds):
            self.checkpoints.begin(round_, *self._to_save())

    def _to_save(self) -> tuple[Tree, dict[str, Any], list[dict[str, Any]]]:
        """What a checkpoint holds: the server's state, values that change every round, and an append-only log."""
        values, log = self.progress.split()
        return merge_overrides(self.server, self.records), {**values, **self.executor.books()}, log

    # --- evaluation --------------------------------------------------------------------------------------------

    def _evaluates(self, round_: int) -> bool:
        """Whether the models are evaluated after this round."""
        every = self.config.eval.every
        return round_ == self.config.rounds or bool(every and round_ % every == 0)

    def _to_evaluate(self, here: Sequence[int]) -> list[int]:
        """The clients whose personal models are evaluated now; after the last round also those of the summary."""
        wanted = set(self._of_the_round())
        if self.progress.round == self.config.rounds:
            wanted |= set(here) if self.executor.deployed else set(self._of_the_summary())
        present = set(here) if self.executor.deployed else wanted
        return sorted(wanted & present)

    def _of_the_round(self) -> list[int]:
        """The clients whose personal models give the round's metrics."""
        return self._measured(self.progress.records[-1], self.members)

    def _measured(self, record: dict[str, Any], members: set[int]) -> list[int]:
        """The same for any round, from its record and its members: `eval.clients`."""
        if self.config.eval.clients == "active":
            active: list[int] = record["clients"]
            return active
        return sampled_clients(self.config, self.config.eval.clients, sorted(members), record["round"])

    def _of_the_summary(self) -> list[int]:
        """The clients in the summary: in a deployment all sites that took part, otherwise those of `eval.final`."""
        members = sorted(self.members)
        if self.executor.deployed:
            return members
        return sampled_clients(self.config, self.config.eval.final, members, self.progress.round)

    def _close(self, answers: Answers) -> None:
        """Evaluate the round and write its line; after the last round also the models and the summary."""
        started, progress = time.perf_counter(), self.progress
        logits = self._global()
        correct = None if logits is None or self.test is None else evaluate.count_correct(logits.argmax(1), self.test)
        people = answers.people()
        chosen, record = set(self._of_the_round()), progress.records[-1]
        few = self.side.one_class
        record |= evaluate.metrics(correct, self.total, [p for p in people if p.client in chosen], few)
        self._add_shared(record, logits, chosen)
        last = progress.round == self.config.rounds
        if last:
            self._write_models(answers)
            self.folder.write_outcomes({p.client: p.outcomes for p in people if p.outcomes is not None})
            self.folder.remove_others(person.client for person in people)
        record["eval_seconds"] = round(time.perf_counter() - started, 4)
        progress.eval_seconds += record["eval_seconds"]
        progress.seconds += time.perf_counter() - started
        if last:
            final = set(self._of_the_summary())
            self.summary = self._summary(correct, [p for p in people if p.client in final])
            self._add_shared(self.summary, logits, final)
        self._write_line(record)

    def _global(self) -> torch.Tensor | None:  # (N, C) the global model's logits for the test set
        with failures.with_context(self.method, f"the global model failed after round {self.progress.round}"):
            model = self.method.global_model(self.server)
            if model is None or self.test is None:
                return None
            self.meter.begin(len(self.test))
            return clients.logits_of(self.method, self.net, model, self.test, self.meter)

    def _add_shared(self, found: dict[str, Any], logits: torch.Tensor | None, chosen: set[int]) -> None:
        """With `eval.prior`: what the global model with their own prior achieves for these clients."""
        if logits is None or self.test is None or not self.side.counts:
            return
        counts = [self.side.counts[client] for client in sorted(chosen)]
        for tau, means in found.get("prior", {}).items():
            means |= evaluate.shared_with_prior(logits, self.test, counts, float(tau), self.config.personal.smoothing)

    def _write_models(self, answers: Answers) -> None:
        """Write the global model, and the Tree that a new client would receive."""
        side = self.side
        if (model := self.method.global_model(self.server)) is not None:
            about = answers.novelty()
            if side.train is not None and side.trained_on is not None:
                self.meter.begin(similarity.sample_count(self.method, len(side.trained_on)))
                seed = self.config.seed
                about = similarity.similarity_quantiles(
                    self.method, self.net, model, side.train, side.trained_on, seed, self.meter
                )
            card = {**side.card, "novelty": about}
            self.folder.write_model(self.folder.global_model, {**self.net.norm, **model}, card)
        self.folder.write_model(self.folder.broadcast_model, self.method.broadcast(self.server), side.card)

    def _summary(self, correct: torch.Tensor | None, people: list[Personal]) -> dict[str, Any]:
        lost = [record["round"] for record in self.progress.records if record.get("lost")]
        metrics = evaluate.final_metrics(correct, self.total, people, self.side.one_class)
        return {
            "method": self.config.method["name"],
            "data": self.side.name,
            "seed": self.config.seed,
            "rounds": self.progress.round,
            **({"test_samples": int(self.total.sum())} if self.config.eval.samples and self.total is not None else {}),
            **metrics,
            **evaluate.best([*self._earlier({person.client for person in people}), metrics]),
            **self.progress.totals(),
            **({"lost": lost} if lost else {}),
        }

    def _earlier(self, clients: set[int]) -> list[dict[str, Any]]:
        """The records of the rounds before the last that measured exactly these clients."""
        members, found = set[int](), []
        for record in self.progress.records[:-1]:
            members |= set(record["clients"])
            if self._evaluates(record["round"]) and set(self._measured(record, members)) == clients:
                found.append(record)
        return found

    def _name_sites(self) -> None:
        """Put the sites' names beside the clients' numbers."""
        names = dict(enumerate(self.side.sites))
        if self.executor.deployed:
            names |= {site["client"]: site["site"] for site in self.summary.get("sites", ())}
        self.summary["clients"] = [
            {"client": row["client"], **({"site": names[row["client"]]} if row["client"] in names else {}), **row}
            for row in self.summary["clients"]
        ]

    def _write_line(self, record: dict[str, Any]) -> None:
        self.folder.append_metrics(record)
        self.progress.closed = record["round"]
        self.watcher.round_done(record)


def _equal(one: Tree, other: Tree) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())
