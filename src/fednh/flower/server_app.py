"""The ServerApp: `flwr run` starts it, with fednh's own settings as the app's run-config.

All of them are flat dotted keys, as `--set` takes them: `rounds`, `method.name`, ... (see deploy/scaffold.py).
`federation.folder` is the run folder. A stopped federation continues when it is started again with the same settings.

`Sites` is the executor of the run: orders go out as messages, answers come back, late, wrong or never. An order asks a
site to evaluate the state after the last round, to train the next round, or both in one message. A wrong answer is
refused, with the reason in the log; the rounds go on without it (federated/rounds.py).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp

from fednh.callbacks import Callback
from fednh.callbacks.screen import metric_words
from fednh.config import Config, dump
from fednh.errors import ConfigError, UserError
from fednh.federated import similarity
from fednh.federated.aggregate import received
from fednh.federated.checks import TensorSpecs, form_of
from fednh.federated.client import ClientResult
from fednh.federated.compress import Compression
from fednh.federated.evaluate import Personal
from fednh.federated.executor import RoundPolicy, RoundTask
from fednh.federated.plan import result_order
from fednh.federated.rounds import RoundLoop
from fednh.federated.setup import Federation, ServerSide, build_federation, frozen_recipe, networks, weights_of
from fednh.flower import audit, layout
from fednh.flower.admission import Admission, Member, MemberRow, Membership
from fednh.flower.audit import head_of
from fednh.flower.client_app import load_test_set
from fednh.flower.deploy.scaffold import read_config
from fednh.flower.pace import Pace, aged, check_late, weight_of
from fednh.flower.protocol import (
    NOTICE,
    Answer,
    Number,
    Order,
    SiteProblem,
    Task,
    balance_of,
    describe_error,
    read_answer,
    read_stage,
    to_arrays,
)
from fednh.flower.secure_messages import RECORD, message_kind
from fednh.flower.secure_round import GivenUp, SecureRound, Total
from fednh.flower.signing import Identity, asked_alike, is_signed, server_identity
from fednh.flower.site_config import for_sites
from fednh.flower.transport import FetchError, Limit, Mailbox, Reply, Request
from fednh.io.chain import Head
from fednh.io.files import keep_private
from fednh.machine import check_machine
from fednh.metric_names import HELD, RoundRecord
from fednh.models.backbone import PINNED, find_weights
from fednh.privacy.ledger import Balance
from fednh.privacy.private_data import left_to_sum
from fednh.privacy.secure_sum import Terms
from fednh.runs.client_states import Store
from fednh.runs.model_file import card_of
from fednh.runs.run_folder import RunFolder
from fednh.text import one_line
from fednh.tree import Tree, canonical

T = TypeVar("T")


@dataclass(frozen=True)
class Transport:
    """How long the server waits for sites, and how many it needs."""

    timeout: float  # seconds for an answer
    enough: int  # sites that must be present before the first round
    pause: float = 0.5  # seconds between two polls for answers
    least: int = 1  # uploads that a round needs; with fewer it is abandoned
    wait: float = math.inf  # seconds to wait for enough sites


def make_run(
    config: Config,
    grid: Grid,
    folder: RunFolder,
    callback: Callback,
    transport: Transport,
    identity: Identity,
    stop: threading.Event | None = None,
) -> RoundLoop:
    """The round loop of a run on the sites behind `grid`; call its `run`."""
    stop = stop or threading.Event()
    sites = Sites(config, grid, folder, callback, transport, stop, identity)
    return RoundLoop(config, folder, sites, callback, stop)


class Sites:
    """The sites of one federation."""

    backend = "flower"

    def __init__(
        self,
        config: Config,
        grid: Grid,
        folder: RunFolder,
        callback: Callback,
        transport: Transport,
        stop: threading.Event,
        identity: Identity,
    ):
        self.config, self.grid, self.folder, self.callback, self.transport = config, grid, folder, callback, transport
        self.identity, self.least = identity, transport.least
        self.policy = RoundPolicy(
            simulated=False,
            min_uploads=transport.least,
            norm_bound=config.upload_bound(deployed=True),
            bad_round="skip",
            client_error="skip",
            evaluate="present",
            trusts_counts=False,
        )
        self.toml = dump(for_sites(config))
        self.method = config.build_method()
        self.compression = Compression.of(config.federation)
        check_late(config.federation.late, config.federation.secure, self.method, config.method["name"])
        self.pace = Pace(config.federation.slack)
        self.overdue: dict[int, Overdue] = {}  # by client
        self.late: dict[int, LateAnswer] = {}  # by client: what the next round uses
        self.ages: dict[int, int] = {}  # of late uploads in this round
        self.dropped_late = 0
        self.mailbox = Mailbox(grid, stop, self._on_unexpected, transport.pause, identity.sign)
        # Sites keep their personal states; a checkpoint records only the round of each.
        self.store = Store(folder.checkpoints / folder.clients.name, 0, lambda client: {})
        self.events = audit.AuditWriter(folder.audit_file, identity.run)
        tell, timeout = self._tell, transport.timeout
        self.admission = Admission(config, grid, self.mailbox, tell, self.events, self.toml, timeout, identity)

    task: Task
    initial: Tree

    @property
    def membership(self) -> Membership:
        return self.admission.membership

    def __enter__(self) -> Sites:
        return self

    def __exit__(self, *_: object) -> None: ...

    # --- before the first round --------------------------------------------------------------------------------

    def open(self, extras: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> ServerSide:
        """Wait for the sites, and find out what they agree on."""
        if extras:
            self._restore(extras, records)
        self.task = self.admission.wait_for_sites(self.transport.enough, self.transport.wait)
        check_machine(self.config.devices, self.config.precision)
        return self._server_side(self.task)

    def _restore(self, extras: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
        """Take members and task from a checkpoint."""
        try:
            self.admission.membership = Membership([MemberRow.parse(row) for row in extras["sites"]], records)
            self.admission.task = Task.read(extras["task"])
            self.dropped_late = int(extras.get("late_dropped", 0))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"the checkpoint in {self.folder.path} does not hold the sites of a federation of this version "
                f"({one_line(str(error), 200)}); move the folder away to begin anew"
            ) from error
        self.identity.keys |= {member.site: member.key for member in self.membership}

    def _server_side(self, task: Task) -> ServerSide:
        """The server's model, method and test set for the agreed task."""
        config = self.config
        if (federation := self._divided_federation(task)) is not None:
            side = federation.server_side(config)
        else:  # the server does not know how the samples of sites with their own data are distributed
            nets = networks(config, task.shape, len(task.classes), task.body is not None)
            describe = partial(card_of, config, shape=task.shape, classes=task.classes, data=task.data)
            cards = {name: describe(net=net, preprocessing=task.recipe) for name, net in nets.nets.items()}
            if task.body is not None:  # a site does not say where its weights lie
                for card in cards.values():
                    card["features"]["file"] = _weights_file(config)
            side = ServerSide(task.data, task.classes, nets, self.network_of, None, cards)
        side = replace(side, network_of=self.network_of)  # sites choose
        if config.federation.test is not None:
            side = replace(side, test=load_test_set(config, config.federation.test, task), notes=())
        return side

    def _divided_federation(self, task: Task) -> Federation | None:
        """The federation of a public set of which each site has a part; None if sites have their own data."""
        if not task.divided:
            return None
        try:
            return build_federation(self.config)
        except UserError as error:
            self.note(f"{task.data} cannot be read at the server, so it has no test set: {error}")
            return None

    def network_of(self, client: int) -> str:
        """The name of a site's network: the one that it has chosen, or that it is dealt."""
        if not self.config.model.differs:
            return self.config.model.names[0]
        member = self.membership.members[client]
        return member.network or self.config.model.of_client(client, member.site)

    def begin(self, initial: Tree) -> None:
        self.initial = initial
        self.nets = networks(self.config, self.task.shape, len(self.task.classes), self.task.body is not None)
        self.upload_forms = self.nets.declared_uploads(initial)
        self.sent_forms = {name: self._sent_form(name) for name in self.upload_forms}

    def _sent_form(self, name: str) -> TensorSpecs:
        """The form in which uploads of a network travel."""
        if self.compression is None:
            return self.upload_forms[name]
        down = form_of(self.method.broadcast(self.nets.view(self.initial, name)))
        return self.compression.packed_form(self.upload_forms[name], down, self.method.upload)

    # --- one exchange ------------------------------------------------------------------------------------------

    def present(self) -> list[int]:
        """The clients whose nodes are online; if there are too few, wait up to the timeout for more."""
        deadline = time.monotonic() + self.transport.timeout
        while True:
            online = set(self.grid.get_node_ids())
            # A site that still works on an earlier order, or sends, gets no other one: its line would never be free.
            busy = self.mailbox.busy(self.keep) if self._lets_sites_be_late else set()
            here = self.membership.present(online - busy)
            if len(rested := [client for client in here if client not in self.late]) >= self.least:
                here = rested
            if len(here) >= self.least or time.monotonic() > deadline:
                break
            note = f"{len(here)} of {self.least} sites are online; waiting"
            self.admission.note_once(f"after round {self.done}: {note}")
            self.admission.query_new_nodes(online)
            self.mailbox.poll()
            self.admission.admit_arrivals()
        # Newcomers introduce themselves while others work, and join in the next round.
        self.admission.query_new_nodes(online)
        return here

    @property
    def keep(self) -> float:
        """Seconds for which an order and its answer are valid."""
        return 2 * self.transport.timeout

    @property
    def _lets_sites_be_late(self) -> bool:
        return self.pace.slack is not None or self.config.federation.late == "use"

    done = 0  # completed rounds

    def ask(self, asked: RoundTask) -> SiteAnswers:
        """Send the orders, and wait for the answers."""
        train, look = set(asked.train), set(asked.evaluate)
        orders = [self._order(k, asked, k in train, k in look) for k in sorted(train | look)]
        summed = train and self.config.federation.secure
        answers = self._ask_sum(orders, asked) if summed else self._ask(orders, asked)
        self.admission.admit_arrivals()
        return answers

    def _order(self, client: int, asked: RoundTask, trains: bool, evaluates: bool) -> Order:
        member = self.membership.members[client]
        # The server may have to go back to an older checkpoint, if newer ones are incomplete or damaged.
        horizon = asked.done - 3 * self.config.checkpoint.every
        since = member.since(horizon if asked.back_to is None else min(horizon, asked.back_to))
        return Order(
            client=client,
            round=asked.done + 1 if trains else 0,
            evaluate=asked.done if evaluates else 0,
            last=member.last if self._back_to is None else member.since(self._back_to),
            since=since,
            final=evaluates and asked.final,
            sites=max(1, len(asked.train)),
            network=self.network_of(client) if self.nets.several else "",
            ledger=member.ledger,
        )

    def _ask(self, orders: list[Order], asked: RoundTask, secure: SumOrders | None = None) -> SiteAnswers:
        """Send the orders; those to train ask for masked uploads if `secure` has their other half."""
        common = {name: self._broadcast_records(asked, name) for name in self.nets.nets}
        requests, alike = [], b""
        for order in orders:
            name, own = self.network_of(order.client), asked.overrides.get(order.client)
            arrays, more = common[name] if own is None else self._broadcast_records(asked, name, own)
            content = order.write(self.toml, self.task, arrays, more)
            if secure is not None and order.round:
                alike = asked_alike(content)
                content[RECORD] = secure.records[order.client]
            requests.append((self._request(order, secure), content))
        if requests:
            sites = {request.site: request.kind for request, _ in requests}
            round_ = asked.done + 1 if asked.train else 0
            self.events("asked", kind="train", round=round_, sites=sites, sent=requests[0][1])
        sent, start = self.mailbox.send(requests, keep=self.keep), time.monotonic()
        waiting, took = {order.client: order for order in orders}, dict[int, float]()
        answers, missing = list[Answer](), dict[int, ClientResult]()
        limit = partial(self.pace.limit, list(waiting), took, self.least) if self._lets_sites_be_late else None
        for request, reply in self.mailbox.replies(sent, self.transport.timeout, limit if secure is None else None):
            order = waiting.pop(request.client)
            took[order.client] = time.monotonic() - start
            self.pace.heard(order.client, took[order.client])
            down = self._received(asked, order.client)
            answer = self._read(request, order, reply, down, 0 if secure is None else secure.numbers)
            if isinstance(answer, Answer):
                answers.append(answer)
            else:
                self._record_missing(order, answer, missing)
        waited = time.monotonic() - start
        for client, order in sorted(waiting.items()):
            limited = waited < self.transport.timeout
            seconds = f"{waited:.1f} s, which is {self.pace.slack:g} times what the usual site takes" if limited else ""
            seconds = seconds or f"{self.transport.timeout:g} s"
            problem = f"round {_when(order)}: {self.name(client)} did not answer in {seconds}"
            self._record_missing(order, ClientResult(client=client, status="silent", problem=problem), missing)
            if order.round and secure is None and self._lets_sites_be_late:
                self.overdue[client] = Overdue(order, self._received(asked, client), start)
        late = self._late_results(asked) if asked.train else ()
        return SiteAnswers(self, answers, missing, alike=alike, late=late)

    def _request(self, order: Order, secure: SumOrders | None = None) -> Request:
        trains, membership = bool(order.round), self.membership
        hidden, form = trains and secure is not None, self.sent_forms[self.network_of(order.client)]
        return Request(
            membership.node(order.client),
            MessageType.TRAIN if trains else MessageType.EVALUATE,
            secure.limit if hidden and secure is not None else Limit.of(form if trains else None),
            order.client,
            _when(order),
            membership.site(order.client),
        )

    # --- secure sums -------------------------------------------------------------------------------------------

    def _ask_sum(self, orders: list[Order], asked: RoundTask) -> SiteAnswers:
        """Send the orders of a round whose uploads are summed up in secret (secure_round.py)."""
        training, round_ = [order.client for order in orders if order.round], asked.done + 1
        missing = dict[int, ClientResult]()
        (form,), stages = self.upload_forms.values(), Stages(self, round_, missing)  # of sites that have one network
        terms = Terms(self.identity.federation, self.identity.run, round_, self.identity.signer.next())
        names = {client: self.membership.site(client) for client in training}
        noisy = left_to_sum(self.method.upload.class_sums, asked.mechanisms)
        exchange = SecureRound(
            terms,
            names,
            form,
            noisy,
            self.transport.least,
            stages.exchange,
            stages.leave_out,
            stages.verify,
        )
        answers, total = SiteAnswers(self, [], missing), None
        try:
            records = exchange.open(training)
            ready = [order for order in orders if not order.round or order.client in records]
            answers = self._ask(ready, asked, SumOrders(records, exchange.numbers, exchange.limit))
            missing |= answers.missing
            masked = {each.client: each.masked for each in answers.answers if each.masked is not None}
            total = exchange.close(masked, answers.alike)
        except GivenUp as error:
            self.note(f"round {round_}: the secure sum is given up: {error}; the server has learned nothing of it")
            if not answers.answers:  # no site was asked to evaluate either
                looks = [order.model_copy(update={"round": 0}) for order in orders if order.evaluate]
                answers = self._ask(looks, asked)
            for client in training:
                problem = f"round {round_}: the upload of {self.name(client)} is lost with the secure sum"
                missing.setdefault(client, ClientResult(client=client, status="silent", problem=problem))
        used = () if total is None else total.clients
        return SiteAnswers(self, answers.answers, {k: v for k, v in missing.items() if k not in used}, total)

    def _broadcast_records(
        self, asked: RoundTask, name: str, override: Tree | None = None
    ) -> tuple[ArrayRecord, ArrayRecord]:
        """What a site with this network receives, and the part of the global model that it cannot rebuild from that."""
        down = {**self.nets.view(asked.down, name), **(override or {})}
        model = self.method.global_model(self.nets.view(asked.server, name)) or {}
        theirs = self.method.global_model({**self.nets.view(self.initial, name), **down}) or {}
        more = {n: v for n, v in model.items() if n not in theirs or not torch.equal(v, theirs[n])}
        return to_arrays(down), to_arrays(more)

    def _received(self, asked: RoundTask, client: int) -> Tree:
        """What a site was sent."""
        return received(self.nets.view(asked.down, self.network_of(client)), asked.overrides, client)

    def _read(self, request: Request, order: Order, reply: Reply, down: Tree, masked: int = 0) -> Answer | ClientResult:
        """The answer of a site that received `down`, or the reason why there is none that can be used."""
        name, unpack = self.network_of(order.client), None
        if (compression := self.compression) is not None:
            form, spec = self.upload_forms[name], self.method.upload
            unpack = partial(compression.unpack, form=form, received=canonical(down), spec=spec)
        more = self.sent_forms[name], self.config.home, self.identity, masked, unpack
        read = self.read_reply(request, lambda: read_answer(request, order, reply, *more))
        return read if isinstance(read, ClientResult) else read[0]

    def read_reply(
        self, request: Request, read: Callable[[], tuple[T, RecordDict]]
    ) -> tuple[T, RecordDict] | ClientResult:
        """What `read` makes of a reply, noted in the audit log, or the reason why it cannot be used."""
        who, when = self.name(request.client), f"round {request.round}"
        try:
            answer, content = read()
            balance = balance_of(content)
        except SiteProblem as error:
            return ClientResult(client=request.client, status="failed", problem=f"{when}: {who} failed: {error}")
        except Exception as error:  # whatever reading it raises is this site's problem, not the server's
            problem = f"{when}: the answer of {who} was refused: {describe_error(error)}"
            return ClientResult(client=request.client, status="refused", problem=problem)
        facts = {"site": request.site, "kind": request.kind, "round": request.round, "head": head_of(content)}
        self.events("took", **facts, **self._heard(request.client, balance), sent=content)
        return answer, content

    def _heard(self, client: int, balance: Balance | None) -> dict[str, Any]:
        """Remember what a site says of its ledger of privacy; returns it for the audit log."""
        if balance is None:
            return {}
        member = self.membership.members[client]
        known = Head.read(member.ledger)
        if balance.head is not None and (
            known is None or balance.head.line > known.line
        ):  # a stored answer has an old one
            member.ledger = str(balance.head)
        member.spent = balance
        return dict(balance.told())

    def _record_missing(self, order: Order, what: ClientResult, missing: dict[int, ClientResult]) -> None:
        """Hand a missing upload to the round loop, which counts them; report a missing evaluation here."""
        if order.round:
            missing[order.client] = what
        else:
            self.note(what.problem, order.client, order.evaluate)

    def commit(self, round_: int, clients: Sequence[int]) -> None:
        self.done = round_
        for client in clients:
            self.membership.members[client].rounds.append(round_ - self.ages.get(client, 0))
        self.ages = {}

    _back_to: int | None = None  # orders are of the state after this round, not of the latest one

    def go_back(self, round_: int, store: Store) -> None:
        self._back_to = round_

    def rollback(self) -> None:
        """The next order says from which round's state a site starts."""
        self.ages = {}

    # --- late answers ------------------------------------------------------------------------------------------

    def _keep_late(self, request: Request, reply: Reply, overdue: Overdue) -> None:
        """An upload has arrived after its round: the next one uses it, or nobody."""
        client, round_ = request.client, request.round
        self.pace.heard(client, time.monotonic() - overdue.start)
        if self.config.federation.late == "drop":
            self._drop_late(request.site, client, round_)
            return
        answer = self._read(request, overdue.order, reply, overdue.down)
        if isinstance(answer, ClientResult):
            self.note(answer.problem, client, round_)
        elif answer.upload is not None:
            self.late[client] = LateAnswer(answer, overdue)

    def _drop_late(self, site: str, client: int, round_: int) -> None:
        self.dropped_late += 1
        self._tell(f"round {round_}: {self.name(client)} answered too late; refused", site=site, round=round_)

    def _late_results(self, asked: RoundTask) -> list[ClientResult]:
        """Late uploads as this round uses them; one of a site that trains in it again is not."""
        late, self.late = self.late, {}
        made = []
        for client, each in sorted(late.items()):
            order, answer = each.overdue.order, each.answer
            if client in asked.train or answer.upload is None:
                self._drop_late(self.membership.site(client), client, order.round)
                continue
            age = asked.done + 1 - order.round
            now = canonical(self.nets.view(asked.server, self.network_of(client)))
            upload = aged(answer.upload, canonical(each.overdue.down), now, age, self.method.upload)
            self.ages[client] = age
            self._tell(
                f"round {order.round}: the upload of {self.name(client)} came late; round {asked.done + 1} uses it "
                f"with the weight {weight_of(age):.2f}"
            )
            numbers = (answer.samples, answer.loss_sum)
            result = ClientResult({}, upload, *numbers, kept_finite=True, client=client, bytes_up=answer.sent)
            made.append(replace(result, age=age))
        return made

    # --- checkpoints and reports -------------------------------------------------------------------------------

    def checkpoint_extras(self) -> dict[str, Any]:
        late = {"late_dropped": self.dropped_late} if self.dropped_late else {}
        return {"sites": self.membership.rows(), "task": self.task.text(), **late}

    def finished(self, rounds: int) -> dict[str, Any]:
        self.events("finished", rounds=rounds)
        for client, each in sorted(self.late.items()):
            self._drop_late(self.membership.site(client), client, each.overdue.order.round)
        late = {"late": {"dropped": self.dropped_late}} if self.dropped_late else {}
        return {"sites": [_told(member) for member in self.membership], **late}

    def name(self, client: int) -> str:
        return f"site {self.membership.site(client)} (client {client})"

    def note(self, text: str, client: int | None = None, round_: int = 0) -> None:
        """Write to the log and to the run folder's federation.log; about a client, to the audit log too."""
        self._tell(text, **({} if client is None else {"site": self.membership.site(client), "round": round_}))

    def _tell(self, text: str, **who: Any) -> None:
        self.callback.on_note(one_line(text))
        layout.add_note(self.folder.path, text)
        if who:
            self.events("refused", **who, why=one_line(text))

    def _on_unexpected(self, request: Request, reply: Reply) -> None:
        """Handle a reply that no exchange waits for: from a newcomer, or too late."""
        if request.kind == NOTICE:
            return
        if request.kind != MessageType.QUERY:
            # An error is Flower's own: the request has expired.
            overdue = self.overdue.pop(request.client, None)
            if overdue is not None and overdue.order.round == request.round and not _is_error(reply):
                self._keep_late(request, reply, overdue)
            elif isinstance(reply, FetchError) or not reply.has_error():
                note = f"round {request.round}: {self.name(request.client)} answered too late; refused"
                self._tell(note, site=request.site, node=request.node, round=request.round)
            return
        self.admission.on_hello(request, reply)


