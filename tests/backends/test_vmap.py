"""Both engines give the same numbers for every method; padding has no effect; the choice follows its rule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednh.backends.tasks import SimulatedData, TrainTask
from fednh.backends.vmap import (
    BLOCKS,
    LARGEST,
    SMALLEST,
    Block,
    BlockFit,
    BlockStep,
    VmapClientData,
    blocks,
    choose_engine,
    outside,
    update_block,
)
from fednh.config import load
from fednh.data.batches import ClientData, Samples
from fednh.errors import RunError, UserError
from fednh.federated import checks, client
from fednh.federated import client as clients
from fednh.federated.architectures import Architectures
from fednh.federated.setup import Federation, build_federation
from fednh.methods import METHODS
from fednh.methods.base import Method
from fednh.methods.fedavg import FedAvg
from fednh.methods.fit import Fit, FitSettings, LocalFit, Sgd
from fednh.methods.optimizers import Adam
from fednh.models import Net, build_net
from fednh.seeding import torch_rng
from fednh.tree import Tree, Uploads, prefix, select, strip_prefix
from tests.helpers.compare import identical, timeless
from tests.helpers.simulator import run_config

SIZES = (1, 3, 7, 10, 11)  # with batches of 4: one to three steps an epoch, last batches of 1, 2 and 3
SGD = Sgd(lr=0.05, weight_decay=0.01, clip=0.5, batch_size=4, epochs=2)


@pytest.fixture
def samples() -> Samples:
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(sum(SIZES), 6)).astype(np.float32)), rng.integers(0, 4, sum(SIZES))
    return Samples(x, torch.from_numpy(y), 4, torch.full((6,), 2.0), torch.full((6,), 0.1), augment=False)


def parts() -> list[np.ndarray]:
    ends = np.cumsum(SIZES)
    return [np.arange(end - size, end) for end, size in zip(ends, SIZES, strict=True)]


def both(
    name: str, samples: Samples, rounds: int = 2, late: int = 0, sgd: Sgd = SGD, **settings: Any
) -> tuple[list[client.Update], list[client.Update]]:
    """Some rounds of a method by the loop and in one block; each starts from what the one before kept.

    Of the first `late` clients, client k joins k rounds before the last one.
    """
    quick: dict[str, dict[str, Any]] = {
        "creff": {"retrain_epochs": 5, "match_steps": 5},
        "floco": {"tau": 1, "endpoints": 3},  # places from the first round on
    }
    method = METHODS[name](**quick.get(name, {}), **settings)
    net = build_net("mlp", (6,), 4, {"hidden": [8, 5]})
    server = method.init(net, torch_rng(0, "init"))
    kept = [method.enroll(server) for _ in SIZES]
    records: list[Tree] = [{} for _ in SIZES]
    for round_ in range(1, rounds + 1):
        down = method.broadcast(server)
        one_by_one = [
            client.update(method, net, kept[k], {**down, **records[k]}, ClientData(samples, part, 5, round_, k), sgd)
            for k, part in enumerate(parts())
        ]
        block = Block(samples, parts(), range(len(SIZES)), 5, round_, "train")
        together = update_block(method, net, block, kept, down, sgd, records)
        kept = [kept[k] if k < late and round_ < rounds - k else u.keep for k, u in enumerate(one_by_one)]
        server = method.aggregate(server, Uploads.of([update.upload for update in one_by_one]))
        records = method.records(server, [select(update.upload, *method.upload.recorded) for update in one_by_one])
    return one_by_one, together


def largest_difference(one_by_one: list[client.Update], together: list[client.Update]) -> float:
    pairs = [
        (getattr(a, part)[name], getattr(b, part)[name])
        for a, b in zip(one_by_one, together, strict=True)
        for part in ("keep", "upload")
        for name in getattr(a, part)
    ]
    return max((float((a - b).abs().max()) for a, b in pairs), default=0.0)


@pytest.mark.parametrize("name", METHODS)
def test_a_block_gives_what_the_loop_gives(name: str, samples: Samples) -> None:
    one_by_one, together = both(name, samples)
    for a, b in zip(one_by_one, together, strict=True):
        assert checks.form_of(a.keep) == checks.form_of(b.keep)
        assert checks.form_of(a.upload) == checks.form_of(b.upload)
        assert a.samples == b.samples
        assert a.loss_sum == pytest.approx(b.loss_sum, rel=1e-4)
    assert largest_difference(one_by_one, together) < 2e-5


@pytest.mark.parametrize(
    ("name", "rounds", "settings"),
    [
        ("feddbe", 1, {"mu": 0.3}),  # the running mean travels in the first round
        ("feddbe", 3, {"mu": 0.3, "kappa": 5.0}),
        ("fedala", 3, {"layers": 2, "batch": 2, "threshold": 1e-3, "eta": 5.0}),
    ],
)
def test_a_block_carries_running_values_and_draws_samples_as_the_loop_does(
    name: str, rounds: int, settings: dict[str, Any], samples: Samples
) -> None:
    """Clients that joined late share a block with others."""
    one_by_one, together = both(name, samples, rounds, late=2 if rounds > 1 else 0, **settings)
    assert largest_difference(one_by_one, together) < 2e-5


@pytest.mark.parametrize(
    "settings", [SGD, Adam(lr=0.01, batch_size=4, epochs=1, keep_state=True, epsilon=1e-3)], ids=["sgd", "adam"]
)
@pytest.mark.parametrize("name", METHODS)
def test_newcomers_among_others_compute_what_the_loop_does(name: str, settings: FitSettings, samples: Samples) -> None:
    """Two clients join in the second round: through the task that divides clients into blocks by what they kept."""
    if METHODS[name].sgd_only and settings is not SGD:
        pytest.skip("it needs SGD from a fresh start")
    quick: dict[str, dict[str, Any]] = {"creff": {"retrain_epochs": 5, "match_steps": 5}, "floco": {"tau": 1}}
    method, everybody = METHODS[name](**quick.get(name, {})), range(len(SIZES))
    nets = Architectures(method, {"mlp": build_net("mlp", (6,), 4, {"hidden": [8, 5]})})
    on = SimulatedData(samples, samples, parts(), [part[:0] for part in parts()], nets, ("mlp",) * len(SIZES))
    server = nets.init(0)
    kept, records = {k: nets.enroll(server, "mlp") for k in everybody}, dict[int, Tree]()
    for round_, picked in ((1, [0, 2, 4]), (2, list(everybody))):
        loop, block = (
            TrainTask(method.broadcast(server), settings, 5, round_, together=together, records=records)(
                on, picked, [kept[k] for k in picked]
            )
            for together in (False, True)
        )
        assert not any(result.fallback_reason or result.problem for result in (*loop, *block))
        for a, b in zip(loop, block, strict=True):
            assert checks.form_of(a.keep) == checks.form_of(b.keep)
            assert a.loss_sum == pytest.approx(b.loss_sum, rel=1e-3)
        assert largest_difference(loop, block) < 2e-4
        kept |= {k: result.keep for k, result in zip(picked, loop, strict=True)}
        uploads = [result.upload or {} for result in loop]
        server = method.aggregate(server, Uploads.of(uploads))
        if parts_of := method.upload.recorded:
            made = method.records(server, [select(upload, *parts_of) for upload in uploads])
            records |= dict(zip(picked, made, strict=True))


@pytest.mark.parametrize("seed", [9, 20, 22, 35])
def test_a_block_breaks_ties_as_the_loop_does(seed: int) -> None:
    """pFedFDA on features that hardly differ: the losses of neighbouring betas are equal but for rounding."""
    rng = np.random.default_rng(seed)
    x, y = 0.03 * rng.normal(size=(sum(SIZES), 6)), rng.integers(0, 2, sum(SIZES))
    flat = torch.from_numpy(x.astype(np.float32))
    samples = Samples(flat, torch.from_numpy(y), 4, torch.full((6,), 2.0), torch.full((6,), 0.1), augment=False)
    assert largest_difference(*both("pfedfda", samples)) < 3e-6


AUTHORS = {  # the settings of the FedNH authors' code, as the paper's presets have them
    name: {key: value for key, value in load("cifar10", {"method.name": name}).method.items() if key != "name"}
    for name in ("fedrod", "ditto", "fedbabu")
}


@pytest.mark.parametrize("name", AUTHORS)
def test_a_block_has_the_authors_settings_as_the_loop_has(name: str, samples: Samples) -> None:
    one_by_one, together = both(name, samples, **AUTHORS[name])
    assert largest_difference(one_by_one, together) < 2e-5


@pytest.mark.parametrize("name", ["fednh", "feddbe", "fedrep"])
def test_clients_of_one_batch_are_not_shuffled_and_give_what_the_loop_gives(
    name: str, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses of single samples do not see an order; a loss of whole batches (FedDBE) might, and is given the loop's."""
    calls, shuffle = [], Block.shuffle
    monkeypatch.setattr(Block, "shuffle", lambda block: calls.append(block) or shuffle(block))
    one_by_one, together = both(name, samples, sgd=replace(SGD, batch_size=max(SIZES)))
    assert bool(calls) == (name == "feddbe")
    assert largest_difference(one_by_one, together) < 2e-5
    both(name, samples, rounds=1, sgd=replace(SGD, batch_size=max(SIZES) - 1))
    assert calls


