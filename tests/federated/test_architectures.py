"""Networks that differ by client: who is averaged with whom, what a client receives, and what is refused."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednh.config import dump, load
from fednh.config.loading import validate
from fednh.errors import ConfigError, Interrupted, RunError
from fednh.federated.architectures import Architectures
from fednh.federated.server_optimizer import ServerOptimizer
from fednh.federated.setup import build_federation
from fednh.io.files import read_tree
from fednh.methods import METHODS
from fednh.methods.base import ClientData, Fit, Method, Net, Tree, Uploads, UploadSpec
from fednh.methods.fednh import FedNH
from fednh.models import build_net
from fednh.runs.layout import RunLayout
from fednh.runs.model_file import read_model
from tests.helpers.callbacks import Recorder
from tests.helpers.compare import identical, lines, same_runs
from tests.helpers.simulator import run_config, simulate

SEVERAL = {
    "model.name": ["mlp", "linear"],
    "model.args": {"mlp": {"hidden": [6]}},
    "model.dim": 12,
    "partition.clients": 4,
    "participation.rate": 1.0,
    "rounds": 2,
    "train.epochs": 1,
    "eval.every": 1,
    "workers": 1,
    "method.name": "fednh",
}


class Stopping(Recorder):
    """Stops the run after its second round."""

    def on_round(self, record: dict[str, Any]) -> bool:
        super().on_round(record)
        return bool(record["round"] == 2)


def nets() -> dict[str, Net]:
    return {
        "wide": build_net("mlp", (4,), 3, {"hidden": [6]}, dim=2),
        "narrow": build_net("mlp", (4,), 3, {"hidden": [2]}, dim=2),
    }


@pytest.fixture
def both() -> Architectures:
    return Architectures(FedNH(rho=0.5), nets())


def upload_of(view: Tree, body: float, rows: list[list[float]]) -> Tree:
    """An upload whose body is full of one number, with these prototypes."""
    made = {name: torch.full_like(value, body) for name, value in view.items() if name.startswith("body")}
    return {**made, "scale": torch.tensor(body), "prototypes": torch.tensor(rows)}


ZERO = [0.0, 0.0]


def averaged(both: Architectures, server: Tree, uploads: list[tuple[str, Tree]], rule: str = "mean") -> Uploads:
    accumulated = both.accumulator(rule, server, 0.2)
    for name, upload in uploads:
        accumulated.add(both.named(upload, name), 1)
    assert accumulated.count == len(uploads)
    return accumulated.uploads()


def test_bodies_are_averaged_by_network_and_prototypes_over_all(both: Architectures) -> None:
    """Bodies of 1 and 3 are averaged to 2 among two clients; the third has another network and keeps its 10."""
    server = both.init(0)
    wide, narrow = both.view(server, "wide"), both.view(server, "narrow")
    assert wide.keys() != narrow.keys() or wide["body.own.linear1.weight"].shape == (6, 4)
    sent = [
        ("wide", upload_of(wide, 1.0, [[0.6, 0.0], ZERO, ZERO])),
        ("narrow", upload_of(narrow, 10.0, [[0.0, 0.6], ZERO, ZERO])),
        ("wide", upload_of(wide, 3.0, [[0.6, 0.0], ZERO, ZERO])),
    ]
    after = both.aggregate(server, averaged(both, server, sent))
    for name, value in both.view(after, "wide").items():
        if name.startswith("body") or name == "scale":
            assert (value == 2.0).all(), name
    for name, value in both.view(after, "narrow").items():
        if name.startswith("body") or name == "scale":
            assert (value == 10.0).all(), name
    moved = 0.5 * server["head.weight"][0] + 0.5 * torch.tensor([0.4, 0.2])  # Eq. (4), over three clients
    torch.testing.assert_close(after["head.weight"][0], moved / moved.norm())
    identical({"head": after["head.weight"][1:]}, {"head": server["head.weight"][1:]})


def test_a_network_that_nobody_trained_stays(both: Architectures) -> None:
    """Also its moments at the server's optimiser."""
    server = both.init(0)
    wide = upload_of(both.view(server, "wide"), 1.0, [[1.0, 0.0], ZERO, ZERO])
    narrow = upload_of(both.view(server, "narrow"), 1.0, [[1.0, 0.0], ZERO, ZERO])
    config = load("digits", {"server.optimizer": "momentum"})
    optimizer = ServerOptimizer(config.server, both.method)
    first = averaged(both, server, [("wide", wide), ("narrow", narrow)])
    _, moments = optimizer.step(server, first, {})
    uploads, later = optimizer.step(server, averaged(both, server, [("wide", wide)]), moments)
    after = both.aggregate(server, uploads)
    assert any(name.startswith("narrow/") for name in later)
    for tree, before in ((after, server), (later, moments)):
        own = [name for name in before if name.startswith("narrow/")]
        assert own
        identical({name: tree[name] for name in own}, {name: before[name] for name in own})
    assert not torch.equal(after["wide/scale"], server["wide/scale"])
    assert not torch.equal(after["head.weight"], server["head.weight"])


