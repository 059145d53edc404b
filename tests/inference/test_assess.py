"""`fednh evaluate`: figures that can be computed by hand, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fednh
from fednh.callbacks.screen import slow_evaluation
from fednh.data.sources.builtin import digits
from fednh.inference.metrics import assess, reliability
from fednh.inference.model import Model, Scores
from tests.helpers.process import fednh as command

DATA = digits()


class _Fixed(Model):
    """A model that says what it is told to."""

    def scores(self, samples: object, tell: object = None) -> Scores:
        return Scores(SAID, SAID, None)


# Three classes in use of ten; true classes 0 0 1 1; predicted 0 1 1 1.
SAID = np.zeros((4, 10), np.float32)
SAID[0, :2] = 0.9, 0.1
SAID[1, :2] = 0.4, 0.6
SAID[2, :2] = 0.2, 0.8
SAID[3, :2] = 0.0, 1.0


def test_by_hand(finished: dict[str, Path]) -> None:
    model = fednh.load_model(finished["fedavg"])
    fixed = _Fixed(model.params, model.card, model.net, model.method)
    found = assess(fixed, DATA.x_test[:4], np.array([0, 0, 1, 1]))
    assert found.accuracy == 0.75
    assert found.balanced_accuracy == pytest.approx((0.5 + 1) / 2)
    zero, one, two = found.classes[:3]
    assert (zero.precision, zero.recall, zero.f1, zero.support) == (1.0, 0.5, pytest.approx(2 / 3), 2)
    assert (one.precision, one.recall, one.support) == (pytest.approx(2 / 3), 1.0, 2)
    assert (two.precision, two.recall, two.support) == (0.0, 0.0, 0)
    assert found.macro_f1 == pytest.approx((2 / 3 + 0.8) / 2)
    assert found.confusion[0][:3] == [1, 1, 0]
    assert found.ece == pytest.approx((0.1 + 0.6 + 0.2 + 0) / 4)
    assert found.log_loss == pytest.approx(-np.log([0.9, 0.4, 0.8, 1.0]).mean(), rel=1e-5)
    json.dumps(found.record(), allow_nan=False)


def test_reliability_bins() -> None:
    bins = reliability(np.array([0.5, 0.500001, 1.0, 0.0], np.float32), np.array([True, False, True, False]), bins=2)
    assert [(b.low, b.high, b.samples) for b in bins] == [(0.0, 0.5, 2), (0.5, 1.0, 2)]
    assert [b.accuracy for b in bins] == [0.5, 0.5]


def test_the_command(finished: dict[str, Path], tmp_path: Path) -> None:
    run, out = finished["fednh"], tmp_path / "out"
    ended = command(["evaluate", str(run), "--data", "digits", "-o", str(out)], tmp_path / "io")
    assert ended.code == 0, ended.stderr
    gm = fednh.load_run(run).summary["gm"]
    assert f"balanced {gm:.1f}%" in ended.stdout, "GM weighs all classes alike"
    record = json.loads((out / "evaluation.json").read_text())
    assert 100 * record["balanced_accuracy"] == pytest.approx(gm)
    assert np.array(record["confusion"]).sum() == record["samples"] == len(DATA.y_test)
    assert (out / "evaluation.svg").read_text().startswith("<?xml")
    assert (out / "evaluation.png").stat().st_size > 5000
    ended = command(["evaluate", str(run), "--data", "digits", "--split", "all", "--format", "json"], tmp_path / "io")
    assert json.loads(ended.stdout)["samples"] == 1797


def test_classes_are_matched_by_name(finished: dict[str, Path], tmp_path: Path) -> None:
    """The same samples with their classes numbered in another order give the same figures; others are refused."""
    order = np.array([3, 1, 0, 2])
    here = np.isin(DATA.y_test, order)
    number = np.zeros(10, np.int64)
    number[order] = np.arange(4)
    arrays = {"x_train": DATA.x_train[:20], "y_train": np.arange(20) % 4}
    arrays |= {"x_test": DATA.x_test[here], "y_test": number[DATA.y_test[here]]}
    np.savez(tmp_path / "some.npz", **arrays, classes=np.array([str(c) for c in order]))
    model = fednh.load_model(finished["fednh"])
    wanted = assess(model, DATA.x_test[here], DATA.y_test[here])
    args = ["evaluate", str(finished["fednh"]), "--data", f"npz:{tmp_path}/some.npz", "--format", "json"]
    found = json.loads(command(args, tmp_path / "io").stdout)
    assert found["confusion"] == wanted.confusion
    np.savez(tmp_path / "some.npz", **arrays, classes=np.array(["3", "1", "pear", "plum"]))
    ended = command(args, tmp_path / "io")
    assert ended.code == 2
    assert "2 classes that the model does not know: pear, plum" in ended.stderr


def test_no_test_samples(finished: dict[str, Path], tmp_path: Path) -> None:
    """The sentence does not lead to samples that the model was trained on."""
    np.savez(tmp_path / "site.npz", x_train=DATA.x_test, y_train=DATA.y_test, classes=np.array(list("0123456789")))
    args = ["evaluate", str(finished["fednh"]), "--data", f"npz:{tmp_path}/site.npz"]
    ended = command(args, tmp_path / "io")
    assert ended.code == 2
    assert "has no test samples; give data that the model was not trained on" in ended.stderr
    assert "split = train" not in ended.stderr
    ended = command([*args, "--split", "all"], tmp_path / "io")
    assert (ended.code, ended.stderr) == (0, "")


def test_a_long_evaluation_says_how_far_it_is(finished: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    model, heard = fednh.load_model(finished["fedavg"]), list[tuple[int, int]]()
    assess(model, DATA.x_test, DATA.y_test, lambda done, total: heard.append((done, total)))
    assert heard[-1] == (len(DATA.y_test), len(DATA.y_test))
    assert [done for done, _ in heard] == sorted({done for done, _ in heard})
    slow_evaluation(seconds=0.0)(30, 120)
    slow_evaluation(seconds=60.0)(60, 120)
    assert capsys.readouterr().err == "evaluating: 25% of 120 samples\n"
