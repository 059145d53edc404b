"""What makes results too good is told before training: identifiers among the features, near copies across a split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fednh.data.dataset import Dataset
from fednh.data.inspection import inspect, near_copies, number_identifiers, word_identifiers
from fednh.data.sources.registry import load
from tests.helpers.process import fednh

RNG = np.random.default_rng(0)


def own(source: str, **options: Any) -> Dataset:
    return load(source, Path("unused"), options)


# --- identifiers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "name", "why"),
    [
        (np.arange(50), "a", "rises or falls"),
        (20_000_000 + np.arange(50)[::-1], "a", "rises or falls"),
        (np.cumsum(RNG.random(40)), "seconds", "rises or falls"),
        (RNG.permutation(60), "a", "a number of its own in every row"),
        (np.arange(60) // 3 + RNG.permutation(60) % 2, "patient_id", "is called so"),
        (RNG.integers(0, 10**6, 60), "PatientID", "is called so"),
        (RNG.integers(18, 90, 60), "age", None),
        (RNG.integers(0, 10**6, 60), "income", None),
        (RNG.integers(15, 60, 200), "body_mass_index", None),
        (RNG.normal(size=60), "id", None),
        (np.repeat([0, 1, 2], 20), "id", None),  # three values do not name anybody
        (np.arange(10), "a", None),  # too few rows to say
        (np.arange(60) // 3, "a", "rises or falls"),  # three visits of every patient
        (np.sort(RNG.integers(0, 30, 200)), "a", None),
    ],
)
def test_numbers_that_look_like_identifiers(values: np.ndarray, name: str, why: str | None) -> None:
    found = number_identifiers(values.astype(np.float64), name)
    assert found == why or (why is not None and found is not None and why in found)


def test_numbers_that_begin_anew_at_every_site() -> None:
    site = np.repeat([0, 1], 40)
    order = np.concatenate([RNG.permutation(40), RNG.permutation(40)])
    assert number_identifiers(order.astype(float), "a") is None
    assert number_identifiers(order.astype(float), "a", site) == "numbers the rows of every site"
    assert number_identifiers(np.tile(np.arange(40) // 8, 2).astype(float), "a", site) is None


def test_words_that_look_like_identifiers() -> None:
    assert word_identifiers(30, 40, "street") == "has a word of its own in most rows"
    assert word_identifiers(25, 100, "case_id") == "is called so"
    assert [
        word_identifiers(3, 100, "case_id"),
        word_identifiers(25, 100, "town"),
        word_identifiers(9, 10, "town"),
    ] == [None] * 3


def test_an_increasing_number_in_a_sorted_file_is_told_by_inspect_and_run(tmp_path: Path) -> None:
    """The features are noise: without the number nothing can be learned, with it everything."""
    rows = [f"{30_000_001 + k},{RNG.normal():.4f},{RNG.normal():.4f},{'ab'[k // 30]}" for k in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["record,a,b,label", *rows]))
    source = f"csv:{tmp_path / 't.csv'}"
    seen = fednh(["inspect", "--data", source, "--format", "json"], tmp_path / "a")
    words = (
        "columns that look like identifiers, which a model learns by heart: 'record' (rises or falls from row to row);"
    )
    assert sum(words in warning for warning in json.loads(seen.stdout)["warnings"]) == 1
    command = ["run", "--data", source, "--partition", "iid", "--clients", "2", "--rounds", "1", "--method", "fedavg"]
    ran = fednh([*command, "--out", str(tmp_path / "r")], tmp_path / "b")
    assert ran.code == 0, ran.stderr
    assert " ".join(ran.stdout.split()).count(words) == 1
    assert own(source, ignore=["record"]).warnings == ()
    assert own(source, group="record").warnings == ()  # then it is no feature
    assert own(source, columns={"record": "number", "a": "number"}).warnings == ()  # somebody chose it


def test_features_without_names(tmp_path: Path) -> None:
    x = np.stack([RNG.normal(size=40), np.arange(40)], axis=1)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=np.arange(40) // 20)
    (warning,) = own(f"npz:{tmp_path / 'a.npz'}").warnings
    assert "features that look like identifiers, which a model learns by heart: '1' (rises or falls" in warning


# --- near copies ---------------------------------------------------------------------------------------------------


def test_rows_that_are_nearly_the_same_on_both_sides_of_a_split(tmp_path: Path) -> None:
    """Of 40 test rows 8 are training rows measured again, one is an exact copy; gaps and words must be the same."""
    train = RNG.normal(10, 3, size=(120, 4))
    test = RNG.normal(10, 3, size=(40, 4))
    test[:8] = train[:8] + RNG.normal(0, 0.01, size=(8, 4))
    test[8:10] = train[8:10] * 1.0001
    lines = ["a,b,c,d,word,label,split"]
    for split, rows in (("train", train), ("test", test)):
        for k, row in enumerate(rows):
            numbers = [f"{value:.5f}" for value in row]
            if split == "test" and k == 8:
                numbers[0] = ""
            word = "other" if split == "test" and k == 9 else "same"
            lines.append(",".join([*numbers, word, "xy"[k % 2], split]))
    lines.append(lines[50].replace("train", "test"))
    (tmp_path / "t.csv").write_text("\n".join(lines))
    found = inspect(own(f"csv:{tmp_path / 't.csv'}"))["warnings"]
    assert any("1 test samples are exact copies of training samples" in words for words in found)
    near = [words for words in found if "nearly copies" in words]
    assert len(near) == 1
    assert near[0].startswith("8 of 40 test samples that were compared with 120 training samples are nearly copies")


def picture(seed: int, size: int = 48) -> Image.Image:
    """A smooth picture with some detail, as photographs have."""
    rng = np.random.default_rng(seed)
    rough = Image.fromarray(rng.integers(0, 255, (6, 6, 3), np.uint8)).resize((size, size), Image.Resampling.BICUBIC)
    return Image.fromarray((np.asarray(rough, float) + rng.normal(0, 8, (size, size, 3))).clip(0, 255).astype(np.uint8))


def test_images_that_were_saved_again_on_the_other_side_of_a_split(tmp_path: Path) -> None:
    for part, seeds in (("train", range(30)), ("test", range(30, 42))):
        for k in seeds:
            folder = tmp_path / part / "ab"[k % 2]
            folder.mkdir(parents=True, exist_ok=True)
            picture(k).save(folder / f"{k}.png")
    folder = tmp_path / "test" / "a"
    picture(1).save(folder / "again.jpg", quality=70)
    picture(2).resize((40, 40)).save(folder / "smaller.png")
    picture(3).point(lambda v: v * 0.8 + 10).save(folder / "darker.png")
    picture(4).save(folder / "same.png")
    found = inspect(own(f"folder:{tmp_path}", size=[32, 32]))["warnings"]
    assert any(words.startswith("1 test samples are exact copies") for words in found)
    near = [words for words in found if "nearly copies" in words]
    assert len(near) == 1
    assert near[0].startswith("3 of 15 test samples that were compared with 30 training samples are nearly copies")


def test_a_folder_that_is_not_divided_yet(tmp_path: Path) -> None:
    for k in range(12):
        (tmp_path / "ab"[k % 2]).mkdir(exist_ok=True)
        picture(k).save(tmp_path / "ab"[k % 2] / f"{k}.png")
    picture(0).save(tmp_path / "a" / "again.jpg", quality=80)
    seen = fednh(["inspect", "--data", f"folder:{tmp_path}", "--format", "json"], tmp_path.parent / "io")
    said = json.loads(seen.stdout)["warnings"]
    assert any(
        "2 of 13 training samples that were compared with 13 others are nearly copies" in words for words in said
    )


def test_a_large_set_is_sampled_and_chance_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in two dimensions are close by chance; not all of many are compared."""
    monkeypatch.setattr("fednh.data.inspection.MOST", 300)
    monkeypatch.setattr("fednh.data.inspection.MOST_OTHERS", 2_000)
    x, others = (RNG.normal(size=(size, 2)).astype(np.float32) for size in (400, 5_000))
    assert near_copies(x, np.arange(400), others, np.arange(5_000), {}) == (0, 300, 2_000)
    monkeypatch.setattr("fednh.data.inspection.MOST_VALUES", 200)
    assert near_copies(x, np.arange(400), others, np.arange(5_000), {}) == (0, 100, 100)