@pytest.mark.parametrize("rule", ["mean", "weighted_mean", "median", "trimmed_mean", "norm_clip"])
def test_every_rule_looks_at_one_network_at_a_time(rule: str, both: Architectures) -> None:
    server = both.init(0)
    views = {name: both.view(server, name) for name in both.nets}
    sent = [
        ("wide", upload_of(views["wide"], 2.0, [[1.0, 0.0], ZERO, ZERO])),
        ("wide", upload_of(views["wide"], 2.0, [[1.0, 0.0], ZERO, ZERO])),
        ("wide", upload_of(views["wide"], 2.0, [[1.0, 0.0], ZERO, ZERO])),
        ("narrow", upload_of(views["narrow"], 7.0, [[1.0, 0.0], ZERO, ZERO])),
    ]
    average = averaged(both, server, sent, rule).mean()
    for name, number in (("wide", 2.0), ("narrow", 7.0)):
        torch.testing.assert_close(average[f"{name}/scale"], torch.tensor(number))
    torch.testing.assert_close(average["prototypes"][0], torch.tensor([1.0, 0.0]))


@given(st.lists(st.sampled_from(["wide", "narrow"]), min_size=1, max_size=4), st.integers(0, 5))
def test_views_and_names_are_inverse(order: list[str], seed: int) -> None:
    several = Architectures(FedNH(), {name: nets()[name] for name in ("wide", "narrow")})
    server = several.init(seed)
    for name in order:
        view = several.view(server, name)
        assert not any("/" in each for each in view)
        back = several.named(view, name)
        identical(back, {each: server[each] for each in back})
        assert several.view(back, name).keys() == view.keys()
    whole = {each for name in several.nets for each in several.named(several.view(server, name), name)}
    assert whole == server.keys()


def test_with_one_network_everything_is_the_methods_own() -> None:
    net = build_net("mlp", (4,), 3, {"hidden": [5]})
    alone = Architectures(METHODS["fedavg"](), {"mlp": net})
    server = alone.init(0)
    assert alone.view(server, "mlp") is server
    assert alone.broadcast(server) is server
    assert alone.named(server, "mlp") is server
    assert alone.global_models(server)["mlp"].keys() == server.keys()


# --- what a method may not do ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixing(FedNH):
    """A method that is wrong: what all share depends on one network's own scale."""

    def aggregate(self, server: Tree, uploads: Uploads) -> Tree:
        after = super().aggregate(server, uploads)
        return {**after, "head.weight": after["head.weight"] * after["scale"]}


def test_a_method_whose_shared_part_depends_on_a_network_is_stopped() -> None:
    mixing = Architectures(Mixing(), nets())
    server = mixing.init(0)
    sent = [
        (name, upload_of(mixing.view(server, name), body, [[1.0, 0.0], ZERO, ZERO]))
        for name, body in (("wide", 1.0), ("narrow", 2.0))
    ]
    with pytest.raises(RunError, match=r"head\.weight is shared by all clients, and wide and narrow disagree"):
        mixing.aggregate(server, averaged(mixing, server, sent))


@dataclass(frozen=True)
class Starting(FedNH):
    """A method that is wrong: clients enroll with a head that every network draws for itself."""

    by_architecture = ("body", "scale")

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        return {**super().init(net, rng), "head.weight": net.init(rng)["head.weight"]}

    def enroll(self, initial: Tree) -> Tree:
        return {"head.weight": initial["head.weight"]}


def test_a_start_that_a_client_cannot_know_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"head\.weight starts as (wide|narrow) has it and is shared"):
        Architectures(Starting(), nets()).init(0)


@dataclass(frozen=True)
class Comparing(Method):
    """A method that compares uploads of bodies."""

    cite = "none"
    by_architecture = ("body",)
    upload = UploadSpec(single=True)

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        return received, received


