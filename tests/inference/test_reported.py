"""What tables, summaries and reports say of a model is what the saved model computes on the same samples.

Sites differ in the level of their features, one lacks a column, one has a constant, and there are gaps: whoever scaled
the same row in two ways would get two answers.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fednh
from fednh.config import dump, load
from fednh.data.partitions.kinds import PARTITIONS
from fednh.data.sources.registry import SOURCES
from fednh.flower.deploy import scaffold
from fednh.inference.eval_data import Training, select_eval_samples
from fednh.inference.metrics import assess
from fednh.inference.personalize import personalize
from fednh.methods import METHODS
from fednh.runs.layout import RunLayout
from fednh.runs.model_file import read_outcomes
from tests.helpers.deployment import trial
from tests.helpers.federation import deployed, serve, server_identity
from tests.helpers.process import fednh as command

pytestmark = pytest.mark.filterwarnings("ignore::fednh.errors.Notice")
SITES = ("bern", "lund", "oslo")
HEAD = ("age", "dose", "lab", "smokes", "label")
COLUMNS = {"age": "number", "dose": "number", "lab": "number", "smokes": ["no", "yes"]}
QUICK: dict[str, Any] = {
    "rounds": 2,
    "train.epochs": 2,
    "train.batch_size": 16,
    "model.name": "mlp",
    "model.args": {"hidden": [8]},
    "participation.rate": 1.0,
    "partition.min_samples": 1,
    "data.classes": ["ill", "well"],
    "workers": 1,
}
FAST = {"creff": {"method.match_steps": 2, "method.retrain_epochs": 2}}


def rows(number: int, count: int, seed: int = 0) -> list[list[str]]:
    """Rows of a site: the level of `age` and the unit of `dose` are its own."""
    rng = np.random.default_rng([seed, number])
    found = []
    for k in range(count):
        ill = int(rng.integers(2)) if k > 1 else k
        age, dose, lab = rng.normal(40 + 15 * number + 6 * ill, 5), rng.gamma(2 + ill) * 20**number, rng.normal(ill)
        cells = [f"{age:.3f}", f"{dose:.3f}", "" if number == 1 else f"{lab:.3f}", ("no", "yes")[int(rng.integers(2))]]
        cells[0] = "" if k % 7 == 3 else cells[0]
        cells[1] = "5" if number == 0 else cells[1]
        found.append([*cells, ("well", "ill")[ill]])
    return found


def written(path: Path, lines: Sequence[Sequence[str]], *more: str) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([[*HEAD, *more], *lines])
    return path


def table(folder: Path, with_test: bool = True, sites: Sequence[str] = SITES) -> Path:
    """All sites in one file; test rows come from them and from a place that is no site."""
    parts = [("train", 30, 0), ("test", 8, 1)] if with_test else [("train", 30, 0)]
    lines = [
        [*row, site, split] for split, n, seed in parts for k, site in enumerate(sites) for row in rows(k, n, seed)
    ]
    lines += [[*row, "rome", "test"] for row in rows(1, 8, 2) if with_test]
    return written(folder / "all.csv", lines, "site", "split")


def says_what_it_computes(run: Path) -> None:
    """Compare the run's summary and outcomes with its saved models, sample by sample."""
    summary = json.loads((run / "summary.json").read_text())
    counts = json.loads((run / "partition.json").read_text())["counts"]
    layout, tested = RunLayout(run), summary["clients"][0]["pm_v"] is not None
    shared = fednh.load_model(run) if layout.global_model.exists() else None
    if shared is not None and tested:
        test = select_eval_samples(shared.card, run, None, "test")
        assert summary["gm"] == pytest.approx(100 * assess(shared, test.x, test.y).balanced_accuracy, abs=1e-9)
    for client in summary["clients"]:
        k = client["client"]
        model = fednh.load_model(run, k)
        if tested:
            test = select_eval_samples(model.card, run, None, "test")
            recall = [100 * c.recall for c in assess(model, test.x, test.y).classes]
            assert client["per_class"] == pytest.approx(recall, abs=1e-9)
            owned = [value for value, n in zip(recall, counts[k], strict=True) if n]
            assert client["pm_v"] == pytest.approx(np.mean(owned), abs=1e-9)
        if "held_share" not in client:
            continue
        held, said = select_eval_samples(model.card, run, None, "held"), read_outcomes(layout.outcomes_of(k))
        assert said.label.tolist() == held.y.tolist()
        found = assess(model, held.x, held.y)
        assert said.personal.tolist() == model.scores(held.x).probabilities.argmax(1).tolist()
        assert client["held_share"] == pytest.approx(100 * found.accuracy, abs=1e-9)
        assert client["held_macro"] == pytest.approx(100 * found.balanced_accuracy, abs=1e-9)
        if shared is not None:
            assert said.shared is not None
            assert said.shared.tolist() == shared.scores(held.x).probabilities.argmax(1).tolist()
            assert client["held_gm_share"] == pytest.approx(100 * assess(shared, held.x, held.y).accuracy, abs=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_at_natural_sites(method: str, tmp_path: Path) -> None:
    """On a test set that all share, and on what each site held out; from arrays, and from a file of raw rows."""
    source = {"data.name": f"csv:{table(tmp_path)}", "partition.name": "site", "data.holdout": 0.3}
    run = fednh.run({**QUICK, **source, "method.name": method, **FAST.get(method, {})}, out=tmp_path / "run").path
    says_what_it_computes(run)
    held = Training(run).parts[1]
    lines = [row for k in range(3) for row in rows(k, 30)]
    for k in range(3):
        file = written(tmp_path / "rows.csv", [lines[i] for i in held[k]])
        said = read_outcomes(RunLayout(run).outcomes_of(k))
        for client, column in ((k, said.personal), (None, said.shared)):
            if column is not None:
                model = fednh.load_model(run, client)
                assert model.predict(file).tolist() == [model.classes[c] for c in column]


def small(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of `fednh.run` for a small source of a kind, with sites."""
    rng = np.random.default_rng(0)
    site, y = np.repeat(np.arange(3), 20), rng.integers(0, 2, 60)
    y[::20], y[1::20] = 0, 1
    x = rng.normal(size=(60, 3)) * [1, 20, 1] + (site * 30 + y)[:, None]
    arrays = {"x_train": x.astype(np.float32), "y_train": y, "site_train": site}
    if kind == "folder":
        from PIL import Image

        for k in range(60):
            place = folder / "photos" / SITES[site[k]] / "ab"[y[k]]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 120 + 60 * site[k], (6, 6, 3), np.uint8)).save(place / f"{k}.png")
        return {"data.name": f"folder:{folder / 'photos'}", "data.size": 6, "data.classes": None}
    if kind == "npz":
        np.savez(folder / "a.npz", **arrays)
        return {"data.name": f"npz:{folder / 'a.npz'}", "data.classes": None}
    if kind == "memory":
        return {"data": (arrays["x_train"], y, site), "data.classes": None}
    file = table(folder, with_test=False)
    if kind == "csv":
        return {"data.name": f"csv:{file}"}
    if kind == "py":
        (folder / "own_rows.py").write_text(
            f"import numpy as np\ndef load():\n    return dict(np.load({str(folder / 'a.npz')!r}))\n"
        )
        np.savez(folder / "a.npz", **arrays)
        monkeypatch.syspath_prepend(str(folder))
        return {"data.name": "py:own_rows:load", "data.classes": None}
    pq = pytest.importorskip("pyarrow.parquet")
    from pyarrow import csv as reader

    read = reader.read_csv(file, convert_options=reader.ConvertOptions(strings_can_be_null=True))
    if kind == "parquet":
        pq.write_table(read, folder / "all.parquet")
        return {"data.name": f"parquet:{folder / 'all.parquet'}"}
    datasets = pytest.importorskip("datasets")
    datasets.Dataset(read.drop_columns(["split"])).save_to_disk(str(folder / "saved"))
    return {"data.name": f"hf:{folder / 'saved'}"}


@pytest.mark.parametrize("partition", ["site", "iid"])
@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source(kind: str, partition: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = small(kind, tmp_path, monkeypatch)
    data = given.pop("data", None)
    divided = {"partition.name": partition} | ({} if partition == "site" else {"partition.clients": 2})
    settings = {key: value for key, value in {**QUICK, **divided, **given}.items() if value is not None}
    run = fednh.run({**settings, "method.name": "fedavg"}, data=data, out=tmp_path / "run").path
    if data is None:
        says_what_it_computes(run)
        return
    x, y, _ = data  # the folder of a run on data in memory does not have them
    models = {k: fednh.load_model(run, k) for k in [None, *RunLayout(run).clients_with_models()]}
    assert len({json.dumps(model.info["preprocessing"]) for model in models.values()}) == 1
    for k, said in ((k, read_outcomes(file)) for k, file in RunLayout(run).clients_with_outcomes().items()):
        assert said.shared is not None
        for model, column in ((models[k], said.personal), (models[None], said.shared)):
            pairs = set(zip(said.label.tolist(), column.tolist(), strict=True))
            assert pairs <= set(zip(y.tolist(), model.scores(x).probabilities.argmax(1).tolist(), strict=True))


@pytest.mark.parametrize("partition", [name for name in PARTITIONS if name != "site"])
def test_every_other_partition(partition: str, tmp_path: Path) -> None:
    divided = {"partition.name": partition, "partition.clients": 2, "data.holdout": 0.3}
    divided |= {"partition.imbalance": 5.0} if partition == "longtail" else {}
    source = {"data.name": f"csv:{table(tmp_path)}", "method.name": "fedavg"}
    says_what_it_computes(fednh.run({**QUICK, **source, **divided}, out=tmp_path / "run").path)


@pytest.mark.parametrize("sites", [SITES[:1], pytest.param(SITES, marks=pytest.mark.soak)], ids=len)
def test_the_commands_say_the_same(sites: tuple[str, ...], tmp_path: Path) -> None:
    """`table` and `compare` of a run, and `predict` and `evaluate` on the same rows, as a person sees them."""
    config = load(
        None, {**QUICK, "data.name": f"csv:{table(tmp_path)}", "partition.name": "site", "method.name": "fednh"}
    )
    (tmp_path / "c.toml").write_text(dump(config))
    run, io = tmp_path / "run", tmp_path / "io"
    ran = command(["run", str(tmp_path / "c.toml"), "--set", "data.holdout=0.3", "--out", str(run), "--quiet"], io)
    assert ran.code == 0, ran.stderr
    shown = command(["table", str(run), "--format", "csv"], io)
    found = command(["evaluate", str(run), "--split", "test", "--format", "json"], io)
    said = {row["metric"]: float(row["mean"]) for row in csv.DictReader(shown.stdout.splitlines())}
    assert said["gm"] == pytest.approx(100 * json.loads(found.stdout)["balanced_accuracy"], abs=1e-9)
    compared = command(["compare", str(run), "--format", "csv"], io)
    told = {(row["site"], row["model"]): float(row["accuracy"]) for row in csv.DictReader(compared.stdout.splitlines())}
    lines, held = [row for k in range(3) for row in rows(k, 30)], Training(run).parts[1]
    for k, site in enumerate(sites):
        file = written(tmp_path / "held.csv", [lines[i] for i in held[k]])
        truth = [lines[i][-1] for i in held[k]]
        for more in ([], ["--site", site]):
            said = command(["predict", str(run), str(file), "--format", "json", *more], io)
            right = np.mean([row["class"] == label for row, label in zip(json.loads(said.stdout), truth, strict=True)])
            measured = command(
                ["evaluate", str(run), "--data", f"csv:{file}", "--split", "all", "--format", "json", *more], io
            )
            assert json.loads(measured.stdout)["accuracy"] == right
            assert told[site, "personal" if more else "global"] == pytest.approx(100 * right, abs=1e-9)


def test_a_newcomer_is_scaled_as_the_run_was(tmp_path: Path) -> None:
    """Also a newcomer of another level: its model, the global one and the local one see the same numbers."""
    from fednh.runs.model_file import write_model

    source = {"data.name": f"csv:{table(tmp_path)}", "partition.name": "site", "method.name": "fedavg"}
    run = fednh.run({**QUICK, **source}, out=tmp_path / "run").path
    new = written(
        tmp_path / "new.csv",
        [[*row, split] for split, n in (("train", 30), ("test", 20)) for row in rows(2, n, 5)],
        "split",
    )
    made = personalize(run, f"csv:{new}", epochs=1)
    write_model(tmp_path / "new.safetensors", made.params, made.card)
    test = written(tmp_path / "test.csv", rows(2, 20, 5))
    for path, name in ((run, "global"), (tmp_path / "new.safetensors", "personalised")):
        model = fednh.load_model(path)
        right = 100 * np.mean(model.predict(test) == np.array([row[-1] for row in rows(2, 20, 5)]))
        assert made.comparison[name]["held_share"] == pytest.approx(right, abs=1e-9)
    assert made.card["preprocessing"] == fednh.load_model(run).info["preprocessing"]


# --- the same in a deployed federation -------------------------------------------------------------------------------

SOME = ("fednh", "local", "fedproto", "fedavg")


@pytest.mark.parametrize(
    "method", [name if name in SOME else pytest.param(name, marks=pytest.mark.soak) for name in METHODS]
)
def test_every_method_of_a_federation(method: str, tmp_path: Path) -> None:
    """Sites with files of their own, and a test set that they and the server share."""
    nodes: dict[int, dict[str, Any]] = {}
    for k, site in enumerate(SITES):
        file = written(tmp_path / f"{site}.csv", rows(k, 30))
        test = written(tmp_path / "test.csv", [row for n in range(3) for row in rows(n, 8, 1)])
        nodes[k + 1] = {"data": f"csv:{file}", "site": site, "columns": ", ".join(COLUMNS), "test": f"csv:{test}"}
        nodes[k + 1] |= {"allow.samples": 1, "allow.counts": True}  # metrics of few samples leave the site, and counts
    own = {"data.name": "own", "federation.name": "own", "federation.test": f"csv:{test}", "data.columns": COLUMNS}
    config = load(None, {**QUICK, "method.name": method, **FAST.get(method, {}), **own})
    serve(config, deployed(tmp_path, nodes), tmp_path / "run", identity=server_identity(tmp_path, "own"))
    alone = {**QUICK, "method.name": method, **FAST.get(method, {}), "data.columns": COLUMNS, "partition.name": "site"}
    alone |= {"data.name": f"csv:{table(tmp_path, with_test=False)}"}
    agrees_with_its_sites(tmp_path / "run", tmp_path / "state" / "own", tmp_path, alone)


def agrees_with_its_sites(
    run: Path, state: Path, folder: Path, alone: dict[str, Any], sites: Sequence[str] = SITES
) -> None:
    """Compare a federation's summary with the models at its sites, and all with the simulation of the same rows."""
    simulated = fednh.run(alone, out=folder / "simulated")
    summary = json.loads((run / "summary.json").read_text())
    held = Training(simulated.path).parts[1]
    lines = [row for k in range(3) for row in rows(k, 30)]
    test = folder / "test.csv"
    labels = np.array([row[-1] for n in range(3) for row in rows(n, 8, 1)])
    shared = fednh.load_model(run) if RunLayout(run).global_model.exists() else None
    if shared is not None and summary["gm"] is not None:
        assert summary["gm"] == pytest.approx(balanced(shared.predict(test), labels), abs=1e-9)
    for k, site in enumerate(sites):
        own = next(state.rglob(f"{site}/personal.safetensors"))
        said, mine = read_outcomes(own.parent / "outcomes.safetensors"), fednh.load_model(own)
        file = written(folder / "held.csv", [lines[i] for i in held[k]])
        client = next(row for row in summary["clients"] if row["site"] == site)
        truth = np.array([lines[i][-1] for i in held[k]])
        pairs = [(mine, said.personal, "held")] + ([(shared, said.shared, "held_gm")] if shared is not None else [])
        for model, column, key in pairs:
            guessed = model.predict(file)
            assert column is not None
            assert guessed.tolist() == [model.classes[c] for c in column]
            assert client[f"{key}_share"] == pytest.approx(100 * np.mean(guessed == truth), abs=1e-9)
            assert client[f"{key}_macro"] == pytest.approx(balanced(guessed, truth), abs=1e-9)
        if client["pm_v"] is not None:
            assert client["pm_v"] == pytest.approx(balanced(mine.predict(test), labels), abs=1e-9)
        theirs = simulated.model(site)
        assert theirs.info["preprocessing"] == mine.info["preprocessing"]
        assert theirs.predict(file).tolist() == mine.predict(file).tolist()


def balanced(guessed: np.ndarray, labels: np.ndarray) -> float:
    """The mean recall of the classes, in percent."""
    return float(100 * np.mean([np.mean(guessed[labels == name] == name) for name in np.unique(labels)]))


@pytest.mark.soak
def test_a_federation_of_processes(tmp_path: Path) -> None:
    """The same with `federation up --local`, as a person starts it; the sites have no shared test set."""
    sources = [f"csv:{written(tmp_path / f'{site}.csv', rows(k, 30))}" for k, site in enumerate(SITES)]
    own = {**QUICK, "method.name": "fednh", "data.columns": COLUMNS}
    names = scaffold.site_names(3)
    with trial(tmp_path) as made:
        scaffold.write(made.folder, 3, sources, {**own, "federation.timeout": 120.0})
        for file in made.folder.glob("sites/*/site.toml"):  # metrics of few held-out samples leave these sites
            file.write_text(re.sub(r"^samples = \d+", "samples = 1", file.read_text(), flags=re.MULTILINE))
        assert made.up().wait(280).code == 0, made.said()
    alone = {**own, "partition.name": "site", "data.name": f"csv:{table(tmp_path, with_test=False, sites=names)}"}
    agrees_with_its_sites(made.run, made.folder / "trial", tmp_path, alone, names)
