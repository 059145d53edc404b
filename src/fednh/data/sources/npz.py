"""Reads .npz files with the arrays x_train, y_train, x_test and y_test. What is accepted, and nothing else:

- images as uint8 (N, H, W) or (N, H, W, C). Images of any other number type are refused rather than guessed at, because
  0..1 and 0..255 cannot be told apart safely;
- vectors as a float or integer array (N, F), which becomes float32;
- labels of shape (N,) or (N, 1): of any integer type or floats that are whole numbers, counted from 0, or names;
- optionally `classes`, an array of strings that names the classes;
- optionally `site_train`, the site of every training sample as a number or a name, and `sites`, the numbers' names;
- optionally an array that data.group names, with the group of every training sample as a number or a name;
- x_test and y_test may both be absent: clients then hold out some of their own samples;
- features that `fednh features` wrote, with the `recipe` by which they were computed;
- MedMNIST's key names (train_images, train_labels, test_images, test_labels); its validation part is left out.

Pickled objects are never loaded.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednh.data.dataset import FEATURES, Arrays, Dataset, Inputs, Labels
from fednh.data.scaling import measure
from fednh.data.sources import Source
from fednh.data.sources.columns import numbered, numbered_sites, spelling
from fednh.data.sources.images import MEAN, STD
from fednh.errors import DataError, UserError
from fednh.io.files import atomic_write, expanded

KEYS = ("x_train", "y_train", "x_test", "y_test")
MEDMNIST_KEYS = ("train_images", "train_labels", "test_images", "test_labels")
INPUTS = ("x", "x_test", "test_images", "images")  # what inputs without labels may be called
RECIPE = "recipe"  # how the vectors of the file were computed, as JSON
OF_FEATURES = (RECIPE, "views", "site_test", "group_train")  # arrays beside KEYS, classes, sites and site_train
MOST_CHANNELS = 4  # beyond this a last axis is taken for a width, see `_images`


def dataset(name: str, path: Path, classes: Sequence[str] = (), group: str | None = None) -> Dataset:
    """The file at `path` as a data set; `classes` are names agreed beforehand, `group` is the array of groups."""
    wanted = [*KEYS, *MEDMNIST_KEYS, "classes", "sites", "site_train", *OF_FEATURES, *([group] if group else [])]
    members = _load(path, wanted)
    if RECIPE not in members:
        return from_arrays(name, str(path), members, classes, group)
    return _features(str(path), members, from_arrays(name, str(path), members, classes, _group_of(members, group)))


def write_features(path: Path, data: Dataset) -> None:
    """Write features with labels, sites and groups, and how they were computed; `npz:` reads the same data set."""
    about = {key: value for key, value in data.preprocessing.items() if key != "kind"}
    arrays: dict[str, NDArray[Any] | None] = {
        "x_train": data.x_train,
        "y_train": data.y_train,
        "x_test": data.x_test if len(data.y_test) else None,
        "y_test": data.y_test if len(data.y_test) else None,
        "classes": np.array(data.classes, str),
        "sites": np.array(data.sites, str) if data.sites else None,
        "site_train": data.site_train,
        "site_test": data.site_test if len(data.y_test) else None,
        "group_train": data.group_train,
        "views": data.views,
        RECIPE: np.array(json.dumps(about, sort_keys=True)),
    }
    with atomic_write(path) as place, place.open("wb") as file:
        np.savez(file, **{key: array for key, array in arrays.items() if array is not None})  # type: ignore[arg-type]


def _group_of(members: Mapping[str, Any], chosen: str | None) -> str | None:
    """The array of groups in a file of features: the one chosen, or that of the data that they were computed from."""
    return chosen or ("group_train" if "group_train" in members else None)


def _features(where: str, members: Mapping[str, NDArray[Any]], data: Dataset) -> Dataset:
    """The vectors of a file as the features that its recipe describes: they are used as they are."""
    about = _recipe(where, members)
    views, site = members.get("views"), members.get("site_test")
    wrong = views is not None and (views.ndim != 3 or views.shape[1:] != data.x_train.shape or len(views) == 0)
    wrong |= site is not None and (site.shape != data.y_test.shape or site.dtype.kind not in "iu")
    wrong |= bool(data.sites) and ("sites" not in members or members["site_train"].dtype.kind not in "iu")
    if data.is_image or about["backbone"].get("dim") != data.shape[0] or wrong:
        raise DataError(f"{where} does not hold the features that its recipe describes; make it again")
    return replace(
        data,
        mean=(0.0,),
        std=(1.0,),
        fitted=False,
        sites=tuple(map(str, members["sites"])) if data.sites else (),  # in the order to which the numbers refer
        site_train=members["site_train"].astype(np.int64) if data.sites else None,
        site_test=None if site is None else site.astype(np.int64),
        preprocessing={"kind": FEATURES, **about},
        views=None if views is None else _vectors(f"{where}: views", views),
    )


def _recipe(where: str, members: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    try:
        about = json.loads(str(members[RECIPE]))
        if not isinstance(about["backbone"], dict) or not isinstance(about["inputs"], dict):
            raise TypeError
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{where}: {RECIPE} is not what `fednh features` writes; make the file again") from error
    return {key: about[key] for key in ("backbone", "inputs")}


def _same_features(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two recipes give the same features; where the weights lay does not matter."""
    return {**one, "file": None} == {**other, "file": None}


