from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednh.config import PRESETS, dump, load, parse_bytes, parse_value, validate
from fednh.data.partitions.kinds import Dirichlet
from fednh.errors import Ignored, UserError
from fednh.methods import METHODS
from tests.helpers.config import BAD, keys, leaf


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid_and_survive_a_round_trip(preset: str) -> None:
    config = load(preset, {})
    assert config.data.name == ("cifar10" if preset == "pfllib" else preset)
    assert validate(tomllib.loads(dump(config))) == config


def test_the_papers_settings() -> None:
    config = load("cifar10", {})
    assert (config.partition.clients, config.participation.rate, config.rounds) == (100, 0.1, 200)
    t = config.train
    assert (t.lr, t.lr_decay, t.momentum, t.weight_decay, t.batch_size, t.epochs, t.clip) == (
        0.01, 0.99, 0.9, 1e-5, 64, 5, 10.0,
    )  # fmt: skip
    assert load("tinyimagenet", {}).train.weight_decay == 1e-3
    assert load("tinyimagenet", {}).model.name == "resnet18"
    assert config.method["rho"] == 0.9


@pytest.mark.parametrize("data", [None, "cifar100"])
def test_pfllibs_settings(data: str | None) -> None:
    """The defaults of its main.py and dataset_utils.py; another data set changes nothing else."""
    config = load("pfllib", {} if data is None else {"data.name": data})
    assert (config.data.name, config.model.name, config.aggregator) == (data or "cifar10", "cnn", "weighted_mean")
    assert (config.data.merge_test, config.data.holdout, config.data.augment) == (True, 0.25, "none")
    assert config.partition.kind == Dirichlet(min_samples=40, clients=20, beta=0.1, min_classes=1)
    assert (config.participation.rate, config.rounds) == (1.0, 2000)
    t = config.train
    assert (t.lr, t.lr_decay, t.momentum, t.weight_decay, t.batch_size, t.epochs, t.clip) == (
        0.005, 1.0, 0.0, 0.0, 10, 1, 0.0,
    )  # fmt: skip


def test_no_argument_is_fednh_on_digits() -> None:
    config = load(None, {})
    assert (config.data.name, config.method["name"]) == ("digits", "fednh")


def test_data_alone_brings_its_preset() -> None:
    assert load(None, {"data.name": "cifar100"}).model.name == "conv2"
    assert load(None, {"data.name": "mnist"}).partition.clients == 100


@pytest.mark.parametrize("name", METHODS)
def test_a_written_config_is_complete(name: str) -> None:
    written = tomllib.loads(dump(load("digits", {"method.name": name})))
    assert written["method"] == {"name": name, **dataclasses.asdict(METHODS[name]())}
    assert {"every", "clients"} <= written["eval"].keys()
    assert written["checkpoint"] == {"every": 5}
    assert written["store"] == {"memory": "25%"}


def test_overrides() -> None:
    config = load("cifar10", {"method.name": "fednh", "method.rho": 0.7, "partition.beta": 1.0, "eval.clients": 5})
    assert (config.method["rho"], config.partition.beta, config.eval.clients) == (0.7, 1.0, 5)


