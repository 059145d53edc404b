"""Who is not the federation's server gives a site orders: forged, changed, redirected, sent again. Nothing is done."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fednh.config import dump
from fednh.errors import Refused, UserError
from fednh.flower import signing
from fednh.flower.deploy import certificates
from fednh.flower.layout import FederationFolder
from fednh.flower.protocol import to_arrays, to_tree
from tests.helpers.hostile import Scene, config_of, message, problem, question


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def harm(folder: Path) -> str:
    """The config that once ran any program at a site, before anything was checked or logged."""
    plain = dump(config_of())
    args = f'[model.args]\nargs = ["touch", "{folder}/harm"]\n'
    before, _, after = plain.partition("[model.args]\nhidden = [\n    8,\n]\n")
    assert after, "the config looks different now"
    return before.replace('name = "mlp"', 'name = "subprocess:Popen"') + args + after


def unsigned(scene: Scene) -> Message:
    return message(question(harm(scene.folder)), 11)


def signed_by_another(scene: Scene) -> Message:
    """A registered site has a key too, but not this one."""
    certificates.make_orders(scene.folder / "rogue", [])
    key = signing.read_orders_private(FederationFolder(scene.folder / "rogue").orders_key)
    scene.server.signer = signing.OrderSigner(key)
    return scene.signed(question(harm(scene.folder)))


def changed(scene: Scene) -> Message:
    """The server's own signature under another config."""
    good = scene.signed(question(dump(config_of())))
    good.content["config"] = question(harm(scene.folder))["config"]
    return good


def more_beside(scene: Scene) -> Message:
    good = scene.signed(question(dump(config_of())))
    good.content["order"] = ConfigRecord({"client": 0})
    return good


def of_another_node(scene: Scene) -> Message:
    """Site b passes on to a what the server sent to b."""
    return message(scene.signed(question(dump(config_of())), node=12).content, 11)


def of_another_site(scene: Scene) -> Message:
    return scene.signed(question(dump(config_of())), kind="train", round_=1, site="b")


def of_another_round(scene: Scene) -> Message:
    return message(scene.signed(question(dump(config_of())), kind="train", round_=1, site="a").content, 11, "train", 2)


def of_another_kind(scene: Scene) -> Message:
    return message(scene.signed(question(dump(config_of()))).content, 11, "query.notice")


def of_another_run(scene: Scene) -> Message:
    scene.server.run = 2
    return scene.signed(question(dump(config_of())))


def of_another_federation(scene: Scene) -> Message:
    """The same key, and a signature that names another federation than the seal says."""
    good = scene.signed(question(dump(config_of())))
    seal = good.content["seal"]
    assert isinstance(seal, ConfigRecord)
    seal["federation"] = "other"
    return good


def with_a_higher_counter(scene: Scene) -> Message:
    good = scene.signed(question(dump(config_of())))
    seal = good.content["seal"]
    assert isinstance(seal, ConfigRecord)
    seal["counter"] = int(str(seal["counter"])) + 1
    return good


def with_a_strange_seal(scene: Scene) -> Message:
    content = question(dump(config_of()))
    content["seal"] = ConfigRecord({"federation": 1, "counter": "x", "signature": [b"a"]})
    return message(content, 11)


FORGED: dict[Callable[[Scene], Message], str] = {
    unsigned: "the order is not signed",
    signed_by_another: "not signed by this federation's server",
    changed: "not signed by this federation's server",
    more_beside: "not signed by this federation's server",
    of_another_node: "not signed by this federation's server",
    of_another_site: "not signed by this federation's server",
    of_another_round: "not signed by this federation's server",
    of_another_kind: "not signed by this federation's server",
    of_another_run: "not signed by this federation's server",
    of_another_federation: "not signed by this federation's server",
    with_a_higher_counter: "not signed by this federation's server",
    with_a_strange_seal: "the signature of the order cannot be read",
}


@pytest.mark.parametrize("forge", FORGED, ids=lambda forge: forge.__name__)
def test_a_forged_order_is_refused_and_logged(
    forge: Callable[[Scene], Message], scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "flwr"):
        reply = scene.deliver(forge(scene))
    assert problem(reply).startswith("refused: ")
    assert FORGED[forge] in problem(reply)
    assert set(reply.content) == {"said"}, "nothing else leaves, and nothing is signed for a forger"
    assert any(FORGED[forge] in row.getMessage() for row in caplog.records)
    assert not (scene.folder / "harm").exists()
    assert not list((scene.folder / "state").glob("orders-*.json")), "a forged order leaves no trace in the order book"


def test_the_servers_own_order_is_obeyed(scene: Scene) -> None:
    """What the attacks above differ from in one thing each."""
    assert scene.asked(config_of()) == ""


