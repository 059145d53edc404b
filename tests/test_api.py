"""The Python API: as small as the command line, and `import fednh` stays fast."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import fednh
from fednh.api import _settings
from fednh.config import load
from fednh.errors import UserError
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