def test_another_method_leaves_the_files_hyper_parameters_behind(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[method]\nname = "fednh"\nrho = 0.5\n')
    assert load(str(file), {"method.name": "ditto"}).method["lam"] == 0.75
    assert load(str(file), {"method.name": "fednh"}).method["rho"] == 0.5


SEVERAL = """
[method]
name = "ditto"
lam = 0.5

[methods.ditto]
lam = 0.1
pull = "trained"

[methods.fedrod]
personal_sgd = "plain"
"""


def test_a_file_has_settings_for_several_methods(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(SEVERAL)
    ditto = load(str(file), {}).method
    assert (ditto["lam"], ditto["pull"]) == (0.5, "trained"), "[method] comes before [methods.ditto]"
    assert load(str(file), {"method.lam": 0.3}).method["lam"] == 0.3
    fedrod = load(str(file), {"method.name": "fedrod"})
    assert fedrod.method["personal_sgd"] == "plain"
    assert load(str(file), {"method.name": "fedrod", "method.personal_sgd": "train"}).method["personal_sgd"] == "train"
    assert load(str(file), {"method.name": "fedavg"}).method == {"name": "fedavg"}
    assert "methods" not in tomllib.loads(dump(fedrod)), "a written config has what holds, and no more"


def test_the_default_method_has_a_table_too(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[methods.fednh]\nrho = 0.5\n")
    assert load(str(file), {}).method["rho"] == 0.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[methods.fedrodd]\n", r"c.toml: \[methods.fedrodd\]: .*did you mean 'fedrod'"),
        ("[methods.ditto]\nlamm = 1\n", r"\[methods.ditto\]: method.lamm is not a hyper-parameter of ditto"),
        ("[methods.ditto]\nlam = -1\n", r"\[methods.ditto\]: method.lam = -1 should be greater"),
        ("[methods]\nditto = 1\n", r"c.toml: methods should have tables, \[methods.fedrod\] for example"),
        ("methods = 1\n", "methods should have tables"),
    ],
)
def test_wrong_settings_of_any_method_are_told(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=words):
        load(str(file), {"method.name": "fedavg"})


PAPERS = ("cifar10", "cifar100", "tinyimagenet")


@pytest.mark.parametrize("preset", PRESETS)
def test_the_papers_presets_have_the_authors_settings(preset: str) -> None:
    """What the FedNH authors' code does otherwise than the texts, where it moves a number of the paper's table."""
    theirs = {
        "fedrod": {"personal_sgd": "plain"},
        "ditto": {"pull": "trained", "personal_sgd": "plain"},
        "fedbabu": {"finetuned": "local"},
    }
    if preset == "pfllib":
        assert load(preset, {"method.name": "feddbe"}).method["kappa"] == 50  # its authors' protocol
    for name in METHODS:
        if name != "fednh" and (preset, name) != ("pfllib", "feddbe"):
            expected = {**dataclasses.asdict(METHODS[name]()), **(theirs.get(name, {}) if preset in PAPERS else {})}
            assert load(preset, {"method.name": name}).method == {"name": name, **expected}


def test_another_methods_setting_is_told_and_ignored() -> None:
    with pytest.warns(Ignored, match=r"method\.rho is a setting of fednh, fedprior, floco, not of fedrod: ignored"):
        config = load("cifar10", {"method.name": "fedrod", "method.rho": 0.7})
    assert config.method == {"name": "fedrod", "hypernetwork": "auto", "personal_sgd": "plain"}


@pytest.mark.parametrize("setting", BAD)
def test_bad_settings_are_named(setting: str) -> None:
    key, _, value = setting.partition("=")
    with pytest.raises(UserError, match=BAD[setting].replace("(", r"\(")) as caught:
        load("digits", {key: parse_value(value)})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"rounds = ", "not valid TOML"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b'[method]\nname = "fednh"\nrho = 2.0\n', r"c\.toml: method\.rho = 2\.0"),
        (b"[nonsense]\nx = 1\n", r"c\.toml: nonsense is not a setting"),
        (b"method = 3\n", r"c\.toml: method = 3"),
        (b'data = "digits"\n', r"c\.toml: data = 'digits'"),
        (b"[method]\nname = 7\n", r"c\.toml: method\.name = 7 is not known"),
    ],
)
def test_bad_files_are_named(content: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(content)
    with pytest.raises(UserError, match=words):
        load(str(file), {})


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        load(str(tmp_path / "no.toml"), {})
    with pytest.raises(UserError, match="neither a preset nor a TOML file; did you mean 'cifar10'"):
        load("cifar1", {})
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        load(str(tmp_path), {})


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.7", 0.7), ("3", 3), ("true", True), ("[16, 8]", [16, 8]), ("conv2", "conv2"), ("a b", "a b"), ("", "")],
)
def test_values_are_read_as_toml(text: str, value: object) -> None:
    assert parse_value(text) == value


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1000, 1000), ("25%", 250), ("2KiB", 2048), ("1.5 MB", 1_500_000), ("100%", 1000), ("3gib", 3 << 30), (0, 0)],
)
def test_bytes(value: int | str, expected: int) -> None:
    assert parse_bytes(value, total=1000) == expected