def from_arrays(
    name: str, where: str, members: dict[str, Any], agreed: Sequence[str] = (), group: str | None = None
) -> Dataset:
    """Named arrays as a data set: the four of `KEYS`, of which the test ones may be absent, and optionally `classes`,
    `site_train` (site numbers or names), `sites` (the names of the numbers) and `group`, with every training sample's
    group.

    Normalised by the mean and deviation of the training part. Images of natural sites are not: no site's images
    should affect how another site's are normalised.
    """
    members, agreed = _numbered_labels(where, {key: np.asarray(value) for key, value in members.items()}, agreed)
    x_train, y_train, x_test, y_test, named = _checked(where, members, agreed)
    classes = tuple(agreed) or named
    if classes is None:
        classes = tuple(str(c) for c in range(_count_classes(where, y_train, y_test)))
    sites, site_train = _sites(where, members, len(y_train))
    image = x_train.ndim == 4
    fitted = not (image and sites)
    scale = 255.0 if image else 1.0
    channels = x_train.shape[-1]
    mean, std = measure(x_train, scale) if fitted else ((MEAN,) * channels, (STD,) * channels)
    return Dataset(
        name,
        x_train,
        y_train,
        x_test,
        y_test,
        classes,
        mean,
        std,
        scale,
        sites=sites,
        site_train=site_train,
        group_train=None if group is None else _groups(where, members, group, len(y_train)),
        fitted=fitted,
    )


def _numbered_labels(
    where: str, arrays: dict[str, NDArray[Any]], agreed: Sequence[str]
) -> tuple[dict[str, NDArray[Any]], Sequence[str]]:
    """The arrays with classes as numbers, and the names of the classes where labels are names; sites' names as text."""
    if "site_train" in arrays:
        arrays["site_train"] = _as_text(where, "site_train", arrays["site_train"])
    labels = [key for key in (KEYS[1], KEYS[3], MEDMNIST_KEYS[1], MEDMNIST_KEYS[3]) if key in arrays]
    names = {key: _as_text(where, key, arrays[key]) for key in labels}
    if not any(part.dtype.kind == "U" for part in names.values()):
        return arrays, agreed
    known = agreed or arrays.get("classes", np.array([], str)).tolist()
    numbers, classes = numbered([str(name) for part in names.values() for name in part.reshape(-1)], known, where)
    parts = np.split(numbers, np.cumsum([part.size for part in names.values()])[:-1])
    return {**arrays, **dict(zip(names, parts, strict=True))}, classes


def _as_text(where: str, key: str, values: NDArray[Any]) -> NDArray[Any]:
    """Names as text, one a sample; numbers as they are."""
    if values.dtype.kind not in "bOSU":
        return values
    plain = (values.astype(str) if values.dtype.kind == "S" else values).reshape(-1).tolist()
    wrong = [value for value in plain if not isinstance(value, str | int)]
    if wrong:
        raise DataError(f"{where}: {key} holds {wrong[0]!r}; give every sample a name or a number")
    return np.array([spelling(value) for value in plain], str)


def read(path: Path) -> Arrays:
    """The arrays of the file, checked, with images as uint8 (N, H, W, C) and vectors as float32 (N, F)."""
    arrays = _checked(str(path), _load(path, [*KEYS, *MEDMNIST_KEYS, "classes"]), ())
    if len(arrays.y_test) == 0:
        raise DataError(f"{path} lacks x_test, y_test; a published data set has them")
    return arrays


