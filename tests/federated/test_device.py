"""`--device`: a round and an evaluation of every method on a device that refuses what a real one refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fednh import api, machine, tree
from fednh.backends import threads
from fednh.config import build_method, load
from fednh.config.schema import ServerConfig
from fednh.data.batches import ClientData, samples_of
from fednh.data.dataset import Dataset
from fednh.errors import ConfigError
from fednh.federated import checks, client, evaluate
from fednh.federated.architectures import Architectures
from fednh.federated.server_optimizer import ServerOptimizer
from fednh.io.files import read_tree, write_tree
from fednh.methods import METHODS
from fednh.methods.fit import Sgd
from fednh.models import Net, build_net
from fednh.privacy import sample_gradients
from fednh.privacy.noise import SeededNoise
from fednh.privacy.private_data import Mechanisms
from fednh.seeding import torch_rng
from fednh.tree import Tree, Uploads, canonical
from tests.helpers.compare import identical
from tests.helpers.method_seconds import TIMED_METHODS
from tests.helpers.pretend import DEVICE, Mixed, OnDevice, Pretend
from tests.helpers.tiny import CLIENTS, tiny_dataset
from tests.privacy.test_private_round import REFUSED

SETTINGS: dict[str, dict[str, Any]] = {"creff": {"match_steps": 3, "retrain_epochs": 3}}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda there: there + torch.ones(3),
        lambda there: there.numpy(),
        lambda there: torch.zeros(()).add_(there.sum()),
        lambda there: torch.rand(3, device=DEVICE, generator=torch.Generator()),
        lambda there: torch.ones(3)[there.long()],
        lambda there: torch.stack([there, torch.ones(3)]),
    ],
    ids=["mixed", "numpy", "written into", "generator", "index into", "stacked"],
)
def test_the_device_refuses_what_a_real_one_does(wrong: Callable[[torch.Tensor], object]) -> None:
    with Pretend():
        there = torch.zeros(3, device=DEVICE)
        with pytest.raises(Mixed):
            wrong(there)


def test_the_device_allows_what_a_real_one_does() -> None:
    with Pretend():
        there = torch.arange(3.0).to(DEVICE)
        assert there[torch.tensor([2, 0])].cpu().tolist() == [2, 0]
        assert (there * torch.tensor(2.0)).cpu().tolist() == [0, 2, 4]
        assert (there.device, type(there)) == (DEVICE, OnDevice)


def one_round(name: str, net: Net, device: str, folder: Path) -> tuple[Tree, list[Tree], list[list[float]]]:
    """A round of both tiny clients: the server's next state, their personal models, and what is right per class."""
    method = build_method({"name": name, **SETTINGS.get(name, {})})
    data = tiny_dataset()
    train, test = samples_of(data, "train", device=device), samples_of(data, "test", device=device)
    sgd = Sgd(lr=0.1, epochs=2, batch_size=4)
    server = {n: v.to(device) for n, v in canonical(method.init(net, torch_rng(0, "init"))).items()}
    checks.declared_upload(method, net, server)
    down, kept = method.broadcast(server), method.enroll(server)
    everyone = [ClientData(train, part, 0, 1, k) for k, part in enumerate(CLIENTS)]
    updates = [client.update(method, net, kept, down, d, sgd, gradient_norm=True) for d in everyone]
    server = method.aggregate(server, Uploads.of(u.upload for u in updates))
    assert method.problem(server) is None
    write_tree(folder / "server.safetensors", server)
    server = {n: v.to(device) for n, v in read_tree(folder / "server.safetensors").items()}
    down = method.broadcast(server)
    models = [client.personal_model(method, net, u.keep, down, d, sgd) for u, d in zip(updates, everyone, strict=True)]
    if (shared := method.global_model(server)) is not None:
        models.append(shared)
    total, correct = evaluate.total_per_class(test), []
    for model in models:
        logits = evaluate.logits_of(lambda x, m=model: method.logits(net, m, x), test)  # type: ignore[misc]
        hits = evaluate.count_correct(logits.argmax(1), test)
        evaluate.personal(0, hits, total, everyone[0].counts)
        correct.append(hits.tolist())
    return server, models, [*correct, *([u.loss_sum, u.gradient_norm or 0.0] for u in updates)]


@pytest.mark.parametrize("name", TIMED_METHODS)
def test_a_round_on_the_device_gives_the_numbers_of_the_cpu(name: str, net: Net, tmp_path: Path) -> None:
    expected = one_round(name, net, "cpu", tmp_path)
    with Pretend() as pretend:
        server, models, figures = one_round(name, net, str(DEVICE), tmp_path)
        assert pretend.operations > 100
        for found, tree in zip([server, *models], [expected[0], *expected[1]], strict=True):
            assert {type(value) for value in found.values()} == {OnDevice}, "everything stays on the device"
            identical({n: v.cpu() for n, v in found.items()}, tree)
    assert figures == expected[2]


