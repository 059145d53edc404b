"""Models of one's own: any module split into body and head, pretrained weights, normalisation that stays local."""

from __future__ import annotations

import re
import shlex
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fednh.backends import threads
from fednh.config import load
from fednh.data.batches import ClientData, Samples
from fednh.errors import Notice, UserError
from fednh.federated import client
from fednh.federated.client import NORM
from fednh.federated.setup import build_federation
from fednh.methods import METHODS
from fednh.methods.fedavg import FedAvg
from fednh.methods.fit import Fit, Sgd
from fednh.models import Net, build_net
from fednh.runs.run_folder import RunFolder
from fednh.seeding import torch_rng
from fednh.testing import one_round
from fednh.tree import Tree, Uploads, strip_prefix
from tests.helpers.callbacks import Recorder
from tests.helpers.compare import identical, same
from tests.helpers.process import fednh
from tests.helpers.simulator import run_config
from tests.helpers.tiny import CLIENTS

ME = __name__


class Plain(nn.Module):
    """A module as people write them: layers, and a forward that calls them."""

    def __init__(self, num_classes: int, softmax: bool = False, twice: bool = False):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.classifier = nn.Sequential(nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, num_classes))
        self.softmax, self.twice = softmax, twice

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y: Tensor = self.classifier(h)
        if self.twice:
            y = y + self.classifier(h + 1)
        return y.log_softmax(1) if self.softmax else y


class BatchNormed(nn.Module):
    def __init__(self, num_classes: int, track: bool = True):
        super().__init__()
        self.lin = nn.Linear(4, 6)
        self.bn = nn.BatchNorm1d(6, track_running_stats=track)
        self.fc = nn.Linear(6, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(F.relu(self.bn(self.lin(x))))
        return y


def test_a_module_is_split_at_the_layer_named() -> None:
    net = build_net(f"{ME}:Plain", (4,), 3, head="classifier.3")
    assert (net.head, net.dim) == ("classifier.3", 6)
    params = net.init(torch.Generator().manual_seed(2))
    assert {"body.first.weight", "body.classifier.1.bias", "head.weight", "head.bias"} <= params.keys()
    module, x = Plain(3), torch.randn(5, 4)
    own = {
        f"classifier.3.{n.removeprefix('head.')}" if "head" in n else n.removeprefix("body."): v
        for n, v in params.items()
    }
    module.load_state_dict(own)
    torch.testing.assert_close(net.logits(params, x), module(x))


def test_the_head_is_found_and_said() -> None:
    with pytest.warns(Notice, match=r"its layer 'classifier\.3' is taken as the head"):
        assert build_net(f"{ME}:Plain", (4,), 6).head == "classifier.3"  # the last of two with six outputs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_net(f"{ME}:Plain", (4,), 6, head="classifier.3")


@pytest.mark.parametrize(
    ("args", "settings", "words"),
    [
        ({"softmax": True}, {"head": "classifier.3"}, "not the last thing that it does"),
        ({"twice": True}, {"head": "classifier.3"}, "not the last thing"),
        ({}, {"head": "first"}, "not the last thing"),
        ({}, {"head": "fc"}, "not a layer of model .*; its linear layers are: first, classifier.1, classifier.3"),
        ({}, {"head": "classifier"}, "is a Sequential"),
        ({"num_classes": 7}, {}, "no linear layer inside it has 3 outputs"),
        ({"num_classes": 7}, {"head": "classifier.3"}, "a head of 7 classes, but the data has 3"),
    ],
)
def test_what_cannot_be_split(args: dict[str, Any], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_net(f"{ME}:Plain", (4,), 3, args, **settings)


def test_a_head_setting_is_for_ones_own_models() -> None:
    with pytest.raises(UserError, match="mlp has a head"):
        build_net("mlp", (4,), 3, head="head")


@pytest.mark.parametrize("name", ["fednh", "feduh", "fedetf", "creff"])
def test_methods_with_a_head_of_their_own_ignore_a_bias(name: str, tiny: Samples) -> None:
    """Their global model predicts the same whatever bias the network's head would have had."""
    net = build_net(f"{ME}:Plain", (4,), 4, head="classifier.3")
    method = METHODS[name]()
    model = method.global_model(method.init(net, torch.Generator().manual_seed(0)))
    assert model is not None
    assert "head.bias" not in model or not model["head.bias"].any()


# --- pretrained weights ----------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Plain]:
    module = Plain(3)
    file = tmp_path / "pretrained.safetensors"
    save_file(module.state_dict(), file)
    return file, module


def start(
    file: Path, classes: int = 3, model: str = "Plain", head: str = "classifier.3", **more: Any
) -> dict[str, Tensor]:
    net = build_net(f"{ME}:{model}", (4,), classes, head=head, weights=str(file), **more)
    return net.init(torch.Generator().manual_seed(0))


def test_weights_by_the_modules_own_names_or_by_ours(saved: tuple[Path, Plain], tmp_path: Path) -> None:
    file, module = saved
    params = start(file)
    torch.testing.assert_close(params["body.first.weight"], module.first.weight.detach())
    torch.testing.assert_close(params["head.bias"], module.classifier[3].bias.detach())
    ours = tmp_path / "ours.safetensors"
    save_file({n: v.half() for n, v in params.items()}, ours)
    same(start(ours), {n: v.half().float() for n, v in params.items()})
    save_file({**params, "scale": torch.ones(1)}, ours, {"fednh": "{}"})  # a model that a run of ours saved
    identical(start(ours), params)


def test_a_head_of_another_size_is_left_out_and_said(saved: tuple[Path, Plain]) -> None:
    file, module = saved
    with pytest.warns(Notice, match="head of another size"):
        params = start(file, classes=5)
    torch.testing.assert_close(params["body.first.weight"], module.first.weight.detach())
    fresh = build_net(f"{ME}:Plain", (4,), 5, head="classifier.3").init(torch.Generator().manual_seed(0))
    assert torch.equal(params["head.weight"], fresh["head.weight"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"first.bias": None}, "it lacks: body.first.bias"),
        ({"extra.weight": torch.ones(2)}, "holds what the model lacks: body.extra.weight"),
        ({"first.weight": torch.ones(2, 2)}, "has other shapes: body.first.weight"),
        ({"first.weight": torch.full((6, 4), torch.nan)}, "not finite"),
    ],
)
def test_weights_that_do_not_fit(saved: tuple[Path, Plain], change: dict[str, Tensor | None], words: str) -> None:
    file, module = saved
    tree = {**module.state_dict(), **change}
    save_file({n: v for n, v in tree.items() if v is not None}, file)
    with pytest.raises(UserError, match=words):
        start(file)


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    (tmp_path / "text.safetensors").write_text("not a model")
    for name in ("text.safetensors", "absent.safetensors"):
        with pytest.raises(UserError, match="cannot be read as safetensors"):
            start(tmp_path / name)