def _is_error(reply: Reply) -> bool:
    return isinstance(reply, FetchError) or reply.has_error()


@dataclass(frozen=True)
class Overdue:
    """An order whose round has ended without its answer."""

    order: Order
    down: Tree  # what its site has received
    start: float  # when it was sent


@dataclass(frozen=True)
class LateAnswer:
    """What has arrived after its round."""

    answer: Answer
    overdue: Overdue


@dataclass(frozen=True)
class SumOrders:
    """What makes orders to train those of a secure sum."""

    records: Mapping[int, ConfigRecord]  # by client
    numbers: int  # in a masked upload
    limit: Limit


@dataclass(frozen=True)
class Stages:
    """How a secure sum reaches the sites: its messages go out and come back as all others do."""

    sites: Sites
    round: int
    missing: dict[int, ClientResult]  # why clients were left out

    def exchange(self, stage: str, orders: Mapping[int, ConfigRecord], limit: Limit) -> dict[int, RecordDict]:
        """Send each client its order of a stage; returns the replies that can be used."""
        sites, kind = self.sites, message_kind(stage)
        requests = []
        for client, record in orders.items():
            site, node = sites.membership.site(client), sites.membership.node(client)
            requests.append((Request(node, kind, limit, client, self.round, site), RecordDict({RECORD: record})))
        asked = {request.site: request.kind for request, _ in requests}
        sites.events("asked", kind=kind, round=self.round, sites=asked, sent=requests[0][1])
        sent = sites.mailbox.send(requests, keep=sites.keep)
        waiting, replies = set(orders), dict[int, RecordDict]()
        for request, reply in sites.mailbox.replies(sent, sites.transport.timeout):
            waiting.discard(request.client)
            read = sites.read_reply(request, partial(_read_stage, request, reply, sites.identity))
            if isinstance(read, ClientResult):
                self.missing[request.client] = read
            else:
                replies[request.client] = read[0]
        for client in waiting:
            who, seconds = sites.name(client), sites.transport.timeout
            problem = f"round {self.round}: {who} did not answer in {seconds:g} s ({kind})"
            self.missing[client] = ClientResult(client=client, status="silent", problem=problem)
        return replies

    def leave_out(self, client: int, why: str) -> None:
        problem = f"round {self.round}: {self.sites.name(client)} is left out: {why}"
        self.missing[client] = ClientResult(client=client, status="refused", problem=problem)

    def verify(self, site: str, statement: bytes, signature: bytes) -> bool:
        return is_signed(self.sites.identity.keys.get(site, ""), statement, signature)


