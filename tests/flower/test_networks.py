"""Sites with different networks: a site chooses within what the config lists, and receives its own network alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fednh.config import Config, dump, load
from fednh.errors import Refused
from fednh.flower import protocol
from fednh.flower.admission import Arrival, MemberRow, Membership, network_problem
from fednh.flower.client_app import with_network
from fednh.flower.protocol import Hello
from fednh.flower.site_config import Policy, read_site_config
from fednh.io.files import read_tree
from fednh.runs.model_file import read_model
from tests.helpers.federation import Wire, divided, serve, server_identity
from tests.helpers.simulator import simulate

BOTH = {
    "model.name": ["mlp", "linear"],
    "model.args": {"mlp": {"hidden": [6]}},
    "model.dim": 12,
    "partition.clients": 3,
    "participation.rate": 1.0,
    "rounds": 2,
    "train.epochs": 1,
    "eval.every": 1,
    "method.name": "fednh",
}


def config_of(**more: Any) -> Config:
    return load("digits", {**BOTH, **more})


def asked(wire: Wire, node: int) -> list[set[str]]:
    """The names of what a node was sent in each order."""
    orders = [request for request, _ in wire.seen if request.metadata.dst_node_id == node and "down" in request.content]
    return [set(protocol.tree_names(request.content, "down")) for request in orders]


def test_a_site_chooses_its_network_and_receives_that_alone(tmp_path: Path) -> None:
    """Client 0 would be dealt the mlp and takes the linear network; the run is that of a simulation dealt so."""
    config = config_of()
    wire = divided(config, tmp_path / "run")
    wire.nodes[1000]["network"] = "linear"
    serve(config, wire, tmp_path / "run", server_identity(tmp_path / "run/fed"))
    for node, name in ((1000, "linear"), (1001, "linear"), (1002, "mlp")):
        its = asked(wire, node)
        assert its
        for names in its:
            assert not any("/" in each for each in names)
            assert ("body.own.linear1.weight" in names) == (name == "mlp")
        model = tmp_path / f"run/fed/state/fednh/client-{node - 1000:06d}/personal.safetensors"
        assert read_model(model)[1].model.name == name
    simulated = config_of(**{"model.name": ["linear", "linear", "mlp"]})
    simulate(simulated, tmp_path / "loop")
    for name in ("mlp", "linear"):
        ours, theirs = (read_tree(tmp_path / which / f"models/{name}/global.safetensors") for which in ("run", "loop"))
        heads = [tree["head.weight"] for tree in (ours, theirs)]
        assert heads[0].equal(heads[1])
        assert all(value.equal(theirs[each]) for each, value in ours.items())


def policy(**more: Any) -> Policy:
    return read_site_config({"site": "a", "data": "npz:a.npz", "state": "s", **more}).policy


def test_a_site_trains_no_network_that_it_did_not_choose_or_allow() -> None:
    toml = dump(config_of())
    assert policy(**{"allow.models": "mlp, linear"}).config(toml, None).model.differs
    assert policy(**{"allow.models": "linear", "network": "linear"}).config(toml, None).model.differs
    with pytest.raises(Refused, match="'linear' is not allowed at this site"):
        policy(**{"allow.models": "mlp"}).config(toml, None)
    with pytest.raises(Refused, match=r"model\.name does not have 'cnn', which this site trains"):
        policy(network="cnn").config(toml, None)
    model, site = (
        config_of().model,
        read_site_config({"site": "a", "data": "npz:a.npz", "state": "s", "network": "mlp"}),
    )
    with pytest.raises(Refused, match="the order is for the network 'linear', and this site trains 'mlp'"):
        with_network(site, model, "linear")
    with pytest.raises(Refused, match=r"the order is for the network .cnn., and model\.name has mlp, linear"):
        with_network(site, model, "cnn")
    with pytest.raises(Refused, match="the order is for the network ''"):
        with_network(site, model, "")
    assert with_network(site, model, "mlp").policy.network == "mlp"


HELLO = Hello.model_construct(site="a", number=-1, network="mlp", task=None)


def test_the_server_takes_no_network_that_the_config_lacks() -> None:
    model = config_of().model
    assert network_problem(model, HELLO) is None
    cnn = HELLO.model_copy(update={"network": "cnn"})
    assert "has chosen the network 'cnn', which is not in model.name" in str(network_problem(model, cnn))
    assert network_problem(load("digits", {}).model, HELLO) is not None
    by_site = config_of(**{"model.name": {"b": "mlp", "c": "linear"}}).model
    none = HELLO.model_copy(update={"network": ""})
    assert "model.name has no network for it" in str(network_problem(by_site, none))
    assert network_problem(by_site, HELLO) is None


def test_a_site_that_comes_back_with_another_network_is_left_out() -> None:
    membership = Membership()
    assert membership.admit([Arrival(1, HELLO, "k")]) == []
    restored = Membership([MemberRow.parse(row) for row in membership.rows()])
    other = replace(Arrival(2, HELLO, "k"), hello=HELLO.model_copy(update={"network": "linear"}))
    assert restored.admit([other]) == [
        "site a comes with the network linear, and took part with mlp; it is left out",
    ]
    assert not restored.knows(2)
    assert restored.admit([Arrival(3, HELLO, "k")]) == []
    assert restored.knows(3)
