"""Before the first round: resume from the newest intact checkpoint, or begin; what cannot run is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from fednh.config import Config
from fednh.errors import ConfigError, UserError
from fednh.federated import checks, compress, evaluate, stopping
from fednh.federated.aggregate import split_overrides
from fednh.federated.compress import Compression
from fednh.federated.executor import Executor
from fednh.federated.plan import most_answers
from fednh.federated.results import Progress
from fednh.federated.server_optimizer import ServerOptimizer, split_moments
from fednh.federated.setup import ServerSide
from fednh.methods.base import Method
from fednh.privacy.plan import PrivacyPlan, make_plan
from fednh.runs.checkpoint import Checkpoint, Checkpoints
from fednh.runs.run_folder import RunFolder
from fednh.tree import Tree


@dataclass(frozen=True)
class Started:
    """What the loop works on; it does not change during a run."""

    side: ServerSide
    server_specs: checks.TensorSpecs  # what the server's state looks like
    upload_specs: dict[str, checks.TensorSpecs]  # what an upload looks like, by the name of the client's network
    optimizer: ServerOptimizer
    total: Tensor | None  # (C,) test samples of each class, where the server has a test set
    privacy: PrivacyPlan | None = None  # what answers spend; None: nothing is noised

    @property
    def method(self) -> Method:
        return self.side.method


def start(
    config: Config, folder: RunFolder, executor: Executor, checkpoints: Checkpoints
) -> tuple[Started, Progress, Tree, dict[int, Tree], Tree]:
    """The run's set-up, what it has done so far, the server's state, the clients' overrides, the optimiser's moments.

    Nothing is written before everything that could be refused has been looked at.
    """
    saved = _newest_checkpoint(config, folder, executor, checkpoints)
    progress, extras = (Progress(), {}) if saved is None else Progress.joined(saved.progress, saved.log)
    _check_end(config, folder, executor, progress)
    side = executor.open(extras, progress.records)
    method, nets = side.method, side.architectures
    with checks.with_context(method, "the first try on blank samples failed, before any round"):
        initial = nets.init(config.seed, config.home)
        checks.check_aggregator(config.aggregator, method, config.method["name"])
        upload_specs = nets.declared_uploads(initial)
        nets.check_uploads(config.method["name"], upload_specs)
        for name, specs in upload_specs.items():
            alone = nets.view(initial, name)
            checks.check_personal(config.personal.model, method, config.method["name"], alone)
            checks.check_shared(method, config.method["name"], alone, specs)
            if (compression := Compression.of(config.federation)) is not None:
                sent = checks.form_of(method.broadcast(alone))
                compress.check(compression, method, config.method["name"], specs, sent)
        stopping.check(config, any(map(len, side.held_out)), executor.policy.simulated)
        optimizer = ServerOptimizer(config.server, method)
        optimizer.check(initial, nets.uploaded(upload_specs))
        privacy = _privacy(config, side, initial, executor.policy.simulated, any(upload_specs.values()))
        executor.begin(initial)
    total = None if side.test is None else evaluate.total_per_class(side.test)
    setup = Started(side, checks.form_of(initial), upload_specs, optimizer, total, privacy)
    state = initial if saved is None else saved.server
    server, moments = split_moments(state) if optimizer.active else (state, {})
    server, overrides = split_overrides(server) if method.upload.recorded else (server, {})
    _begin_folder(config, folder, executor, side, progress, resumed=saved is not None)
    return setup, progress, server, overrides, moments


def _privacy(config: Config, side: ServerSide, initial: Tree, simulated: bool, sends: bool) -> PrivacyPlan | None:
    """What answers will spend, if clients send anything; what the level does not allow is refused."""
    level = config.privacy.level
    if level == "none":
        return None
    if level == "client" and not simulated:
        raise ConfigError(
            "privacy.level = 'client' is of simulations: in a deployment the server would see single moves; use "
            "privacy.level = 'sample'"
        )
    if level == "sample" and side.measured:
        raise ConfigError(
            "privacy.level = 'sample' does not go with data whose means and deviations are measured on the samples: "
            "they would leave without noise; give data that are scaled already"
        )
    answers = most_answers(config, len(side.counts)) if simulated else config.rounds
    plan = make_plan(config, side.method, side.net, initial, answers)
    return plan if plan is None or sends else replace(plan, first=(), later=(), once=())


def _newest_checkpoint(
    config: Config, folder: RunFolder, executor: Executor, checkpoints: Checkpoints
) -> Checkpoint | None:
    """The newest intact checkpoint; a finished run, which is to be extended, needs one."""
    try:
        saved = checkpoints.latest(executor.note, config.home)
    except UserError:
        if not folder.finished:
            raise
        saved = None
    if saved is None and folder.finished:
        raise UserError(
            f"{folder.path} holds a finished run without checkpoints that can be read, so it cannot go on; "
            f"start another run with rounds = {config.rounds}"
        )
    return saved


def _check_end(config: Config, folder: RunFolder, executor: Executor, progress: Progress) -> None:
    """Refuse an end that the run has passed, and weights that sites would choose for themselves."""
    if not executor.policy.trusts_counts and config.aggregator == "weighted_mean":
        raise ConfigError(
            "aggregator = 'weighted_mean' weighs sites by numbers of samples, which they report themselves and may "
            "keep to themselves; use 'mean' in a deployment"
        )
    if progress.closed >= config.rounds:
        raise UserError(
            f"{folder.path} has done {progress.round} rounds, so it cannot end after {config.rounds}; give more rounds"
        )


def _begin_folder(
    config: Config, folder: RunFolder, executor: Executor, side: ServerSide, progress: Progress, resumed: bool
) -> None:
    """Write the run's description; refuse to resume with other data than it began with, or without its state."""
    folder.begin(config, side.classes, side.counts, side.sites, executor.backend, side.raw_fingerprint)
    for words in side.notes:
        executor.note(words)
    if resumed:
        executor.note(f"going on after round {progress.round}")
    elif recorded := folder.rounds_written():
        # The writer finishes one checkpoint before it starts the next: a kill can cost the first, not the second.
        if config.checkpoint.every and recorded > 2 * config.checkpoint.every:
            raise UserError(
                f"{folder.path}: {recorded} rounds are recorded but there is no checkpoint; restore checkpoints/ and "
                f"clients/ from a copy, or delete the folder to start from the beginning"
            )
        executor.note("there is no checkpoint yet; starting again from the beginning")
    folder.write_metrics(progress.records[: progress.closed])  # later rounds will be repeated
