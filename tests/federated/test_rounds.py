"""The round loop: the same numbers for any number of workers, dropouts, refusals, failures, invariants."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from fednh import machine
from fednh.backends.threads import SimulationReplies, in_order
from fednh.callbacks.screen import RunLines, Throttle
from fednh.config import Config, load
from fednh.data.batches import ClientData
from fednh.errors import RunError, UserError
from fednh.federated import checks, plan
from fednh.federated import client as clients
from fednh.federated.architectures import initial_state
from fednh.federated.client import ClientResult
from fednh.federated.plan import dropped_clients, picked_clients, sampled_clients
from fednh.federated.results import Progress
from fednh.federated.rounds import RoundLoop
from fednh.federated.setup import Federation, build_federation
from fednh.federated.start import _check_end
from fednh.io.files import read_tree
from fednh.methods import METHODS
from fednh.methods.fedavg import FedAvg
from fednh.methods.fit import Fit
from fednh.models import Net
from fednh.runs.layout import RunLayout
from fednh.tree import Tree, Uploads
from tests.helpers.compare import identical
from tests.helpers.method_seconds import TRAINED
from tests.helpers.simulator import SMALL, play, run_config


def test_the_clients_of_a_round_are_counted_as_they_finish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So that a round that takes minutes does not look like a hang; a short one says nothing."""
    _, _, told = play(tmp_path, rounds=2, partition__clients=6, participation__rate=0.5, eval__every=0)
    assert told.trained == [(1, 3), (2, 3), (3, 3)] * 2
    lines = RunLines(Console(), rounds=2, name="fedavg")
    lines.on_progress("training", 1, 3)
    lines.throttle = Throttle(seconds=0.0)
    lines.on_progress("training", 2, 3)
    assert capsys.readouterr().out == "training: 2 of 3 clients\n"


def test_another_seed_gives_another_result(tmp_path: Path) -> None:
    a, b = (play(tmp_path / str(s), seed=s)[1] for s in (0, 1))
    assert a["gm"] != b["gm"]


def test_all_methods_see_the_same_picks() -> None:
    config = load("cifar10", {})
    picks = [picked_clients(config, t) for t in range(1, 6)]
    for name in METHODS:
        other = load("cifar10", {"method.name": name, "participation.rate": 0.1})
        assert [picked_clients(other, t) for t in range(1, 6)] == picks
    assert all(len(set(p)) == 10 for p in picks)
    assert len({tuple(p) for p in picks}) == 5


@pytest.mark.parametrize(
    ("rate", "clients", "count"),
    [(0.1, 100, 10), (0.07, 100, 7), (0.101, 100, 11), (0.001, 20, 1), (1e-12, 20, 1), (1, 7, 7)],
)
def test_picks_are_the_ceiling_of_gamma_k(rate: float, clients: int, count: int) -> None:
    config = load("digits", {"participation.rate": rate, "partition.clients": clients})
    assert len(picked_clients(config, 1)) == count