def test_a_block_draws_what_each_client_would(samples: Samples) -> None:
    block = Block(samples, parts(), range(len(SIZES)), 5, 1, "train")

    def every(me: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        return list(VmapClientData(block, me).drawn(0.5, 2))

    batches = torch.func.vmap(every, randomness="same")(torch.arange(len(SIZES)))
    for k, part in enumerate(parts()):
        rows = zip(*ClientData(samples, part, 5, 1, k).drawn(0.5, 2), strict=True)
        x, y, weight = (torch.cat(column) for column in rows)
        x_block, y_block, weight_block = (torch.cat([batch[i][k] for batch in batches]) for i in range(3))
        assert weight_block.tolist() == [1.0] * len(weight) + [0.0] * (len(weight_block) - len(weight))
        assert torch.equal(x_block[: len(x)], x)
        assert torch.equal(y_block[: len(y)], y)


@pytest.mark.parametrize("name", ["fedavg", "fednh", "creff"])
def test_without_the_mask_the_block_is_wrong(name: str, samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Block.__init__

    def unmasked(self: Block, *args: Any) -> None:
        made(self, *args)
        self.real = torch.ones_like(self.real)

    monkeypatch.setattr(Block, "__init__", unmasked)
    assert largest_difference(*both(name, samples)) > 1e-3


def test_who_has_no_batch_left_stands_still(samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight decay and momentum would go on moving a client after its last batch."""
    monkeypatch.setattr(BlockStep, "everyone", property(lambda step: True, lambda step, value: None))
    assert largest_difference(*both("fedavg", samples)) > 1e-3


def test_outside_of_the_map_a_tensor_is_the_whole_blocks() -> None:
    """Mapped along any axis, or the same for all clients; what comes back is mapped again, with its gradient."""
    seen: list[torch.Tensor] = []
    row, column, shared = torch.arange(6.0).view(3, 2), torch.arange(6.0).view(2, 3), torch.ones(2)

    def one(row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        def work(*whole: torch.Tensor) -> list[torch.Tensor]:
            seen.extend(whole)
            return [whole[0] + whole[1] + whole[2]]

        (total,) = outside(work, row, column, shared)
        return 10 * total

    made = torch.func.vmap(one, in_dims=(0, 1))(row.requires_grad_(), column)
    assert [tuple(value.shape) for value in seen] == [(3, 2)] * 3
    assert made.tolist() == (10 * (row + column.T + 1)).tolist()
    made.sum().backward()
    assert row.grad is not None
    assert row.grad.tolist() == [[10.0, 10.0]] * 3


def test_an_error_outside_of_the_map_leaves_the_map_as_it_was() -> None:
    def one(x: torch.Tensor) -> torch.Tensor:
        def work(x: torch.Tensor) -> list[torch.Tensor]:
            raise ValueError("not today")

        with pytest.raises(ValueError, match="not today"):
            outside(work, x)
        return x.sum()

    assert torch.func.vmap(one)(torch.ones(3, 2)).tolist() == [2.0, 2.0, 2.0]
    assert torch.func.vmap(lambda x: x * 2)(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]


@dataclass(frozen=True)
class Spare(FedAvg):
    """Two names have a gradient of 1 in common, one has a gradient of zero, and one the loss does not depend on."""

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        still = torch.full((2,), 1.5)
        return {"body.one": torch.zeros(2), "body.two": torch.zeros(2), "body.zero": still, "body.spare": still.clone()}

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        def loss(params: Tree, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (params["body.one"] + params["body.two"]).sum() + 0 * params["body.zero"].sum() + 0 * x[:, 0]

        model = fit(received, loss, only=("body",))
        return model, model


@pytest.mark.parametrize("clip", [0.0, 10.0])
@pytest.mark.parametrize("together", [False, True], ids=["loop", "vmap"])
def test_weight_decay_leaves_alone_what_the_loss_does_not_use(together: bool, clip: float, samples: Samples) -> None:
    """Without momentum a name of gradient zero shrinks by 1 - lr * decay = 0.9 in each of three or six steps."""
    method, net, sgd = Spare(), build_net("mlp", (6,), 4), Sgd(0.1, 0.0, 1.0, clip=clip, batch_size=4, epochs=3)
    server, pair = method.init(net, torch_rng(0, "init")), parts()[1:3]  # clients of 3 and 7 samples
    if together:
        made = update_block(method, net, Block(samples, pair, [0, 1], 5, 1, "train"), [{}, {}], server, sgd)
    else:
        data = [ClientData(samples, part, 5, 1, k) for k, part in enumerate(pair)]
        made = [client.update(method, net, {}, server, own, sgd) for own in data]
    for update, steps in zip(made, (3, 6), strict=True):
        assert update.keep["body.zero"].tolist() == pytest.approx([1.5 * 0.9**steps] * 2)
        assert update.keep["body.spare"].tolist() == [1.5, 1.5]
        for name in ("body.one", "body.two"):  # w <- 0.9 w - 0.1 * 1
            assert update.keep[name].tolist() == pytest.approx([0.9**steps - 1] * 2, rel=1e-5)


def federation(**settings: Any) -> tuple[Any, Federation]:
    config = load(
        "digits", {"partition.clients": 40, "partition.min_samples": 5, "participation.rate": 1.0, **settings}
    )
    return config, build_federation(config)


def engine_of(fed: Federation, config: Any) -> str:
    return choose_engine(config, fed, fed.method.init(fed.net, torch_rng(0, "init")))


def test_the_rule() -> None:
    config, fed = federation()
    assert engine_of(fed, config) == "vmap"
    few, _ = federation(**{"participation.rate": 0.1})
    assert engine_of(fed, few) == "loop"
    looking, _ = federation(**{"diagnostics.gradient_norm": True})
    assert engine_of(fed, looking) == "loop"
    conv, with_conv = federation(**{"model.name": "conv2", "model.args": {}})
    assert engine_of(with_conv, conv) == "loop"
    assert engine_of(with_conv, conv.model_copy(update={"engine": "vmap"})) == "vmap"
    wide = {"model.args": {"hidden": [800]}, "method.name": "afl"}  # Gram matrices of 5 MB
    assert [
        engine_of(those, config)
        for config, those in (federation(**wide), federation(**wide | {"model.args": {"hidden": [64]}}))
    ] == ["loop", "vmap"]
    asked, _ = federation(engine="loop")
    assert engine_of(fed, asked) == "loop"


def test_blocks_hold_every_client_once_and_are_bounded() -> None:
    _, fed = federation()
    order = sorted(range(40), key=lambda k: -len(fed.parts[k]))
    big = replace(fed, parts=[np.tile(np.arange(len(fed.train)), 12)] * 40)
    for those in (fed, big):
        made = list(blocks(those, order))
        assert [k for block in made for k in block] == order
        assert max(len(block) for block in made) <= LARGEST
    assert len(list(blocks(big, order))) > len(list(blocks(fed, order)))


@given(clients=st.integers(1, 3000))
def test_blocks_are_equally_large(clients: int) -> None:
    _, fed = federation()
    many = replace(fed, parts=[np.arange(5)] * clients)
    sizes = [len(block) for block in blocks(many, range(clients))]
    assert sum(sizes) == clients
    assert max(sizes) - sizes[-1] < len(sizes)
    assert max(sizes) <= LARGEST
    if clients >= SMALLEST:
        assert max(sizes) >= SMALLEST / 2
    if SMALLEST * BLOCKS <= clients <= LARGEST * BLOCKS:
        assert len(sizes) == BLOCKS


@dataclass(frozen=True)
class Peeking(FedAvg):
    """Decides by a number that it saw: fine for one client, impossible for many at once."""

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        if data.counts[0] > 3:
            return super().client_update(net, kept, received, data, fit)
        return received, received


def test_a_method_that_cannot_be_mapped_takes_the_loop() -> None:
    config, fed = federation()
    peeking = fed.with_method(Peeking())
    assert engine_of(peeking, config) == "loop"
    told: list[str] = []
    choose_engine(config, peeking, peeking.method.init(fed.net, torch_rng(0, "init")), told.append)
    assert len(told) == 1
    assert told[0].startswith("clients are computed one by one: Peeking or its model does not run for many")
    with pytest.raises(UserError, match=r"engine = 'vmap' cannot be used: Peeking or its model does not run"):
        engine_of(peeking, config.model_copy(update={"engine": "vmap"}))


@dataclass(frozen=True)
class Failing(FedAvg):
    """Fails for clients of one size; a block fails as a whole and is then worked through one by one."""

    size: int = 0

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        block = getattr(data, "block", None)
        sizes = block.sizes if block is not None else [len(data)]
        if self.size in sizes:
            raise RuntimeError("no luck")
        return super().client_update(net, kept, received, data, fit)


@dataclass(frozen=True)
class Remembering(FedAvg):
    """Starts with nothing of its own, and later goes half the way from its last model."""

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        last = strip_prefix(kept, "last")
        model, upload = super().client_update(net, kept, received, data, fit)
        moved = {name: (value + last[name]) / 2 if last else value for name, value in model.items()}
        return prefix("last", moved), upload


def test_newcomers_and_old_hands_in_one_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, update = list[Any](), clients.update
    monkeypatch.setattr(clients, "update", lambda *client: alone.append(client) or update(*client))
    states, told = [], None
    for name in ("vmap", "loop"):
        config, fed = federation(
            rounds=2, engine=name, **{"participation.rate": 0.6, "train.epochs": 1, "eval.every": 0, "eval.final": 1}
        )
        simulation, _, told = run_config(tmp_path / name, config, fed.with_method(Remembering()))
        states.append([simulation.executor.store.get(k) for k in simulation.executor.store.members])
        assert bool(alone) == (name == "loop"), "a block was given up"
    first, second = (set(record["clients"]) for record in told.records)
    assert first & second
    assert second - first
    for vmap, loop in zip(*states, strict=True):
        assert vmap.keys() == loop.keys()
        for key, value in loop.items():
            torch.testing.assert_close(vmap[key], value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("method", ["fednh", pytest.param("fedrod", marks=pytest.mark.soak)])
def test_vmap_runs_are_reproducible_and_near_the_loop(method: str, tmp_path: Path) -> None:
    runs = {}
    for name, settings in {"one": {"workers": 1}, "two": {"workers": 2}, "loop": {"engine": "loop"}}.items():
        config, fed = federation(rounds=2, **{"method.name": method, "train.epochs": 1, "eval.every": 0, **settings})
        simulation, summary, _ = run_config(tmp_path / name, config, fed)
        runs[name] = simulation, timeless(summary)
    assert runs["one"][0].executor.engine == "vmap"
    identical(runs["one"][0].server, runs["two"][0].server)
    assert runs["one"][1] == runs["two"][1]
    for key, value in runs["loop"][0].server.items():
        torch.testing.assert_close(runs["one"][0].server[key], value, atol=1e-4, rtol=1e-4)


def test_one_failing_client_does_not_cost_its_block(tmp_path: Path) -> None:
    config, fed = federation(rounds=1, on_error="skip", **{"train.epochs": 1, "eval.every": 0})
    sizes = [len(part) for part in fed.parts]
    bad = max(sizes)
    simulation, summary, told = run_config(tmp_path / "run", config, fed.with_method(Failing(size=bad)))
    assert simulation.executor.engine == "vmap"
    assert summary["failed"] == sizes.count(bad)
    assert told.records[0]["failed"] == [k for k, size in enumerate(sizes) if size == bad]
    assert len(told.records[0]["clients"]) == 40 - sizes.count(bad)
    assert not any("could not be computed at once" in words for words in told.notes)


@dataclass(frozen=True)
class Misspelt(FedAvg):
    """Distils from a teacher whose tensors it looks for under a name that nothing has."""

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        def loss(params: Tree, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (net.logits(params, x) - net.logits(strip_prefix(received, "techer"), x)).square().mean(1)

        model = fit(received, loss, only=("body", "head"))
        return model, model


@pytest.mark.parametrize("name", ["auto", "loop"])
def test_a_teacher_without_its_tensors_is_an_error_on_both_engines(name: str, tmp_path: Path) -> None:
    config, fed = federation(rounds=1, engine=name, **{"train.epochs": 1, "eval.every": 0})
    with pytest.raises(RunError, match=r"failed in round 1: .* is given a tree that lacks body.linear1.bias, .* and "):
        run_config(tmp_path / "run", config, fed.with_method(Misspelt()))


def test_a_block_that_fails_where_its_clients_do_not_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> list[client.Update]:
        raise RuntimeError("a fault of ours")

    config, fed = federation(rounds=2, engine="vmap", **{"train.epochs": 1, "eval.every": 0})
    monkeypatch.setattr("fednh.backends.tasks.update_block", broken)
    simulation, _, told = run_config(tmp_path / "run", config, fed)
    assert simulation.executor.engine == "vmap"
    assert [len(record["clients"]) for record in told.records] == [40, 40]
    notes = [words for words in told.notes if "could not be computed at once" in words]
    assert len(notes) == 1
    assert notes[0].startswith(
        "round 1: a block of clients could not be computed at once (RuntimeError: a fault of ours)"
    )


def test_every_method_can_be_mapped() -> None:
    config, fed = federation()
    for name, kind in METHODS.items():
        method: Method = kind()
        assert engine_of(fed.with_method(method), config) == "vmap", name


@pytest.mark.parametrize(("epochs", "steps"), [(0.13, None), (1.39, None), (2, None), (1, 7)])
def test_a_block_counts_steps_as_the_loop_does(epochs: float, steps: int | None) -> None:
    """0.13 of 900 samples are 117 and not 116, which are a batch less: SCAFFOLD divides by the number."""
    sizes, settings = (900, 300, 1), Sgd(batch_size=4, epochs=epochs, steps=steps)
    whole = Samples(torch.zeros(1201, 2), torch.zeros(1201).long(), 4, torch.ones(2), torch.zeros(2), augment=False)
    index = np.split(np.arange(1201), np.cumsum(sizes)[:-1])
    block = Block(whole, index, range(3), 0, 1, "train")
    together = torch.func.vmap(lambda me: BlockFit(VmapClientData(block, me), settings).reach())(torch.arange(3))
    alone = [LocalFit(ClientData(whole, part), settings).reach() for part in index]
    torch.testing.assert_close(together, torch.tensor(alone))
