"""Published sets whose samples come from natural sites, from small files of the same format."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fednh.cli import app
from fednh.config import load
from fednh.data.published.har import CLASSES as ACTIVITIES
from fednh.data.sources import registry
from fednh.errors import UserError
from fednh.federated.setup import divide, load_data

NATURAL = ("har", "femnist", "camelyon17")


# --- UCI HAR ----------------------------------------------------------------------------------------------------------


def write_har(folder: Path) -> Path:
    """Two people in the training part, one in the test part; each does every activity in two bouts of three windows.

    The first number of a window is its place in time, by which tests know it again.
    """
    for part, people in (("train", (3, 11)), ("test", (7,))):
        (folder / part).mkdir(parents=True, exist_ok=True)
        person = np.repeat(people, 36)
        y = np.tile(np.repeat(np.tile(np.arange(1, 7), 2), 3), len(people))
        x = np.full((len(y), 561), -2.5e-1)
        x[:, 0] = np.arange(len(y)) / 100
        for name, values in (("X", x), ("y", y), ("subject", person)):
            style = "%16.7e" if name == "X" else "%d"
            np.savetxt(folder / part / f"{name}_{part}.txt", values, fmt=style)
    return folder


def zipped(folder: Path, archive: Path) -> Path:
    with zipfile.ZipFile(archive, "w") as out:
        for file in sorted(folder.rglob("*.txt")):
            out.write(file, f"{folder.name}/{file.relative_to(folder).as_posix()}")
    return archive


def test_har_has_a_site_a_person_and_keeps_the_order_of_time(tmp_path: Path) -> None:
    write_har(tmp_path / "har" / "UCI HAR Dataset")
    data = registry.load("har", tmp_path)
    assert data.sites == ("03", "07", "11")
    assert data.site_train is not None
    assert np.bincount(data.site_train).tolist() == [36, 36, 36]
    assert data.classes == ACTIVITIES
    assert data.shape == (561,)
    assert len(data.y_test) == 0
    first = data.x_train[data.site_train == 0]
    np.testing.assert_allclose(first[:, 0], np.arange(36) / 100)
    np.testing.assert_allclose(first[:, 1], -0.25)
    assert data.y_train[data.site_train == 0][:7].tolist() == [0, 0, 0, 1, 1, 1, 2]


def test_har_is_the_same_from_its_folder_its_archive_and_uci_s_outer_archive(tmp_path: Path) -> None:
    folder = write_har(tmp_path / "a" / "UCI HAR Dataset")
    for place in ("b", "c"):
        (tmp_path / place).mkdir()
    inner = zipped(folder, tmp_path / "b" / "UCI HAR Dataset.zip")
    with zipfile.ZipFile(tmp_path / "c" / "human+activity+recognition+using+smartphones.zip", "w") as outer:
        outer.write(inner, inner.name)
        outer.writestr("UCI HAR Dataset.names", "notes")
    prints = [registry.load("har", tmp_path / place).fingerprint for place in "abc"]
    assert prints[0] == prints[1] == prints[2]


def test_a_bout_is_not_divided_between_training_and_held_out_windows(tmp_path: Path) -> None:
    write_har(tmp_path / "UCI HAR Dataset")
    asked = {"data.dir": str(tmp_path), "data.group": "bout", "data.folds": 2}
    data = load_data(load("har", asked))
    assert data.group_train is not None
    assert len(set(data.group_train.tolist())) == 3 * 12
    for fold in (0, 1):
        parts, held = divide(data, load("har", {**asked, "data.fold": fold}))
        for part, out in zip(parts, held, strict=True):
            assert not set(data.group_train[part].tolist()) & set(data.group_train[out].tolist())
            assert np.bincount(data.y_train[out], minlength=6).tolist() == [3] * 6  # one of an activity's two bouts
    with pytest.raises(UserError, match=r"data\.group = 'person' is not known of har"):
        registry.load("har", tmp_path, {"group": "person"})


def test_wrong_har_files_are_named(tmp_path: Path) -> None:
    folder = write_har(tmp_path / "UCI HAR Dataset")
    np.savetxt(folder / "test" / "y_test.txt", [1, 2], fmt="%d")
    with pytest.raises(UserError, match="test has 36 windows of 561 numbers, 2 labels and 36 people"):
        registry.load("har", tmp_path)
    (folder / "test" / "y_test.txt").unlink()
    with pytest.raises(UserError, match=r"cannot be read .*y_test\.txt.*fednh data get har"):
        registry.load("har", tmp_path)


# --- FEMNIST ----------------------------------------------------------------------------------------------------------


def write_leaf(file: Path, writers: dict[str, list[int]], shade: float = 1.0) -> None:
    """A file of LEAF's: writers with a sample for each of these labels, whose first pixel is black."""
    file.parent.mkdir(parents=True, exist_ok=True)
    data = {writer: {"x": [[0.0] + [shade] * 783 for _ in labels], "y": labels} for writer, labels in writers.items()}
    content = {"users": list(data), "num_samples": [len(one["y"]) for one in data.values()], "user_data": data}
    file.write_text(json.dumps(content))