def test_a_method_section_without_a_name_is_fednhs() -> None:
    assert validate({"method": {}}).method == validate({}).method
    assert validate({"method": {"rho": 0.7}}).method == {**validate({}).method, "rho": 0.7}


@given(st.dictionaries(keys, leaf | st.dictionaries(keys, leaf, max_size=4), max_size=5))
def test_any_tree_is_a_config_or_one_sentence(tree: dict[str, object]) -> None:
    try:
        config = validate(tree)
    except UserError as error:
        message = str(error)
        assert message, "an error says something"
        return
    assert validate(tomllib.loads(dump(config))) == config


def test_few_clients_all_take_part_unless_set(tmp_path: Path) -> None:
    """A preset says 10% itself, and stays as it is."""

    def rate(source: str | None = None, **given: object) -> float:
        return load(source, {key.replace("__", "."): value for key, value in given.items()}).participation.rate

    assert rate(data__name="npz:x.npz", partition__clients=20) == 1.0
    assert rate(data__name="npz:x.npz", partition__clients=21) == 0.1
    assert rate(data__name="npz:x.npz", partition__clients=20, participation__rate=0.5) == 0.5
    assert rate(data__name="npz:x.npz") == 0.1  # of 100 clients
    assert rate("cifar10", partition__clients=10) == 0.1
    (tmp_path / "c.toml").write_text("[partition]\nclients = 5\n")
    assert rate(str(tmp_path / "c.toml")) == 1.0


def test_samples_privacy_takes_sums_unless_the_user_chose_otherwise(tmp_path: Path) -> None:
    """A preset's choice is nobody's; a method that has no such setting is left alone."""

    def sent(source: str | None, **given: object) -> object:
        private = {"privacy.level": "sample", "privacy.epsilon": 8.0}
        return load(source, private | {k.replace("__", "."): v for k, v in given.items()}).method.get("aggregation")

    for source in ("digits", "cifar10", None):
        assert sent(source) == sent(source, method__name="fedprior") == "sum"
    assert sent("digits", method__aggregation="count") == "count"
    assert sent("digits", privacy__level="client") == "uniform"
    assert sent("digits", method__name="fedavg") is None
    for table in ("method", "methods.fednh"):
        (tmp_path / "c.toml").write_text(f'[{table}]\naggregation = "uniform"\n')
        assert sent(str(tmp_path / "c.toml")) == "uniform"
        assert sent(str(tmp_path / "c.toml"), method__name="fedprior") == "sum"


def test_a_measurement_of_earlier_runs_is_left_out_of_their_configs() -> None:
    """results/ has finished runs whose config.toml asks for it."""
    complete = {**load("digits", {}).model_dump(), "eval": {"every": 7, "prior": [0.5, 1.0]}}
    assert validate(complete, written=True).eval.model_dump() == validate({"eval": {"every": 7}}).eval.model_dump()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"epsilon": 8.0}, "level = 'none' protects nothing, yet privacy.epsilon is set"),
        ({"level": "sample"}, "takes privacy.epsilon or privacy.noise"),
        ({"level": "client", "epsilon": 8.0, "noise": 1.0}, "takes privacy.epsilon or privacy.noise"),
        ({"level": "sample", "noise": 1.0, "clip": "adaptive"}, "is of privacy.level = 'client'"),
        ({"level": "sample", "epsilon": 1000.0}, "privacy.epsilon"),
        ({"level": "sample", "noise": 0.0}, "privacy.noise"),
        ({"level": "sample", "noise": 1.0, "clip": 0.0}, "privacy.clip"),
        ({"level": "sample", "noise": 1.0, "delta": 0.5}, "privacy.delta"),
    ],
)
def test_settings_that_give_no_privacy_cannot_be_spelled(given: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load("digits", {f"privacy.{name}": value for name, value in given.items()})


def test_a_level_and_a_budget_are_a_config() -> None:
    privacy = load("digits", {"privacy.level": "client", "privacy.epsilon": 8.0, "privacy.clip": "adaptive"}).privacy
    assert (privacy.level, privacy.epsilon, privacy.noise, privacy.clip) == ("client", 8.0, None, "adaptive")
