"""The round loop, the only one: plan, ask, check, aggregate, evaluate, record, save.

An executor computes the clients (executor.py), so a simulation and a deployment run the same loop. A run of R rounds
is R + 1 exchanges. In each, clients evaluate the models of the last round, if an evaluation is due, and train the next
round; the line of an evaluated round is written once its metrics have arrived.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from fednh.callbacks import Callback
from fednh.config import Config
from fednh.errors import Interrupted, RunError
from fednh.federated import checks, stopping
from fednh.federated.aggregate import Accumulator, merge_overrides, split_overrides
from fednh.federated.client import ClientResult
from fednh.federated.executor import Executor, Replies, RoundTask
from fednh.federated.plan import RoundPlan, evaluated_clients, is_evaluated, plan_round, sampled_clients
from fednh.federated.results import Progress, RoundBuilder, RoundResult, check_lost
from fednh.federated.server_optimizer import merge_moments, split_moments
from fednh.federated.start import Started, start
from fednh.federated.stopping import ChosenRound
from fednh.federated.summary import client_rows, close_round
from fednh.interrupt import Meter
from fednh.machine import gc_frozen, one_thread
from fednh.metric_names import RoundRecord, RunSummary
from fednh.privacy import clients
from fednh.privacy.clients import PrivateMean
from fednh.privacy.ledger import covers
from fednh.privacy.noise import SeededNoise
from fednh.privacy.plan import entry, exceeds
from fednh.runs.checkpoint import Checkpoints
from fednh.runs.client_states import Store
from fednh.runs.run_folder import RunFolder
from fednh.tree import Tree


class RoundLoop:
    """One run of one method, in one run folder, on one executor."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        executor: Executor,
        callback: Callback,
        stop: threading.Event | None = None,
    ):
        self.config, self.folder, self.executor, self.callback = config, folder, executor, callback
        self.stop = stop or threading.Event()
        self.meter = Meter(self.stop, partial(callback.on_progress, "evaluating"))
        self.checkpoints = Checkpoints(folder.checkpoints, executor.store)
        self.progress = Progress()
        self.summary: dict[str, Any] = {}

    _back = False  # whether the run has gone back to the round that it keeps
    _clip: float | None = None  # of clients' moves in the next round
    setup: Started  # what the run works on; it does not change
    server: Tree
    overrides: dict[int, Tree]  # what single clients receive in place of the broadcast
    moments: Tree  # of the server's optimiser

    def run(self) -> dict[str, Any]:
        """Run all rounds that the folder does not have yet; returns the summary."""
        with one_thread(), gc_frozen(), self.checkpoints, self.executor:
            self.setup, self.progress, self.server, self.overrides, self.moments = start(
                self.config, self.folder, self.executor, self.checkpoints
            )
            self.callback.on_start(self.config.model_dump(), self.progress.round)
            self._write_line_if_complete()  # of a run that was extended
            while not self._ended:
                try:
                    with checks.with_context(self.setup.method, f"the server failed in round {self._next_round}"):
                        self._exchange()
                except (Interrupted, RunError):
                    self.executor.rollback()
                    if self.config.checkpoint.every:
                        self.checkpoints.save(self.progress.round, *self._to_save())
                    raise
            self.checkpoints.wait()
            self._keep_chosen_round()
            self.summary |= self.executor.finished(self.progress.round)
            self.summary["clients"] = client_rows(self.summary, self.setup.side)
            self.folder.write_summary(self.summary)
        self.callback.on_end(cast(RunSummary, self.summary))
        check_lost(self.summary)
        return self.summary

    @property
    def _ended(self) -> bool:
        """Whether all rounds are done, or `stop_when` ends the run before."""
        chosen = self._choice()
        return self.progress.closed >= self.config.rounds or (chosen is not None and chosen.ends)

    def _choice(self) -> ChosenRound | None:
        """Which round's models are kept, as far as is known."""
        return stopping.choice(self.config, self.progress.records[: self.progress.closed])

    @property
    def _next_round(self) -> int:
        return min(self.progress.round + 1, self.config.rounds)

    def _exchange(self) -> None:
        """One message a client: evaluate the last round, if that is due, and train the next, if there is one."""
        if self.stop.is_set():
            raise Interrupted
        config, executor, progress = self.config, self.executor, self.progress
        pending, training = progress.closed < progress.round, progress.round < config.rounds
        present = executor.present()
        plan = plan_round(config, progress.round + 1, present, executor.policy.min_uploads)
        checks.check_picks(plan.picked, present, plan.round)
        if training:
            self._check_budget(plan)
        evaluate, train = self._clients_to_evaluate(present) if pending else [], plan.train
        down = self.setup.side.architectures.broadcast(self.server)
        overrides = {client: self.overrides[client] for client in {*evaluate, *train} if client in self.overrides}

        mechanisms = None if self.setup.privacy is None else self.setup.privacy.mechanisms
        started = time.perf_counter()
        final, chosen = pending and not training, self._choice()
        replies = executor.ask(
            RoundTask(
                self.server,
                down,
                progress.round,
                evaluate,
                train,
                final,
                mechanisms,
                overrides,
                back_to=None if chosen is None else chosen.round,
            )
        )
        waited = time.perf_counter() - started
        progress.client_seconds += waited

        if pending:
            self._evaluate(replies)
            self._copy_chosen_round()
            if training and self._ended:
                executor.rollback()
                return
        if training:
            started = time.perf_counter()
            side = self.setup.side
            bytes_down = side.architectures.bytes_down(down, [side.network_of(client) for client in plan.picked])
            result = self._train(plan, present, bytes_down, replies)
            executor.commit(plan.round, result.clients)
            progress.add(result, waited + time.perf_counter() - started, self._spent(plan))
            self._write_line_if_complete()
            every = config.checkpoint.every
            if every and (plan.round % every == 0 or plan.round == config.rounds):
                self.checkpoints.begin(plan.round, *self._to_save())

    # --- training ------------------------------------------------------------------------------------------------

    def _train(self, plan: RoundPlan, present: Sequence[int], bytes_down: int, replies: Replies) -> RoundResult:
        """Check the clients' results and aggregate their uploads into the server's next state."""
        method, policy, nets = self.setup.method, self.executor.policy, self.setup.side.architectures
        parts = method.upload.recorded  # the parts of used uploads of which overrides are made
        builder = RoundBuilder(plan, bytes_down, parts)
        if policy.bad_round == "skip" and not plan.picked:
            return self._skip_round(builder, f"{len(present)} sites are there")
        accepted = self._accumulator(plan)
        try:
            bounded: list[ClientResult] = []  # with a bound on norms all uploads are compared before any is used
            started = time.perf_counter()  # until a result arrives the clients are at work, then the server is
            for result in replies.results():
                self.progress.client_seconds += time.perf_counter() - started
                builder.processed += result.samples or 0
                if problem := self._problem(result, plan.round):
                    self._leave_out(result, problem, builder)
                elif policy.norm_bound:
                    bounded.append(result)
                else:
                    builder.use(result)
                    accepted.add(self._upload(result), self._weight(result.client), len(result.together) or 1)
                started = time.perf_counter()
            self.progress.client_seconds += time.perf_counter() - started
            for result in self._within_bound(bounded, builder):
                builder.use(result)
                accepted.add(self._upload(result), self._weight(result.client))
            self._check_refusals(builder)
            if accepted.count < policy.min_uploads and not isinstance(accepted, PrivateMean):
                return self._skip_round(builder, f"{accepted.count} uploads can be used")
            with checks.with_context(method, f"the server failed in round {plan.round}"):
                uploads, moments = self.setup.optimizer.step(self.server, accepted.uploads(), self.moments)
                self._clip = accepted.next_clip() if isinstance(accepted, PrivateMean) else None
                server = nets.aggregate(self.server, uploads)
                server = {**server, **nets.frozen(self.server)}  # a mean of equal numbers may be rounded
                made = method.records(server, builder.recorded) if parts else []
                down = method.broadcast(server) if parts else {}
            checks.check_server(method, server, self.setup.server_specs, nets.problem, plan.round)
            if parts:
                checks.check_records(method, made, checks.form_of(down), len(builder.recorded), plan.round)
        except RunError as error:
            if policy.bad_round == "stop":
                raise
            self.executor.note(f"{error}; the server stays as it was")
            return builder.done(lost=str(error))
        before, self.server, self.moments = self.server, server, moments
        self.overrides = {**self.overrides, **dict(zip(builder.clients, made, strict=True) if parts else ())}
        changes = (
            any(self.setup.upload_specs.values()) and not method.upload.summed
        )  # sums that were sent before change nothing
        if policy.bad_round == "skip" and changes and _equal(server, before):
            return self._unchanged(builder)
        return builder.done()

    # --- privacy -------------------------------------------------------------------------------------------------

    def _accumulator(self, plan: RoundPlan) -> Accumulator:
        """What takes the round's uploads; under privacy.level = "client" it adds noise to their sum."""
        config, setup = self.config, self.setup
        if setup.privacy is None or config.privacy.level != "client" or not setup.privacy.later:
            return setup.side.architectures.accumulator(config.aggregator, self.server, config.trim)
        expected = config.participation.rate * len(setup.side.counts)
        clip = self._clip or next(
            (row["privacy"]["clip"] for row in reversed(self.progress.records)), clients.first_clip(config.privacy)
        )
        rng, noise = SeededNoise(config.seed, plan.round, 0, "privacy of clients"), setup.privacy.later[0].noise
        (specs,) = setup.upload_specs.values()  # with privacy all clients have one network
        return PrivateMean(self.server, specs, config.privacy, noise, clip, expected, rng)

    def _check_budget(self, plan: RoundPlan) -> None:
        """Stop before a round that would exceed the budget: what has been done so far stays."""
        privacy, train = self.setup.privacy, plan.train
        if privacy is not None and exceeds(privacy, plan.round, train, self.progress.records):
            raise RunError(
                f"round {plan.round} would exceed privacy.epsilon = {privacy.config.epsilon:g}, the run's budget: "
                f"it ends after round {self.progress.round}; its models are in the newest checkpoint"
            )

    def _spent(self, plan: RoundPlan) -> dict[str, Any]:
        """What the round's record says of its privacy."""
        if self.setup.privacy is None:
            return {}
        row = entry(self.setup.privacy, plan.round, plan.train, self.progress.records)
        clip = {} if self._clip is None else {"clip": self._clip}
        return {"train_loss": None, "epsilon": row.pop("epsilon"), "privacy": {**row, **clip}}  # no account covers it

    def _problem(self, result: ClientResult, round_: int) -> str | None:
        """Why a client's result cannot be used, as a sentence, or None; an error at a client may end the run."""
        if result.upload is None:
            if result.status == "failed" and self.executor.policy.client_error == "stop":
                raise RunError(result.problem) from result.error
            return result.problem + ("" if result.status == "refused" else "; going on without it")
        if (plan := self.setup.privacy) is not None and not covers(plan.answer(round_, True), result.released):
            raise RunError(f"round {round_}: an upload would hold more than the account of its privacy names")
        if what := checks.not_finite(result):
            return f"round {round_}: {what} of {self.executor.name(result.client)} is not finite and was refused"
        declared = self.setup.upload_specs[self.setup.side.network_of(result.client)]
        checks.check_upload(self.setup.method, result.upload, declared, result.client, round_)
        return None

    def _upload(self, result: ClientResult) -> Tree:
        """A client's upload by the server's names."""
        side = self.setup.side
        return side.architectures.named(result.upload or {}, side.network_of(result.client))

    def _weight(self, client: int) -> int:
        """How many training samples a client has, however many its method processed; 0 if only sites know."""
        counts = self.setup.side.counts
        return int(counts[client].sum()) if len(counts) else 0

    def _within_bound(self, results: list[ClientResult], builder: RoundBuilder) -> Iterator[ClientResult]:
        """The results whose uploads are not far longer than the others or than the client's earlier ones."""
        norms = {result.client: checks.norms(self._upload(result), self.server) for result in results}
        self.progress.typical_norms = checks.typical_norms(norms, self.progress.typical_norms)
        past = {client: self.progress.past_norms.get(str(client), []) for client in norms}
        too_long = checks.norm_problems(norms, past, self.progress.typical_norms, self.executor.policy.norm_bound)
        for result in results:
            if problem := self.setup.method.upload.problem(result.upload or {}) or too_long.get(result.client):
                who = self.executor.name(result.client)
                self._leave_out(
                    result, f"round {builder.plan.round}: the upload of {who} was refused: {problem}", builder
                )
                continue
            builder.norms[result.client] = norms[result.client]
            yield result

    def _leave_out(self, result: ClientResult, problem: str, builder: RoundBuilder) -> None:
        builder.leave_out(result)
        self.executor.note(problem, result.client, builder.plan.round)

    def _check_refusals(self, builder: RoundBuilder) -> None:
        """A round most of whose uploads are refused is not to be trusted: raise."""
        reported = len(builder.clients) + len(builder.refused)
        if 2 * len(builder.refused) > reported:
            raise RunError(
                f"round {builder.plan.round}: {len(builder.refused)} of {reported} uploads were not finite or refused; "
                f"if training diverges, lower train.lr (now {self.config.train.lr:g}) or look for extreme values in "
                f"the data"
            )

    def _skip_round(self, builder: RoundBuilder, what: str) -> RoundResult:
        """Too few uploads. In a simulation dropouts are part of the experiment; a deployment loses the round."""
        round_, policy = builder.plan.round, self.executor.policy
        if policy.bad_round == "stop":
            why = f"no client of {len(builder.plan.picked)} reported"
            self.executor.note(f"round {round_}: {why}; the server stays as it was")
            return builder.done()
        lost = f"{what}, and federation.min_clients = {policy.min_uploads}"
        self.executor.note(f"round {round_} is given up: {lost}; the server stays as it was")
        return builder.done(lost)

    def _unchanged(self, builder: RoundBuilder) -> RoundResult:
        """The round is used but marked: its uploads were what the server had sent."""
        lost = "the uploads change nothing"
        self.executor.note(f"round {builder.plan.round}: {lost}")
        return builder.done(lost, used=True)

    # --- evaluation ----------------------------------------------------------------------------------------------

    def _clients_to_evaluate(self, present: Sequence[int]) -> list[int]:
        """The clients whose personal models are evaluated now; after the last round also those of the summary."""
        wanted = set(self._evaluated())
        if self.executor.policy.evaluate == "sampled":
            return sorted(wanted | set(self._in_summary() if self._is_last else ()))
        return sorted((wanted | set(present) if self._is_last else wanted) & set(present))

    @property
    def _is_last(self) -> bool:
        return self._back or self.progress.round == self.config.rounds

    def _evaluated(self) -> list[int]:
        """The clients whose personal models give the metrics of the round that is evaluated."""
        return evaluated_clients(self.config, self.progress.records[-1], self.progress.members)

    def _in_summary(self) -> list[int]:
        """The clients in the summary: those of `eval.final`, or all that took part."""
        members = sorted(self.progress.members)
        if self.executor.policy.evaluate == "present":
            return members
        return sampled_clients(self.config, self.config.eval.final, members, self.progress.round)

    def _evaluate(self, replies: Replies) -> None:
        """Add the metrics to the round's record and write its line; after the last round also models and summary."""
        self.summary = self._closed(replies)
        self._write_line()
        if warning := self.summary.get("warning"):
            self.executor.note(warning)

    def _closed(self, replies: Replies) -> dict[str, Any]:
        """The summary, after the last round."""
        in_summary = self._in_summary() if self._is_last else None
        work = self.config, self.setup, self.server, self.progress
        return close_round(*work, replies, self._evaluated(), in_summary, self.meter, self.folder)

    # --- the round that is kept ------------------------------------------------------------------------------------

    def _copy_chosen_round(self) -> None:
        """Copy the state after the newest round, if `stop_when` likes it best so far, to go back to it at the end."""
        chosen, round_ = self._choice(), self.progress.round
        if chosen is None or chosen.round != round_ or round_ == self.config.rounds:
            return
        self.checkpoints.save(round_, *self._to_save())  # its record has the metrics: a resumed run chooses alike
        copy = self.folder.kept_round(round_)
        self.checkpoints.copy(round_, copy)
        self.folder.remove_kept_rounds(but=copy)

    def _keep_chosen_round(self) -> None:
        """Let the run's models and metrics be those of the round that `stop_when` has chosen."""
        chosen, whole = self._choice(), self.progress
        if chosen is None:
            return
        if chosen.round != whole.round:
            copy, executor = self.folder.kept_round(chosen.round), self.executor
            store = Store(copy.clients, executor.store.budget, executor.store.newcomer, self.config.home)
            with Checkpoints(copy.checkpoints, store) as checkpoints:
                saved = checkpoints.latest(executor.note, self.config.home)
            if saved is None or saved.round != chosen.round:
                raise RunError(
                    f"{copy.path} does not hold the state after round {chosen.round}, which stop_when has chosen; "
                    f"restore it from a copy, or start another run"
                )
            executor.go_back(chosen.round, store)
            state, _ = split_moments(saved.server) if self.setup.optimizer.active else (saved.server, {})
            recorded = self.setup.method.upload.recorded
            self.server, self.overrides = split_overrides(state) if recorded else (state, {})
            records = [dict(record) for record in whole.records[: chosen.round]]
            self.progress = replace(whole, round=chosen.round, closed=chosen.round - 1, records=records)
            self._evaluate_chosen()
            whole.seconds, whole.eval_seconds = self.progress.seconds, self.progress.eval_seconds
            self.progress = whole
            lost = [record["round"] for record in whole.records if record.get("lost")]
            self.summary |= {**whole.totals(), "rounds": whole.round, **({"lost": lost} if lost else {})}
        self.summary |= stopping.told(self.config, chosen, whole.round)
        self.executor.note(stopping.sentence(self.config, chosen, whole.round))

    def _evaluate_chosen(self) -> None:
        """The run's last exchange: the clients evaluate and save the models of the round that is kept."""
        self._back = True
        evaluate = self._clients_to_evaluate(self.executor.present())
        down, done = self.setup.side.architectures.broadcast(self.server), self.progress.round
        overrides = {client: self.overrides[client] for client in evaluate if client in self.overrides}
        task = RoundTask(self.server, down, done, evaluate, final=True, overrides=overrides, back_to=done)
        self.summary = self._closed(self.executor.ask(task))

    # --- records -------------------------------------------------------------------------------------------------

    def _write_line_if_complete(self) -> None:
        """Write the newest round's line, unless it is written or waits for its metrics."""
        progress = self.progress
        if progress.closed < progress.round and not is_evaluated(self.config, progress.round):
            self._write_line()

    def _write_line(self) -> None:
        record = self.progress.records[-1]
        self.folder.append_metrics(record)
        self.progress.closed = record["round"]
        if self.callback.on_round(cast(RoundRecord, record)):
            self.stop.set()

    def _to_save(self) -> tuple[Tree, dict[str, Any], list[dict[str, Any]]]:
        """What a checkpoint holds: the server's state, values that change every round, and an append-only log."""
        values, log = self.progress.split()
        state = merge_moments(merge_overrides(self.server, self.overrides), self.moments)
        return state, {**values, **self.executor.checkpoint_extras()}, log


def _equal(one: Tree, other: Tree) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())