def test_what_a_run_folder_holds(tmp_path: Path) -> None:
    simulation, summary, told = play(tmp_path / "r")
    lines = [json.loads(line) for line in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    assert lines == told.records
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert ["gm" in line for line in lines] == [False, True, True], "evaluated every two rounds and at the end"
    for line in lines:
        assert line.keys() >= {"round", "train_loss", "seconds", "bytes_up", "bytes_down", "clients"}
        assert len(line["clients"]) == 4
    took_part = sorted({k for line in lines for k in line["clients"]})
    assert [c["client"] for c in summary["clients"]] == took_part == simulation.executor.store.members
    assert summary["pm_l"] == pytest.approx(np.mean([c["pm_l"] for c in summary["clients"]]))
    assert summary["pm_l_std"] == pytest.approx(np.std([c["pm_l"] for c in summary["clients"]]))
    assert len(summary["per_class"]) == 10
    assert json.loads((tmp_path / "r/summary.json").read_text()) == summary
    model = read_tree(tmp_path / "r/models/global.safetensors")
    identical(model, simulation.server)
    assert len(list((tmp_path / "r/models/personal").iterdir())) == len(took_part)
    counts = json.loads((tmp_path / "r/partition.json").read_text())["counts"]
    assert sum(map(sum, counts)) == len(simulation.executor.fed.train)


def test_bytes_are_what_travels(tmp_path: Path) -> None:
    """The digits MLP: 64*128+128 + 128*64+64 body, 10*64 head, a scale: 4 bytes each, times 4 clients."""
    body, head = 64 * 128 + 128 + 128 * 64 + 64, 640
    _, _, told = play(tmp_path / "nh", rounds=1)
    assert told.records[0]["bytes_down"] == told.records[0]["bytes_up"] == 4 * 4 * (body + head + 1)
    _, _, told = play(tmp_path / "per", rounds=1, method__name="fedper")
    assert told.records[0]["bytes_down"] == told.records[0]["bytes_up"] == 4 * 4 * body
    _, _, told = play(tmp_path / "local", rounds=1, method__name="local")
    assert told.records[0]["bytes_down"] == told.records[0]["bytes_up"] == 0


def test_samples_are_counted(tmp_path: Path) -> None:
    simulation, summary, told = play(tmp_path / "r", rounds=2, train__epochs=3)
    parts = simulation.executor.fed.parts
    expected = 3 * sum(len(parts[k]) for r in told.records for k in r["clients"])
    assert summary["samples"] == expected
    assert summary["samples_per_second"] == pytest.approx(expected / summary["client_seconds"], rel=0.01)


@dataclass(frozen=True)
class Slow(FedAvg):
    """FedAvg that takes its time: `client` seconds for every update, `server` seconds after every upload read."""

    client: float = 0.0
    server: float = 0.0

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        time.sleep(self.client)
        return super().client_update(net, kept, received, data, fit)

    def aggregate(self, server: Tree, uploads: Uploads) -> Tree:
        time.sleep(self.server * uploads.count)
        return super().aggregate(server, uploads)


@pytest.mark.parametrize("bound", [0.0, 10.0], ids=["one by one", "all at once"])
def test_client_seconds_are_those_of_clients(bound: float, tmp_path: Path) -> None:
    """Four uploads a round, two rounds: what the server does with them is not in it, what clients do is."""
    more = {"method.name": "fedavg", "rounds": 2, "workers": 1, "engine": "loop", "eval.every": 0, "bound": bound}
    config = load("digits", {**SMALL, **more})
    federation = build_federation(config)
    for pause in ({"client": 0.05}, {"server": 0.05}):
        slow = federation.with_method(Slow(**pause))
        _, summary, _ = run_config(tmp_path / "-".join(pause), config, slow)
        if "client" in pause:
            assert summary["client_seconds"] >= 8 * 0.05
        else:
            assert summary["seconds"] - summary["client_seconds"] >= 8 * 0.05


HELD = {"data.merge_test": True, "data.holdout": 0.25, "method.name": "fedproto", "train.epochs": 1}


def test_the_best_round_is_over_the_clients_of_the_last(tmp_path: Path) -> None:
    """With some of the clients in a round: other rounds' clients are others, so the last round has no rival."""
    more = {**HELD, "partition.clients": 8, "participation.rate": 0.25}
    for name, each in {"once": {"rounds": 4, "eval.every": 0}, "often": {"rounds": 4, "eval.every": 1}}.items():
        _, summary, told = run_config(tmp_path / name, load("digits", {**more, **each}))
        assert summary["held_pooled_best"] == summary["held_pooled"]
        assert summary["held_pooled"] != told.records[-1]["held_pooled"], "the round's own clients are fewer"


def test_the_best_round_of_all_clients(tmp_path: Path) -> None:
    """Rounds count from when everybody has taken part on; with all clients in each, that is from the first."""
    common = {**HELD, "rounds": 5, "eval.every": 1, "eval.clients": "all", "partition.clients": 4, "train.lr": 0.3}
    for rate in (1.0, 0.75):
        _, summary, told = run_config(tmp_path / str(rate), load("digits", {**common, "participation.rate": rate}))
        whole = [
            record["held_pooled"]
            for number, record in enumerate(told.records, 1)
            if len({client for each in told.records[:number] for client in each["clients"]}) == 4
        ]
        assert len(whole) == 5 if rate == 1.0 else 2 <= len(whole) < 5
        assert summary["held_pooled_best"] == max(whole) > summary["held_pooled"] == whole[-1]


def test_the_members_of_a_run_are_those_who_reported(tmp_path: Path) -> None:
    """Who drops out has no model to measure, neither at once nor after an interruption."""
    for rounds_ in (1, 2):  # the second call goes on with the first one's run
        _, summary, _ = play(tmp_path, rounds=rounds_, participation__dropout=0.5, method__name="fedavg")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    reported = {client for line in lines for client in line["clients"]}
    assert {client for line in lines for client in line["dropped"]} - reported
    assert [row["client"] for row in summary["clients"]] == sorted(reported)


def test_a_sample_of_the_members_is_drawn_anew_in_every_round() -> None:
    config, members = load("digits", {}), list(range(100, 140))
    samples = [sampled_clients(config, 5, members, round_) for round_ in range(1, 21)]
    assert samples == [sampled_clients(config, 5, members, round_) for round_ in range(1, 21)]
    assert all(len(set(sample)) == 5 and set(sample) <= set(members) for sample in samples)
    assert len({tuple(sample) for sample in samples}) == 20
    assert sampled_clients(config, "all", members, 1) == sampled_clients(config, 40, members, 1) == members


def test_a_personal_model_is_trained_at_the_rate_of_its_round(tmp_path: Path) -> None:
    """FedBABU's fine-tuning after round 3, with a tenth of a tenth of the first rate."""
    config = load("digits", {**SMALL, "method.name": "fedbabu", "train.lr": 0.3, "train.lr_decay": 0.1})
    simulation, summary, _ = run_config(tmp_path, config)
    fed, method, net = simulation.executor.fed, simulation.setup.method, simulation.setup.side.net
    down, sgd = method.broadcast(simulation.server), replace(config.fit_settings(1), lr=0.3 * 0.01)
    for client in (row["client"] for row in summary["clients"][:2]):
        data = ClientData(fed.train, fed.parts[client], config.seed, 3, client, "personal")
        kept = simulation.executor.store.get(client)
        expected = clients.personal_model(method, net, kept, down, data, sgd)
        identical(read_tree(RunLayout(tmp_path).personal_model(client)), expected)


def test_dropout(tmp_path: Path) -> None:
    """Who drops out is picked, but neither trains nor uploads: the server is the mean of the others' models."""
    config = load("digits", {**SMALL, "participation.dropout": 0.5, "method.name": "fedavg", "rounds": 1})
    simulation, summary, told = run_config(tmp_path / "r", config)
    (record,) = told.records
    dropped, clients = set(record["dropped"]), set(record["clients"])
    assert len(dropped) + len(clients) == 4, "half of eight clients are picked"
    assert dropped
    assert clients
    assert not dropped & clients
    assert summary["dropped"] == len(dropped)
    assert simulation.executor.store.members == sorted(clients)
    assert record["bytes_down"] * len(clients) == record["bytes_up"] * 4, "all are sent the model, some send one back"
    kept = [simulation.executor.store.get(k)["head.weight"] for k in clients]
    torch.testing.assert_close(simulation.server["head.weight"], torch.stack(kept).mean(0))


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.9])
def test_so_many_drop_out(rate: float) -> None:
    """Of 20,000 picked; five standard deviations of a coin of this weight."""
    config = load("digits", {"participation.dropout": rate})
    everybody = list(range(100, 120))
    drops = [dropped_clients(config, t, everybody) for t in range(1, 1001)]
    assert abs(sum(map(len, drops)) - 20_000 * rate) <= 5 * (20_000 * rate * (1 - rate)) ** 0.5
    assert all(set(some) <= set(everybody) for some in drops)


