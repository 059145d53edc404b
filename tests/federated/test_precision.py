"""bfloat16: tried in a child process first; inside the body only; the same bits for any number of workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open

from fednh import machine
from fednh.api import run
from fednh.data.sources.images import decode_all
from fednh.errors import UserError
from fednh.experiments.sweep import share
from fednh.machine import check_bf16, check_machine
from fednh.models import build_net
from fednh.seeding import torch_rng
from tests.helpers.process import fednh

ILLEGAL = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


@pytest.mark.parametrize(
    ("trial", "told"),
    [
        (ILLEGAL, "was killed by SIGILL"),
        ("raise RuntimeError('no such kernel')", r"failed \(RuntimeError: no such kernel\)"),
        ("import sys; sys.exit(3)", "gave no reason"),
        ("import time; time.sleep(60)", "did not end within 0.5 seconds"),
    ],
    ids=["dies", "fails", "is silent", "hangs"],
)
def test_a_trial_that_goes_wrong_is_one_sentence_with_advice(trial: str, told: str) -> None:
    began = time.monotonic()
    with pytest.raises(UserError, match=told) as caught:
        check_bf16("cpu", trial, seconds=0.5 if "sleep" in trial else 30)
    assert "float32" in str(caught.value)
    assert time.monotonic() - began < 30


def test_the_trial_is_told_the_device_and_made_once(tmp_path: Path) -> None:
    trial = f"import sys; open({str(tmp_path / 'seen')!r}, 'a').write(sys.argv[1] + ' ')"
    check_bf16("cuda:1", trial)
    check_bf16("cuda:1", trial)
    assert (tmp_path / "seen").read_text() == "cuda:1 "


def test_float32_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    check_machine(("cpu",), "float32")


def test_a_machine_without_it_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forked command line meets a trial that dies of an illegal instruction."""
    monkeypatch.setattr(machine.check_bf16, "__defaults__", ("cpu", ILLEGAL, 30.0))
    out = tmp_path / "r"
    ended = fednh(
        ["run", "--rounds", "1", "--set", "precision=bf16", "--out", str(out)], tmp_path / "cli", inherit=True
    )
    assert ended.code == 2
    assert ended.stderr.startswith("fednh: precision = 'bf16' cannot be used on this machine")
    assert len(ended.stderr.splitlines()) == 1
    assert not out.exists()


@pytest.mark.usefixtures("bf16")
@pytest.mark.parametrize(("model", "shape"), [("mlp", (12,)), ("conv2", (3, 16, 16)), ("resnet18", (3, 8, 8))])
def test_the_body_computes_in_bfloat16_and_nothing_else_does(model: str, shape: tuple[int, ...]) -> None:
    net = build_net(model, shape, 4)
    params = {name: value.requires_grad_() for name, value in net.init(torch_rng(0, "init")).items()}
    x = torch.randn(6, *shape, generator=torch_rng(0, "x"))
    exact = net.features(params, x)
    net.precision = "bf16"
    inside: list[torch.dtype] = []
    layer = next(m for m in net._part("body").modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d)))
    layer.register_forward_hook(lambda *call: inside.append(call[2].dtype))
    coarse = net.features(params, x)
    assert inside == [torch.bfloat16]
    assert coarse.dtype == net.logits(params, x).dtype == torch.float32
    assert not torch.equal(coarse, exact)
    assert (coarse - exact).norm() < 0.05 * exact.norm(), "seven bits of fraction"
    gradients = torch.autograd.grad(net.logits(params, x).sum(), list(params.values()))
    assert {g.dtype for g in gradients} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.usefixtures("bf16")
def test_a_run_is_the_same_for_any_number_of_workers_and_says_its_precision(tmp_path: Path) -> None:
    def run(name: str, *more: str) -> Path:
        out = tmp_path / name
        args = ["run", "--rounds", "2", "--epochs", "1", "--set", "eval.every=1", "--quiet", "--out", str(out), *more]
        ended = fednh(args, tmp_path / f"{name}-cli")
        assert ended.code == 0, ended.stderr
        return out

    one = run("one", "--set", "precision=bf16", "--workers", "1")
    two = run("two", "--set", "precision=bf16", "--workers", "2")
    plain = run("plain")
    files = sorted(path.relative_to(one) for path in (one / "models").rglob("*.safetensors"))
    assert len(files) > 5
    for file in files:
        assert (one / file).read_bytes() == (two / file).read_bytes(), file
    exact, coarse = (json.loads((run / "metrics.jsonl").read_text().splitlines()[0]) for run in (plain, one))
    assert exact["train_loss"] != coarse["train_loss"]
    assert exact["train_loss"] == pytest.approx(coarse["train_loss"], rel=0.02)
    assert json.loads((one / "environment.json").read_text())["precision"] == "bf16"
    assert json.loads((plain / "environment.json").read_text())["precision"] == "float32"
    with safe_open(one / "models" / "global.safetensors", "pt") as model:
        assert json.loads(model.metadata()["fednh"])["trained_on"]["precision"] == "bf16"
        assert {model.get_tensor(name).dtype for name in model.keys()} == {torch.float32}  # noqa: SIM118


def test_the_trial_itself_is_sound_python() -> None:
    """Whatever the machine can do, the trial never fails for a reason of its own: in float32 it must work."""
    program = machine.TRIAL.replace("torch.bfloat16", "torch.bfloat16, enabled=False")
    assert program != machine.TRIAL
    done = subprocess.run([sys.executable, "-c", program, "cpu"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_run_on_a_system_that_does_not_say_which_cores_are_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS and Windows have no os.sched_getaffinity: all cores are used."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert machine.cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert machine.cores() == 6
    Image.new("L", (9, 9)).save(tmp_path / "a.png")
    assert decode_all([tmp_path / "a.png"], ["a.png"], None, "here").x.shape == (1, 9, 9, 1)
    assert share(2, None, 10, None) == (2, 3)
    done = run("digits", out=tmp_path / "run", rounds=1, clients=4)
    assert (done.path / "summary.json").exists()