def _groups(where: str, arrays: dict[str, NDArray[Any]], name: str, samples: int) -> Labels:
    """Every training sample's group as a number."""
    if name not in arrays:
        raise DataError(f"data.group: {where} has no array {name!r} with the group of every training sample")
    given = arrays[name].reshape(-1)
    if len(given) != samples or given.dtype.kind not in "Uiu":
        raise DataError(
            f"data.group: {where}: {name} holds {len(given)} entries of type {given.dtype}; it needs a name or a whole "
            f"number for each of {samples} training samples"
        )
    return np.unique(given, return_inverse=True)[1].astype(np.int64)


def _load(path: Path, wanted: Sequence[str]) -> dict[str, NDArray[Any]]:
    """The wanted arrays that a file has; the training arrays must be there."""
    with _opened(path) as stored:
        _keys(str(path), stored.files)
        return {key: np.asarray(stored[key]) for key in wanted if key in stored.files}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The arrays of a file by name; whatever is wrong with it is a sentence."""
    try:
        if not path.exists():
            raise DataError(f"{path} does not exist; check the path of the .npz file")
        if path.is_dir():
            raise DataError(f"{path} is a folder; give the path of an .npz file")
        if not zipfile.is_zipfile(path):  # np.load would take it for a pickle and say so
            raise ValueError("it is not a zip file")
        with np.load(path, allow_pickle=False) as stored:
            yield stored
    except UserError:
        raise
    except Exception as error:  # a damaged zip or header fails in many ways
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise DataError(
            f"{path} cannot be read as an .npz file ({reason}); it is damaged, incomplete or something else: "
            "write it again with numpy.savez"
        ) from error


def _keys(where: str, members: Collection[str]) -> tuple[str, ...]:
    """Which names it uses; the two training arrays must be there, and of the test arrays both or none."""
    keys = MEDMNIST_KEYS if "x_train" not in members and "train_images" in members else KEYS
    needed = keys if keys[2] in members or keys[3] in members else keys[:2]
    if missing := [key for key in needed if key not in members]:
        held = ", ".join(sorted(members)) or "nothing"
        raise DataError(f"{where} lacks {', '.join(missing)}; it needs {', '.join(KEYS)} and holds {held}")
    return needed


def _checked(where: str, arrays: dict[str, NDArray[Any]], agreed: Sequence[str]) -> Arrays:
    keys = _keys(where, arrays)
    parts = [
        (_inputs(f"{where}: {x}", arrays[x]), _labels(f"{where}: {y}", arrays[y]))
        for x, y in (keys[:2], keys[2:])[: len(keys) // 2]
    ]
    x_train, y_train = parts[0]
    x_test, y_test = parts[1] if len(parts) > 1 else (x_train[:0], y_train[:0])
    for x, y, (key_x, key_y) in ((x_train, y_train, keys[:2]), (x_test, y_test, keys[-2:])):
        if len(x) != len(y):
            raise DataError(f"{where}: {key_x} has {len(x)} samples but {key_y} has {len(y)} labels")
    if x_train.shape[1:] != x_test.shape[1:] or x_train.dtype != x_test.dtype:
        raise DataError(
            f"{where}: {keys[0]} holds {x_train.dtype} samples of shape {x_train.shape[1:]}, "
            f"{keys[2]} {x_test.dtype} samples of shape {x_test.shape[1:]}; both parts must be alike"
        )
    if y_train.min() == y_train.max() and len(agreed) < 2:
        raise DataError(f"{where}: {keys[1]} holds only class {y_train[0]}; training needs at least two classes")
    classes = None
    if agreed or "classes" in arrays:
        names = np.array(agreed, dtype=str) if agreed else arrays["classes"]
        classes = _class_names(where, names, _count_classes(where, y_train, y_test, len(names)))
    return Arrays(x_train, y_train, x_test, y_test, classes)


def _sites(where: str, arrays: dict[str, NDArray[Any]], samples: int) -> tuple[tuple[str, ...], Labels | None]:
    """Site names in their order, and every training sample's number."""
    if "site_train" not in arrays:
        return (), None
    given = arrays["site_train"].reshape(-1)
    if len(given) != samples:
        raise DataError(f"{where}: site_train has {len(given)} entries for {samples} training samples")
    if given.dtype.kind == "U":
        site_names = [str(name) for name in given]
    else:
        numbers = _labels(f"{where}: site_train", given)
        names = [str(n) for n in arrays["sites"]] if "sites" in arrays else [str(n) for n in range(numbers.max() + 1)]
        if numbers.max() >= len(names):
            raise DataError(f"{where}: site_train holds {numbers.max()}, but sites has {len(names)} names")
        site_names = [names[n] for n in numbers]
    return numbered_sites(site_names, np.zeros(samples, bool))


