"""data.group: samples that belong together are never separated, by no partition, hold-out or test share."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fednh.config import PartitionConfig
from fednh.config import load as load_config
from fednh.data.dataset import Dataset
from fednh.data.inspection import Division, inspect
from fednh.data.partitions import Drawn
from fednh.data.partitions.kinds import PARTITIONS, BySite, LongTail
from fednh.data.sources.registry import load, taken
from fednh.data.splits import hold_out
from fednh.data.splits import test_rows as cut_rows
from fednh.errors import Notice, Refused, UserError
from fednh.federated.setup import build_federation, divide
from fednh.flower.deploy.scaffold import site_toml
from fednh.flower.site_config import for_sites, read_policy
from fednh.seeding import numpy_rng
from tests.helpers.process import fednh

# --- properties ----------------------------------------------------------------------------------------------------


@st.composite
def grouped(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Labels and groups of 20 to 150 samples: groups of any size, of one class or of several."""
    classes, count = draw(st.integers(2, 5)), draw(st.integers(2, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    samples = draw(st.integers(20, 150))
    groups = rng.choice(count, samples, p=rng.dirichlet(np.full(count, draw(st.sampled_from([0.3, 1.0, 50.0])))))
    pure = rng.integers(0, classes, count)[groups]
    mixed = rng.integers(0, classes, samples)
    return np.where(rng.random(samples) < draw(st.sampled_from([0.0, 0.3, 1.0])), mixed, pure), groups * 7 + 3


def kept_together(groups: np.ndarray, *parts: np.ndarray) -> bool:
    seen = [set(groups[part].tolist()) for part in parts]
    return sum(map(len, seen)) == len(set().union(*seen))


partitions = st.builds(
    PartitionConfig,
    name=st.sampled_from([name for name, kind in PARTITIONS.items() if not kind.natural]),
    clients=st.integers(1, 6),
    beta=st.sampled_from([0.1, 1.0, 100.0]),
    imbalance=st.sampled_from([1.0, 3.0, 20.0]),
    classes_per_client=st.integers(1, 3),
    shards_per_client=st.integers(1, 3),
    min_samples=st.integers(1, 12),
    min_classes=st.integers(1, 2),
)


@given(grouped(), partitions, st.integers(0, 2**31 - 1))
@settings(max_examples=60, deadline=None)
def test_no_partition_separates_a_group(
    data: tuple[np.ndarray, np.ndarray], config: PartitionConfig, seed: int
) -> None:
    """Each sample in one client, each group in one client, the minimum respected, the same seed the same parts.

    A long tail leaves samples out, those that its own subset does not have, and no others.
    """
    (labels, groups), kind = data, config.kind
    assert isinstance(kind, Drawn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drawn, "tries", 10)
        try:
            parts = kind.draw(labels, numpy_rng(seed, "p"), groups)
        except UserError:
            return
        again = kind.draw(labels, numpy_rng(seed, "p"), groups)
    whole = kind.subset(labels, numpy_rng(seed, "p")) if isinstance(kind, LongTail) else np.arange(len(labels))
    assert sorted(np.concatenate(parts).tolist()) == whole.tolist()
    assert kept_together(groups, *parts)
    assert min(map(len, parts)) >= config.min_samples
    if config.name == "dirichlet":
        assert all(len(np.unique(labels[part])) >= config.min_classes for part in parts)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@given(grouped(), st.sampled_from([0.05, 0.2, 0.5, 0.9]), st.integers(0, 2**31 - 1))
@settings(max_examples=60, deadline=None)
def test_neither_hold_out_nor_test_share_separates_a_group(
    data: tuple[np.ndarray, np.ndarray], share: float, seed: int
) -> None:
    labels, groups = data
    part = np.flatnonzero(np.arange(len(labels)) % 3)  # a client that does not hold everything
    train, held = hold_out(labels, part, share, numpy_rng(seed, "h"), groups)
    assert sorted([*train, *held]) == part.tolist()
    assert kept_together(groups, train, held)
    assert set(labels[train]) == set(labels[part])  # every class keeps a training sample
    try:
        test = cut_rows(labels, share, groups)
    except UserError:
        return
    assert kept_together(groups, np.flatnonzero(test), np.flatnonzero(~test))
    assert set(labels[~test]) == set(labels)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=60), st.sampled_from([0.1, 0.2, 0.5]))
@settings(max_examples=40, deadline=None)
def test_groups_of_one_are_held_out_as_single_samples_are(labels: list[int], share: float) -> None:
    y, everything = np.array(labels), np.arange(len(labels))
    _, held = hold_out(y, everything, share, numpy_rng(0, "h"), everything)
    for label, count in zip(*np.unique(y, return_counts=True), strict=True):
        assert (y[held] == label).sum() == min(int(share * count + 0.5), count - 1)


