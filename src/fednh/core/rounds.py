"""The round loop, in one process: pick clients, send, train, receive, aggregate, evaluate, record."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fednh.config import Config, parse_bytes
from fednh.core import aggregate, checks, evaluate, failures, memory, novelty, outliers
from fednh.core import client as clients
from fednh.core.evaluate import Personal
from fednh.core.federation import Federation
from fednh.core.machine import one_thread
from fednh.core.meter import Meter
from fednh.core.picks import dropped_clients, picked_clients, sampled_clients
from fednh.core.progress import Progress, Round, Watcher
from fednh.core.seeding import torch_rng
from fednh.core.tree import Tree, Uploads, arranged, size
from fednh.data.batches import ClientData, Samples, subset
from fednh.data.inspection import about_test_set
from fednh.errors import Interrupted, RunError, UserError
from fednh.executors import pool
from fednh.storage.checkpoint import Checkpoints
from fednh.storage.client_states import Store
from fednh.storage.run_folder import RunFolder, worker_count


class Simulation:
    """One run of one method on one federation, in one run folder."""

    def __init__(
        self,
        config: Config,
        federation: Federation,
        run: RunFolder,
        watcher: Watcher,
        stop: threading.Event | None = None,
    ):
        self.config, self.fed, self.folder, self.watcher = config, federation, run, watcher
        self.method, self.net = federation.method, federation.net
        self.stop = stop or threading.Event()
        self.meter = Meter(self.stop, watcher.evaluating)
        self.workers = worker_count(config)
        memory.keep_freed()
        budget = parse_bytes(config.store.memory, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        with one_thread(), failures.named(self.method, "the first try on blank samples failed, before any round"):
            initial = self.method.init(self.net, torch_rng(config.seed, "init"))
            self.server = {name: value.to(config.device) for name, value in arranged(initial).items()}
            self.store = Store(run.clients, budget, self.method.enroll(self.server), config.device)
            self.upload_form = clients.declared_upload(self.method, self.net, self.server)
            self.engine = pool.choose(config, federation, self.server)
        self.checkpoints = Checkpoints(run.checkpoints, self.store)
        self.form = clients.form_of(self.server)
        self.progress = Progress()

    def run(self) -> dict[str, Any]:
        """All rounds, from where the folder stands to the end; returns the summary."""
        self._begin()
        self._resume()
        workers = ThreadPoolExecutor(self.workers, initializer=torch.set_num_threads, initargs=(1,))
        with one_thread(), self.checkpoints, workers as self.pool:
            if self.progress.closed < self.progress.round < self.config.rounds:  # stopped while it was evaluated
                self._close_round(self.progress.round)
            while self.progress.round < self.config.rounds:
                self._one_round(self.progress.round + 1)
            with failures.named(self.method, f"the end failed after round {self.progress.round}"):
                summary = self._finish()
            self.checkpoints.wait()
            self.folder.write_summary(summary)
            return summary

    # --- one round ---------------------------------------------------------------------------------------------

    def _one_round(self, round_: int) -> None:
        started = time.perf_counter()
        try:
            with failures.named(self.method, f"the server failed in round {round_}"):
                happened = self._train(round_)
        except (Interrupted, RunError):
            self.store.rollback()
            self._checkpoint()
            raise
        self.store.commit()
        self.progress.round = round_
        self.progress.samples += happened.processed
        self.progress.records.append(happened.record(time.perf_counter() - started))
        self.progress.seconds += time.perf_counter() - started
        if round_ < self.config.rounds:  # the last round is closed by `_finish`
            self._close_round(round_)
        if self.config.checkpoint.every and round_ % self.config.checkpoint.every == 0:
            self.checkpoints.begin(round_, self.server, *self.progress.split())

    def _close_round(self, round_: int) -> None:
        """Evaluate the round if that is due, and write its line."""
        started, record = time.perf_counter(), self.progress.records[-1]
        if self.config.eval.every and round_ % self.config.eval.every == 0:
            try:
                people = self._personal(self._whom(round_, record["clients"]), round_)
                correct = self._global()
            except (Interrupted, RunError):
                self._checkpoint()
                raise
            record |= self._figures(correct, people)
            record["eval_seconds"] = round(time.perf_counter() - started, 4)
            self.progress.eval_seconds += record["eval_seconds"]
        self.folder.append_metrics(record)
        self.progress.closed = round_
        self.progress.seconds += time.perf_counter() - started
        self.watcher.round_done(record)

    def _train(self, round_: int) -> Round:
        """Downlink, client work, uplink, aggregation."""
        if self.stop.is_set():
            raise Interrupted
        picked = picked_clients(self.config, round_, len(self.fed.parts))
        checks.check_picks(picked, len(self.fed.parts), round_)
        dropped = dropped_clients(self.config, round_, picked)
        down = self.method.broadcast(self.server)
        happened = Round(round_, bytes_down=size(down) * len(picked), dropped=dropped)
        # The largest first: nobody waits for a latecomer. The order is fixed, so sums have the same bits every time.
        order = sorted(set(picked) - set(dropped), key=lambda k: (-len(self.fed.parts[k]), k))
        uploads = self._uploads(order, down, happened)
        first = next(uploads, None)
        if first is None:
            self.watcher.note(f"round {round_}: no client of {len(picked)} reported; the server stays as it was")
            next_server = self.server
        else:
            rule = aggregate.rule(self.config.aggregator, self.server, self.config.trim, self.method)
            next_server = self.method.aggregate(self.server, Uploads(chain([first], uploads), rule))
            for _ in uploads:  # an aggregate that did not read them all still lets every client do its part
                pass
        self._stop_if_mostly_refused(happened)
        checks.check_server(self.method, next_server, self.form, round_)
        self.server = next_server
        return happened

    def _uploads(self, order: list[int], down: Tree, happened: Round) -> Iterator[Tree]:
        """The round's uploads, one by one as they are ready; what a client keeps goes to the store."""
        started, round_, config = time.perf_counter(), happened.round, self.config
        look, sgd = config.diagnostics.gradient_norm, config.train.sgd(round_)
        work = pool.Work(self.fed, down, sgd, config.seed, round_, self.store.get, self.stop.is_set, look)
        updates = pool.updates(self.engine, self.pool, work, order, ahead=2 * self.workers)
        if bound := config.upload_bound(deployed=False):
            updates = self._bounded(list(updates), bound, happened)
        for client, update in updates:
            if update is None:
                raise Interrupted
            if isinstance(update, Exception):
                self._failed(client, update, happened)
                continue
            happened.processed += update.samples
            if what := update.not_finite:
                happened.refused.append(client)
                self.watcher.note(f"round {round_}: {what} of client {client} is not finite and was refused")
                continue
            if problem := checks.upload_problem(update.upload, self.upload_form):
                name = type(self.method).__name__
                raise RunError(
                    f"invariant broken by {name}: the upload of client {client} in round {round_}: {problem}"
                )
            self.store.put(client, update.keep, round_)
            happened.clients.append(client)
            happened.bytes_up += size(update.upload)
            happened.samples += update.samples
            happened.loss_sum += update.loss_sum
            if update.gradient_norm is not None and math.isfinite(update.gradient_norm):
                happened.gradient_norms[client] = update.gradient_norm
            yield update.upload
        self.progress.client_seconds += time.perf_counter() - started

    def _bounded(self, updates: list[tuple[int, Any]], bound: float, happened: Round) -> Iterator[tuple[int, Any]]:
        """The updates without those whose uploads are far larger than the others'; it needs to see all of them."""
        whole = {k: u.upload for k, u in updates if isinstance(u, clients.Update) and not u.not_finite}
        lengths = {k: outliers.lengths(upload, self.server) for k, upload in whole.items()}
        self.progress.usual = outliers.usual(lengths, self.progress.usual)
        found = outliers.problems(lengths, {}, self.progress.usual, bound)
        for client, update in updates:
            problem = self.method.upload_problem(whole[client]) or found.get(client) if client in whole else None
            if problem:
                happened.refused.append(client)
                self.watcher.note(f"round {happened.round}: the upload of client {client} was refused: {problem}")
            else:
                yield client, update

    def _failed(self, client: int, error: Exception, happened: Round) -> None:
        """A client's training raised an error: stop, or go on without it, as `on_error` says."""
        told = failures.sentence(self.method, error, f"client {client} failed in round {happened.round}")
        if self.config.on_error == "stop":
            raise RunError(told) from error
        happened.failed.append(client)
        self.watcher.note(f"{told}; going on without it")

    def _stop_if_mostly_refused(self, happened: Round) -> None:
        reported = len(happened.clients) + len(happened.refused)
        if 2 * len(happened.refused) > reported:
            raise RunError(
                f"round {happened.round}: {len(happened.refused)} of {reported} uploads were not finite, so training "
                f"diverges; lower train.lr (now {self.config.train.lr:g}) or look for extreme values in the data"
            )

    def _data(self, client: int, round_: int, purpose: str) -> ClientData:
        return ClientData(self.fed.train, self.fed.parts[client], self.config.seed, round_, client, purpose)

    # --- evaluation --------------------------------------------------------------------------------------------

    def _whom(self, round_: int, active: list[int]) -> list[int]:
        """Whose personal models to look at: `eval.clients`."""
        whom = self.config.eval.clients
        if whom == "active":
            return active
        return self._sample(whom, round_)

    def _sample(self, number: str | int, round_: int) -> list[int]:
        """Of the clients that took part so far `number`, or all."""
        return sampled_clients(self.config, number, self.store.members, round_)

    def _global(self) -> torch.Tensor | None:  # (C,) correct per class
        with failures.named(self.method, f"the global model failed after round {self.progress.round}"):
            model = self.method.global_model(self.server)
            if model is None or not len(self.fed.test):
                return None
            self.meter.begin(len(self.fed.test))
            return self.pool.submit(self._correct, model, self.fed.test).result()

    def _correct(self, model: Tree, test: Samples) -> torch.Tensor:  # (C,)
        model = arranged(model)

        def predict(x: torch.Tensor) -> torch.Tensor:
            self.meter(len(x))
            return self.method.logits(self.net, model, x)

        return evaluate.correct_per_class(predict, test)

    def _held_out(self, client: int, personal: Tree, shared: Tree | None) -> dict[str, Any]:
        """What the client's own model and the global one achieve on the client's held-out samples."""
        test, found = subset(self.fed.train, self.fed.held_out[client]), dict[str, float | None]()
        total = evaluate.total_per_class(test)
        for prefix, model in (("held", personal), ("held_gm", shared)):
            if model is not None and len(test):
                macro, share = evaluate.held_accuracy(self._correct(model, test), total)
                found |= {f"{prefix}_macro": macro, f"{prefix}_share": share}
        return found

    def _personal(self, whom: list[int], round_: int, save: bool = False) -> list[Personal]:
        """The personal models' figures; on request, the models are saved too."""
        sgd, total = self.config.train.sgd(round_), evaluate.total_per_class(self.fed.test)
        with failures.named(self.method, f"the server failed after round {round_}"):
            down = self.method.broadcast(self.server)
            shared = self.method.global_model(self.server) if self.fed.measures_held_out else None
        nothing = torch.zeros_like(total)

        def work(client: int) -> Personal:
            with failures.named(self.method, f"the personal model of client {client} failed after round {round_}"):
                return measured(client)

        def measured(client: int) -> Personal:
            data = self._data(client, round_, "personal")
            model = clients.personal_model(self.method, self.net, self.store.get(client), down, data, sgd, self.meter)
            if save:
                about = self._novelty(model, self.fed.parts[client])
                card = {**self.fed.card(self.config, client), "novelty": about}
                self.folder.write_model(self.folder.personal_model(client), model, card)
            correct = self._correct(model, self.fed.test) if len(self.fed.test) else nothing
            person = evaluate.personal(client, correct, total, data.counts)
            return replace(person, **self._held_out(client, model, shared))

        self.meter.begin(sum(self._to_look_at(client, shared, save) for client in whom))
        return list(pool.in_order(self.pool, work, whom, ahead=2 * self.workers))  # stopped, it starts again on resume

    def _to_look_at(self, client: int, shared: Tree | None, save: bool) -> int:
        """How many samples go through models for a client's figures."""
        held = len(self.fed.held_out[client]) * (1 if shared is None else 2)
        return len(self.fed.test) + held + (novelty.number(self.method, len(self.fed.parts[client])) if save else 0)

    def _novelty(self, model: Tree, *parts: NDArray[np.int64]) -> dict[str, Any] | None:
        """How similar training samples are to their prototypes, where the method has them: for the model's card."""
        if not self.method.cosine:
            return None
        index = np.concatenate(parts)
        return novelty.look(self.method, self.net, model, self.fed.train, index, self.config.seed, self.meter)

    def _figures(self, correct: torch.Tensor | None, people: list[Personal]) -> dict[str, float | None]:
        total = evaluate.total_per_class(self.fed.test)
        return {
            "gm": None if correct is None else evaluate.accuracy(correct, total, torch.ones_like(total)),
            "pm_v": evaluate.mean_and_spread(p.pm_v for p in people)[0],
            "pm_l": evaluate.mean_and_spread(p.pm_l for p in people)[0],
            **self._held_out_figures(people),
        }

    def _held_out_figures(self, people: list[Personal]) -> dict[str, float | None]:
        if not self.fed.measures_held_out:
            return {}
        keys = ("held_macro", "held_share", "held_gm_macro", "held_gm_share")
        return {key: evaluate.mean_and_spread(getattr(p, key) for p in people)[0] for key in keys}

    # --- start and end -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Write down what the run is, or refuse to go on with other data than it began with."""
        fed, note = self.fed, self.watcher.note
        counts = fed.class_counts()
        self.folder.begin(self.config, fed.dataset.classes, counts, fed.sites, data=fed.as_read, tell=note)
        for words in about_test_set(fed.dataset):
            note(f"{fed.dataset.name}: {words}")

    def _checkpoint(self) -> None:
        if self.config.checkpoint.every:
            self.checkpoints.save(self.progress.round, self.server, *self.progress.split())

    def _resume(self) -> None:
        """Go on from the newest whole checkpoint; metrics written after it are dropped, they will come again."""
        saved = self.checkpoints.latest(self.watcher.note, self.config.device)
        if saved is not None:
            self.server, self.progress = saved.server, Progress.joined(saved.progress, saved.log)
            self.watcher.note(f"going on after round {saved.round}")
        elif recorded := self.folder.rounds_written():
            # The writer finishes one checkpoint before it starts the next: a kill can cost the first, not the second.
            if self.config.checkpoint.every and recorded > 2 * self.config.checkpoint.every:
                raise UserError(
                    f"{self.folder.path}: {recorded} rounds are recorded but there is no checkpoint; restore "
                    f"checkpoints/ and clients/ from a copy, or delete the folder to start from the beginning"
                )
            self.watcher.note("there is no checkpoint yet; starting again from the beginning")
        self.folder.write_metrics(self.progress.records[: self.progress.closed])

    def _finish(self) -> dict[str, Any]:
        """Evaluate the global model and the clients that `eval.final` says; write the models; returns the summary."""
        started = time.perf_counter()
        round_, record = self.progress.round, self.progress.records[-1]
        if self.config.checkpoint.every and round_ % self.config.checkpoint.every:
            self._checkpoint()
        card, correct = self.fed.card(self.config), self._global()
        if (model := self.method.global_model(self.server)) is not None:
            self.meter.begin(novelty.number(self.method, sum(map(len, self.fed.parts))))
            about = {**card, "novelty": self._novelty(model, *self.fed.parts)}
            self.folder.write_model(self.folder.global_model, {**self.net.norm, **model}, about)
        self.folder.write_model(self.folder.broadcast_model, self.method.broadcast(self.server), card)
        final, chosen = set(self._sample(self.config.eval.final, round_)), set(self._whom(round_, record["clients"]))
        people = self._personal(sorted(final | chosen), round_, save=True)
        record |= self._figures(correct, [p for p in people if p.client in chosen])
        record["eval_seconds"] = round(time.perf_counter() - started, 4)
        self.folder.append_metrics(record)
        self.watcher.round_done(record)
        self.progress.closed = round_
        self.progress.eval_seconds += record["eval_seconds"]
        self.progress.seconds += time.perf_counter() - started
        return self._summary(correct, [p for p in people if p.client in final])

    def _summary(self, correct: torch.Tensor | None, people: list[Personal]) -> dict[str, Any]:
        progress, total = self.progress, evaluate.total_per_class(self.fed.test)
        held = self.fed.measures_held_out
        return {
            "method": self.config.method["name"],
            "data": self.fed.dataset.name,
            "seed": self.config.seed,
            "rounds": progress.round,
            **self._figures(correct, people),
            "pm_l_std": evaluate.mean_and_spread(p.pm_l for p in people)[1],
            **({"held_share_std": evaluate.mean_and_spread(p.held_share for p in people)[1]} if held else {}),
            "per_class": None if correct is None else evaluate.per_class(correct, total),
            "clients": [{**p.record(), "samples": len(self.fed.parts[p.client])} for p in people],
            **progress.totals(),
        }