# --- batch normalisation ---------------------------------------------------------------------------------------------

SGD = Sgd(lr=0.1, momentum=0.0, weight_decay=0.0, clip=0.0, batch_size=100, epochs=3)
NORMS = {f"body.bn.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}


def local(**more: Any) -> Net:
    return build_net(f"{ME}:BatchNormed", (4,), 4, head="fc", norm="local", **more)


def test_batch_norm_is_refused_with_advice() -> None:
    with pytest.raises(UserError, match=r'use GroupNorm instead, or set model.norm = "local"'):
        build_net(f"{ME}:BatchNormed", (4,), 4, head="fc")
    with pytest.raises(UserError, match="track_running_stats=True"):
        local(args={"track": False})


def test_local_norm_equals_a_module_trained_by_torch(tiny: Samples) -> None:
    """FedAvg: the client's module in train mode, its normalisation kept over rounds, the rest averaged."""
    net, method = local(), METHODS["fedavg"]()
    assert net.stateful
    assert net.norm.keys() == NORMS
    server = method.init(net, torch.Generator().manual_seed(1))
    assert not server.keys() & NORMS, "the server never sees normalisation"
    data = [ClientData(tiny, index, client=k) for k, index in enumerate(CLIENTS)]
    kept = [method.enroll(server) for _ in data]
    modules = [BatchNormed(4) for _ in data]

    def receive(module: BatchNormed, tree: dict[str, Tensor]) -> None:
        own = {f"fc.{n.removeprefix('head.')}" if "head" in n else n.removeprefix("body."): v for n, v in tree.items()}
        module.load_state_dict(own, strict=False)

    for _ in range(2):
        for module, d in zip(modules, data, strict=True):
            receive(module, server)
            module.train()
            optimiser = torch.optim.SGD(module.parameters(), SGD.lr)
            for _ in range(SGD.epochs):
                optimiser.zero_grad()
                F.cross_entropy(module(tiny.x[d.index]), d.y).backward()
                optimiser.step()
        updates = [client.update(method, net, k, server, d, SGD) for k, d in zip(kept, data, strict=True)]
        assert all(not u.upload.keys() & NORMS for u in updates), "nor does an upload"
        kept = [u.keep for u in updates]
        server = method.aggregate(server, Uploads.of([u.upload for u in updates]))
        for k, module in enumerate(modules):
            state = {f"body.bn.{n}": v for n, v in module.bn.state_dict().items()}
            same(strip_prefix(kept[k], NORM), state, rtol=1e-4, atol=1e-5)
            model = client.personal_model(method, net, kept[k], server, data[k], SGD)
            module.eval()
            torch.testing.assert_close(method.logits(net, model, tiny.x), module(tiny.x), rtol=1e-4, atol=1e-5)


def test_average_norm_is_fedavg_of_whole_state_dicts(tiny: Samples) -> None:
    """The clients' modules in train mode, all that their state_dicts hold averaged; counters are no part of it."""
    net, method = build_net(f"{ME}:BatchNormed", (4,), 4, head="fc", norm="average"), METHODS["fedavg"]()
    server = method.init(net, torch.Generator().manual_seed(1))
    assert server.keys() > net.statistics == {"body.bn.running_mean", "body.bn.running_var"}
    data, modules = (
        [ClientData(tiny, index, client=k) for k, index in enumerate(CLIENTS)],
        [BatchNormed(4) for _ in CLIENTS],
    )
    for _ in range(2):
        for module, d in zip(modules, data, strict=True):
            own = {f"fc.{n[5:]}" if n.startswith("head.") else n.removeprefix("body."): v for n, v in server.items()}
            module.load_state_dict(own, strict=False)
            optimiser = torch.optim.SGD(module.train().parameters(), SGD.lr)
            for _ in range(SGD.epochs):
                optimiser.zero_grad()
                F.cross_entropy(module(tiny.x[d.index]), d.y).backward()
                optimiser.step()
        before = {name: value.clone() for name, value in server.items()}
        updates = [client.update(method, net, {}, server, d, SGD) for d in data]
        identical(server, before)  # what was received is not written to
        server = method.aggregate(server, Uploads.of([u.upload for u in updates]))
        states = [module.state_dict() for module in modules]
        for name in server:
            theirs = f"fc.{name[5:]}" if name.startswith("head.") else name.removeprefix("body.")
            mean = sum(state[theirs] for state in states) / len(states)
            torch.testing.assert_close(server[name], mean, rtol=1e-4, atol=1e-5)
    module = modules[0].eval()
    torch.testing.assert_close(method.logits(net, updates[0].keep, tiny.x), module(tiny.x), rtol=1e-4, atol=1e-5)
    looks = [
        client.update(method, net, {}, before, ClientData(tiny, CLIENTS[0]), SGD, look).keep for look in (False, True)
    ]
    identical(*looks)
    assert build_net(shape=(4,), num_classes=4, **net.card).statistics == net.statistics


@pytest.mark.parametrize("method", ["fedprox", "scaffold", "ditto", "fedbn", "fednh", "fedrod", "fedala"])
def test_average_norm_with_other_methods(method: str, tiny: Samples) -> None:
    """Statistics are where the method keeps its body, they move, and nothing but batches moves them."""
    net, rule = build_net(f"{ME}:BatchNormed", (4,), 4, head="fc", norm="average"), METHODS[method]()
    played = one_round(rule, net, [ClientData(tiny, index, client=k) for k, index in enumerate(CLIENTS)], SGD)
    assert all(rule.logits(net, played.personal(k), tiny.x).isfinite().all() for k in range(len(played.clients)))
    alone = one_round(rule, net, played.clients, replace(SGD, lr=1e-12, weight_decay=0.0))
    x = tiny.x[played.clients[0].index] @ alone.before["body.lin.weight"].T + alone.before["body.lin.bias"]
    expected = 0.9**3 + (1 - 0.9**3) * x.var(0)  # after three batches
    name = "norm.body.bn.running_var" if method == "fedbn" else "body.bn.running_var"
    torch.testing.assert_close({**(alone.results[0].upload or {}), **alone.results[0].keep}[name], expected)


@pytest.mark.parametrize(
    ("method", "settings"),
    [("fedavg", {}), ("scaffold", {"eta_g": 3.0}), ("feddyn", {}), ("fedas", {}), ("mrmtl", {}), ("gpfl", {})],
)
def test_statistics_are_averaged_whatever_the_method_does_with_weights(
    method: str, settings: dict[str, Any], tiny: Samples
) -> None:
    """Of clients that move far: FedDyn's h and SCAFFOLD's eta_g would take a variance below zero."""
    net, rule = build_net(f"{ME}:BatchNormed", (4,), 4, head="fc", norm="average"), METHODS[method](**settings)
    clients = [ClientData(tiny, index, client=k) for k, index in enumerate(CLIENTS)]
    played = one_round(rule, net, clients, replace(SGD, lr=0.05, epochs=9))
    for name in ("body.bn.running_mean", "body.bn.running_var"):
        sent = torch.stack([(result.upload or {})[name] for result in played.results])
        weight = torch.stack([(result.upload or {}).get("fisher", torch.ones(())) for result in played.results])
        torch.testing.assert_close(played.after[name], (weight[:, None] * sent).sum(0) / weight.sum())
    kept = {name for result in played.results for name in result.keep}
    assert not any(name.startswith("g.") and "running" in name for name in kept)


def test_group_norm_takes_the_place_of_batch_norm() -> None:
    net = build_net(f"{ME}:BatchNormed", (4,), 4, head="fc", norm="group:3")
    params, x = net.init(torch.Generator().manual_seed(1)), torch.randn(5, 4)
    hidden = F.group_norm(F.linear(x, params["body.lin.weight"], params["body.lin.bias"]), 3)
    expected = F.linear(F.relu(hidden), params["head.weight"], params["head.bias"])
    torch.testing.assert_close(net.logits(params, x), expected)
    assert not any(n.endswith(("running_mean", "running_var")) for n in params)
    again = build_net(shape=(4,), num_classes=4, **net.card)
    torch.testing.assert_close(again.logits(params, x), expected)
    with pytest.raises(UserError, match=r"bn has 6 channels, which 4 groups do not divide; set model\.groups"):
        build_net(f"{ME}:BatchNormed", (4,), 4, head="fc", norm="group:4")


def test_looking_at_gradients_leaves_statistics_alone(tiny: Samples) -> None:
    net, method = local(), METHODS["fedavg"]()
    server = method.init(net, torch.Generator().manual_seed(1))
    keeps = []
    for look in (False, True):
        data = ClientData(tiny, CLIENTS[0])
        keeps.append(client.update(method, net, {}, server, data, SGD, gradient_norm=look).keep)
    identical(*keeps)


@dataclass(frozen=True)
class Looking(FedAvg):
    """FedAvg whose loss makes other passes beside the one that trains; they add nothing to it."""

    cite = "none"

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        def loss(params: Tree, x: Tensor, y: Tensor) -> Tensor:
            teacher = net.logits(received, x)
            with torch.no_grad():
                prototypes = net.features(params, x)
            own = F.cross_entropy(net.logits(params, x), y, reduction="none")
            return own + 0 * (teacher.sum() + prototypes.sum() + net.features(received, x).sum())

        model = fit(received, loss, only=("body", "head"))
        return model, model


def test_only_the_pass_that_trains_changes_statistics(tiny: Samples) -> None:
    """Teachers, earlier models and prototypes pass through the network too, in the middle of a step."""
    net = local()
    server = FedAvg().init(net, torch.Generator().manual_seed(1))
    data = ClientData(tiny, CLIENTS[0])
    plain, looking = (client.update(method, net, {}, server, data, SGD).keep for method in (FedAvg(), Looking()))
    assert int(looking[f"{NORM}.body.bn.num_batches_tracked"]) == SGD.epochs, "one batch an epoch"
    same(plain, looking, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_statistics_change_once_a_step(method: str, tiny: Samples) -> None:
    """For every method, by the number of samples that it trained on; heads alone are trained without them."""
    net, how = local(), METHODS[method]()
    server = how.init(net, torch.Generator().manual_seed(1))
    data = ClientData(tiny, CLIENTS[0])
    update = client.update(how, net, how.enroll(server), how.broadcast(server), data, SGD)
    steps, counted = update.samples / len(data), int(update.keep[f"{NORM}.body.bn.num_batches_tracked"])
    assert 0 < counted <= steps or how.training_free
    assert counted == steps or method in {"fedrep", "fedrod", "fedpac", "fedloge", "fedetf"}


def test_a_teacher_uses_running_statistics(tiny: Samples) -> None:
    net = local()
    received = FedAvg().init(net, torch.Generator().manual_seed(1))
    seen = []

    class Teaching(Looking):
        def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
            def loss(params: Tree, x: Tensor, y: Tensor) -> Tensor:
                seen.append((net.logits(received, x), x))
                return F.cross_entropy(net.logits(params, x), y, reduction="none")

            model = fit(received, loss, only=("body", "head"), epochs=1)
            return model, model

    client.update(Teaching(), net, {}, received, ClientData(tiny, CLIENTS[0]), SGD)
    [(teacher, x)] = seen
    torch.testing.assert_close(teacher, net.logits({**received, **net.norm}, x))


def test_a_batch_of_one_sample(tiny: Samples) -> None:
    net, method = local(), METHODS["fedavg"]()
    server = method.init(net, torch.Generator().manual_seed(1))
    one = Sgd(lr=0.1, batch_size=1, epochs=1)
    keep = client.update(method, net, {}, server, ClientData(tiny, np.arange(3)), one).keep
    assert torch.equal(keep[f"{NORM}.body.bn.running_mean"], net.norm["body.bn.running_mean"])
    assert not torch.equal(keep[f"{NORM}.body.bn.weight"], net.norm["body.bn.weight"])


def run(path: Path, method: str, workers: int, rounds: int = 3) -> dict[str, Any]:
    small = {"partition.clients": 4, "participation.rate": 0.5, "train.epochs": 1, "rounds": rounds, "workers": workers}
    small |= {"model.name": f"{ME}:Digits", "model.args": {}, "model.norm": "local", "checkpoint.every": 1}
    config = load("digits", {"method.name": method, "eval.every": 0, **small})
    federation = build_federation(config)
    with RunFolder(path) as folder:
        if not folder.started:
            folder.begin(config, federation.dataset.classes, federation.class_counts())
        return threads.make_run(config, federation, folder, Recorder()).run()


class Digits(nn.Module):
    def __init__(self, num_classes: int):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, num_classes, bias=False)


@pytest.mark.parametrize("method", ["fedavg", "fednh", "ditto", "fedbabu", "creff", "scaffold"])
def test_local_norm_with_other_methods(method: str, tiny: Samples) -> None:
    net, how = local(), METHODS[method]()
    server = how.init(net, torch.Generator().manual_seed(1))
    data, first = ClientData(tiny, CLIENTS[0]), how.broadcast(server)
    keep, upload = {}, {}
    for _ in range(2):
        update = client.update(how, net, keep or how.enroll(server), first, data, SGD)
        keep, upload = update.keep, update.upload
    assert not any("bn" in name for name in upload)
    assert {name for name in keep if name.startswith(NORM)} == {f"{NORM}.{name}" for name in NORMS}
    model = client.personal_model(how, net, keep, first, data, SGD)
    assert model.keys() >= NORMS
    assert torch.isfinite(how.logits(net, model, tiny.x)).all()


def test_local_norm_does_not_depend_on_workers_nor_on_an_interruption(tmp_path: Path) -> None:
    figures = ("gm", "pm_v", "pm_l", "clients")
    one, three = (run(tmp_path / f"w{w}", "fedavg", w) for w in (1, 3))
    assert [one[f] for f in figures] == [three[f] for f in figures]
    for gone in ("summary.json", "checkpoints/round-000003.json"):
        (tmp_path / "w3" / gone).unlink()
    resumed = run(tmp_path / "w3", "fedavg", 2)
    assert [one[f] for f in figures] == [resumed[f] for f in figures]
    for name in ("global", f"personal/client-{one['clients'][0]['client']:06d}"):
        a, b = (load_file(tmp_path / w / "models" / f"{name}.safetensors") for w in ("w1", "w3"))
        identical(a, b)
        assert {n for n in a if ".2." in n} == {f"body.2.{n.rpartition('.')[2]}" for n in NORMS}, "the file is complete"


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page on models of one's own, as it stands."""
    page = (Path(__file__).parents[2] / "docs" / "own-models.md").read_text()
    blocks = page.split("```")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mynets", raising=False)
    (tmp_path / "mynets.py").write_text(next(b for b in blocks if b.startswith("python")).partition("\n")[2])
    lines = [line for b in blocks if b.startswith("sh") for line in b.splitlines() if line.startswith("fednh ")]
    lines = [line for line in lines if "timm:" not in line]  # test_timm.py runs it
    lines = [line for line in lines if not re.search("cifar10|heart", line)]  # their data are not everywhere
    assert len(lines) >= 3
    for line in lines:
        ended = fednh(
            [*shlex.split(line, comments=True)[1:], "--rounds", "1", "--epochs", "1", "--quiet"], tmp_path / "log"
        )
        assert ended.code == 0, f"{line}: {ended.stderr}"


class Frozen(nn.Module):
    """A first layer that the module itself has frozen, as one does with pretrained layers."""

    def __init__(self, num_classes: int, freeze: bool = True):
        super().__init__()
        first = nn.Linear(64, 8).requires_grad_(not freeze)
        self.body = nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(8, 6), nn.ReLU())
        self.head = nn.Linear(6, num_classes, bias=False)