def test_a_share_is_met_as_far_as_groups_allow() -> None:
    """Ten groups of four, half of each class: two of them are a fifth of both classes."""
    groups, labels = np.repeat(np.arange(10), 4), np.tile([0, 0, 1, 1], 10)
    _, held = hold_out(labels, np.arange(40), 0.2, numpy_rng(0, "h"), groups)
    assert np.bincount(labels[held]).tolist() == [4, 4]


# --- files ---------------------------------------------------------------------------------------------------------

PATIENTS = [(k // 3, "ab"[k // 3 % 2], k) for k in range(36)]  # three samples a patient


def source(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    """A source of twelve patients with three samples each, and its data.group."""
    if kind.startswith("folder"):
        lines = ["file,group"]
        for patient, label, k in PATIENTS:
            file = folder / "images" / label / f"p{patient}_{k}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.random.default_rng(k).integers(0, 255, (4, 4), np.uint8)).save(file)
            lines.append(f"{label}/{file.name},{patient}")
        (folder / "groups.csv").write_text("\n".join(lines))
        given = {"folder": r"^p(\d+)_", "folder path": r"^[ab]/p(\d+)_", "folder csv": str(folder / "groups.csv")}
        return f"folder:{folder / 'images'}", given[kind]
    if kind in ("npz", "py"):
        arrays = {"x_train": [[float(k % 5), k % 7] for *_, k in PATIENTS], "y_train": [p % 2 for p, _, _ in PATIENTS]}
        np.savez(folder / "a.npz", **arrays, patient=[f"p{p}" for p, _, _ in PATIENTS])
        (folder / "grouped_patients.py").write_text(
            f"import numpy as np\ndef load():\n    return dict(np.load({str(folder / 'a.npz')!r}))\n"
        )
        monkeypatch.syspath_prepend(folder)
        sys.modules.pop("grouped_patients", None)
        return (f"npz:{folder / 'a.npz'}" if kind == "npz" else "py:grouped_patients:load"), "patient"
    rows = [f"p{p},{k % 5},{k % 7},{y}" for p, y, k in PATIENTS]
    (folder / "t.csv").write_text("\n".join(["patient,a,b,label", *rows]))
    if kind == "csv":
        return f"csv:{folder / 't.csv'}", "patient"
    from pyarrow import csv, parquet

    if kind == "memory":
        return csv.read_csv(folder / "t.csv"), "patient"
    parquet.write_table(csv.read_csv(folder / "t.csv"), folder / "t.parquet")
    return f"{kind}:{folder / 't.parquet'}", "patient"


def own(name: Any, **options: Any) -> Dataset:
    return load(name, Path("unused"), options) if isinstance(name, str) else taken(name, options)


@pytest.mark.parametrize("kind", ["folder", "folder path", "folder csv", "csv", "parquet", "hf", "memory", "npz", "py"])
def test_every_kind_of_source_has_groups(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, group = source(kind, tmp_path, monkeypatch)
    data = own(name, group=group)
    assert data.group_train is not None
    assert sorted(np.bincount(data.group_train).tolist()) == [3] * 12
    if not data.is_image:
        assert data.x_train.shape == (36, 2)  # the group is no feature
        assert data.group_train[::3].tolist() == data.group_train[2::3].tolist()
    cut = own(name, group=group, test_share=0.25)
    assert np.bincount(cut.y_test).tolist() == [6, 6]  # 4.5 of 18, in threes
    assert cut.group_train is not None
    assert len(cut.group_train) == len(cut.y_train)
    assert len(np.unique(cut.group_train)) == 8
    with pytest.raises(UserError, match=r"data\.group|has no column"):
        own(name, group="nothing")
    plain = own(name)
    assert plain.group_train is None
    assert "groups" not in plain.fingerprint
    assert "groups" in data.fingerprint


def test_what_names_no_groups_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _ = source("folder", tmp_path, monkeypatch)
    (tmp_path / "bad.csv").write_text("file;who\nx;1\n")
    table, _ = source("csv", tmp_path, monkeypatch)
    for where, group, words in [
        (name, "p[0-9", "is no pattern that Python knows"),
        (name, "p[0-9]+", "should have one pair of brackets"),
        (name, "p([0-5])_", "gives no group to 18 of 36 images"),
        (name, str(tmp_path / "none.csv"), "none.csv does not exist"),
        (name, str(tmp_path / "bad.csv"), "has no column 'group'"),
        ("digits", "patient", "digits does not say which samples belong together"),
    ]:
        with pytest.raises(UserError, match=words.replace("(", r"\(").replace("[", r"\[")):
            own(where, group=group)
    with pytest.raises(UserError, match=r"'patient' of .* says what belongs together, and is no feature"):
        own(table, group="patient", columns={"patient": ["p1"]})
    assert own(name, group=r"(p)\d").group_train is not None
    with pytest.raises(UserError, match=r"the 1 groups of data\.group are too few"):
        own(name, group=r"(p)\d", test_share=0.2)
    many = load_config(None, {"partition.name": "iid", "partition.clients": 13, "partition.min_samples": 1})
    with pytest.raises(
        UserError, match=r"partition.clients = 13 cannot each have a group: .* are dealt, and there are 12"
    ):
        divide(own(table, group="patient"), many)


def test_a_split_that_separates_groups_is_told(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("p,a,label,split\n1,0,x,train\n1,1,x,test\n2,2,y,train\n2,3,y,train\n")
    (warning,) = own(f"csv:{tmp_path / 't.csv'}", group="p").warnings
    assert "1 groups have training and test samples" in warning


def test_what_cannot_be_divided_is_told(tmp_path: Path) -> None:
    """At north all samples are of one patient, who has also been at south."""
    rows = [f"{0 if k < 12 else k // 2},{k},{'xy'[k % 2]},{'north' if k < 10 else 'south'}" for k in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["p,a,label,site", *rows]))
    settings = {"data.name": f"csv:{tmp_path / 't.csv'}", "data.group": "p", "partition.name": "site"}
    config = load_config(None, settings)
    with pytest.warns(Notice) as caught:
        fed = build_federation(config)
    said = "\n".join(str(each.message) for each in caught)
    assert "1 groups have samples at several sites: one site may train on what another holds out" in said
    assert "nothing is held out at north, because no group can be spared there" in said
    assert [len(held) for held in fed.held_out] == [0, 6]
    data = own(settings["data.name"], group="p")
    found = inspect(data, Division(BySite(), data.sites, fed.parts, fed.held_out))["warnings"]
    assert any("nothing is held out at north" in words for words in found)


def test_a_run_keeps_groups_whole_and_remembers_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _ = source("csv", tmp_path, monkeypatch)
    run = str(tmp_path / "run")
    small = ["--partition", "iid", "--clients", "2", "--rounds", "1", "--method", "fedavg", "--participation", "1"]
    command = ["run", "--data", name, *small, "--out", run, "--quiet"]
    ran = fednh([*command, "--set", "data.group=patient", "--set", "data.holdout=0.4"], tmp_path / "a")
    assert ran.code == 0, ran.stderr
    recorded = json.loads((tmp_path / "run" / "fingerprint.json").read_text())
    assert recorded["settings"]["data.group"] == "patient"
    assert "groups" in recorded["data"]
    made = fednh(["personalize", run, "--data", name, "--holdout", "0.4", "--format", "json"], tmp_path / "b")
    assert json.loads(made.stdout)["held_out"] == 12, made.stderr  # one by one they would be 14
    (tmp_path / "other.csv").write_text((tmp_path / "t.csv").read_text().replace("patient", "who"))
    other = ["personalize", run, "--data", f"csv:{tmp_path / 'other.csv'}", "-o", str(tmp_path / "o")]
    said = fednh(other, tmp_path / "c")
    assert said.code == 0, said.stderr
    assert "has no 'patient', by which the run kept samples together" in said.stderr


# --- sites of a deployed federation --------------------------------------------------------------------------------


def test_a_site_says_itself_what_belongs_together() -> None:
    """The server's pattern or path is not used; without one of its own a site would separate what belongs together."""
    config = load_config(None, {"data.name": "folder:/srv/x", "data.group": "/srv/secret/groups.csv"})
    asked = for_sites(config).model_dump()
    assert "/srv/secret" not in str(asked)
    with pytest.raises(Refused, match=r"data\.group: which samples belong together, this site's site.toml says"):
        read_policy({}).applied(asked, "folder:/srv/own")
    mine = {"group": "p([0-9]+)", "ignore": "id, notes", "separator": ";", "decimal": ","}
    found = read_policy(mine).applied(asked, "csv:/srv/own.csv")["data"]
    assert {key: found[key] for key in mine} == {**mine, "ignore": ["id", "notes"]}
    server = {"data": {"name": "csv:/x", "ignore": ["age"], "separator": "x", "decimal": "y", "sites": ["a"]}}
    assert read_policy({}).applied(server, "csv:/srv/own.csv")["data"] == {"name": "csv:/srv/own.csv"}
    written = site_toml({"data": "csv:x"}, load_config(None, {"data.group": "patient", "data.ignore": ["id"]}))
    assert 'group = "patient"' in written
    assert 'ignore = "id"' in written
