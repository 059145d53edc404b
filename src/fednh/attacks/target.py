"""A client's upload of one round, computed again from a run's config and seeds, and what the server knows of it.

The server's state before the round is the initial one, that of a checkpoint, or of the same run repeated in a temporary
folder up to that round: every draw has an address, so the bits are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray

from fednh.backends.threads import Pool, make_run
from fednh.callbacks import Callback
from fednh.config import Config
from fednh.data.batches import Samples
from fednh.data.partitions import Indices
from fednh.data.sources.registry import with_prefix
from fednh.errors import Interrupted, UserError
from fednh.federated.aggregate import split_overrides
from fednh.federated.architectures import initial_state
from fednh.federated.executor import RoundTask
from fednh.federated.plan import most_answers
from fednh.federated.server_optimizer import ServerOptimizer, split_moments
from fednh.federated.setup import Federation, build_federation
from fednh.flower.layout import FederationFolder
from fednh.io.files import read_tree
from fednh.methods.base import UploadSpec
from fednh.metric_names import RoundRecord
from fednh.privacy.plan import make_plan
from fednh.privacy.private_data import Mechanisms
from fednh.runs.checkpoint import read_state
from fednh.runs.layout import RunLayout
from fednh.runs.run_folder import SIMULATED, RunFolder, find_client, read_backend, read_config
from fednh.tree import Tree


@dataclass(frozen=True)
class Before:
    """What stands before a round: the server's state, and what clients have kept."""

    round: int  # the one that comes next
    initial: Tree  # the server's state before the first, from which newcomers start
    server: Tree
    overrides: dict[int, Tree] = field(default_factory=dict)
    kept: dict[int, Tree] = field(default_factory=dict)
    mechanisms: Mechanisms | None = None  # noise in all that clients release; None: there is none


@dataclass(frozen=True)
class Target:
    """One client's upload, and what the attacks are measured by."""

    config: Config
    fed: Federation  # its `train` are all samples of the data set, training samples first
    before: Before
    client: int
    part: Indices  # the client's samples
    upload: Tree
    received: Tree

    @property
    def method_upload(self) -> UploadSpec:
        return self.fed.method.upload

    @property
    def counts(self) -> NDArray[np.int64]:
        """How many samples of each class the client has."""
        return np.bincount(self.fed.train.y.numpy(force=True)[self.part], minlength=self.fed.train.num_classes)


def open_run(
    folder: Path,
    clients: Sequence[str] | None,
    number: int,
    round_: int,
    limit: int | None = None,
    data: str | None = None,
) -> list[Target]:
    """The uploads of some clients of a run in a round: those named, or the first `number` that hold samples.

    `folder` is a run's, or a federation's, which has its run inside. Samples of real sites are with them alone: there
    `data` stands for them. With `limit`, clients train on so many of their samples.
    """
    run = folder if RunLayout(folder).started else FederationFolder(folder).run
    config = read_config(run if RunLayout(run).started else folder)
    remote = read_backend(run) not in SIMULATED
    if remote and data is None:
        raise UserError(
            f"{run} holds a run of real sites, and no server stores single uploads or has the sites' samples; give "
            f"samples that stand for theirs, to see what it would learn from the next upload: --data SOURCE"
        )
    changed: dict[str, object] = {} if data is None else {"name": with_prefix(data)}
    changed |= {} if limit is None else {"limit": limit}
    changing = config.model_copy(update={"data": config.data.model_copy(update=changed)})
    fed = build_federation(changing, run=None if changed else run)
    there = {client: fed.name(client) for client in range(len(fed.parts))}
    names = dict(enumerate(fed.sites)) if fed.sites else {}
    chosen = None if clients is None else [find_client(names, name, run, there) for name in clients]
    return targets_of(changing, fed, before(changing, fed, run, round_, replay=not remote), chosen, number)


def targets_of(
    config: Config, fed: Federation, start: Before, clients: Sequence[int] | None, number: int
) -> list[Target]:
    """The same for a federation that is at hand."""
    there = [client for client, part in enumerate(fed.parts) if len(part)]
    chosen = there[:number] if clients is None else list(clients)
    if unknown := [client for client in chosen if client not in there]:
        raise UserError(f"there is no client {unknown[0]} with samples; clients are 0 to {len(fed.parts) - 1}")
    made = computed(config, fed, start, chosen)
    whole = replace(fed, train=everything(fed))
    down = fed.method.broadcast(start.server)
    return [
        Target(
            config=config,
            fed=whole,
            before=start,
            client=client,
            part=fed.parts[client],
            upload=made[client],
            received={**down, **start.overrides.get(client, {})},
        )
        for client in chosen
    ]


