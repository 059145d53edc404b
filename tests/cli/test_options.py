"""One table of short options: the commands and `fednh.run` understand the same names in the same way."""

from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from fednh import api
from fednh.cli.options import Given, Short, short, with_short_options
from fednh.cli.sweep import sweep
from fednh.config import flat, load
from fednh.config.options import SHORT_OPTIONS
from fednh.errors import UserError

# option of the command line, its text, the setting, its value
EXPECTED = {
    "method": ("--method", "fedprox", "method.name", "fedprox"),
    "data": ("--data", "cifar10", "data.name", "cifar10"),
    "data_dir": ("--data-dir", "/far/away", "data.dir", "/far/away"),
    "partition": ("--partition", "iid", "partition.name", "iid"),
    "beta": ("--beta", "0.25", "partition.beta", 0.25),
    "clients": ("--clients", "7", "partition.clients", 7),
    "participation": ("--participation", "0.5", "participation.rate", 0.5),
    "rounds": ("--rounds", "3", "rounds", 3),
    "epochs": ("--epochs", "2", "train.epochs", 2),
    "seed": ("--seed", "11", "seed", 11),
    "workers": ("--workers", "4", "workers", 4),
    "engine": ("--engine", "vmap", "engine", "vmap"),
    "device": ("--device", "cuda:1", "device", "cuda:1"),
}


def parsed(options: Short, *words: str) -> dict[str, Any]:
    """What a command with these options gets from these words."""
    app, got = typer.Typer(), {}

    @app.command()
    @with_short_options
    def command(*, given: Annotated[Given, options], plain: str | None = None) -> None:
        got.update(given, plain=plain)

    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return got


def test_the_table_is_complete() -> None:
    assert set(SHORT_OPTIONS) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_command_line_and_python_set_the_same(name: str) -> None:
    flag, text, key, value = EXPECTED[name]
    assert parsed(Short(*SHORT_OPTIONS), flag, text, "--plain", "word") == {key: value, "plain": "word"}
    assert flat(api._settings(None, {name: value}).model_dump())[key] == value


def test_what_is_not_given_is_not_set() -> None:
    assert parsed(Short(*SHORT_OPTIONS)) == {"plain": None}


def test_a_command_can_ask_for_several_values() -> None:
    assert parsed(Short(short("seed", several=True)), "--seed", "0,1") == {"seed": "0,1", "plain": None}


def test_every_short_option_is_a_setting() -> None:
    known = {*flat(load(None, {}).model_dump()), "method.name"}
    assert {option.key for option in SHORT_OPTIONS.values()} <= known


def test_an_option_and_set_contradict() -> None:
    with pytest.raises(UserError, match=r"^train\.epochs is given twice: with --epochs and with --set$"):
        sweep(**dict.fromkeys(sweep.__annotations__) | {"epochs": 2, "settings": ["train.epochs=3"]})
