"""federation.secure, message by message: the plain federation's model, of which the server saw no single upload."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message, RecordDict

from fednh.config import Config, load
from fednh.errors import ConfigError, RunError
from fednh.federated.checks import check_secure
from fednh.flower import server_app, signing
from fednh.flower.deploy import scaffold
from fednh.flower.protocol import to_arrays, to_tree
from fednh.flower.site_config import read_site_config
from fednh.flower.transport import Request
from fednh.io.files import read_tree
from fednh.methods import METHODS
from tests.helpers.callbacks import Recorder
from tests.helpers.config import small
from tests.helpers.federation import divided, federate, serve, server_identity
from tests.helpers.hostile import Scene, config_of

EVERYBODY = {"partition.clients": 3, "participation.rate": 1.0, "eval.every": 1, "rounds": 2}
SECURE = {**EVERYBODY, "federation.secure": True}


def works(method: str) -> bool:
    """Whether a method can be summed up in secret."""
    try:
        check_secure(
            config := load("digits", {"method.name": method, "federation.secure": True}), config.build_method()
        )
    except ConfigError:
        return False
    return True


def lines(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def equal_to_plain(method: str, tmp_path: Path, **more: object) -> None:
    """The global models of a plain and of a secure federation, within grid and float32, whose steps add up."""
    federate(small(method, **{**EVERYBODY, **more}), tmp_path / "plain")
    wire, _ = federate(small(method, **{**SECURE, **more}), tmp_path / "secure")
    for request, reply in wire.seen:
        assert reply is not None
        assert "upload" not in reply.content
        if "masked" in reply.content:
            assert request.metadata.message_type == "train"
            assert set(reply.content["facts"]) == {"client", "round"}
    one, other = (read_tree(tmp_path / name / "models/global.safetensors") for name in ("plain", "secure"))
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for plain, secure in zip(lines(tmp_path / "plain"), lines(tmp_path / "secure"), strict=True):
        assert plain["clients"] == secure["clients"]
        assert plain["train_loss"] == pytest.approx(secure["train_loss"], abs=1e-4)


@pytest.mark.parametrize("method", ["fednh", "scaffold"])
def test_the_model_is_the_plain_federations(method: str, tmp_path: Path) -> None:
    equal_to_plain(method, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("method", [name for name in METHODS if works(name)])
def test_the_model_is_the_plain_federations_with_every_method(method: str, tmp_path: Path) -> None:
    equal_to_plain(method, tmp_path)


def test_a_round_goes_on_without_a_site_and_is_given_up_without_two(tmp_path: Path) -> None:
    """Site 2 is silent in round 2 from its masked upload on, sites 1 and 2 in round 3."""
    config = small("fedavg", **{**SECURE, "rounds": 4, "federation.min_clients": 2})
    wire = divided(config, tmp_path)

    def silent(node: int, request: Message, reply: Message) -> Message | None:
        round_ = request.metadata.group_id
        gone = {"2": [1002], "3": [1001, 1002]}.get(round_, []) if request.metadata.message_type == "train" else []
        return None if node in gone else reply

    wire.tamper = silent
    told = Recorder()
    with pytest.raises(RunError, match=r"1 of 4 rounds changed nothing \(round 3\)"):
        serve(config, wire, tmp_path, identity=server_identity(tmp_path / "fed"), recorder=told)
    rows = lines(tmp_path)
    assert [row["clients"] for row in rows] == [[0, 1, 2], [0, 1], [], [0, 1, 2]]
    assert rows[1]["dropped"] == [2]
    assert "lost" in rows[2]
    assert any("the secure sum is given up: 1 of 3 sites have sent a masked upload, and 2" in x for x in told.notes)
    kinds = [request.metadata.message_type for request, _ in wire.seen if request.metadata.group_id == "3"]
    assert "train.survivors" not in kinds
    assert "train.reveal" not in kinds


@pytest.mark.parametrize("lies", [False, True])
def test_a_server_that_gives_one_site_another_model_gets_no_sum_with_it(
    lies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of weights of its choice it would know what the other sites send, and so that one's upload."""
    sign = signing.Identity.sign

    def changed(self: Any, request: Request, content: RecordDict) -> Any:
        if request.client == 0 and request.kind == "train":
            down = {name: value * 2 for name, value in to_tree(content["down"]).items()}  # type: ignore[arg-type]
            content = RecordDict({**content, "down": to_arrays(down)})
        return sign(self, request, content)

    monkeypatch.setattr(signing.Identity, "sign", changed)
    if lies:
        monkeypatch.setattr(server_app.Stages, "verify", lambda *_: True)
    config = small("fedavg", **{**SECURE, "rounds": 1})
    wire, told = divided(config, tmp_path), Recorder()
    with suppress(RunError):
        serve(config, wire, tmp_path, identity=server_identity(tmp_path / "fed"), recorder=told)
    (row,) = lines(tmp_path)
    assert row["clients"] == ([] if lies else [1, 2])
    kinds = [request.metadata.message_type for request, _ in wire.seen]
    assert ("train.reveal" in kinds) is not lies
    if lies:
        said = [
            json.loads(line)["why"]
            for line in (tmp_path / "fed/state/audit").glob("*.jsonl")
            for line in line.open()
            if '"refused"' in line
        ]
        assert said
        assert all("has not signed that it was asked the same as this one" in why for why in said)