def _read_stage(request: Request, reply: Reply, identity: Identity) -> tuple[RecordDict, RecordDict]:
    content = read_stage(request, reply, identity)
    return content, content


@dataclass(frozen=True)
class SiteAnswers:
    """What the sites answered."""

    sites: Sites
    answers: list[Answer]
    missing: dict[int, ClientResult]  # clients that were asked to train and sent no usable upload
    total: Total | None = None  # the sum of the others' uploads, where the server has no single one
    alike: bytes = b""  # a digest of what the orders of a secure sum asked of all sites
    late: Sequence[ClientResult] = ()  # of earlier rounds

    def results(self) -> Iterator[ClientResult]:
        if (total := self.total) is not None:
            facts = total.samples, total.loss_sum
            yield ClientResult({}, total.upload, *facts, kept_finite=True, together=total.clients, bytes_up=total.sent)
        trained = {answer.client: answer for answer in self.answers if answer.upload is not None}
        for client in result_order(self.sites.config, trained, lambda client: trained[client].samples or 0):
            a = trained[client]
            assert a.upload is not None
            numbers = a.samples, a.loss_sum, a.gradient_norm
            yield ClientResult({}, a.upload, *numbers, kept_finite=True, client=a.client, bytes_up=a.sent)
        yield from self.late
        yield from (result for _, result in sorted(self.missing.items()))

    def personal_metrics(self) -> list[Personal]:
        classes = len(self.sites.task.classes)
        return [_personal_metrics(answer, classes) for answer in self._by_client() if answer.metrics]

    def similarity(self) -> dict[str, Any] | None:
        return similarity.merged([_quantiles(answer.metrics) for answer in self._by_client()])

    def _by_client(self) -> list[Answer]:
        return sorted(self.answers, key=lambda answer: answer.client)