def test_when_all_drop_the_server_stays(tmp_path: Path) -> None:
    simulation, summary, told = play(tmp_path / "r", participation__dropout=1 - 1e-12)
    identical(
        simulation.server, initial_state(simulation.setup.method, simulation.setup.side.net, simulation.config.seed)
    )
    assert told.notes[0] == "round 1: no client of 4 reported; the server stays as it was"
    assert (summary["pm_v"], summary["clients"]) == (None, [])
    assert summary["gm"] is not None


@dataclass(frozen=True)
class Broken(FedAvg):
    """FedAvg with one client that misbehaves; clients are told apart by their number of samples."""

    victim: int = -1
    how: str = "nan"

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        keep, upload = super().client_update(net, kept, received, data, fit)
        if len(data) != self.victim:
            return keep, upload
        if self.how == "raise":
            raise ZeroDivisionError("a broken sensor")
        bad = {
            "nan": {**upload, "head.weight": upload["head.weight"] * torch.nan},
            "missing": {n: v for n, v in upload.items() if n != "head.weight"},
            "extra": {**upload, "secret": torch.zeros(3)},
            "shape": {**upload, "head.weight": upload["head.weight"][:5]},
        }
        return keep, bad[self.how]


def broken(how: str, **settings: Any) -> tuple[Config, Federation, int]:
    """A federation in which one client of round 2 misbehaves, and who it is."""
    config = load("digits", {**SMALL, "method.name": "fedavg", **settings})
    federation = build_federation(config)
    sizes = [len(p) for p in federation.parts]
    victim = next(k for k in picked_clients(config, 2) if sizes.count(sizes[k]) == 1)
    return config, federation.with_method(Broken(victim=sizes[victim], how=how)), victim


