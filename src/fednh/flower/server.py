"""The server's rounds on Flower: the simulator's bookkeeping, with sites that may be late, lost or wrong.

An exchange asks some sites to evaluate what the last round left and some to train the next: mostly the same ones, in
one message each. So a federation of R rounds has R + 1 exchanges, and the line of a round that is evaluated is written
after the next one. What a site should not have sent is refused, told in words, and the round goes on without it.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from flwr.app import MessageType
from flwr.serverapp import Grid

from fednh.config import Config, dump
from fednh.core import aggregate, checks, failures, outliers
from fednh.core import client as clients
from fednh.core.federation import Federation, build_federation, network
from fednh.core.machine import check_machine, one_thread
from fednh.core.meter import Meter
from fednh.core.picks import dropped_clients, picked_clients, sampled_clients
from fednh.core.progress import Progress, Round, Watcher
from fednh.core.tree import Tree, Uploads, size
from fednh.data.inspection import about_test_set
from fednh.errors import Interrupted, RunError, UserError
from fednh.flower import audit, notes
from fednh.flower.arrays import to_arrays
from fednh.flower.audit_events import head_of
from fednh.flower.bounds import Limit
from fednh.flower.evaluation import Evaluation
from fednh.flower.identity import Identity
from fednh.flower.mailbox import Letter, Post, Reply
from fednh.flower.membership import Roster
from fednh.flower.messages import NOTICE, Answer, Order, SiteProblem, Task
from fednh.flower.parcels import Broken
from fednh.flower.policy import for_sites
from fednh.flower.reception import Reception
from fednh.flower.replies import read_answer, why
from fednh.flower.site import balanced, initial_state
from fednh.storage.checkpoint import Checkpoints
from fednh.storage.client_states import Store
from fednh.storage.model_file import card_of
from fednh.storage.run_folder import RunFolder
from fednh.words import one_line


@dataclass(frozen=True)
class Manner:
    """How the sites are reached: over a network, or as a simulation on this machine or cluster."""

    timeout: float  # seconds for an answer
    enough: int  # sites that must be there before the first round
    simulated: bool = False  # an error at a client stops the run, if on_error says so; latecomers are not looked after
    pause: float = 0.5  # seconds between two looks for answers
    least: int = 1  # uploads that a round needs: with fewer it is given up


class Server:
    """One federation's server, in one run folder."""

    def __init__(
        self,
        config: Config,
        grid: Grid,
        folder: RunFolder,
        watcher: Watcher,
        manner: Manner,
        stop: threading.Event | None = None,
        federation: Federation | None = None,
        identity: Identity | None = None,
    ):
        """`federation` is what a simulation has built already; without an `identity` nothing is signed nor checked."""
        self.identity = identity
        self.config, self.grid, self.folder, self.watcher, self.manner = config, grid, folder, watcher, manner
        self.toml = dump(config if manner.simulated else for_sites(config))
        self.method = config.build_method()
        sign = identity.sign if identity is not None else None
        stop = stop or threading.Event()
        self.meter = Meter(stop, watcher.evaluating)
        self.post = Post(grid, stop, self._stray, manner.pause, sign)
        # Personal states are the sites': what a checkpoint has of them is the round of each.
        unused = Store(folder.checkpoints / folder.clients.name, 0, {})
        self.checkpoints = Checkpoints(folder.checkpoints, unused)
        path = None if manner.simulated else folder.audit_file
        self.events = audit.Writer(path, 0 if identity is None else identity.run)
        self.reception = Reception(config, grid, self.post, self.note, self.events, self.toml, manner.timeout, identity)
        self.progress, self.fed = Progress(), federation
        self.lengths: dict[int, outliers.Lengths] = {}  # of the round's uploads, where they are bounded

    task: Task
    server: Tree

    @property
    def roster(self) -> Roster:
        return self.reception.roster

    def run(self) -> dict[str, Any]:
        """All rounds, from where the folder stands to the end; returns the summary."""
        with one_thread(), self.checkpoints:
            saved = self._resume()
            self.task = self.reception.gather(self.manner.enough, aloud=not self.manner.simulated)
            with failures.named(self.method, "the first try on blank samples failed, before any round"):
                self._prepare(saved)
            try:
                while self.progress.closed < self.config.rounds:
                    at = min(self.progress.round + 1, self.config.rounds)
                    with failures.named(self.method, f"the server failed in round {at}"):
                        self._exchange()
            except (Interrupted, RunError):
                self._checkpoint()
                raise
            self.checkpoints.wait()
            summary = self._summary()
            self.events("finished", rounds=self.progress.round)
            self.folder.write_summary(summary)
            if lost := summary.get("lost"):
                raise RunError(notes.lost_words(lost, self.config.rounds))
            return summary

    def note(self, text: str, **who: Any) -> None:
        """To the log, and to a file of the run folder; who was refused something is in the audit log too."""
        self.watcher.note(one_line(text))
        notes.add(self.folder.path, text)
        if who:
            self.events("refused", **who, why=one_line(text))

    # --- before the first round --------------------------------------------------------------------------------

    def _stray(self, letter: Letter, reply: Reply) -> None:
        """A reply that nobody waits for: of a newcomer, or of somebody late."""
        if letter.kind == NOTICE:
            return
        if letter.kind != MessageType.QUERY:
            if isinstance(reply, Broken) or not reply.has_error():  # an error is Flower's own: the letter has expired
                told = f"round {letter.round}: {self._who(letter.client)} answered too late; refused"
                self.note(told, site=letter.site, node=letter.node, round=letter.round)
            return
        self.reception.heard(letter, reply)

    def _prepare(self, saved: Tree | None) -> None:
        """The network, the server's state, and the test set if there is one; begin or check the run folder."""
        config, task = self.config, self.task
        check_machine(config.device, config.precision)
        self.net = network(config, task.shape, len(task.classes))
        self.initial = initial_state(config, self.method, self.net)
        self.server = saved or self.initial
        self.form = clients.form_of(self.initial)
        self.upload_form = clients.declared_upload(self.method, self.net, self.initial)
        self.fed = self.fed or self._divided_federation(task)
        test = self.fed.test if self.fed is not None and len(self.fed.test) else None
        if config.federation.test is not None:
            test = balanced(config, config.federation.test, task)
        elif self.fed is not None:
            for words in about_test_set(self.fed.dataset):
                self.note(f"{self.fed.dataset.name}: {words}")
        self.evaluation = Evaluation(self.method, self.net, test)
        # How the samples of sites with data of their own are spread is not known here.
        counts, sites = (self.fed.class_counts(), self.fed.sites) if self.fed else ([], ())
        data = self.fed.as_read if self.fed else None
        self.folder.begin(config, task.classes, counts, sites, backend="flower", data=data, tell=self.note)
        self.folder.write_metrics(self.progress.records[: self.progress.closed])

    def _divided_federation(self, task: Task) -> Federation | None:
        """Where each site has a part of a set that everybody has: that set."""
        if not task.divided:
            return None
        try:
            return build_federation(self.config)
        except UserError as error:
            self.note(f"{task.data} cannot be read at the server, so it has no test set: {error}")
            return None

    def _resume(self) -> Tree | None:
        """Go on from the newest whole checkpoint: returns the server's state."""
        saved = self.checkpoints.latest(self.note, self.config.device)
        if saved is None:
            if self.folder.rounds_written():
                self.note("there is no checkpoint yet; starting again from the beginning")
            return None
        rest = dict(saved.progress)
        self.reception.roster = Roster(rest.pop("sites"))
        self.reception.task = Task.read(rest.pop("task"))
        if self.identity is not None:
            self.identity.keys |= {member.site: member.key for member in self._members() if member.key}
        self.progress = Progress(**rest)
        self.note(f"going on after round {saved.round}")
        return saved.server

    # --- one exchange ------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """Evaluate the last round, if that is due, and train the next, if there is one."""
        started, progress = time.perf_counter(), self.progress
        closing = progress.round if progress.closed < progress.round else 0
        round_ = progress.round + 1 if progress.round < self.config.rounds else 0
        online = self._online()
        self.reception.greet(online)  # who is new says so while the others work, and takes part from the next one on
        here = self.roster.present(online)
        picked = self._picked(round_, here) if round_ else []
        happened = Round(round_, bytes_down=0, dropped=dropped_clients(self.config, round_, picked))
        if round_ and len(here) < self.manner.least:
            self._lose(happened, f"{len(here)} sites are there")
        down = self.method.broadcast(self.server)
        happened.bytes_down = size(down) * len(picked)
        train = set(picked) - set(happened.dropped)
        look = set(self._looked_at(closing)) & set(here) if closing else set()
        orders = [
            replace(self._order(k, round_ if k in train else 0, closing if k in look else 0), sites=max(1, len(train)))
            for k in sorted(train | look)
        ]
        answers = self._ask(orders, down, happened)
        if closing:
            self._close(closing, answers)
        if round_:
            if not happened.lost:
                self._aggregate(happened, [answer for answer in answers if answer.round == round_])
            self._keep_books(happened, time.perf_counter() - started)
        self.reception.welcome()

    def _online(self) -> set[int]:
        """The nodes that are there; if too few of them are known, some time is given for more to come."""
        deadline = time.monotonic() + self.manner.timeout
        while True:
            online = set(self.grid.get_node_ids())
            here = len(self.roster.present(online))
            if here >= self.manner.least or time.monotonic() > deadline:
                return online
            words = f"{here or 'no'} site is there; waiting for {self.manner.least}"
            self.reception.once(f"after round {self.progress.round} {words}")
            self.reception.greet(online)
            self.post.rest()
            self.reception.welcome()

    def _picked(self, round_: int, here: list[int]) -> list[int]:
        """Of those who are there: with all there, the very clients that the simulator picks."""
        if len(here) < self.manner.least:
            return []
        return [here[k] for k in picked_clients(self.config, round_, len(here), self.manner.least)]

    def _looked_at(self, round_: int) -> list[int]:
        """Who evaluates: after the last round every site, or in a simulation those that `eval.final` says."""
        if round_ < self.config.rounds:
            return self._whom(round_)
        if not self.manner.simulated:
            return sorted(self.roster.members)
        return sorted({*self._final(), *self._whom(round_)})

    def _final(self) -> list[int]:
        """Whose figures the summary holds."""
        members = self.roster.took_part()
        if not self.manner.simulated:
            return members
        return sampled_clients(self.config, self.config.eval.final, members, self.config.rounds)

    def _whom(self, round_: int) -> list[int]:
        """Whose personal models make the round's figures: `eval.clients`."""
        chosen, members = self.config.eval.clients, self.roster.took_part()
        if chosen == "active":
            active: list[int] = self.progress.records[-1]["clients"]
            return active
        return sampled_clients(self.config, chosen, members, round_)

    def _order(self, client: int, round_: int, closing: int) -> Order:
        member = self.roster.members[client]
        # The newest whole checkpoint may be the last but one, and one may be damaged.
        since = member.since(self.progress.round - 3 * self.config.checkpoint.every)
        return Order(client, round_, closing, member.last, since, final=closing == self.config.rounds)

    def _ask(self, orders: list[Order], down: Tree, happened: Round) -> list[Answer]:
        """Send the orders and wait; returns the answers that can be used."""
        arrays, more = to_arrays(down), to_arrays(self._beyond(down))
        letters = [
            (
                Letter(
                    self.roster.node(order.client),
                    MessageType.TRAIN if order.round else MessageType.EVALUATE,
                    Limit.of(self.upload_form if order.round else None),
                    order.client,
                    order.round or order.evaluate,
                    self.roster.site(order.client),
                ),
                order.write(self.toml, self.task, arrays, more),
            )
            for order in orders
        ]
        if letters:
            sites = {letter.site: letter.kind for letter, _ in letters}
            facts = {"kind": "train", "round": happened.round, "sites": sites}
            self.events("asked", **facts, sent=letters[0][1])
        sent = self.post.send(letters, keep=2 * self.manner.timeout)
        started, by_client = time.perf_counter(), {order.client: order for order in orders}
        answers: list[Answer] = []
        for letter, reply in self.post.replies(sent, self.manner.timeout):
            order = by_client.pop(letter.client)
            answers += self._read(letter, order, reply, happened)
        for client, order in sorted(by_client.items()):
            when = f"round {order.round or order.evaluate}"
            told = f"{when}: {self._who(client)} did not answer in {self.manner.timeout:g} s; going on without it"
            self.note(told, site=self.roster.site(client), round=order.round or order.evaluate)
            if order.round:
                happened.dropped = sorted([*happened.dropped, client])
        self.progress.client_seconds += time.perf_counter() - started
        return sorted(answers, key=lambda answer: answer.client)

    def _beyond(self, down: Tree) -> Tree:
        """What the global model has that a site cannot make from the broadcast and the config."""
        model = self.method.global_model(self.server) or {}
        theirs = self.method.global_model({**self.initial, **down}) or {}
        return {n: v for n, v in model.items() if n not in theirs or not torch.equal(v, theirs[n])}

    def _read(self, letter: Letter, order: Order, reply: Reply, happened: Round) -> Iterator[Answer]:
        """The answer, if it is one; what is wrong with it is told."""
        who, when = self._who(order.client), f"round {order.round or order.evaluate}"
        try:
            answer, content = read_answer(letter, order, reply, self.upload_form, self.config.device, self.identity)
        except SiteProblem as error:
            self._failed(f"{when}: {who} failed: {error}", site=letter.site, round=letter.round)
            if order.round:
                happened.failed.append(order.client)
        except Exception as error:  # whatever reading it raises is this site's problem, not the server's
            told = f"{when}: the answer of {who} was refused: {why(error)}"
            self.note(told, site=letter.site, round=letter.round)
            if order.round:
                happened.refused.append(order.client)
        else:
            facts = {"site": letter.site, "kind": letter.kind, "round": letter.round, "head": head_of(content)}
            self.events("took", **facts, sent=content)
            yield answer

    def _failed(self, told: str, **who: Any) -> None:
        if self.manner.simulated and self.config.on_error == "stop":
            raise RunError(f"{type(self.method).__name__}: {told}")
        self.note(f"{told}; going on without it", **who)

    def _aggregate(self, happened: Round, answers: list[Answer]) -> None:
        """The server's next state; one that breaks an invariant is not taken."""
        # As in the simulator: the largest first. A sum's last bits depend on the order.
        answers = sorted(answers, key=lambda answer: (-(answer.samples or 0), answer.client))
        answers = self._bounded(happened, answers)
        uploads = [answer.upload for answer in answers if answer.upload is not None]
        if len(uploads) < self.manner.least:
            self._lose(happened, f"{len(uploads)} uploads can be used")
            return
        rule = aggregate.rule(self.config.aggregator, self.server, self.config.trim, self.method)
        try:
            with failures.named(self.method, f"the server failed in round {happened.round}"):
                server = self.method.aggregate(self.server, Uploads(uploads, rule))
            checks.check_server(self.method, server, self.form, happened.round)
        except RunError as error:
            if self.manner.simulated:
                raise
            happened.lost = str(error)
            self.note(f"{error}; the server stays as it was")
            return
        same = all(torch.equal(value, self.server[name]) for name, value in server.items())
        if same and self.upload_form and not self.manner.simulated:
            happened.lost = "the uploads change nothing"
            self.note(f"round {happened.round}: {happened.lost}")
        self.server = server
        for answer in answers:
            assert answer.upload is not None
            self.roster.members[answer.client].took(happened.round, self.lengths.get(answer.client))
            happened.clients.append(answer.client)
            happened.bytes_up += size(answer.upload)
            happened.processed += answer.samples or 0
            if answer.samples is not None and answer.loss_sum is not None:
                happened.samples += answer.samples
                happened.loss_sum += answer.loss_sum
            if answer.gradient_norm is not None and math.isfinite(answer.gradient_norm):
                happened.gradient_norms[answer.client] = answer.gradient_norm

    def _bounded(self, happened: Round, answers: list[Answer]) -> list[Answer]:
        """Those whose uploads are not far longer than others', nor than their own before; the rest are refused."""
        bound = self.config.upload_bound(deployed=not self.manner.simulated)
        uploads = {answer.client: answer.upload for answer in answers if answer.upload is not None}
        if not bound or not uploads:
            return answers
        self.lengths = {client: outliers.lengths(upload, self.server) for client, upload in uploads.items()}
        past = {client: self.roster.members[client].lengths for client in uploads}
        self.progress.usual = outliers.usual(self.lengths, self.progress.usual)
        found = outliers.problems(self.lengths, past, self.progress.usual, bound)
        for client, upload in uploads.items():
            if problem := self.method.upload_problem(upload) or found.get(client):
                found[client] = problem
                happened.refused.append(client)
                told = f"round {happened.round}: the upload of {self._who(client)} was refused: {problem}"
                self.note(told, site=self.roster.site(client), round=happened.round)
        return [answer for answer in answers if answer.client not in found]

    def _lose(self, happened: Round, what: str) -> None:
        """Give a round up: nothing of it counts, at the server and, with the next order, at the sites."""
        if self.manner.simulated:  # clients that never report are part of what is simulated
            self.note(f"round {happened.round}: no upload could be used; the server stays as it was")
            return
        happened.lost = f"{what}, and federation.min_clients = {self.manner.least}"
        self.note(f"round {happened.round} is given up: {happened.lost}; the server stays as it was")

    def _keep_books(self, happened: Round, seconds: float) -> None:
        """Count the round; close it unless the next exchange evaluates it; save."""
        progress, every, round_ = self.progress, self.config.eval.every, happened.round
        progress.round = round_
        progress.samples += happened.processed
        progress.records.append(happened.record(seconds))
        progress.seconds += seconds
        if round_ < self.config.rounds and not (every and round_ % every == 0):
            self._write_line(progress.records[-1])
        save = self.config.checkpoint.every
        if save and (round_ % save == 0 or round_ == self.config.rounds):
            self.checkpoints.begin(round_, self.server, self._books())

    # --- evaluation and the end --------------------------------------------------------------------------------

    def _close(self, round_: int, answers: list[Answer]) -> None:
        """Figures of a round, from what the sites say and from the server's test set."""
        started, record = time.perf_counter(), self.progress.records[-1]
        self.evaluation.look(self.server, answers, self.meter)
        record |= self.evaluation.figures(self._whom(round_))
        record["eval_seconds"] = round(time.perf_counter() - started, 4)
        self.progress.eval_seconds += record["eval_seconds"]
        self.progress.seconds += record["eval_seconds"]
        if round_ == self.config.rounds:
            model = self.method.global_model(self.server)
            if model is not None:
                self.folder.write_model(self.folder.global_model, {**self.net.norm, **model}, self._card())
            self.folder.write_model(self.folder.broadcast_model, self.method.broadcast(self.server), self._card())
        self._write_line(record)

    def _write_line(self, record: dict[str, Any]) -> None:
        self.folder.append_metrics(record)
        self.progress.closed = record["round"]
        self.watcher.round_done(record)

    def _summary(self) -> dict[str, Any]:
        progress, task = self.progress, self.task
        lost = [record["round"] for record in progress.records if record.get("lost")]
        return {
            "method": self.config.method["name"],
            "data": task.data,
            "seed": self.config.seed,
            "rounds": progress.round,
            **self.evaluation.summary(self._final()),
            "sites": [{"client": m.number, "site": m.site, "rounds": len(m.rounds)} for m in self._members()],
            **progress.totals(),
            **({"lost": lost} if lost else {}),
        }

    def _members(self) -> list[Any]:
        return [member for _, member in sorted(self.roster.members.items())]

    def _card(self) -> dict[str, Any]:
        """What the global model's file says about itself."""
        task, config = self.task, self.config
        if self.fed is not None:
            return self.fed.card(config)
        scale = {"scale": task.scale, "mean": task.mean, "std": task.std}
        preprocessing = {**json.loads(task.preprocessing), **scale}
        return card_of(config, self.net, task.shape, task.classes, task.data, preprocessing)

    def _books(self) -> dict[str, Any]:
        return {**asdict(self.progress), "sites": self.roster.rows(), "task": self.task.text()}

    def _checkpoint(self) -> None:
        if self.config.checkpoint.every and self.progress.round:
            self.checkpoints.save(self.progress.round, self.server, self._books())

    def _who(self, client: int) -> str:
        return f"client {client}" if self.manner.simulated else f"site {self.roster.site(client)} (client {client})"