def test_femnist_has_a_site_a_writer_who_holds_out_the_test_samples(tmp_path: Path) -> None:
    root = tmp_path / "femnist"
    write_leaf(root / "train" / "a.json", {"f0001_41": [0, 10, 36], "f0002_05": [61] * 4}, shade=0.5)
    write_leaf(root / "train" / "b.json", {"f0000_14": [1, 2, 3, 4]})
    write_leaf(root / "test" / "c.json", {"f0001_41": [10], "f0000_14": [2, 3]})
    config = load("femnist", {"data.dir": str(tmp_path), "partition.min_samples": 1})
    for source in ("the files", "what was kept"):
        data = load_data(config)
        assert data.sites == ("f0000_14", "f0001_41", "f0002_05"), source
        assert [data.classes[k] for k in (0, 9, 10, 35, 36, 61)] == list("09AZaz")
        assert data.shape == (1, 28, 28)
        assert not data.warnings  # A and a are two classes
        parts, held = divide(data, config)
        assert [data.y_train[part].tolist() for part in parts] == [[1, 2, 3, 4], [0, 10, 36], [61] * 4]
        assert [data.y_train[part].tolist() for part in held] == [[2, 3], [10], []]
        assert sorted(set(data.x_train[parts[1]].reshape(-1).tolist())) == [0, 128]
        assert set(data.x_train[parts[0]][:, 0, 0].reshape(-1).tolist()) == {0}
        for file in root.rglob("*.json"):  # the second time they are not needed
            file.unlink()
    assert (tmp_path / "femnist.npz").is_file()


def test_femnist_in_one_folder_holds_out_by_the_usual_share(tmp_path: Path) -> None:
    write_leaf(tmp_path / "femnist" / "data" / "all_data" / "a.json", {"w": [0, 1] * 10, "v": [2, 3] * 10})
    config = load("femnist", {"data.dir": str(tmp_path)})
    _, held = divide(load_data(config), config)
    assert [len(out) for out in held] == [4, 4]
    only = registry.load("femnist", tmp_path, {"sites": ["v"]})
    assert only.sites == ("v",)
    assert set(only.y_train.tolist()) == {2, 3}


def test_wrong_femnist_samples_are_named(tmp_path: Path) -> None:
    write_leaf(tmp_path / "femnist" / "a.json", {"w": [0, 1]}, shade=255.0)
    with pytest.raises(UserError, match=r"a\.json: the samples of w are not 784 numbers from 0 to 1"):
        registry.load("femnist", tmp_path)
    (tmp_path / "femnist" / "a.json").write_text('{"users": [')
    with pytest.raises(
        UserError, match=r"femnist cannot be read .* damaged or incomplete: move it away and get it again"
    ):
        registry.load("femnist", tmp_path)


# --- Camelyon17 -------------------------------------------------------------------------------------------------------


