"""`--device`: a round and an evaluation of every method on a device that refuses what a real one refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fednh import api, machine, tree
from fednh.backends import threads
from fednh.config import build_method, load
from fednh.data.batches import ClientData, samples_of
from fednh.data.dataset import Dataset
from fednh.errors import ConfigError
from fednh.federated import checks, client, evaluate
from fednh.io.files import read_tree, write_tree
from fednh.methods import METHODS
from fednh.methods.fit import Sgd
from fednh.models import Net, build_net
from fednh.seeding import torch_rng
from fednh.tree import Tree, Uploads, canonical
from tests.helpers.compare import identical
from tests.helpers.method_seconds import TIMED_METHODS
from tests.helpers.pretend import DEVICE, Mixed, OnDevice, Pretend
from tests.helpers.tiny import CLIENTS, tiny_dataset

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
