"""TinyImageNet from its folder and from its zip, the cache of the decoded arrays, and damaged copies."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fednh.data.published import tinyimagenet
from fednh.data.sources import npz, registry
from fednh.errors import UserError

WNIDS = ("n02", "n01", "n03")
SHADES = {"n01": 40, "n02": 120, "n03": 200}  # each class has a colour of its own, so that a mix-up would show


def jpeg(shade: int, mode: str = "RGB", side: int = 64) -> bytes:
    buffer = io.BytesIO()
    colour = (shade, shade // 2, 10) if mode == "RGB" else shade
    Image.new(mode, (side, side), colour).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def contents() -> dict[str, bytes]:
    """The files of a tiny set: three classes, two training and one validation image each; one image is grey."""
    files = {
        "wnids.txt": "\n".join(WNIDS).encode(),
        "words.txt": b"n00\tentity\nn01\tcrane\nn02\tgoldfish, Carassius auratus\nn03\tcrane",
    }
    lines = []
    for i, (wnid, shade) in enumerate(SHADES.items()):
        files[f"train/{wnid}/images/{wnid}_0.JPEG"] = jpeg(shade)
        files[f"train/{wnid}/images/{wnid}_1.JPEG"] = jpeg(shade, "L" if wnid == "n03" else "RGB")
        files[f"train/{wnid}/{wnid}_boxes.txt"] = b"not read"
        files[f"val/images/val_{i}.JPEG"] = jpeg(shade)
        lines.append(f"val_{i}.JPEG\t{wnid}\t0\t0\t63\t63")
    files["val/val_annotations.txt"] = "\n".join(lines).encode() + b"\n"
    return files


def write(folder: Path, files: dict[str, bytes], zipped: bool) -> Path:
    if zipped:
        path = folder / "tiny-imagenet-200.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in files.items():
                archive.writestr(f"tiny-imagenet-200/{name}", content)
        return path
    for name, content in files.items():
        path = folder / "tiny-imagenet-200" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder / "tiny-imagenet-200"


BOTH = pytest.mark.parametrize("zipped", [False, True], ids=["folder", "zip"])


@BOTH
def test_images_and_labels_belong_together(tmp_path: Path, zipped: bool) -> None:
    found = tinyimagenet.read(write(tmp_path, contents(), zipped))
    assert found.x_train.shape == (6, 64, 64, 3)
    assert found.y_train.tolist() == [0, 0, 1, 1, 2, 2]
    assert found.y_test.tolist() == [1, 0, 2]
    for images, labels in ((found.x_train, found.y_train), (found.x_test, found.y_test)):
        expected = [SHADES[WNIDS[label]] for label in labels]
        np.testing.assert_allclose(images[..., 0].mean(axis=(1, 2)), expected, atol=3)
    grey = found.x_train[5]
    assert (grey[..., 0] == grey[..., 2]).all()
    assert (found.x_train[4, ..., 2] < 30).all()


@BOTH
def test_class_names_are_first_words_told_apart_by_id(tmp_path: Path, zipped: bool) -> None:
    files = contents()
    found = tinyimagenet.read(write(tmp_path, files, zipped))
    assert found.classes == ("goldfish", "crane (n01)", "crane (n03)")


@BOTH
def test_the_decoded_arrays_are_kept_and_used_the_next_time(tmp_path: Path, zipped: bool) -> None:
    source = write(tmp_path, contents(), zipped)
    first = registry.load("tinyimagenet", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {source.name, "tinyimagenet.npz"}
    source.rename(tmp_path / "gone")
    again = registry.load("tinyimagenet", tmp_path)
    np.testing.assert_array_equal(first.x_train, again.x_train)
    np.testing.assert_array_equal(first.y_test, again.y_test)
    assert first.classes == again.classes == ("goldfish", "crane (n01)", "crane (n03)")
    assert again.augment == "crop_flip"
    assert again.mean == (0.485, 0.456, 0.406)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tinyimagenet.read(write(tmp_path, contents(), zipped=False))
    file = tmp_path / "tiny-imagenet-200" / "wnids.txt"  # no folder
    assert not tinyimagenet.save(found, file / "tinyimagenet.npz")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert len(registry.load("tinyimagenet", tmp_path).y_train) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-imagenet-200"]  # no half-written file stays behind


def test_the_cache_is_an_ordinary_npz(tmp_path: Path) -> None:
    found = tinyimagenet.read(write(tmp_path, contents(), zipped=False))
    assert tinyimagenet.save(found, tmp_path / "a.npz")
    np.testing.assert_array_equal(npz.read(tmp_path / "a.npz").x_train, found.x_train)


def test_more_images_than_one_task_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinyimagenet, "AT_A_TIME", 4)  # six training images: a full task and a rest
    test_images_and_labels_belong_together(tmp_path, zipped=True)


DAMAGE: dict[str, tuple[str, bytes | None]] = {
    "no wnids": ("wnids.txt", None),
    "empty wnids": ("wnids.txt", b""),
    "wnids not text": ("wnids.txt", b"\xff\xfe\x00"),
    "no annotations": ("val/val_annotations.txt", None),
    "unknown class": ("val/val_annotations.txt", b"val_0.JPEG\tn01\t0\nval_1.JPEG\tn99\t0"),
    "no class": ("val/val_annotations.txt", b"val_0.JPEG n01"),
    "outside": ("val/val_annotations.txt", b"../../wnids.txt\tn01\t0"),
    "missing image": ("val/images/val_2.JPEG", None),
    "truncated image": ("train/n01/images/n01_1.JPEG", jpeg(9)[:300]),
    "empty image": ("train/n01/images/n01_1.JPEG", b""),
}


@pytest.mark.parametrize(("name", "content"), DAMAGE.values(), ids=DAMAGE.keys())
@BOTH
def test_damaged(tmp_path: Path, name: str, content: bytes | None, zipped: bool) -> None:
    files = contents()
    if content is None:
        del files[name]
    else:
        files[name] = content
    path = write(tmp_path, files, zipped)
    with pytest.raises(UserError) as caught:
        registry.load("tinyimagenet", tmp_path)
    text = str(caught.value)
    assert text.startswith(f"{path} is damaged (its SHA-256" if zipped else f"{path} cannot be read (")
    assert text.endswith("move it away and run `fednh data get tinyimagenet`")
    assert list(tmp_path.iterdir()) == [path]  # nothing is kept of it


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    files = contents()
    files["train/n01/images/n01_1.JPEG"] = b"GIF"
    write(tmp_path, files, zipped=False)
    with pytest.raises(UserError, match=r"train/n01/images/n01_1\.JPEG: "):
        registry.load("tinyimagenet", tmp_path)


@BOTH
def test_a_class_without_images(tmp_path: Path, zipped: bool) -> None:
    files = {name: content for name, content in contents().items() if not name.startswith("train/n02/images")}
    with pytest.raises(UserError, match="no images of n02; it is incomplete"):
        tinyimagenet.read(write(tmp_path, files, zipped))


def test_damaged_zip(tmp_path: Path) -> None:
    path = write(tmp_path, contents(), zipped=True)
    whole = path.read_bytes()
    at = whole.index(jpeg(SHADES["n01"])) + 400
    flipped = whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]
    for data in (b"", b"no zip", whole[: len(whole) // 2], flipped):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"tiny-imagenet-200\.zip is damaged"):
            registry.load("tinyimagenet", tmp_path)
