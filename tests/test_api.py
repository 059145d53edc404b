"""The Python API: as small as the command line, and `import fednh` stays fast."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fednh
from fednh.api import _settings
from fednh.config import load
from fednh.errors import UserError
from fednh.methods.fedavg import FedAvg
from fednh.metric_names import ClientSummary, MetricValues, RoundRecord, RunSummary
from tests.helpers.compare import identical


def test_run_and_load(tmp_path: Path) -> None:
    result = fednh.run("digits", method="fedavg", rounds=2, epochs=1, clients=4, train__lr=0.1, out=tmp_path / "r")
    assert result.config.method["name"] == "fedavg"
    assert (result.config.train.lr, result.config.partition.clients) == (0.1, 4)
    assert [line["round"] for line in result.metrics] == [1, 2]
    assert result.summary["gm"] > 0
    assert result.model().classes == tuple("0123456789")
    assert result.model(result.clients[0]).info["client"] == result.clients[0]
    again = fednh.load_run(tmp_path / "r")
    assert (again.summary, again.metrics) == (result.summary, result.metrics)
    assert fednh.run(result.config, out=tmp_path / "r").summary == result.summary, "a finished run is recognised"
    with pytest.raises(UserError, match="other settings"):
        fednh.run(result.config, seed=5, out=tmp_path / "r")


def test_records_and_summary_have_the_keys_that_their_types_name(tmp_path: Path) -> None:
    more: dict[str, Any] = {"data__holdout": 0.2, "diagnostics__gradient_norm": True, "eval__every": 2}
    result = fednh.run("digits", method="fednh", rounds=3, epochs=1, clients=4, out=tmp_path / "r", **more)
    for values, form in [
        *((record, RoundRecord) for record in result.metrics),
        *((client, ClientSummary) for client in result.summary["clients"]),
        (result.summary, RunSummary),
    ]:
        assert form.__required_keys__ <= set(values) <= set(form.__required_keys__ | form.__optional_keys__)
    assert [set(MetricValues.__optional_keys__) <= set(record) for record in result.metrics] == [False, True, True]


def test_settings_from_everything(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('rounds = 7\n[method]\nname = "fedper"\n')
    assert _settings(file, {}).rounds == 7
    assert _settings({"method": "fedper", "rounds": 7, "train": {"lr": 0.5}}, {"seed": 3}).train.lr == 0.5
    assert _settings({"method.name": "fednh", "method.rho": 0.7}, {}).method["rho"] == 0.7
    assert _settings(None, {"method": {"name": "fednh", "rho": 0.7}}).method["rho"] == 0.7
    config = load("digits", {"method.rho": 0.7})
    assert _settings(config, {}) == config
    assert _settings(config, {"rounds": 3}) == load("digits", {"method.rho": 0.7, "rounds": 3})
    assert _settings(config, {"method": "fedavg"}).method == {"name": "fedavg"}
    with pytest.raises(UserError, match="not a setting"):
        _settings(None, {"roundz": 3})


def test_import_is_fast_and_lazy() -> None:
    code = (
        "import sys, fednh; assert 'torch' not in sys.modules and 'numpy' not in sys.modules; print(fednh.__version__);"
        "import fednh.errors; assert 'torch' not in sys.modules; assert not hasattr(fednh, 'nothing');"
        "assert callable(fednh.load_model) and 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda run: run.model(1.0), "a client is chosen by its whole number or its site's name, not by 1.0"),
        (lambda run: run.model(True), "not by True"),
        (lambda run: run.model([1]), r"not by \[1\]"),
        (lambda run: fednh.load_model(None), "None is not a path; give a model file or a run folder"),
        (lambda run: fednh.load_model(1), "1 is not a path"),
        (lambda run: fednh.load_run(None), "None is not a path; give the folder of a run"),
        (lambda run: fednh.resume(None), "None is not a path; give the folder of a run"),
        (lambda run: fednh.run("digits", out=1.0), "1.0 is not a path; give out= the folder of the run"),
        (lambda run: fednh.run({1: 2}), "1 is not a setting"),
        (lambda run: run.model().threshold(None), "'None' should be a cosine"),
    ],
)
def test_what_is_of_another_type_is_refused_in_a_sentence(
    call: Callable[[fednh.Result], object], told: str, finished: dict[str, Path]
) -> None:
    with pytest.raises(UserError, match=told) as error:
        call(fednh.load_run(finished["fednh"]))
    assert "\n" not in str(error.value)


def test_numbers_of_other_types_choose_clients_and_thresholds(finished: dict[str, Path]) -> None:
    run = fednh.load_run(finished["fednh"])
    client = run.clients[0]
    identical(run.model(np.int64(client)).params, run.model(client).params)  # type: ignore[arg-type]
    assert run.model().threshold(0.6) == run.model().threshold("0.6") == 0.6


def test_a_sweep_is_its_runs(tmp_path: Path) -> None:
    small: dict[str, Any] = {"rounds": 1, "epochs": 1, "clients": 4}
    runs = fednh.sweep(method="fedper", seed=[0], train__lr=[0.2, 0.1], out=tmp_path / "s", **small)
    assert [run.config.train.lr for run in runs] == [0.2, 0.1]
    alone = fednh.run(method="fedper", seed=0, lr=0.1, out=tmp_path / "r", **small)
    assert runs[1].summary["pm_l"] == alone.summary["pm_l"]
    assert [run.path.name for run in runs] == [f"digits-fedper-dirichlet0.3-lr{lr}-seed0" for lr in (0.2, 0.1)]


def test_a_sweep_refuses_what_its_processes_cannot_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cell(FedAvg):
        pass

    Cell.__module__, Cell.__qualname__ = "__main__", "Cell"
    monkeypatch.setattr(sys.modules["__main__"], "Cell", Cell, raising=False)
    with pytest.raises(fednh.ConfigError, match="Cell is defined in this program or notebook; move it into a module"):
        fednh.sweep(method=[Cell, "fedavg"], out=tmp_path / "s")
    with pytest.raises(fednh.ConfigError, match="a sweep takes the class FedAvg; give its hyper-parameters as"):
        fednh.sweep(method=FedAvg(), out=tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_evaluate_is_the_summary_of_the_run(finished: dict[str, Path]) -> None:
    run = fednh.load_run(finished["fedavg"])
    assert 100 * fednh.evaluate(run).balanced_accuracy == pytest.approx(run.summary["gm"], abs=1e-4)
    own = fednh.evaluate(finished["fedavg"], client=run.clients[0], split="test")
    assert 0 < own.accuracy < 1
    with pytest.warns(UserWarning, match="the model was trained on"):
        fednh.evaluate(run, split="train")


def test_personalize_gives_a_model_and_writes_it(finished: dict[str, Path], tmp_path: Path) -> None:
    made = fednh.personalize(finished["fednh"], "digits", epochs=1, out=tmp_path / "p")
    x = np.zeros((2, 8, 8), np.uint8)
    assert (made.model.predict_proba(x) == fednh.load_model(tmp_path / "p").predict_proba(x)).all()
    with pytest.raises(UserError, match="holds something already"):
        fednh.personalize(finished["fednh"], "digits", epochs=1, out=tmp_path / "p")


def test_export_takes_a_run_or_a_model(finished: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    run = fednh.load_run(finished["fedavg"])
    assert fednh.export(run, tmp_path / "m.onnx")["difference"] < 1e-4
    assert (tmp_path / "m.onnx").exists()


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: fednh.run(rounds=-1), fednh.ConfigError),
        (lambda: fednh.run(method="fednhh"), fednh.ConfigError),
        (lambda: fednh.run(model="conv22"), fednh.ConfigError),
        (lambda: fednh.run(data="csv:/nowhere.csv"), fednh.DataError),
        (lambda: fednh.run(clients=100_000), fednh.DataError),
    ],
)
def test_errors_say_their_kind_and_name_no_flags(call: Callable[[], object], kind: type[UserError]) -> None:
    with pytest.raises(kind, match=r"^((?!--).)*$") as error:
        call()
    assert isinstance(error.value, UserError)
    assert error.value.exit_code == 2
    assert fednh.RunError.exit_code == 1


def test_documents_import_public_names_alone() -> None:
    """fednh itself, the words that methods are written in, and help for tests."""
    root = Path(__file__).parents[1]
    files = [*root.glob("docs/**/*.md"), root / "README.md", *root.glob("src/fednh/cli/notebooks/*.ipynb")]
    lines = [(file.name, line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    imports = [
        (name, found[0]) for name, line in lines if (found := re.findall(r"(?:from|import) (fednh\.[\w.]+)", line))
    ]
    assert {module for _, module in imports} <= {"fednh.methods.base", "fednh.testing"}, imports