def waits(name: str, net: Net, epochs: int) -> Counter[str]:
    """For what the CPU waits while a client trains, by operation."""
    method = build_method({"name": name, **SETTINGS.get(name, {})})
    with Pretend() as pretend:
        train = samples_of(tiny_dataset(), "train", device=str(DEVICE))
        server = {n: v.to(DEVICE) for n, v in canonical(method.init(net, torch_rng(0, "init"))).items()}
        kept, down = method.enroll(server), method.broadcast(server)
        data = ClientData(train, CLIENTS[0], 0, 1, 0)
        pretend.waits.clear()
        client.update(method, net, kept, down, data, Sgd(lr=0.1, epochs=epochs, batch_size=4))
        return pretend.waits


@pytest.mark.parametrize("name", TIMED_METHODS)
def test_no_step_waits_for_the_device(name: str, net: Net) -> None:
    """The CPU may ask for numbers before and after training: three more epochs ask for no more of them."""
    assert waits(name, net, 4) == waits(name, net, 1)


def test_a_client_waits_three_times(net: Net) -> None:
    """For its loss, and to see whether its upload and what it keeps are finite: not once for each of their tensors."""
    assert waits("fedavg", net, 1).total() == 3


@pytest.mark.parametrize("name", TIMED_METHODS)
def test_what_needs_double_precision_says_so(
    name: str, net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device without it every method works that does not declare `doubles`, and those alone."""
    monkeypatch.setattr(tree, "double_dtype", lambda device: torch.float32 if device.type == "meta" else torch.float64)
    with Pretend(doubles=False):
        if not METHODS[name].doubles:
            one_round(name, net, str(DEVICE), tmp_path)
            return
        with pytest.raises(Mixed, match="double precision"):
            one_round(name, net, str(DEVICE), tmp_path)
    with pytest.raises(ConfigError, match=f"device = 'mps' lacks double precision, which {name} needs"):
        load("digits", {"method.name": name, "device": "mps"})


def private_round(name: str, net: Net, device: str) -> list[Tree]:
    """A client's round under privacy.level = "sample", on seeded noise."""
    method = METHODS[name](**({"aggregation": "sum"} if name in ("fednh", "fedprior") else {}))
    train = samples_of(tiny_dataset(), "train", device=device)
    server = {n: v.to(device) for n, v in canonical(method.init(net, torch_rng(0, "init"))).items()}
    kept, down = method.enroll(server), method.broadcast(server)
    data, sgd = ClientData(train, CLIENTS[0], 0, 1, 0), Sgd(lr=0.1, epochs=2, batch_size=2, momentum=0.5)
    noisy = Mechanisms(clip=0.7, rate=0.5, gradients=1.3, sums=2.0, counts=3.0)
    result = client.private_update(method, net, kept, down, data, sgd, noisy, SeededNoise(0, 1, 0))
    return [result.upload, result.keep]


# FedROD's hyper-network has copies for each sample whose form the pretended device loses.
PRIVATE = [name for name in METHODS if name not in REFUSED and name != "fedrod"]


@pytest.mark.parametrize("name", PRIVATE)
def test_a_private_round_on_the_device_gives_the_numbers_of_the_cpu(name: str, net: Net) -> None:
    expected = private_round(name, net, "cpu")
    with Pretend():
        same(private_round(name, net, str(DEVICE)), expected)


@pytest.mark.parametrize("name", ["fednh", "fedavg"])
def test_a_private_round_needs_no_double_precision(name: str, net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (tree, sample_gradients):
        monkeypatch.setattr(
            place, "double_dtype", lambda device: {"meta": torch.float32}.get(device.type, torch.float64)
        )
    with Pretend(doubles=False):
        private_round(name, net, str(DEVICE))


def server_steps(optimizer: str, net: Net, device: str) -> list[Tree]:
    """Two rounds of a server's optimiser, with the moments of the first: weights, prototypes and moments."""
    method = build_method({"name": "fednh"})
    server = {n: v.to(device) for n, v in canonical(method.init(net, torch_rng(0, "init"))).items()}
    step, moments = ServerOptimizer(ServerConfig(optimizer=optimizer), method), dict[str, torch.Tensor]()
    for factor in (1.5, 0.5):
        upload = {name: value * factor for name, value in server.items()}
        moved, moments = step.step(server, Uploads.of([upload, upload]), moments)
        server = {**server, **moved.mean()}
    return [server, moments]


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "yogi"])
def test_the_servers_optimiser_works_on_the_device(optimizer: str, net: Net) -> None:
    expected = server_steps(optimizer, net, "cpu")
    with Pretend():
        same(server_steps(optimizer, net, str(DEVICE)), expected)


