"""The Python API. `import fednh` offers what `__all__` names; every function has a command of the same name."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rich.console import Console
from torch import nn

from fednh.backends import run_maker
from fednh.callbacks import Callback, CallbackList
from fednh.callbacks.screen import screen_for
from fednh.config import Config, load, validate, with_settings
from fednh.config.options import SHORT_OPTIONS
from fednh.data.dataset import Dataset
from fednh.data.sources.memory import is_given
from fednh.data.sources.registry import taken
from fednh.errors import ConfigError, DataError, Interrupted, Notice, Refused, RunError, UserError
from fednh.extras import data_frame, import_path
from fednh.federated.setup import build_federation, fingerprint_of
from fednh.inference.model import Model, load_model
from fednh.io.files import path_of
from fednh.methods import METHODS, Method
from fednh.methods.base import UploadSpec
from fednh.metric_names import HELD_SHARE, TEST_SET, RoundRecord, RunSummary
from fednh.report.load import load_run as _load_run
from fednh.runs import fingerprint
from fednh.runs.layout import new_folder
from fednh.runs.run_folder import RunFolder, read_config
from fednh.text import html_table, plural

RUN = "the folder of a run"
KEYWORDS = {**{name: option.key for name, option in SHORT_OPTIONS.items()}, "lr": "train.lr"}  # keyword -> setting

if TYPE_CHECKING:
    import pandas as pd

    from fednh.experiments.recommend import Recommendation
    from fednh.inference.metrics import Assessment
    from fednh.inference.personalize import Personalised

__all__ = [
    "Callback",
    "Config",
    "ConfigError",
    "DataError",
    "Dataset",
    "Interrupted",
    "Method",
    "Model",
    "Refused",
    "Result",
    "RunError",
    "UploadSpec",
    "UserError",
    "evaluate",
    "export",
    "load_model",
    "load_run",
    "personalize",
    "recommend",
    "resume",
    "run",
    "sweep",
]


@dataclass(frozen=True)
class Result:
    """A finished run."""

    path: Path
    config: Config
    summary: RunSummary  # the final metrics: gm, pm_v, pm_l, per_class, clients, ...
    metrics: list[RoundRecord] = field(repr=False)  # a dict for every round

    @cached_property
    def clients(self) -> list[int]:
        """The clients that have a personal model."""
        return [int(person["client"]) for person in self.summary["clients"]]

    def __repr__(self) -> str:
        """One line: what was run, for how long, and its main metrics."""
        metrics = [f"{name} {value}" for name, value in self._metrics().items()]
        return f"<Result: {', '.join([self._what(), *metrics])}; {self.path}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return html_table({"run": self._what(), **self._metrics(), "folder": str(self.path)})

    def _what(self) -> str:
        return f"{self.summary['method']} on {self.summary['data']}, {plural(self.summary['rounds'], 'round')}"

    def _metrics(self) -> dict[str, str]:
        shown = {**TEST_SET, HELD_SHARE: "own accuracy"}
        values = {name: self.summary.get(key) for key, name in shown.items()}
        return {name: f"{value:.1f}" for name, value in values.items() if value is not None}

    def to_frame(self) -> pd.DataFrame:
        """The metrics as a pandas data frame, a row for every round."""
        return data_frame(self.metrics, "round", "metrics")

    def model(self, client: int | str | None = None, weights: str | Path | None = None) -> Model:
        """The global model, or that client's personal one, by its number or its site's name; see `load_model`."""
        return load_model(self.path, client, weights)


def run(
    config: str | Path | Mapping[str, Any] | Config | None = None,
    *,
    method: str | type[Method] | Method | Mapping[str, Any] | None = None,
    model: str | type[nn.Module] | Mapping[str, Any] | None = None,
    data: Any = None,
    data_dir: str | Path | None = None,
    partition: str | Mapping[str, Any] | None = None,
    beta: float | None = None,
    clients: int | None = None,
    participation: float | Mapping[str, Any] | None = None,
    rounds: int | None = None,
    epochs: int | None = None,
    lr: float | None = None,
    seed: int | None = None,
    workers: int | None = None,
    engine: str | None = None,
    device: str | None = None,
    callbacks: Sequence[Callback] = (),
    backend: str = "simulator",
    address: str | None = None,
    out: str | Path | None = None,
    progress: bool = False,
    **settings: Any,
) -> Result:
    """Run one method on one federation and return what came out.

    `config` is a preset, a TOML file, a dict of settings (nested, or by dotted name) or a Config; none is `digits`.
    Keywords overrule it. Those with a name of their own are the settings used most: `partition` and `beta` divide the
    samples among `clients`, of which `participation` is the share picked in a round; `epochs` and `lr` are those of
    local training. All other settings go by their dotted name with two underscores for the dot
    (`train__batch_size=32`); a section may be a dict (`eval={"every": 5}`).

    `method` is a name, a class of your own or an instance with its hyper-parameters. `model` is a name or a class of
    your own, whose arguments are `model__args`; an instance is refused, since every client makes its own and its
    arguments are not known: `model__weights` starts from its saved weights. Classes may be written in a notebook cell,
    for `backend="ray"` too; a run of such a class goes on in the program that has it.

    `data` is a source as `data.name` takes it, settings as a dict, or the samples themselves: `(x, y)`, `(x, y, site)`,
    `(x_train, y_train, x_test, y_test)`, a dict of arrays with the names of an .npz file, a data frame (pandas, Polars,
    Arrow) with a label column (`data__label="diagnosis"`), or a `Dataset`. Labels are numbers from 0, or names. Such
    samples are not kept: `data.name` is `memory:` and a name or a checksum, and to go on with the run, give them again.

    `callbacks` are told what happens (see `Callback`); one whose `on_round` returns True stops the run, which is saved:
    `Interrupted` is raised, and `resume` goes on. `backend="ray"` computes clients on a Ray cluster, at `address` or
    started here. The run folder is `out`, by default a new one below `runs/`; the same run there is continued, or
    returned if it is finished.
    """
    named = {"data_dir": data_dir, "partition": partition, "beta": beta, "clients": clients, "rounds": rounds}
    named |= {"participation": participation, "epochs": epochs, "lr": lr, "seed": seed, "workers": workers}
    given = {**_method_settings(method), **_model_settings(model), **named, "engine": engine, "device": device}
    complete, samples = _with_data(config, data, {**_present(given), **settings})
    folder = RunFolder(new_folder(complete) if out is None else path_of(out, "out= the folder of the run"))
    return _run(complete, folder, progress, samples=samples, callbacks=callbacks, backend=backend, address=address)


def _present(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None}


def _method_settings(method: Any) -> dict[str, Any]:
    """The settings that choose a method given as a name, a class or an instance."""
    if isinstance(method, Method):
        own = {f"method__{each.name}": getattr(method, each.name) for each in fields(method)}
        return {**_method_settings(type(method)), **own}
    if not isinstance(method, type):
        return {"method": method}
    if not issubclass(method, Method):
        raise ConfigError(f"method = {method.__name__} does not derive from fednh.Method")
    known = next((name for name, each in METHODS.items() if each is method), None)
    return {"method": known or import_path(method, "method")}


def _model_settings(model: Any) -> dict[str, Any]:
    """The settings that choose a model given as a name or a class."""
    if isinstance(model, nn.Module):
        name = type(model).__name__
        raise ConfigError(
            f"model = a {name} that exists already: every client makes its own, so give the class (model={name}) and "
            f"its arguments as model__args={{...}}; model__weights starts from saved weights"
        )
    if isinstance(model, str):
        return {"model__name": model}
    if not isinstance(model, type):
        return {"model": model}
    if not issubclass(model, nn.Module):
        raise ConfigError(f"model = {model.__name__} does not derive from torch.nn.Module")
    return {"model__name": import_path(model, "model")}


def resume(
    path: str | Path,
    *,
    rounds: int | None = None,
    data: Any = None,
    callbacks: Sequence[Callback] = (),
    backend: str = "simulator",
    address: str | None = None,
    progress: bool = False,
) -> Result:
    """Go on with the run in a folder and return what came out; `rounds` may lie beyond its planned end.

    The result is that of one run of that many rounds without any interruption. A run that was given its `data` is given
    the same again.
    """
    folder = RunFolder(path_of(path, RUN))
    settings = read_config(folder.path)
    if rounds is not None:
        settings = validate({**settings.model_dump(), "rounds": rounds})
    samples = None if data is None else taken(data, settings.data.model_dump())
    return _run(settings, folder, progress, rounds is not None, samples, callbacks, backend, address)


def _run(
    settings: Config,
    folder: RunFolder,
    progress: bool,
    extend: bool = False,
    samples: Dataset | None = None,
    callbacks: Sequence[Callback] = (),
    backend: str = "simulator",
    address: str | None = None,
) -> Result:
    """The run in this folder, from where it stands to its end; `samples` are those that a program gave."""
    make = run_maker(backend, address)
    for each in callbacks:
        if not isinstance(each, Callback):
            raise ConfigError(f"callbacks has a {type(each).__name__}, which does not derive from fednh.Callback")
    if samples is not None and folder.started:  # also where it is finished: its result is that of its own data
        fingerprint.check_data(folder.path, fingerprint_of(settings, samples))
    with folder.opened(settings, backend, extend=extend) as unfinished:
        if unfinished:
            federation = build_federation(settings, samples, run=folder.path)
            for note in (*federation.dataset.notes, *federation.dataset.warnings):
                warnings.warn(note, Notice, stacklevel=3)
            name = f"{settings.method['name']} on {federation.dataset.name}"
            with screen_for(Console(stderr=True), settings.rounds, name, quiet=not progress) as screen:
                try:
                    make(settings, federation, folder, CallbackList([screen, *callbacks])).run()
                except Interrupted:
                    done = folder.rounds_written()
                    raise Interrupted(
                        f"stopped after round {done}; fednh.resume({str(folder.path)!r}) continues"
                    ) from None
    return load_run(folder.path)


def load_run(path: str | Path) -> Result:
    """A finished run from its folder."""
    run = _load_run(path_of(path, RUN))
    return Result(run.path, run.config, cast(RunSummary, run.summary), cast(list[RoundRecord], run.records))


def sweep(
    config: str | Path | None = None,
    *,
    out: str | Path = "sweep",
    jobs: int | None = None,
    workers: int | None = None,
    backend: str = "simulator",
    address: str | None = None,
    **settings: Any,
) -> list[Result]:
    """Run every combination of settings, each in a folder of its own below `out`; returns the finished runs.

    Settings are named as in `run`; a list has several values: `sweep(method=["fednh", "fedavg"], seed=[0, 1, 2])`. A
    value that is a list itself stands in another one (`model__args={"hidden": [[16, 8]]}`). A hyper-parameter is given
    to the methods that have it. A method of your own is a class in a module: runs are processes, `jobs` of them at
    once, each with `workers`. The same call again skips what is finished, goes on with what was interrupted and tries
    again what failed; what failed raises RunError after the others are done.
    """
    from fednh.experiments import sweep as sweeps

    run_maker(backend, address)  # refuses what cannot be
    axes = {key: value if isinstance(value, list) else [value] for key, value in _flat(settings).items()}
    axes |= {"method.name": [_importable(each) for each in axes["method.name"]]} if "method.name" in axes else {}
    folder = path_of(out, "out= the folder of the sweep")
    varied = [key for key, values in axes.items() if len(values) > 1]  # they are part of a run's name
    plan = sweeps.combine(None if config is None else str(config), axes, varied, folder)
    with sweeps.locked(folder):
        sweeps.check(plan)
        pending = sum(not each.folder.finished for each in plan)
        with sweeps.place_of(backend, address, plan) as place:
            at_once, each_has = sweeps.share(jobs, workers, pending, place.slots)
            done = sweeps.execute(plan, at_once, each_has, (), sweeps.Unwatched(), threading.Event(), place)
    if done.failed:
        name, why = next(iter(done.failed.items()))
        raise RunError(f"{len(done.failed)} of {len(plan)} runs of the sweep {folder} failed; {name}: {why}")
    return [load_run(each.folder.path) for each in plan]


def recommend(
    data: Any = None,
    *,
    config: str | Path | Mapping[str, Any] | Config | None = None,
    minutes: float = 10.0,
    methods: Sequence[str] = (),
    seeds: int = 3,
    out: str | Path = "answer",
    **settings: Any,
) -> Recommendation:
    """Try what is worth trying for the sites of these data, and return what federating gives each of them.

    `data` and settings are those of `run`; a setting that is given holds for everything that is tried. It takes about
    `minutes`. `methods` are tried, beside training alone, instead of a selection; `seeds` is how many at most;
    `data__folds` fixes the number of folds. The folder `out` gets the runs, the models of the winner, and a page. The
    same call goes on with an interrupted search, and answers at once if a finished one had as much time.
    """
    from fednh.experiments import recommend as search

    base, samples = _with_data(config, data, {**search.SHARED, **settings})
    given = {*_flat(settings), *(() if config is None else search.ADAPTED)}
    return search.find(base, path_of(out, "out= the folder of the answer"), minutes, methods, seeds, given, samples)


def _importable(method: Any) -> Any:
    """The name of a method that another process can find; a class of a notebook cell has none."""
    if isinstance(method, Method):
        raise ConfigError(f"a sweep takes the class {type(method).__name__}; give its hyper-parameters as method__NAME")
    name = _method_settings(method)["method"]
    if str(name).startswith("__main__:"):
        raise ConfigError(f"method = {method.__name__} is defined in this program or notebook; move it into a module")
    return name


def evaluate(
    model: Result | str | Path,
    data: str | None = None,
    *,
    client: int | str | None = None,
    split: Literal["held", "test", "train", "all"] | None = None,
    weights: str | Path | None = None,
    **settings: Any,
) -> Assessment:
    """Measure a model on labelled data: accuracy, precision, recall, F1 and confusion by class, calibration.

    `model` is a run (its global model, or `client`'s personal one) or a model file. Without `data` they are those of
    the model's own run; without `split` those that it held out, else the test set. Settings say how to read them
    (`data__label="kind"`). Samples that the model was trained on are counted and warned about. `weights` is the file of
    a frozen body's weights, where they are not in a place that the model knows.
    """
    from fednh.inference.eval_data import select_eval_samples
    from fednh.inference.metrics import assess

    path = _path(model)
    used = load_model(path, client, weights)
    chosen = select_eval_samples(used.card, path, data, split, _flat(settings))
    if chosen.warning:
        warnings.warn(chosen.warning, Notice, stacklevel=2)
    return assess(used, chosen.x, chosen.y)


def personalize(
    run: Result | str | Path,
    data: str,
    *,
    epochs: int | None = None,
    holdout: float | None = None,
    site: str | None = None,
    out: str | Path | None = None,
    weights: str | Path | None = None,
    network: str | None = None,
    **settings: Any,
) -> Personalised:
    """Make a personal model for a site that never took part in a finished run, from the site's `data`.

    Its `model` predicts, and its `comparison` has the accuracies of the global model, of this one and of one trained
    alone, on samples held out: the data's test set, or the share `holdout`. Of a source with several sites, `site` is
    meant. With `out` model and comparison are written to that folder. `weights` is as in `evaluate`. Where
    the run's clients have different networks, `network` is the site's.
    """
    from fednh.inference import personalize as personal

    folder = None if out is None else personal.empty_folder(path_of(out, "out= the folder of the model"))
    made = personal.personalize(_path(run), data, epochs, holdout, _flat(settings), site, weights, network)
    if folder is not None:
        made.write(folder)
    return made


def export(
    model: Model | Result | str | Path,
    out: str | Path,
    *,
    client: int | str | None = None,
    weights: str | Path | None = None,
) -> dict[str, Any]:
    """Write a model as ONNX, preprocessing included, for use without fednh.

    `model` is a model, a run (its global model, or `client`'s personal one) or a model file. What was written is
    compared with the original before it gets its name; returns the file, the samples and the largest difference.
    `weights` is as in `evaluate`.
    """
    from fednh.inference.export import export as write

    used = model if isinstance(model, Model) else load_model(_path(model), client, weights)
    return write(used, path_of(out, "out= the file to write"))


def _path(given: Result | str | Path) -> Path:
    return given.path if isinstance(given, Result) else path_of(given, "a run folder or a model file")


def _with_data(config: Any, data: Any, overrides: Mapping[str, Any]) -> tuple[Config, Dataset | None]:
    """The settings, and the samples where a program gives them."""
    if is_given(config) and not isinstance(config, Mapping | Config):
        raise ConfigError(f"config is of the type {type(config).__name__}; if these are the data, write data=")
    if not is_given(data):
        return _settings(config, overrides if data is None else {**overrides, "data": data}), None
    settings = _settings(config, {**overrides, "data__name": "memory:given"})
    samples = taken(data, settings.data.model_dump())
    named = settings.data.model_copy(update={"name": samples.name})
    return settings.model_copy(update={"data": named}), samples


def _settings(config: str | Path | Mapping[str, Any] | Config | None, overrides: Mapping[str, Any]) -> Config:
    given = _flat(overrides)
    if isinstance(config, Config):
        return with_settings(config, given) if given else config
    if isinstance(config, Mapping):
        return load(None, {**_flat(config), **given})
    return load(None if config is None else str(config), given)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name, from options, sections and names with underscores."""
    flattened: dict[str, Any] = {}
    for key, value in ((str(key), value) for key, value in settings.items()):
        if isinstance(value, Mapping) and value:
            flattened |= _flat(value, f"{prefix}{key if prefix else key.replace('__', '.')}.")
        elif prefix or isinstance(value, Mapping):
            flattened[prefix + key] = value
        else:
            flattened[KEYWORDS.get(key) or key.replace("__", ".")] = str(value) if isinstance(value, Path) else value
    return flattened