def test_a_site_that_trains_in_secure_sums_only_refuses_others(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **{"allow.secure": True})
    assert "trains in secure sums only (allow.secure)" in scene.asked(config_of())
    assert scene.asked(config_of(**{"federation.secure": True})) == ""


def test_an_order_for_a_plain_upload_in_a_secure_federation_is_refused(tmp_path: Path) -> None:
    from fednh.flower.protocol import Order
    from tests.helpers.hostile import problem

    scene = Scene(tmp_path)
    config = config_of(**{"federation.secure": True})
    assert "do not agree whether this is a secure sum" in problem(scene.ordered(config, Order(client=0, round=1)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method.name": "fedcof"}, "federation.secure is not supported by method fedcof, whose server computes from"),
        (
            {"method.name": "fedpac"},
            "federation.secure is not supported by method fedpac, whose server makes something",
        ),
        *[({"aggregator": rule}, f"aggregator = '{rule}'") for rule in ("median", "trimmed_mean", "norm_clip")],
        ({"aggregator": "weighted_mean"}, "aggregator = 'weighted_mean' compares or weighs single uploads"),
        ({"bound": 10.0}, "bound = 10 measures single uploads"),
        ({"diagnostics.gradient_norm": True}, "a number of every single site"),
        ({"federation.min_clients": 1}, "the sum of one upload hides nothing"),
    ],
)
def test_what_looks_at_single_uploads_is_refused_before_a_folder_is_written(
    settings: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        scaffold.write(tmp_path / "fed", 3, [], {"federation.secure": True, **settings})
    assert not (tmp_path / "fed").exists()


def test_a_new_federation_says_so_at_every_site(tmp_path: Path) -> None:
    sites = scaffold.write(tmp_path / "fed", 5, [], {"federation.secure": True})
    import tomllib

    for site in sites:
        text = tomllib.loads(site.node_config.read_text())
        assert text["allow"]["secure"] is True
        assert text["allow"]["sites"] == 3, "more than half"
    config: Config = scaffold.read(tmp_path / "fed")[0]
    assert config.federation.secure
    assert config.federation.min_clients == 3
    assert read_site_config({"site": "a", "state": "s", "partition-id": 0, "num-partitions": 1}).peers.name == "peers"


def test_the_page_says_which_methods_work() -> None:
    page = (Path(__file__).parents[2] / "docs/privacy.md").read_text(encoding="utf-8")
    table = page.partition("<!-- methods in secure sums -->")[2].partition("\n\n#")[0]
    rows = {row.split("|")[1].strip(): row for row in table.splitlines() if row.startswith("| ") and "`" in row}
    told = {name: "yes" in row.split("|")[2] for names, row in rows.items() for name in re.findall(r"`(\w+)`", names)}
    assert told == {name: works(name) for name in METHODS}