def test_nothing_of_a_forged_order_is_read(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the TOML nor the data: the signature comes first."""

    def read(*_: object) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr("fednh.flower.client_app.Site", read)
    for toml in ("[" * 100_000, "x = ", harm(scene.folder)):
        assert "not signed" in problem(scene.deliver(message(question(toml), 11)))


def test_an_order_is_obeyed_once(scene: Scene) -> None:
    first, second = (scene.signed(question(dump(config_of()))) for _ in range(2))
    assert problem(scene.deliver(second)) == ""
    for again in (second, first):  # the same one, and one that was held back
        assert "given before, or is older" in problem(scene.deliver(again))
    assert scene.asked(config_of()) == ""


def test_a_server_that_starts_again_is_obeyed(scene: Scene) -> None:
    assert scene.asked(config_of()) == ""
    again = Scene(scene.folder)
    assert again.server.signer is not scene.server.signer
    assert again.asked(config_of()) == ""


def test_a_site_without_the_servers_key_obeys_nobody(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    (scene.folder / "sites" / "a" / "orders.pub").unlink()
    said = scene.asked(config_of())
    assert said == "UserError; the site's own log says more"
    assert "fednh federation certs DIR" in caplog.text


def test_a_damaged_order_book_is_not_an_empty_one(scene: Scene) -> None:
    assert scene.asked(config_of()) == ""
    (book,) = (scene.folder / "state").glob("orders-*.json")
    book.write_text("{")
    assert scene.asked(config_of()).startswith("UserError")


def test_a_server_without_a_key_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`fednh federation certs DIR` makes what is missing"):
        signing.read_orders_private(tmp_path / "certs" / "orders.key")


def upload() -> ArrayRecord:
    return to_arrays({"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor([1, 2])})


def another_byte(content: RecordDict) -> None:
    array = content["down"]["tree"]  # type: ignore[index]
    array.data = array.data[:-1] + b"\x01"


def another_shape(content: RecordDict) -> None:
    content["down"] = to_arrays({**to_tree(upload()), "w": torch.arange(6.0).reshape(3, 2)})


def another_type(content: RecordDict) -> None:
    tree = to_tree(upload())
    content["down"] = to_arrays({**tree, "w": tree["w"].view(torch.int32)})


def another_name(content: RecordDict) -> None:
    tree = to_tree(upload())
    content["down"] = to_arrays({"v": tree.pop("w"), **tree})


def another_outer_type(content: RecordDict) -> None:
    """Not the type of a tensor, which is in the bytes, but of the array that carries them."""
    content["down"]["tree"].dtype = "int8"  # type: ignore[index]


def another_array(content: RecordDict) -> None:
    content["down"]["tree"].stype = "numpy.ndarray"  # type: ignore[index]


def one_for_true(content: RecordDict) -> None:
    content["facts"]["flag"] = 1  # type: ignore[index]


def one_for_one_point_zero(content: RecordDict) -> None:
    content["facts"]["real"] = 1  # type: ignore[index]


def text_for_bytes(content: RecordDict) -> None:
    content["facts"]["bytes"] = "ab"  # type: ignore[index]


def another_border(content: RecordDict) -> None:
    """The same characters, cut at another place."""
    content["facts"]["words"] = ["a", "bc"]  # type: ignore[index]


def moved(content: RecordDict) -> None:
    content["other"] = content.pop("facts")


@pytest.mark.parametrize(
    "change",
    [
        another_byte,
        another_shape,
        another_type,
        another_name,
        another_outer_type,
        another_array,
        one_for_true,
        one_for_one_point_zero,
        text_for_bytes,
        another_border,
        moved,
    ],
    ids=lambda change: change.__name__,
)
def test_a_signature_covers_every_value_with_its_type(
    change: Callable[[RecordDict], None], scene: Scene, tmp_path: Path
) -> None:
    facts = ConfigRecord({"flag": True, "real": 1.0, "bytes": b"ab", "words": ["ab", "c"], "none": [], "n": -5})
    envelope = signing.Envelope("f", 1, "train", "3", 11, "a", 7)
    key = signing.read_orders_public(tmp_path / "sites" / "a" / "orders.pub")
    sealed = scene.server.signer.sign(RecordDict({"facts": facts, "down": upload()}), envelope)
    arrived = scene_travelled(sealed)
    assert signing.check_order(arrived, key, envelope) == envelope
    change(arrived)
    with pytest.raises(Refused, match="not signed by this federation's server"):
        signing.check_order(arrived, key, envelope)


def scene_travelled(content: RecordDict) -> RecordDict:
    from tests.helpers.federation import travelled

    return travelled(message(content, 11)).content