def test_a_non_finite_upload_is_refused(tmp_path: Path) -> None:
    config, federation, victim = broken("nan")
    simulation, summary, told = run_config(tmp_path / "r", config, federation)
    rounds = [r["round"] for r in told.records if victim in r["refused"]]
    assert 2 in rounds
    assert summary["refused"] == len(rounds)
    assert f"round 2: the upload of client {victim} is not finite and was refused" in told.notes
    assert victim not in simulation.executor.store.members
    assert all(torch.isfinite(v).all() for v in simulation.server.values())


@dataclass(frozen=True)
class Poisoned(FedAvg):
    """FedAvg with a client, known by its number of samples, whose personal state or upload is infinite, not both."""

    victim: int = -1
    uploads: bool = False

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        model, upload = super().client_update(net, kept, received, data, fit)
        state = torch.where(data.counts.sum() == self.victim, torch.inf, 0.0)
        if self.uploads:
            return model, {**upload, "head.weight": upload["head.weight"] + state}
        return {**model, "memory": state}, upload


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize(("uploads", "what"), [(True, "upload"), (False, "personal state")])
def test_what_is_not_finite_is_refused_by_either_engine(uploads: bool, what: str, engine: str, tmp_path: Path) -> None:
    config, federation, victim = broken("nan", engine=engine)
    federation = federation.with_method(Poisoned(victim=len(federation.parts[victim]), uploads=uploads))
    simulation, summary, told = run_config(tmp_path / "r", config, federation)
    picked = [r["round"] for r in told.records if victim in picked_clients(config, r["round"])]
    assert [r["round"] for r in told.records if r["refused"] == [victim]] == picked
    assert summary["refused"] == len(picked) > 0
    assert f"round 2: the {what} of client {victim} is not finite and was refused" in told.notes
    assert victim not in simulation.executor.store.members
    assert not any(victim in r["clients"] for r in told.records)


def test_a_failing_client_stops_the_run_by_name(tmp_path: Path) -> None:
    config, federation, victim = broken("raise")
    with pytest.raises(
        RunError,
        match=f"Broken: client {victim} failed in round . ZeroDivisionError: a broken sensor".replace(". Z", ".: Z"),
    ):
        run_config(tmp_path / "r", config, federation)


def test_or_is_skipped(tmp_path: Path) -> None:
    config, federation, victim = broken("raise", on_error="skip")
    _, summary, told = run_config(tmp_path / "r", config, federation)
    assert any(victim in r["failed"] for r in told.records)
    assert summary["failed"] >= 1
    assert any("going on without it" in note for note in told.notes)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", "head.weight is missing"),
        ("extra", "secret does not belong there"),
        ("shape", r"head.weight is \(5, 64\)"),
    ],
)
def test_an_upload_that_was_not_declared_is_an_error(how: str, words: str, tmp_path: Path) -> None:
    config, federation, victim = broken(how)
    with pytest.raises(
        RunError, match=f"invariant broken by Broken: the upload of client {victim} in round .: {words}"
    ):
        run_config(tmp_path / "r", config, federation)


@dataclass(frozen=True)
class Stretching(METHODS["fednh"]):  # type: ignore[misc]
    """FedNH whose prototypes are not normalised."""

    def aggregate(self, server: Tree, uploads: Uploads) -> Tree:
        out: Tree = super().aggregate(server, uploads)
        return {**out, "head.weight": out["head.weight"] * 1.5}