def write_patches(root: Path, size: int = 12) -> None:
    """Five hospitals, two slides each, four patches a slide; a patch is as bright as its number."""
    lines, number = ["patient,node,x_coord,y_coord,tumor,slide,center,split"], 0
    for center in range(5):
        for slide in (2 * center, 2 * center + 1):
            patient, node = f"{slide:03d}", slide % 3
            folder = root / "patches" / f"patient_{patient}_node_{node}"
            folder.mkdir(parents=True)
            for x in range(4):
                file = folder / f"patch_patient_{patient}_node_{node}_x_{x}_y_7.png"
                Image.new("RGB", (size, size), (number, 0, 255)).save(file)
                lines.append(f"{patient},{node},{x},7,{x % 2},{slide},{center},0")
                number += 1
    (root / "metadata.csv").write_text("\n".join(lines) + "\n")


def test_camelyon17_has_a_site_a_hospital_and_keeps_slides_whole(tmp_path: Path) -> None:
    write_patches(tmp_path / "camelyon17_v1.0")
    config = load("camelyon17", {"data.dir": str(tmp_path), "partition.min_samples": 1, "data.holdout": 0.5})
    data = load_data(config)
    assert data.sites == ("0", "1", "2", "3", "4")
    assert data.classes == ("normal", "tumor")
    assert data.x_train[:, 0, 0, 0].tolist() == list(range(40))
    assert data.y_train.tolist() == [0, 1, 0, 1] * 10
    assert data.site_train is not None
    assert data.site_train.tolist() == np.repeat(range(5), 8).tolist()
    parts, held = divide(data, config)
    for part, out in zip(parts, held, strict=True):
        assert len(part) == len(out) == 4  # a slide each
        assert len(set((part // 4).tolist())) == len(set((out // 4).tolist())) == 1


def test_camelyon17_in_another_size_without_a_hospital(tmp_path: Path) -> None:
    write_patches(tmp_path / "camelyon17", size=96)
    assert registry.load("camelyon17", tmp_path).shape == (3, 32, 32)
    data = registry.load("camelyon17", tmp_path, {"size": [24, 24], "without": ["2"], "group": "patient"})
    assert data.shape == (3, 24, 24)
    assert data.sites == ("0", "1", "3", "4")
    assert data.group_train is not None
    assert len(set(data.group_train.tolist())) == 8
    with pytest.raises(UserError, match=r"data\.group = 'doctor' is no column of metadata\.csv; choose from patient"):
        registry.load("camelyon17", tmp_path, {"group": "doctor"})
    next((tmp_path / "camelyon17" / "patches").rglob("*x_3*.png")).write_bytes(b"no picture")
    with pytest.raises(UserError, match="1 of 40 images cannot be read"):
        registry.load("camelyon17", tmp_path)


# --- all of them ------------------------------------------------------------------------------------------------------


def said_by(*words: object) -> str:
    """What a command prints; it succeeds."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.replace("│", " ").split())


def test_a_set_without_a_published_checksum_says_where_it_comes_from(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"femnist cannot be downloaded here: .*preprocess\.sh"):
        registry.download("femnist", tmp_path)
    with pytest.raises(UserError, match=r"camelyon17 is not in the data folder .*: put there .*metadata\.csv.*wilds"):
        registry.load("camelyon17", tmp_path)


@pytest.mark.parametrize("name", NATURAL)
def test_a_run_of_natural_sites_by_name(tmp_path: Path, name: str) -> None:
    write_har(tmp_path / "UCI HAR Dataset")
    write_leaf(tmp_path / "femnist" / "a.json", {"w": [0, 1] * 10, "v": [2, 3] * 10})
    write_patches(tmp_path / "camelyon17")
    listed = said_by("datasets", "--data-dir", tmp_path)
    assert listed.count("natural sites:") == 5
    small = [
        "--rounds",
        1,
        "--set",
        "partition.min_samples=1",
        "--set",
        "participation.rate=1",
        "--set",
        "eval.final=all",
        "--quiet",
    ]
    said_by("run", name, "--data-dir", tmp_path, "--out", tmp_path / "run", *small)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(summary["clients"]) == len(registry.load(name, tmp_path).sites)
