"""fednh.run on arrays, data frames and a Dataset: the numbers of the same data in a file, and runs that go on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import fednh
from fednh.data.sources.registry import load, taken
from fednh.errors import Notice, UserError
from fednh.runs.model_file import read_model
from fednh.runs.run_folder import RunFolder
from tests.helpers.compare import identical
from tests.helpers.process import fednh as command

QUICK: dict[str, Any] = {"method": "fedavg", "rounds": 4, "epochs": 1, "clients": 2, "partition": "iid"}
QUICK |= {"participation": 1.0, "checkpoint__every": 1}
RNG = np.random.default_rng(0)
Y = np.arange(60) % 3
X = (RNG.normal(size=(60, 4)) + 3 * np.eye(4)[Y]).astype(np.float32)
SITE = np.array(["north", "south", "east"])[np.arange(60) // 20]


def tensors(run: Path) -> dict[str, torch.Tensor]:
    return read_model(run / "models" / "global.safetensors")[0]


def frame() -> pd.DataFrame:
    """Numbers with a gap, words, categories and truth values; its index is no feature."""
    found = pd.DataFrame(X[:, :2], columns=["age", "dose"]).assign(diagnosis=np.array(["ill", "no", "well"])[Y])
    found.loc[4, "age"] = np.nan
    found["blood"] = pd.Categorical(np.array(["A", "B"])[np.arange(60) % 2])
    found["smokes"] = np.arange(60) % 5 == 0
    found.index = pd.Index(1000 + np.arange(60))
    return found


def test_arrays_give_the_run_of_an_npz_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x_train=X, y_train=Y, site_train=SITE)
    wanted = fednh.run(data=f"npz:{tmp_path / 'x.npz'}", out=tmp_path / "file", **QUICK)
    found = fednh.run(data=(X, Y, SITE), out=tmp_path / "arrays", **QUICK)
    identical(tensors(found.path), tensors(wanted.path))
    assert re.fullmatch("memory:[0-9a-f]{8}", found.config.data.name)
    written = tomllib.loads((found.path / "config.toml").read_text())
    assert (written["data"]["name"], found.model().info["trained_on"]["data"]) == (found.config.data.name,) * 2
    again = fednh.run(data=(X, Y, SITE), out=found.path, **QUICK)  # finished: recognised
    assert again.summary == found.summary


@pytest.mark.parametrize(
    "given",
    [
        (X.tolist(), Y.tolist(), SITE.tolist()),
        (torch.tensor(X, requires_grad=True), torch.tensor(Y), list(SITE)),
        (pd.DataFrame(X).to_numpy(), pd.Series(Y), pd.Series(SITE)),
        {"x_train": X, "y_train": Y[:, None], "site_train": SITE},
        (X, np.array(["c0", "c1", "c2"], object)[Y], SITE),
        fednh.Dataset("mine", X, Y, X[:0], Y[:0], ("0", "1", "2"), (0.0,) * 4, (1.0,) * 4, 1.0),
    ],
)
def test_every_form_of_arrays(given: Any) -> None:
    data = taken(given, {"test_share": 0.5})
    whole = np.concatenate([data.x_train, data.x_test])
    assert sorted(map(tuple, whole.tolist())) == sorted(map(tuple, X.tolist()))
    assert (len(data.y_train), len(data.y_test), data.num_classes) == (30, 30, 3)
    if isinstance(given, fednh.Dataset):
        assert (data.name, data.sites) == ("memory:mine", ())
    else:
        assert data.sites == ("east", "north", "south")
        assert len(taken(given, {"without": ["east"]}).y_train) == 40


def test_four_arrays_and_truth_values() -> None:
    data = taken((X, Y > 0, X[:6], Y[:6] > 0), {})
    assert (data.classes, len(data.y_test)) == (("false", "true"), 6)
    assert taken((X, Y > 0), {"classes": ["true", "false"]}).y_train[:3].tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((X,), "data is of the type tuple; give .*a Dataset"),
        (7, "data is of the type int"),
        ((X, Y[:5]), "x_train has 60 samples but y_train has 5 labels"),
        ((X, Y, SITE[:5]), "site_train has 5 entries for 60"),
        ((X, np.where(Y == 0, None, "a")), "y_train holds None; give every sample a name or a number"),
        ((X.reshape(60, 2, 2), Y), "holds images as float32"),
        (([[1], [2, 3]], [0, 1]), "x_train cannot be made one array"),
        ((torch.zeros(4, 3, 8, 8, dtype=torch.uint8), [0, 1, 0, 1]), "channels first"),
        (pd.DataFrame({"a": [1, 2]}), "the data frame has no column 'label'; choose from a"),
        (pd.DataFrame({"a": [1, "x"], "label": [0, 1]}), "the data frame cannot be read as a table"),
    ],
)
def test_what_cannot_be_taken_is_one_sentence(given: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as error:
        fednh.run(data=given, out=tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="write data="):
        fednh.run(given if not isinstance(given, str) else None)


def test_a_data_frame_gives_the_run_of_its_parquet_file(tmp_path: Path) -> None:
    given = frame()
    given.to_parquet(tmp_path / "t.parquet", index=False)
    settings = {**QUICK, "data__label": "diagnosis"}
    with pytest.warns(Notice, match=r"t.parquet: values are missing \('age' 1 of 60\)"):
        wanted = fednh.run(data=f"parquet:{tmp_path / 't.parquet'}", out=tmp_path / "file", **settings)
    with pytest.warns(Notice, match=r"the data frame: values are missing \('age' 1 of 60\)"):
        found = fednh.run(data=given, out=tmp_path / "frame", **settings)
    identical(tensors(found.path), tensors(wanted.path))
    named = [column["name"] for column in found.model().info["preprocessing"]["columns"]]
    assert named == ["age", "dose", "blood", "smokes"]  # not the index
    names = [taken(each, {"label": "diagnosis"}).name for each in (given, pa.table(given.reset_index(drop=True)))]
    assert names == [found.config.data.name] * 2


def killed(out: Path, **settings: Any) -> None:
    """A run in a process of its own, killed after the second round."""
    pid = os.fork()
    if pid == 0:
        append = RunFolder.append_metrics

        def die(self: RunFolder, record: dict[str, Any]) -> None:
            append(self, record)
            if record["round"] == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        RunFolder.append_metrics = die  # type: ignore[method-assign]
        try:
            fednh.run(out=out, **settings)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_run_from_arrays_goes_on_with_the_same_arrays_only(tmp_path: Path) -> None:
    run, settings = tmp_path / "run", {**QUICK, "data": (X, Y)}
    killed(run, **settings)
    assert not (run / "summary.json").exists()
    name = tomllib.loads((run / "config.toml").read_text())["data"]["name"]
    refused = command(["resume", str(run)], tmp_path / "io")
    assert (refused.code, refused.stderr.count("\n")) == (2, 1)
    assert f"the data {name} were given in Python and are not kept" in refused.stderr
    assert "fednh.resume(RUN, data=...)" in refused.stderr
    other = X.copy()
    other[5, 0] += 1
    for wrong, words in {(1,): "the training samples are others", (2,): "the labels .* are others"}.items():
        data = (other, Y) if wrong == (1,) else (X, (Y + 1) % 3)
        with pytest.raises(UserError, match=f"the data are not those that the run in .* began with: {words}"):
            fednh.resume(run, data=data)
    with pytest.raises(UserError, match="were given in Python"):
        fednh.resume(run)
    found = fednh.resume(run, data=(X, Y))
    whole = fednh.run(out=tmp_path / "whole", **settings)
    assert found.summary["held_macro"] == whole.summary["held_macro"]
    same = [(path / "models" / "global.safetensors").read_bytes() for path in (found.path, whole.path)]
    assert same[0] == same[1]
    with pytest.raises(UserError, match="the training samples are others"):  # a finished run is not taken for another's
        fednh.run(data=(other, Y), out=run, **QUICK)
    asked = command(["evaluate", str(run)], tmp_path / "io")
    assert (asked.code, asked.stderr.count("\n")) == (2, 1)
    assert "were given in Python" in asked.stderr


@pytest.mark.soak
def test_a_dataset_by_its_own_name(tmp_path: Path) -> None:
    digits = load("digits", Path("unused"))
    run = fednh.run("digits", data=digits, rounds=1, epochs=1, clients=4, method="fedavg", out=tmp_path / "run")
    assert run.config.data.name == "memory:digits"
    assert run.config.partition.clients == 4
    wanted = fednh.run("digits", rounds=1, epochs=1, clients=4, method="fedavg", out=tmp_path / "wanted")
    identical(tensors(run.path), tensors(wanted.path))


@pytest.mark.soak
def test_neither_pandas_nor_pyarrow_is_needed_for_arrays(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('pandas', 'pyarrow', 'polars', 'datasets'): sys.modules[name] = None\n"
        "import numpy as np, fednh\n"
        "x = np.random.default_rng(0).normal(size=(40, 3)); y = np.arange(40) % 2\n"
        "run = fednh.run(data=(x, y), method='local', rounds=1, epochs=1, clients=2, partition='iid', out='run')\n"
        "print(len(run.model(0).predict(x)))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "40\n"), ended.stderr