def test_prototypes_off_the_sphere_are_an_error(tmp_path: Path) -> None:
    config = load("digits", SMALL)
    federation = build_federation(config).with_method(Stretching())
    with pytest.raises(RunError, match=r"invariant broken by Stretching in round 1: prototype . has length 1\.5"):
        run_config(tmp_path / "r", config, federation)


def test_picking_a_client_twice_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "picked_clients", lambda config, round_, clients, least: [1, 2, 2])
    with pytest.raises(RunError, match="picked twice"):
        play(tmp_path / "r")


def test_divergence_stops_with_advice(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"4 of 4 uploads were not finite.*lower train\.lr \(now 1e\+20\)"):
        play(tmp_path / "r", train__lr=1e20, train__clip=0)


def test_dittos_global_model_is_fedavgs_to_the_bit(tmp_path: Path) -> None:
    ditto, fedavg = (play(tmp_path / m, method__name=m)[0] for m in ("ditto", "fedavg"))
    identical(ditto.server, fedavg.server)


@pytest.mark.parametrize("method", ["fedper", "fedrep"])
def test_local_epochs_hold_for_every_method(method: str, tmp_path: Path) -> None:
    head = 10 if method == "fedrep" else 0
    _, summary, told = play(tmp_path / "r", method__name=method, rounds=1, train__epochs=2)
    size = sum(len(build_federation(load("digits", SMALL)).parts[k]) for k in told.records[0]["clients"])
    assert summary["samples"] == (2 + head) * size


def test_a_client_without_samples_breaks_an_invariant() -> None:
    with pytest.raises(RunError, match="class weights of client 3 sum to nan, not 1"):
        checks.check_share(torch.zeros(4) / 0, 3)