FROZEN = ("body.1.bias", "body.1.weight")


@pytest.mark.parametrize(
    ("method", "engine"),
    [(name, "loop") for name in METHODS]
    + [pytest.param(name, "vmap", marks=() if name in ("fedavg", "ditto") else pytest.mark.soak) for name in METHODS],
)
def test_what_a_module_has_frozen_never_moves(method: str, engine: str, tmp_path: Path) -> None:
    """To the bit, at the server and at every client, wherever a method keeps it; everything else moves."""
    light = {"creff": {"match_steps": 2, "retrain_epochs": 2}, "fedetf": {"turns": 1, "turn_epochs": 1}}
    settings = {f"method.{key}": value for key, value in light.get(method, {}).items()}
    settings |= {"method.name": method, "model.name": f"{ME}:Frozen", "model.args": {}, "engine": engine, "rounds": 2}
    settings |= {"partition.clients": 3, "participation.rate": 1.0, "train.epochs": 1, "eval.every": 0}
    config = load("digits", {**settings, "train.weight_decay": 0.1, "eval.final": 1, "eval.samples": 50})
    made, _, _ = run_config(tmp_path / "run", config, build_federation(config))
    first = made.setup.side.net.init(torch_rng(config.seed, "init"))
    server, kept = made.server, [made.executor.store.get(client) for client in range(3)]
    seen = 0
    for tree in (server, *kept):
        for name, value in tree.items():
            if name.endswith(FROZEN) and not name.startswith(("c.", "c_i.", "h.", "g.")):  # corrections
                assert torch.equal(value, first[name[name.index("body.") :]]), name
                seen += 1
    assert seen or method in {"fedproto"}
    assert not any(torch.equal(tree[name], first[name]) for tree in kept for name in ("body.3.weight",) if name in tree)


def test_a_frozen_layer_makes_a_difference_and_a_frozen_model_is_refused(tmp_path: Path) -> None:
    models = []
    for freeze in (True, False):
        more = {"model.args": {"freeze": freeze}, "partition.clients": 3, "participation.rate": 1.0, "eval.every": 0}
        config = load("digits", {"model.name": f"{ME}:Frozen", "rounds": 1, "train.epochs": 1, **more})
        made, _, _ = run_config(tmp_path / str(freeze), config, build_federation(config))
        models.append(made.server)
    assert not torch.equal(*(model["body.3.weight"] for model in models))
    with pytest.raises(UserError, match="has frozen all of its parameters, so nothing can be trained"):
        build_net(f"{ME}:AllFrozen", (4,), 3)


class AllFrozen(nn.Module):
    def __init__(self, num_classes: int):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, num_classes)
        self.requires_grad_(False)
