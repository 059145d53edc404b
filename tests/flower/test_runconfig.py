"""Settings on their way through Flower: every setting that a Config can have comes back as it was."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from flwr.common.config import flatten_dict
from flwr.common.serde import user_config_from_proto, user_config_to_proto
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fednh import config as settings
from fednh.config import Config, Section
from fednh.errors import UserError
from fednh.flower.deploy import scaffold
from fednh.flower.deploy.scaffold import read_config, run_config
from fednh.methods import METHODS
from tests.helpers.process import fednh

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8) | st.sampled_from(
    ["1", "true", "[1, 2]", '"x"', "{a", "a,b", "a.b", "number", " x ", "[", "null"]
)
PATHS = TEXT.map(lambda text: f"/{text.replace('/', '_')}")
PLAIN = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, width=32) | TEXT
ANYTHING = st.recursive(
    PLAIN.filter(lambda v: v is not None),
    lambda each: st.lists(each, max_size=2) | st.dictionaries(TEXT, each, max_size=2),
    max_leaves=4,
)
SPECIAL: dict[str, st.SearchStrategy[Any]] = {  # settings that do not take all that their type allows
    "data.name": st.sampled_from(["digits", "own", "cifar10", "csv:/a b/[x].csv"]),
    "data.dir": PATHS,
    "data.size": st.lists(st.integers(1, 4096), min_size=2, max_size=2),
    "data.columns": st.dictionaries(TEXT, st.just("number") | st.lists(TEXT, max_size=3), max_size=3),
    "model.args": st.dictionaries(TEXT | st.sampled_from(["hidden", "width"]), ANYTHING, max_size=3),
    "model.weights": PATHS,
    "store.memory": st.sampled_from(["25%", "2GiB", 1000]),
    "eval.clients": st.sampled_from(["all", "active", 3]),
    "eval.final": st.sampled_from(["all", 3]),
    "federation.folder": PATHS,
    "method": st.sampled_from(sorted(METHODS)).map(lambda name: {"name": name}),
}


def values(key: str, annotation: Any, limits: list[Any]) -> st.SearchStrategy[Any]:
    """Values of a setting, from its type and limits."""
    if key in SPECIAL:
        return SPECIAL[key]
    if get_origin(annotation) is Annotated:
        return values(key, get_args(annotation)[0], limits)
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if annotation in (int, float):
        least, most = -1e6, 1e6
        for limit in limits:
            least = max(least, getattr(limit, "ge", least), getattr(limit, "gt", least - 1) + 1e-3)
            most = min(most, getattr(limit, "le", most), getattr(limit, "lt", most + 1) - 1e-3)
        whole = st.integers(int(-(-least // 1)), int(most))
        return whole if annotation is int else st.floats(least, most, width=64)
    if get_origin(annotation) is list:
        return st.lists(values(key, get_args(annotation)[0], []), max_size=3)
    if get_origin(annotation) is dict:
        return st.dictionaries(TEXT, ANYTHING, max_size=3)
    if get_args(annotation):
        return st.one_of(*(values(key, each, limits) for each in get_args(annotation) if each is not type(None)))
    return {bool: st.booleans(), str: TEXT}[annotation]


def trees() -> st.SearchStrategy[dict[str, Any]]:
    """Any part of all settings that there are."""
    sections: dict[str, st.SearchStrategy[Any]] = {}
    for name, field in Config.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            some = {k: values(f"{name}.{k}", f.annotation, f.metadata) for k, f in inner.model_fields.items()}
            sections[name] = st.fixed_dictionaries({}, optional=some)
        else:
            sections[name] = values(name, inner, field.metadata)
    return st.fixed_dictionaries({}, optional=sections)


def through_flower(config: Config) -> Config:
    """What the ServerApp makes of the pyproject.toml that is written, after Flower has read, flattened and sent it."""
    tree = tomllib.loads(scaffold.app("fed", config))["tool"]["flwr"]["app"]["config"]
    return read_config(user_config_from_proto(user_config_to_proto(flatten_dict(tree))))


@pytest.mark.filterwarnings("ignore::fednh.errors.Ignored")
@given(trees())
@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_setting_comes_back(tree: dict[str, Any]) -> None:
    try:
        config = settings.validate({**tree, "federation": {"folder": "/run", **tree.get("federation", {})}})
    except UserError:
        assume(False)
    assume(config.data.folds is None)
    try:
        found = through_flower(config)
    except UserError as refused:  # what a deployment alone refuses; tests of these settings look at it
        assume(
            not any(
                name in str(refused) for name in ("federation.secure", "privacy.", "stop_when", "is for simulations")
            )
        )
        raise
    assert found == config


def test_folds_are_refused_in_a_deployment() -> None:
    config = settings.validate({"federation": {"folder": "/run"}, "data": {"folds": 5, "fold": 2}})
    with pytest.raises(UserError, match=r"data\.folds is for simulations: .* use data\.holdout$"):
        through_flower(config)


@pytest.mark.parametrize(
    ("given_", "key", "value"),
    [
        ("data.size=24", "size", [24, 24]),
        ("data.size=[24, 32]", "size", [24, 32]),
        ('data.classes=["a, b", "c"]', "classes", ["a, b", "c"]),
        (
            'data.columns={"blood.pressure" = "number", sex = ["f", "m, d"]}',
            "columns",
            {"blood.pressure": "number", "sex": ["f", "m, d"]},
        ),
    ],
)
def test_the_command_writes_what_the_server_reads(given_: str, key: str, value: object, tmp_path: Path) -> None:
    ended = fednh(["federation", "init", str(tmp_path / "fed"), "--set", given_], tmp_path / "io")
    assert ended.code == 0, ended.stderr
    config, _ = scaffold.read(tmp_path / "fed")
    assert getattr(config.data, key) == value
    assert through_flower(config) == config


def test_a_table_of_arguments_is_not_mixed_with_the_presets() -> None:
    config = settings.load("digits", {"model.args": {"linear_output": True}, "federation.folder": "/run"})
    assert through_flower(config).model.args == {"linear_output": True}


def test_lists_of_flwr_run_are_read() -> None:
    """`flwr run -c 'model.args.hidden="[7, 5]" data.classes="a,b"'`."""
    given = {"data.classes": "a,b", "data.columns.sex": "f,m", "data.columns.age": "number", "model.name": "mlp"}
    config = read_config({**given, "model.args.hidden": "[7, 5]", "federation.folder": "/run"})
    assert (config.data.classes, config.data.columns) == (["a", "b"], {"sex": ["f", "m"], "age": "number"})
    assert config.model.args == {"hidden": [7, 5]}


def test_settings_over_a_table_win() -> None:
    """`flwr run -c 'model.args.width=3'` over a table that is written as JSON."""
    flat = settings.flat(run_config(settings.load("digits", {"model.args": {}, "federation.folder": "/run"})))
    assert flat["model.args"] == "{}"
    assert read_config({"model.args.width": 3, **flat}).model.args == {"width": 3}