def test_uploads_of_different_networks_are_not_compared() -> None:
    comparing = Architectures(Comparing(), nets())
    declared = comparing.declared_uploads(comparing.init(0))
    with pytest.raises(ConfigError, match="method mine compares the uploads of all clients, and body"):
        comparing.check_uploads("mine", declared)
    alone = replace(comparing, nets={"wide": nets()["wide"]})
    alone.check_uploads("mine", alone.declared_uploads(alone.init(0)))


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_method_says_whether_it_takes_different_networks(method: str) -> None:
    """The seven that do are named; every other is refused before anything is computed."""
    settings = {**SEVERAL, "method.name": method}
    if method in ("fednh", "feduh", "fedprior", "fedproto", "local", "lgfedavg", "fedtgp"):
        assert load("digits", settings).model.names == ("mlp", "linear")
        return
    with pytest.raises(
        ConfigError, match=f"method {method} needs one network for all clients, and model.name has mlp, l"
    ):
        load("digits", settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model.name": []}, r"model.name = \[\] should be a network, a list of them"),
        ({"model.name": ["mlp", "auto"]}, "'auto' cannot be one of several networks"),
        ({"model.args": {"hidden": [4]}}, r"args has a table for each, as \[model.args.mlp\]"),
        ({"model.weights": "w.safetensors"}, "weights is of one network, and clients have mlp, linear"),
        ({"model.head": "fc"}, "head is of one network"),
        ({"model.frozen": "body"}, "frozen is of one network"),
        ({"model.name": ["mlp", "efficientnet_lite0"]}, "is not trained but computes features"),
        (
            {"model.name": "mlp", "model.args": {}, "model.weights": "w"},
            "dim changes the network, and weights takes it",
        ),
        ({"model.dim": 0}, "model.dim"),
        ({"model.name": 3}, "model.name"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load("digits", {**SEVERAL, **settings})


def test_networks_are_dealt_in_turn_or_by_site() -> None:
    model = load("digits", {"model.name": ["mlp", "mlp", "linear"], "method.name": "local"}).model
    assert [model.of_client(k) for k in range(5)] == ["mlp", "mlp", "linear", "mlp", "mlp"]
    by_site = load("digits", {"model.name": {"a": "linear", "b": "mlp"}, "method.name": "local"}).model
    assert (by_site.of_client(0, "b"), by_site.of_client(1, "a")) == ("mlp", "linear")
    with pytest.raises(ConfigError, match="no network for site c; it has a, b"):
        by_site.of_client(2, "c")
    with pytest.raises(ConfigError, match="clients of this partition have no sites; give a list"):
        by_site.of_client(0)
    assert load("digits", {"model.name": ["mlp", "mlp"]}).model.common_dim is None, "all have one network"


def test_a_config_with_networks_is_written_and_read_again() -> None:
    for name in (["mlp", "linear"], {"a": "mlp", "b": "linear"}):
        config = load("digits", {**SEVERAL, "model.name": name})
        assert validate(tomllib.loads(dump(config))) == config


# --- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fednh", "fedtgp", "lgfedavg"])
def test_a_run_tells_which_network_a_model_has(method: str, tmp_path: Path) -> None:
    config = load("digits", {**SEVERAL, "method.name": method})
    _, summary, _ = run_config(tmp_path / "run", config)
    layout = RunLayout(tmp_path / "run")
    assert [row["network"] for row in summary["clients"]] == ["mlp", "linear", "mlp", "linear"]
    for client, file in layout.clients_with_models().items():
        tree, card = read_model(file)
        assert (card.model.name, card.client) == (("mlp", "linear")[client % 2], client)
        assert tree["head.weight"].shape == (10, 12)
    rows = summary["networks"]
    assert [rows[name]["clients"] for name in ("mlp", "linear")] == [2, 2]
    for name, row in rows.items():
        mean = sum(each["pm_v"] for each in summary["clients"] if each["network"] == name) / 2
        assert row["pm_v"] == pytest.approx(mean)
    assert len(layout.shared_models()) == 2
    assert not layout.global_model.exists()
    if method == "fednh":
        assert summary["gm"] == pytest.approx(sum(row["gm"] for row in rows.values()) / 2)
        cards = {read_model(shared.global_model)[1].model.name for shared in layout.shared_models()}
        assert cards == {"mlp", "linear"}
    else:
        assert summary["gm"] is None
    sizes = [sum(v.nbytes for v in read_tree(shared.broadcast_model).values()) for shared in layout.shared_models()]
    assert summary["bytes_down"] == 2 * 2 * sum(sizes), "every client receives its own network's alone"
    assert lines(tmp_path / "run")[0]["bytes_down"] == 2 * sum(sizes)


def test_a_run_with_networks_goes_on_to_the_bit(tmp_path: Path) -> None:
    """Four rounds at once, and with an interrupt, with some clients absent and the server's momentum."""
    more = {"participation.rate": 0.5, "partition.clients": 6, "checkpoint.every": 1, "server.optimizer": "momentum"}
    config = load("digits", {**SEVERAL, **more, "method.name": "fedprior", "method.ema": 0.5, "rounds": 4})
    simulate(config, tmp_path / "once")
    with pytest.raises(Interrupted):
        simulate(config, tmp_path / "twice", Stopping())
    assert 2 <= (tmp_path / "twice/metrics.jsonl").read_text().count("\n") < 4
    simulate(config, tmp_path / "twice")
    same_runs(tmp_path / "once", tmp_path / "twice")
    assert json.loads((tmp_path / "twice/summary.json").read_text())["networks"]


def test_sites_without_a_network_are_refused() -> None:
    config = load("digits", {**SEVERAL, "model.name": {"a": "mlp", "b": "linear"}})
    with pytest.raises(ConfigError, match="give a list"):
        build_federation(config)