def everything(fed: Federation) -> Samples:
    """All samples of the data set: the training samples under their own numbers, then the test samples."""
    train, test = fed.train, fed.test
    x = train.x[: len(train)]  # other views of a sample tell nothing new
    if not len(test):
        return replace(train, x=x, views=1)
    return replace(train, x=torch.cat([x, test.x.to(x.dtype)]), y=torch.cat([train.y, test.y]), views=1)


def computed(config: Config, fed: Federation, start: Before, clients: Sequence[int]) -> dict[int, Tree]:
    """What these clients upload in the next round, by the executor that a run would use."""
    with _pool(config, fed, start) as pool:
        down = fed.method.broadcast(start.server)
        task = RoundTask(
            start.server,
            down,
            start.round - 1,
            train=clients,
            mechanisms=start.mechanisms,
            overrides=start.overrides,
        )
        made = {}
        for result in pool.ask(task).results():
            if result.upload is None:
                raise UserError(f"the upload of {fed.name(result.client)} cannot be computed: {result.problem}")
            made[result.client] = result.upload
        return made


@contextmanager
def _pool(config: Config, fed: Federation, start: Before) -> Iterator[Pool]:
    """An executor before this round, whose clients keep what they kept."""
    with (
        TemporaryDirectory() as folder,
        Pool(config, fed, RunFolder(Path(folder)), Callback(), threading.Event()) as it,
    ):
        it.begin(start.initial)
        for client, kept in start.kept.items():
            it.store.put(client, kept, start.round - 1)
        it.commit(start.round - 1, list(start.kept))
        yield it


def before(config: Config, fed: Federation, run: Path, round_: int, replay: bool = True) -> Before:
    """What stood before a round of a run: from its checkpoint or, with `replay`, by repeating it."""
    if config.model.differs:
        raise UserError(f"{run} has clients with different networks, which attacks do not know; attack a run with one")
    if not 1 <= round_ <= config.rounds + 1:
        raise UserError(
            f"{run} has {config.rounds} rounds; --round takes 1 to {config.rounds + 1}, the one after the last"
        )
    if round_ == 1:
        initial = initial_state(fed.method, fed.net, config.seed, config.device)
        return Before(1, initial, initial, mechanisms=_mechanisms(config, fed, initial))
    found = _read(config, fed, RunLayout(run).checkpoints, round_)
    if found is None and not replay:
        raise UserError(f"{run} has no checkpoint of round {round_ - 1}, so round {round_} cannot be attacked")
    return found or _repeated(config, fed, round_)


def _mechanisms(config: Config, fed: Federation, initial: Tree) -> Mechanisms | None:
    """The noise of a run's clients."""
    plan = make_plan(config, fed.method, fed.net, initial, most_answers(config, len(fed.parts)))
    return None if plan is None else plan.mechanisms


def _read(config: Config, fed: Federation, checkpoints: Path, round_: int) -> Before | None:
    state = read_state(checkpoints, round_ - 1)
    if state is None:
        return None
    server = state[0]
    if ServerOptimizer(config.server, fed.method).active:
        server, _ = split_moments(server)
    server, overrides = split_overrides(server) if fed.method.upload.recorded else (server, {})
    initial = initial_state(fed.method, fed.net, config.seed, config.device)
    kept = {client: read_tree(path) for client, path in state[1].items()}
    return Before(round_, initial, server, overrides, kept, _mechanisms(config, fed, initial))


class _StopAfter(Callback):
    """Stops a run after a round."""

    def __init__(self, round_: int):
        self.round = round_

    def on_round(self, record: RoundRecord) -> bool:
        return record["round"] >= self.round


def _repeated(config: Config, fed: Federation, round_: int) -> Before:
    """The run again, from its seeds, up to the round before. Evaluations are left out: they change nothing."""
    again = config.model_copy(
        update={
            "eval": config.eval.model_copy(update={"every": 0}),
            "checkpoint": config.checkpoint.model_copy(update={"every": 1}),
        }
    )
    with TemporaryDirectory() as folder, RunFolder(Path(folder, "run")) as run:
        with suppress(Interrupted):
            make_run(again, fed, run, _StopAfter(round_ - 1)).run()
        found = _read(again, fed, run.checkpoints, round_)
    if found is None:
        raise UserError(f"round {round_} cannot be reached again: the run ends before it")
    return found
