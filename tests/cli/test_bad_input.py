"""Bad input, tried on purpose through the command line: one clear sentence, exit code 2, nothing left behind."""

from __future__ import annotations

import io
import os
import pickle
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fednh.cli import main
from tests.helpers.config import BAD
from tests.helpers.counts import count

X = np.arange(80, dtype=np.float32).reshape(40, 2)
Y = np.arange(40) % 4
GOOD: dict[str, Any] = {"x_train": X, "y_train": Y, "x_test": X, "y_test": Y}


def fails(args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Run `fednh ARGS`; it must end with code 2 and one sentence, which is returned."""
    monkeypatch.setattr(sys, "argv", ["fednh", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    text = capsys.readouterr().err
    assert ended.value.code == 2, text
    assert "Traceback" not in text
    lines = text.strip().splitlines()
    assert len(lines) == 1, f"not one sentence: {text}"
    assert lines[0].startswith("fednh: ")
    count("bad inputs tried")
    return lines[0]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("setting", BAD)
def test_bad_settings(
    setting: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence = fails(["run", "digits", "--set", setting, "--out", "r"], capsys, monkeypatch)
    assert setting.partition("=")[0].split(".")[0] in sentence
    assert list(here.iterdir()) == []


def npz(**changes: Any) -> Callable[[Path], list[str]]:
    """A file like GOOD with some arrays changed; None leaves one out."""

    def make(here: Path) -> list[str]:
        arrays = {k: v for k, v in {**GOOD, **changes}.items() if v is not None}
        np.savez(here / "d.npz", **arrays)
        return ["--data", "npz:d.npz", "--clients", "2"]

    return make


def raw(content: bytes, name: str = "d.npz", data: str = "npz:d.npz") -> Callable[[Path], list[str]]:
    def make(here: Path) -> list[str]:
        (here / name).write_bytes(content)
        return ["--data", data, "--data-dir", ".", "--clients", "2"]

    return make


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch owned",)


def tar_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def huge_npz() -> bytes:
    """A header that declares a petabyte, with a few bytes behind it."""
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000, 32000, 32000), }"
    header += b" " * (118 - len(header)) + b"\n"
    member = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\0" * 64
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for key in GOOD:
            archive.writestr(f"{key}.npy", member)
    return buffer.getvalue()


DATA: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "missing file": (lambda here: ["--data", "npz:no.npz"], "no.npz"),
    "unknown set": (lambda here: ["--data", "cifar11"], "did you mean 'cifar10"),
    "unknown source": (lambda here: ["--data", "ftp:x"], "ftp:x"),
    "set not here": (lambda here: ["--data", "cifar10", "--data-dir", "."], "fednh data get cifar10"),
    "data folder missing": (lambda here: ["--data", "mnist", "--data-dir", "nowhere"], "nowhere"),
    "empty file": (raw(b""), "d.npz"),
    "not a zip": (raw(b"hello" * 100), "d.npz"),
    "a folder": (lambda here: ((here / "d.npz").mkdir(), ["--data", "npz:d.npz"])[1], "d.npz"),
    "no labels": (npz(y_train=None), "y_train"),
    "no test": (npz(x_test=None), "x_test"),
    "fewer labels": (npz(y_train=Y[:-1]), "39 labels"),
    "NaN": (npz(x_train=np.where(X == 5, np.nan, X)), "NaN"),
    "infinite": (npz(x_test=np.where(X == 5, np.inf, X)), "infinite"),
    "negative label": (npz(y_train=Y - 1), "-1"),
    "fractional label": (npz(y_train=Y + 0.5), "y_train"),
    "label beyond the classes": (npz(classes=np.array(["a", "b"])), "2"),
    "one class only": (npz(y_train=Y * 0, y_test=Y * 0), "class"),
    "empty": (npz(x_train=X[:0], y_train=Y[:0]), "empty|no samples|0"),
    "other width in test": (npz(x_test=np.zeros((40, 3), np.float32)), "shape"),
    "five dimensions": (npz(x_train=np.zeros((40, 2, 2, 2, 2), np.uint8)), "shape"),
    "complex": (npz(x_train=X + 1j), "complex"),
    "objects": (npz(x_train=np.array([{}] * 40, object)), "object|pickle"),
    "huge declared size": (raw(huge_npz()), "d.npz"),
    "fewer samples than clients": (lambda here: [*npz()(here)[:2], "--clients", "50"], "cannot give 50 clients"),
    "hostile pickle": (
        raw(tar_of({"cifar-10-batches-py/data_batch_1": pickle.dumps(Evil())}), "cifar-10-python.tar.gz", "cifar10"),
        "cifar-10",
    ),
    "hostile archive": (
        raw(
            tar_of({"../../escaped": b"x", "cifar-10-batches-py/data_batch_1": b"y"}),
            "cifar-10-python.tar.gz",
            "cifar10",
        ),
        "cifar-10",
    ),
    "truncated archive": (
        raw(tar_of({"cifar-10-batches-bin/data_batch_1.bin": b"z" * 9999})[:60], "cifar-10-binary.tar.gz", "cifar10"),
        "cifar-10",
    ),
    "gz that is none": (raw(b"\0" * 99, "cifar-100-python.tar.gz", "cifar100"), "cifar-100"),
    "crop on vectors": (lambda here: [*npz()(here), "--set", "data.augment=crop_flip"], "needs images"),
    "conv2 on vectors": (lambda here: [*npz()(here), "--set", "model.name=conv2"], "needs images"),
    "unknown model": (lambda here: ["--set", "model.name=resnet81"], "did you mean 'resnet18'"),
    "model not importable": (lambda here: ["--set", "model.name=no.such:Net"], "cannot be imported"),
    "model without a head": (lambda here: ["--set", "model.name=torch.nn:Identity"], "has no .body|cannot be built"),
    "model without a module": (lambda here: ["--set", "model.name=:Net"], "cannot be imported"),
    "model that cannot be called": (lambda here: ["--set", "model.name=os:sep"], "not a class"),
    "a device without numbers": (lambda here: ["--device", "meta"], "meta"),
    "a batch of everything": (lambda here: ["--set", "train.batch_size=99999999999999999999"], "train.batch_size"),
    "true for a number": (lambda here: ["--set", "seed=true"], "seed"),
    "model argument": (lambda here: ["--set", "model.args.depth=3"], "depth"),
    "device": (lambda here: ["--device", "abacus"], "abacus"),
    "no such accelerator": (lambda here: ["--device", "cuda:77"], "cuda"),
    "unknown method": (lambda here: ["--method", "fedavgg"], "did you mean 'fedavg'"),
    "unknown partition": (lambda here: ["--partition", "dirichlt"], "partition.name"),
    "a word for a number": (lambda here: ["--rounds", "many"], "--rounds"),
    "unknown option": (lambda here: ["--round", "3"], "--round"),
    "set without a value": (lambda here: ["--set", "rounds"], "KEY=VALUE"),
    "more classes than there are": (
        lambda here: ["--partition", "classes", "--set", "partition.classes_per_client=11"],
        "only 10 classes",
    ),
    "beta too small": (lambda here: ["--beta", "1e-9", "--clients", "60"], "larger beta"),
}


@pytest.mark.parametrize("case", DATA)
def test_bad_data_and_contradictions(
    case: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, words = DATA[case]
    args = make(here)
    before = sorted(p.name for p in here.iterdir())
    sentence = fails(["run", *args, "--out", "r"], capsys, monkeypatch)
    assert any(word in sentence for word in words.split("|")), sentence
    assert sorted(p.name for p in here.iterdir()) == before, "nothing was written, nothing was run"
    assert not (here.parent / "escaped").exists()


def occupied(here: Path) -> None:
    (here / "r").mkdir()
    (here / "r" / "thesis.tex").write_text("precious")


def emptied(here: Path) -> None:
    (here / "r").mkdir()
    (here / "r/config.toml").write_text("")
    (here / "r/summary.json").write_text("{}")
    (here / "r/metrics.jsonl").write_text("")
    (here / "r/environment.json").write_text("{}")
    (here / "r/partition.json").write_text('{"classes": [], "counts": []}')


ELSEWHERE: dict[str, tuple[list[str], str, Callable[[Path], object]]] = {
    "out is a file": (["run", "--out", "f"], "is a file", lambda here: (here / "f").write_text("x")),
    "out holds something else": (["run", "--out", "r"], "is not empty and holds no run", occupied),
    "out below a file": (["run", "--out", "f/r"], "cannot be written", lambda here: (here / "f").write_text("x")),
    "a very long name": (["run", "--out", "n" * 300], "too long", lambda here: None),
    "a very long path": (["run", "--out", "/".join(["d" * 200] * 30)], "too long", lambda here: None),
    "no such preset": (["run", "cifr10"], "did you mean 'cifar10'", lambda here: None),
    "no such file": (["run", "a.toml"], "a.toml cannot be read", lambda here: None),
    "resume nothing": (["resume", "r"], "is not a run folder", lambda here: None),
    "resume a bad config": (
        ["resume", "r"],
        "not valid TOML",
        lambda here: ((here / "r").mkdir(), (here / "r/config.toml").write_text("x =")),
    ),
    "table of nothing": (["table", "r"], "is not a folder", lambda here: None),
    "table of an empty folder": (["table", "r"], "no finished run", lambda here: (here / "r").mkdir()),
    "table of an emptied run": (["table", "r"], "summary.json cannot be read", emptied),
    "report of an emptied run": (["report", "r", "-o", "x.html"], "summary.json cannot be read", emptied),
    "no prototypes": (["prototypes", "--classes", "0", "--dim", "3"], "classes", lambda here: None),
    "no dimensions": (["prototypes", "--classes", "3", "--dim", "0"], "dim", lambda here: None),
    "three points on a line": (["prototypes", "--classes", "3", "--dim", "1"], "dim", lambda here: None),
    "prototypes into a folder": (
        ["prototypes", "--classes", "3", "--dim", "3", "--out", "d"],
        "cannot be written",
        lambda here: (here / "d").mkdir(),
    ),
    "get an unknown set": (["data", "get", "imagenet"], "tinyimagenet", lambda here: None),
    "no such command": (["ruin"], "No such command", lambda here: None),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_bad_paths_and_commands(
    case: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args, words, prepare = ELSEWHERE[case]
    prepare(here)
    before = sorted(p.relative_to(here).as_posix() for p in here.rglob("*"))
    sentence = fails(args, capsys, monkeypatch)
    assert words in sentence
    assert sorted(p.relative_to(here).as_posix() for p in here.rglob("*")) == before


def test_there_are_at_least_sixty_cases() -> None:
    assert len(BAD) + len(DATA) + len(ELSEWHERE) >= 60


def test_unicode_paths_are_no_trouble(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = here / "Änderungen – 数据 \N{PARTY POPPER}"
    folder.mkdir()
    np.savez(folder / "größe.npz", **GOOD)
    out = folder / "läufe" / "eins"
    args = ["run", "--data", f"npz:{folder}/größe.npz", "--clients", "2", "--rounds", "1", "--out", str(out), "--quiet"]
    monkeypatch.setattr(sys, "argv", ["fednh", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None), capsys.readouterr().err
    assert (out / "summary.json").exists()