@pytest.mark.parametrize(("whom", "count"), [("active", 4), ("all", None), (2, 2), (100, None)])
def test_whose_models_are_evaluated(
    whom: str | int, count: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    original = SimulationReplies.personal_metrics

    def spy(self: SimulationReplies) -> Any:
        seen.append(len(self.task.evaluate))
        return original(self)

    monkeypatch.setattr(SimulationReplies, "personal_metrics", spy)
    simulation, _, _ = play(tmp_path / "r", eval__clients=whom)
    so_far = {k for r in simulation.progress.records[:2] for k in r["clients"]}
    assert seen == [count or len(so_far), len(simulation.executor.store.members)]


def test_in_order_keeps_order_and_bounds_what_is_under_way() -> None:
    from concurrent.futures import ThreadPoolExecutor

    started: list[int] = []

    def work(i: int) -> int:
        started.append(i)
        return i * i

    with ThreadPoolExecutor(3) as pool:
        results: Iterator[int] = in_order(pool, work, range(20), ahead=4)
        assert next(results) == 0
        assert len(started) <= 4
        assert list(results) == [i * i for i in range(1, 20)]


@pytest.mark.parametrize(
    "aggregator",
    [
        "median",
        "weighted_mean",
        *(pytest.param(a, marks=pytest.mark.soak) for a in ("mean", "trimmed_mean", "norm_clip")),
    ],
)
@pytest.mark.parametrize("method", TRAINED)
def test_every_method_runs_with_every_aggregator(
    method: str, aggregator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the clients of the last round uploaded, averaged by NumPy, is the server's model."""
    seen: list[tuple[Tree, list[Tree], list[int]]] = []
    train, results = RoundLoop._train, SimulationReplies.results

    def training(self: RoundLoop, *args: Any) -> Any:
        seen.append((self.server, [], []))
        return train(self, *args)

    def remembering(self: SimulationReplies) -> Iterator[ClientResult]:
        for result in results(self):
            seen[-1][1].append({name: value.clone() for name, value in (result.upload or {}).items()})
            seen[-1][2].append(result.client)
            yield result

    monkeypatch.setattr(RoundLoop, "_train", training)
    monkeypatch.setattr(SimulationReplies, "results", remembering)
    simulation, summary, _ = play(tmp_path / "r", method__name=method, aggregator=aggregator, rounds=2)
    assert summary["refused"] == 0
    before, uploads, clients = seen[-1]
    assert len(uploads) == 4
    parts = build_federation(simulation.config).parts
    weights = [len(parts[client]) if aggregator == "weighted_mean" else 1 for client in clients]
    special = (*simulation.setup.method.upload.by_class, *simulation.setup.method.upload.marks)
    names = [name for name in uploads[0] if name in before and name not in special]
    assert bool(names) != (method in ("local", "fedproto", "fedtgp")), "these upload no weights"
    if method == "feddyn" or (method == "fedas" and aggregator == "weighted_mean"):
        return  # their servers add a correction, or take the weights that uploads bring: their own tests compare that
    for name, value in averaged(aggregator, before, uploads, names, weights).items():
        np.testing.assert_allclose(simulation.server[name].numpy(), value, rtol=1e-4, atol=1e-5, err_msg=name)
        assert not torch.equal(simulation.server[name], before[name]), name
    if method == "local":
        identical(simulation.server, before)


def test_a_weighted_mean_counts_samples_that_nothing_was_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pFedFDA trains the body alone, and a linear model has none: its clients' means count by their samples still."""
    seen: list[tuple[Tree, int]] = []
    results = SimulationReplies.results

    def remembering(self: SimulationReplies) -> Iterator[ClientResult]:
        for result in results(self):
            assert result.samples == 0
            seen.append((result.upload or {}, result.client))
            yield result

    monkeypatch.setattr(SimulationReplies, "results", remembering)
    settings = {"method__name": "pfedfda", "model__name": "linear", "aggregator": "weighted_mean"}
    simulation, _, _ = play(tmp_path / "r", rounds=1, **settings)
    parts = build_federation(simulation.config).parts
    weights = [len(parts[client]) for _, client in seen]
    assert len(set(weights)) > 1
    by_hand = np.average([upload["means"].numpy() for upload, _ in seen], axis=0, weights=weights)
    np.testing.assert_allclose(simulation.server["means"].numpy(), by_hand, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", sorted(METHODS.keys() - set(TRAINED)))
@pytest.mark.parametrize("aggregator", ["median", "trimmed_mean", "norm_clip", "weighted_mean"])
def test_sums_are_added_up_by_no_other_rule_than_the_mean(method: str, aggregator: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"aggregator = '{aggregator}' is not supported by method {method}, whose .*"):
        play(tmp_path / "r", method__name=method, aggregator=aggregator)
    assert not (tmp_path / "r" / "metrics.jsonl").exists()


def averaged(
    aggregator: str, before: Tree, uploads: list[Tree], names: list[str], weights: list[int]
) -> dict[str, np.ndarray]:
    """Four uploads: the trimmed mean is that of the middle two; norm_clip cuts moves to the second shortest."""
    rows = {name: np.stack([tree[name].double().numpy() for tree in uploads]) for name in names}
    if aggregator == "norm_clip":
        moves = {name: rows[name] - before[name].double().numpy() for name in names}
        norms = [float(np.sqrt(sum((move[k] ** 2).sum() for move in moves.values()))) for k in range(4)]
        shrink = [min(1.0, sorted(norms)[1] / norm) for norm in norms] if names else []
        clipped = {name: sum(s * move[k] for k, s in enumerate(shrink)) / 4 for name, move in moves.items()}
        return {name: before[name].double().numpy() + clipped[name] for name in names}
    if aggregator in ("mean", "weighted_mean"):
        return {name: np.average(row, axis=0, weights=weights) for name, row in rows.items()}
    return {name: np.sort(row, 0)[1:3].mean(0) for name, row in rows.items()}  # of four, the median is the same


def test_a_deployment_does_not_weigh_sites_by_what_they_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation, _, _ = play(tmp_path / "r", rounds=1, aggregator="weighted_mean")
    loop = (simulation.config, simulation.folder, simulation.executor, Progress())
    _check_end(*loop)
    monkeypatch.setattr(simulation.executor, "policy", replace(simulation.executor.policy, trusts_counts=False))
    with pytest.raises(UserError, match=r"which they report themselves .* use 'mean' in a deployment"):
        _check_end(*loop)


def test_what_exists_is_spared_garbage_collections_only_while_a_run_lasts() -> None:
    with machine.gc_frozen():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0
