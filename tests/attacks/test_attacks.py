"""Attacks on small runs of digits, and the command."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fednh.attacks import images, membership
from fednh.attacks.labels import Labels, infer, rounded
from fednh.attacks.membership import MemberScores
from fednh.attacks.simulate import Simulator
from fednh.attacks.suite import Settings, attack
from fednh.attacks.target import Target, before, open_run, targets_of
from fednh.config import load
from fednh.errors import UserError
from fednh.federated.setup import build_federation
from fednh.methods import METHODS
from tests.helpers.process import fednh as cli

SMALL = {"data.name": "digits", "partition.name": "iid", "partition.min_samples": 1, "workers": 1, "rounds": 2}


def targets(method: str = "fednh", number: int = 1, clients: int = 180, **more: object) -> list[Target]:
    config = load(None, {**SMALL, "partition.clients": clients, "method.name": method, **more})
    fed = build_federation(config)
    return targets_of(config, fed, before(config, fed, None, 1), None, number)  # type: ignore[arg-type]


def test_scores():
    scores = MemberScores(np.array([3.0, 1.0]), np.array([0.0, 2.0]))
    assert scores.auc == 0.75
    assert scores.true_positives(0.5) == 1.0  # both are above the lower of the others
    assert scores.true_positives(0.01) is None  # two others say nothing about one in a hundred


def test_counts_are_rounded_to_the_number_of_samples():
    counts = rounded(np.array([2.6, -0.4, 1.3, 0.5]), 4, np.zeros(4, np.int64))
    assert counts.sum() == 4
    assert counts.tolist()[:2] == [3, 0] or counts.tolist()[:2] == [2, 0]
    assert rounded(np.array([9.0, 0.0]), 3, np.array([1, 1])).tolist() == [2, 1]


@pytest.mark.parametrize("method", ["fedavg", "fednh"])
def test_all_images_of_a_small_site_come_back(method):
    (target,) = targets(method, **{"train.epochs": 1})
    found = images.reconstruct(target, Labels(target.counts, True), np.arange(1400, 1700), 0, 512)
    assert not isinstance(found, str)
    assert float((found.psnr > 40).double().mean()) >= 0.75
    assert float(found.psnr.mean()) > float(found.guess_psnr.mean()) + 20


def test_noise_on_the_update_leaves_the_public_guess():
    (target,) = targets("fedavg", **{"train.epochs": 1})
    noisy = {name: value + 0.05 * torch.randn_like(value) for name, value in target.upload.items()}
    hidden = Target(target.config, target.fed, target.before, target.client, target.part, noisy, target.received)
    found = images.reconstruct(hidden, Labels(target.counts, True), np.arange(1400, 1700), 0, 256)
    assert not isinstance(found, str)
    assert not found.from_update.any()
    assert bool((found.psnr <= found.guess_psnr + 1e-4).all())


def test_members_are_told_from_others():
    (target,) = targets("fedavg", clients=70, **{"train.epochs": 1})
    samples = membership.split(target, 0, 150)
    simulator = Simulator(target, 0)
    labels = infer(target, simulator, samples.known, 64)
    assert labels.recovered(target.counts) > 0.7
    assert membership.whitened(target, simulator, samples, labels).auc > 0.8


def test_rows_of_lacking_classes_are_read_exactly():
    (target,) = targets(
        "fednh", clients=60, **{"partition.name": "dirichlet", "partition.beta": 0.1, "partition.min_classes": 1}
    )
    labels = infer(target, Simulator(target, 0), membership.split(target, 0, 100).known, 48)
    assert labels.read
    assert labels.classes_right(target.counts) == 1.0


def test_counted_rows_tell_the_counts():
    (target,) = targets("fednh", **{"method.aggregation": "count"})
    labels = infer(target, Simulator(target, 0), membership.split(target, 0, 50).known, 48)
    assert labels.counts.tolist() == target.counts.tolist()


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.soak
def test_every_method_can_be_attacked(method):
    found = targets(method, clients=70, **{"train.epochs": 1})
    outcome = attack(found, Settings(("classes", "membership"), public=60))
    measures = outcome.measures()
    assert ("gradient AUC" in measures and "labels right" in measures) or "upload nothing" in " ".join(outcome.notes)
    json.dumps(outcome.record(), allow_nan=False)


def test_local_uploads_nothing_and_fedproto_has_no_update():
    (silent,) = attack(targets("local"), Settings(public=50)).clients
    assert "upload nothing" in silent.notes[0]
    (proto,) = attack(targets("fedproto"), Settings(("images",), public=50)).clients
    assert proto.images is None
    assert "linear layer" in " ".join(proto.notes)


def test_a_name_of_no_attack_is_refused():
    with pytest.raises(UserError, match="there is no attack 'guess'"):
        attack(targets("local"), Settings(("guess",)))


@pytest.mark.soak
def test_the_command_twice_gives_the_same_bits(tmp_path):
    run = tmp_path / "run"
    settings = ["--method", "fednh", "--partition", "iid", "--clients", "180", "--rounds", "2", "--epochs", "1"]
    more = ["--set", "partition.min_samples=1", "--set", "participation.rate=0.02", "--out", str(run)]
    assert cli(["run", "digits", *settings, *more], tmp_path / "a").code == 0
    wanted = ["attack", str(run), "--number", "1", "--round", "2", "--public", "60", "--attacks", "classes,images"]
    one = cli([*wanted, "--format", "json", "--out", str(tmp_path / "seen")], tmp_path / "b")
    other = cli([*wanted, "--format", "json"], tmp_path / "c")
    assert one.code == 0, one.stderr
    assert one.stdout == other.stdout
    assert json.loads(one.stdout)["round"] == 2
    names = {path.name for path in (tmp_path / "seen").iterdir()}
    assert {"attack.json", "attack.csv", "attack.html", "images-000000.png"} <= names
    with pytest.raises(UserError, match="--round takes 1 to 3"):
        open_run(run, None, 1, 9)


def test_a_repeated_round_is_the_one_of_the_checkpoint(tmp_path):
    """Round 2 of a run without checkpoints is reached again, with the same bits."""
    settings = {**SMALL, "partition.clients": 180, "participation.rate": 0.02, "train.epochs": 1, "rounds": 3}
    config = load(None, settings)
    fed = build_federation(config)
    again = before(config, fed, tmp_path, 2)
    assert set(again.server) == set(again.initial)
    assert not all(torch.equal(again.server[name], again.initial[name]) for name in again.server)
    more = before(config, fed, tmp_path, 2)
    assert all(torch.equal(again.server[name], more.server[name]) for name in again.server)


def test_made_up_uploads_are_clipped_as_the_runs_are_and_have_its_noise_only_where_asked():
    private = {"privacy.level": "sample", "privacy.noise": 1.0, "privacy.clip": 1e-4}
    (target,) = targets("fedavg", **{"train.epochs": 1, **private})
    simulator = Simulator(target, 0)
    once, again = (simulator.uploads([target.part]) for _ in range(2))
    torch.testing.assert_close(once, again, atol=1e-9, rtol=1e-4)
    steps, speed = 10, target.config.train.lr / (1 - target.config.train.momentum)
    assert 1e-6 < float(once.norm()) < 1.5 * steps * speed * 1e-4
    assert float(simulator.uploads([target.part], private=True).norm()) > 5 * float(once.norm())