def _told(member: Member) -> dict[str, Any]:
    """A site in the summary, with what it says that its samples have cost in all."""
    spent = member.spent.told() if member.spent is not None else {}
    return {"client": member.number, "site": member.site, "rounds": len(member.rounds), **spent}


def _weights_file(config: Config) -> str | None:
    """Where the server itself has the weights of the frozen body; None: in a package, or nowhere."""
    if config.model.name in PINNED:
        return None
    with suppress(ConfigError):
        return str(find_weights(frozen_recipe(config), weights_of(config)))
    return None


def _when(order: Order) -> int:
    return order.round or order.evaluate


def _personal_metrics(answer: Answer, classes: int) -> Personal:
    """A site's metrics, without implausible values: accuracies lie between 0 and 100 percent."""
    metrics, samples = answer.metrics, answer.metrics.get("samples")
    percent: dict[str, Any] = {
        key: float(value)
        for key in ("pm_v", "pm_l", *HELD)
        if isinstance(value := metrics.get(key), int | float) and 0 <= value <= 100
    }
    rows = metrics.get("per_class")
    if not isinstance(rows, list) or len(rows) != classes or not all(v == -1 or 0 <= v <= 100 for v in rows):
        rows = None
    return Personal(
        answer.client,
        percent.pop("pm_v", None),
        percent.pop("pm_l", None),
        None if rows is None else [None if value == -1 else value for value in rows],
        samples=samples if isinstance(samples, int) else 0,
        **percent,
    )