def _inputs(where: str, x: NDArray[Any]) -> Inputs:
    if x.size == 0:
        raise DataError(f"{where} is empty (shape {x.shape}); it must hold at least one sample")
    if x.dtype.kind not in "fiu":
        raise DataError(f"{where} is of type {x.dtype}; save uint8 images or float vectors")
    if x.ndim == 2:
        return _vectors(where, x)
    if x.ndim in (3, 4):
        return _images(where, x)
    raise DataError(f"{where} has shape {x.shape}; images are (N, H, W) or (N, H, W, C), vectors (N, F)")


def _vectors(where: str, x: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # what overflows becomes infinite and is refused in the next line
        vectors = x.astype(np.float32)
    if not np.isfinite(vectors).all():
        raise DataError(f"{where} holds NaN or infinite values; clean or impute them first")
    return vectors


def _images(where: str, x: NDArray[Any]) -> NDArray[np.uint8]:
    if x.dtype != np.uint8:
        raise DataError(
            f"{where} holds images as {x.dtype}; save them as uint8 from 0 to 255, for values in 0..1 with "
            "(x * 255).round().astype('uint8')"
        )
    if x.ndim == 4 and x.shape[1] <= MOST_CHANNELS < x.shape[3]:
        raise DataError(
            f"{where} has shape {x.shape}, channels first; save x.transpose(0, 2, 3, 1), that is (N, H, W, C)"
        )
    images = x if x.ndim == 4 else x[..., np.newaxis]
    return np.ascontiguousarray(images)


def _labels(where: str, y: NDArray[Any]) -> Labels:
    if y.size == 0:
        raise DataError(f"{where} is empty (shape {y.shape}); it must hold one label a sample")
    if y.dtype.kind not in "fiu":
        raise DataError(f"{where} is of type {y.dtype}; labels must be whole numbers counted from 0")
    if not (y.ndim == 1 or (y.ndim == 2 and y.shape[1] == 1)):
        raise DataError(f"{where} has shape {y.shape}; one label a sample is needed, shape (N,) or (N, 1)")
    y = y.reshape(-1)
    if y.dtype.kind == "f" and not (np.isfinite(y).all() and (y == np.floor(y)).all()):
        raise DataError(f"{where} holds labels with fractions or NaN; labels must be whole numbers counted from 0")
    if y.min() < 0:
        raise DataError(f"{where} holds the negative label {int(y.min())}; labels are counted from 0")
    if int(y.max()) > np.iinfo(np.int32).max:
        raise DataError(f"{where} holds the label {int(y.max())}; number the classes 0, 1, 2 and so on")
    return y.astype(np.int64)


def _count_classes(where: str, y_train: Labels, y_test: Labels, named: int = 0) -> int:
    count = int(max(y_train.max(), y_test.max(initial=0))) + 1
    if count > max(len(y_train) + len(y_test), named):
        raise DataError(
            f"{where} holds the label {count - 1}, which makes more classes than samples; number the classes 0, 1, 2 "
            "and so on"
        )
    return count


def _class_names(where: str, names: NDArray[Any], count: int) -> tuple[str, ...]:
    if names.ndim != 1 or names.dtype.kind != "U":
        raise DataError(f"{where}: classes must be a list of strings, but is {names.dtype} of shape {names.shape}")
    if len(names) < count:
        raise DataError(f"{where}: classes names {len(names)} classes, but the labels go up to {count - 1}")
    return tuple(str(name) for name in names)


@dataclass(frozen=True)
class Npz(Source):
    prefix = "npz"
    address = "FILE"
    example = "data/own.npz"
    help = "arrays x_train, y_train and perhaps x_test, y_test, site_train"
    suffixes = (".npz",)

    def read(self, name: str, address: str) -> Dataset:
        return dataset(name, expanded(address), self.classes or (), self.group)

    def unlabelled(
        self, path: Path, shape: tuple[int, ...], preprocessing: Mapping[str, Any]
    ) -> Iterator[NDArray[Any]]:
        with _opened(path) as stored:
            keys = [key for key in INPUTS if key in stored.files] or stored.files[:1] * (len(stored.files) == 1)
            if not keys:
                raise DataError(f"{path} holds {', '.join(stored.files)}; the inputs should be called x")
            wanted = preprocessing.get("backbone")
            if RECIPE in stored.files and wanted and not _same_features(_recipe(str(path), stored)["backbone"], wanted):
                raise DataError(f"{path} holds features of another network, or of images of another size")
            array: NDArray[Any] = stored[keys[0]]
        yield array