@pytest.mark.parametrize("rule", ["mean", "weighted_mean", "median", "trimmed_mean", "norm_clip"])
def test_networks_of_two_kinds_meet_on_the_device(rule: str) -> None:
    def both(device: str) -> list[Tree]:
        nets = {"mlp": build_net("mlp", (4,), 4, {"hidden": [5]}, dim=3), "linear": build_net("linear", (4,), 4, dim=3)}
        method = build_method({"name": "fednh"})
        several, train = Architectures(method, nets), samples_of(tiny_dataset(), "train", device=device)
        server = several.init(0, device)
        down, taken = several.broadcast(server), several.accumulator(rule, server, 0.2)
        for k, name in enumerate(nets):
            work, kept = ClientData(train, CLIENTS[k], 0, 1, k), several.enroll(server, name)
            received = several.view(down, name)
            sent = client.update(method, nets[name], kept, received, work, Sgd(lr=0.1, epochs=2, batch_size=4)).upload
            taken.add(several.named(sent, name), len(CLIENTS[k]))
        return [several.aggregate(server, taken.uploads())]

    expected = both("cpu")
    with Pretend():
        same(both(str(DEVICE)), expected)


@pytest.mark.parametrize("norm", ["average", "local"])
@pytest.mark.parametrize("name", ["fednh", "fedavg", "ditto", "fedrep"])
def test_normalisation_stays_on_the_device(name: str, norm: str, tmp_path: Path) -> None:
    def normed() -> Net:
        return build_net("tests.helpers.contract:BatchNormed", (64,), 4, norm=norm)

    def update(device: str) -> list[Tree]:
        net, method, data = normed(), build_method({"name": name}), wide_dataset()
        server = {n: v.to(device) for n, v in canonical(method.init(net, torch_rng(0, "init"))).items()}
        work = ClientData(samples_of(data, "train", device=device), CLIENTS[0], 0, 1, 0)
        kept, down, sgd = method.enroll(server), method.broadcast(server), Sgd(lr=0.1, epochs=2, batch_size=3)
        done = client.update(method, net, kept, down, work, sgd)
        return [done.keep, done.upload, client.personal_model(method, net, done.keep, down, work, sgd)]

    expected = update("cpu")
    with Pretend():
        same(update(str(DEVICE)), expected)


def wide_dataset() -> Dataset:
    """The tiny data set with each feature sixteen times."""
    tiny = tiny_dataset()
    return replace(tiny, x_train=np.tile(tiny.x_train, 16), x_test=np.tile(tiny.x_test, 16))


def same(found: list[Tree], expected: list[Tree]) -> None:
    """Everything is on the device, with these numbers."""
    for mine, wanted in zip(found, expected, strict=True):
        assert {type(value) for value in mine.values()} <= {OnDevice}
        identical({n: v.cpu() for n, v in mine.items()}, wanted)


def test_clients_are_divided_between_devices_by_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each task runs where its turn is, whoever is free, on samples, states and broadcasts that are there."""
    seen: list[tuple[str, str]] = []
    moved = threads.to_device

    def watched(value: object, device: str) -> object:
        seen.append((type(value).__name__, device))
        return moved(value, "cpu")

    monkeypatch.setattr(threads, "to_device", watched)
    monkeypatch.setattr(machine, "check_device", lambda device: None)
    small: dict[str, Any] = {"rounds": 2, "partition": {"clients": 6}, "participation": 0.5, "epochs": 1}
    small |= {"engine": "loop", "eval": {"final": 1, "every": 0, "clients": 1}}
    one = api.run("digits", out=tmp_path / "one", **small)
    assert seen == []
    two = api.run("digits", out=tmp_path / "two", device="cpu,cuda:0", **small)
    assert one.summary["gm"] == two.summary["gm"]
    assert seen[0] == ("SimulatedData", "cuda:0")
    assert [where for kind, where in seen if kind == "TrainTask"] == ["cpu", "cuda:0"] * 2
    states = [where for kind, where in seen if kind == "list"]  # what clients kept, and their results come home
    evaluated = len(two.summary["clients"])
    assert states.count("cuda:0") == 2 + evaluated // 2  # the second of three clients in each round
    assert states.count("cpu") == 2 * 2 + (evaluated + 1) // 2 + (2 * 3 + evaluated)


def test_images_are_cropped_flipped_and_convolved_on_the_device() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (6, 8, 8, 3), np.uint8), np.arange(6, dtype=np.int64) % 3
    data = Dataset("images", x, y, x, y, ("a", "b", "c"), (0.5,) * 3, (0.25,) * 3, scale=255.0)
    # The kernels for a CPU are not for a device, and differ in the last bits.
    images, method = build_net("conv2", (3, 8, 8), 3, convolution="ordinary"), build_method({"name": "fedavg"})
    server = method.init(images, torch_rng(0, "init"))

    def upload(device: str) -> Tree:
        train = samples_of(data, "train", "crop_flip", device)
        sent = {n: v.to(device) for n, v in canonical(server).items()}
        work = ClientData(train, np.arange(6), 0, 1, 0)
        return client.update(method, images, {}, sent, work, Sgd(epochs=1, batch_size=4)).upload

    expected = upload("cpu")
    with Pretend():
        identical({n: v.cpu() for n, v in upload(str(DEVICE)).items()}, expected)