def _quantiles(metrics: Mapping[str, Number]) -> tuple[list[float], int] | None:
    """A site's quantiles of cosines and the number of samples they come from; None if they are implausible."""
    levels, samples = metrics.get("novelty"), metrics.get("samples")
    if not isinstance(levels, list) or len(levels) != len(similarity.QUANTILES) or not isinstance(samples, int):
        return None
    return (levels, samples) if samples > 0 and all(abs(level) <= 1.001 for level in levels) else None


# --- server app -----------------------------------------------------------------------------------------------------


log = logging.getLogger("flwr")
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation that the run-config describes."""
    config = read_config(context.run_config)
    federation = config.federation
    assert federation.folder is not None
    folder = RunFolder(Path(federation.folder))
    transport = Transport(federation.timeout, federation.enough, least=federation.min_clients, wait=federation.wait)
    identity = server_identity(config, context.run_id)
    with folder.opened(config, "flower", extend=True) as unfinished:
        if not unfinished:
            raise UserError(f"{folder.path} holds a finished run; move it away, or choose another federation.folder")
        keep_private(folder.path)
        make_run(config, grid, folder, LogCallback(config.rounds), transport, identity).run()
    log.info("run folder: %s", folder.path)


class LogCallback(Callback):
    """Writes progress to Flower's log, which `flwr run --stream` shows."""

    def __init__(self, rounds: int):
        self.rounds = rounds

    def on_round(self, record: RoundRecord) -> None:
        log.info("%s", "  ".join([f"round {record['round']}/{self.rounds}", *metric_words(record)]))

    def on_note(self, text: str) -> None:
        log.warning("%s", text)
