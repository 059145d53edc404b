"""Every figure drawn from real runs, in every form; and the command that draws them."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import warnings
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fednh.cli import app
from fednh.errors import UserError
from fednh.report.figures import FIGURES, Choice, FigureUnavailable, style, write_figure, write_possible
from fednh.report.figures.style import shortened_apart, sparse
from fednh.report.load import load_runs
from fednh.runs.model_file import write_model
from tests.helpers.synthetic import fake_run, real_run, record


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_from_real_runs(name: str, real_runs: Path, tmp_path: Path) -> None:
    own = {  # what the other runs do not have
        "reliability": {"data.holdout": 0.2},
        "privacy": {"method.name": "fedavg", "privacy.level": "sample", "privacy.epsilon": 8.0},
    }.get(name)
    runs = [real_run(tmp_path / "own", {**own, "rounds": 1})] if own else load_runs([real_runs])
    for kind in style.FORMATS:
        [(path, caption)] = write_figure(FIGURES[name], runs, Choice(), tmp_path / f"{name}.{kind}")
        assert "n = " in caption or name in ("partition", "similarity")
        content = path.read_bytes()
        if kind == "png":
            with Image.open(path) as picture:
                assert picture.width > 900
                assert len(set(picture.convert("L").tobytes())) > 10  # something is drawn
        elif kind == "pdf":
            assert content.startswith(b"%PDF")
        else:
            assert ElementTree.fromstring(content).tag.endswith("svg")
    with (tmp_path / f"{name}.csv").open() as file:
        assert len(list(csv.reader(file))) > (3 if name == "privacy" else 5)


def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "r", {}, [record(1, gm=1.0), record(2, gm=2.0)])
    for kind in style.FORMATS:
        files = [tmp_path / f"{name}.{kind}" for name in ("one", "two")]
        for file in files:
            write_figure(FIGURES["curves"], [run], Choice(), file)
        assert files[0].read_bytes() == files[1].read_bytes()


def test_figure_numbers_reach_the_file(tmp_path: Path) -> None:
    for seed, last in ((0, 40.0), (1, 60.0)):
        fake_run(tmp_path / str(seed), {"seed": seed}, [record(1, gm=10.0), record(2, gm=last)])
    runs = load_runs([tmp_path])
    write_figure(FIGURES["curves"], runs, Choice(), tmp_path / "out" / "curves.svg")
    with (tmp_path / "out" / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["method"], r["metric"], r["round"], r["mean"], r["n"]) for r in rows] == [
        ("FedNH", "GM", "1", "10", "2"),
        ("FedNH", "GM", "2", "50", "2"),
    ]


def test_each_setting_gets_its_own_file(tmp_path: Path) -> None:
    for beta in (0.3, 1.0):
        fake_run(tmp_path / str(beta), {"partition.beta": beta}, [record(1, gm=1.0), record(2, gm=2.0)])
    written = write_figure(FIGURES["partition"], load_runs([tmp_path]), Choice(), tmp_path / "o" / "p.svg")
    assert sorted(path.name for path, _ in written) == [
        "p-digits-dirichlet-0.3-2-clients-50-a-round.svg",
        "p-digits-dirichlet-1-2-clients-50-a-round.svg",
    ]


def test_what_runs_lack_is_said(tmp_path: Path) -> None:
    fake_run(tmp_path / "r", {}, [record(1, gm=1.0)])
    answers = {name: reason for name, _, reason in write_possible(load_runs([tmp_path]), Choice(), None)}
    assert answers["partition"] is None
    assert "more than one round" in (answers["curves"] or "")
    assert "diagnostics.gradient_norm = true" in (answers["convergence"] or "")
    assert "no client took part" in (answers["fairness"] or "")
    assert "no client held out samples" in (answers["reliability"] or "")
    assert "saved personal models" in (answers["representations"] or "")
    assert "saved model with class prototypes" in (answers["similarity"] or "")
    assert "method.rho=0.1,0.5,0.9" in (answers["sensitivity"] or "")


def test_choices_are_checked(real_runs: Path) -> None:
    runs = load_runs([real_runs])
    cases = [
        ("curves", Choice(x="parsecs"), "parsecs"),
        ("representations", Choice(classes=("zebra",)), "no class 'zebra'"),
        ("representations", Choice(clients=(0, 99)), "no client 99"),
        ("sensitivity", Choice(setting="train.lr"), "train.lr was not swept"),
        ("sensitivity", Choice(base=0.3), "the base may be 0.1, 0.9"),
    ]
    for name, choice, complaint in cases:
        with pytest.raises(UserError, match=complaint):
            FIGURES[name].draw(runs, choice)


def test_chosen_classes_and_clients_are_drawn(real_runs: Path) -> None:
    drawn = FIGURES["representations"].draw(load_runs([real_runs]), Choice(clients=(2, 5), classes=("1", "7")))
    assert {row[1] for row in drawn.rows} == {"all", 2, 5}
    assert {row[2] for row in drawn.rows} == {"1", "7"}
    assert {row[0] for row in drawn.rows} == {"before training", "FedAvg", "FedNH rho=0.1", "FedNH rho=0.9", "FedProto"}


def test_similarity_with_a_mapping_file_tells_one_number_a_method(real_runs: Path, tmp_path: Path) -> None:
    groups = tmp_path / "groups.json"
    groups.write_text(json.dumps({"even": list("02468"), "odd": list("13579")}))
    drawn = FIGURES["similarity"].draw(load_runs([real_runs]), Choice(groups=groups))
    assert "Semantics captured" in drawn.caption
    assert all(f"{name} " in drawn.caption for name in ("FedAvg", "FedProto", "FedNH rho=0.1"))
    assert [row[1] for row in drawn.rows] == list("0246813579") * 4  # four methods, classes in the groups' order


def test_damaged_models_are_named(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "r", {})
    model = run.path / "models" / "global.safetensors"
    model.parent.mkdir()
    model.write_bytes(b"not a model")
    with pytest.raises(UserError, match=r"global\.safetensors is not a model saved by fednh"):
        FIGURES["similarity"].draw([run], Choice())


def test_a_class_called_like_a_formula_or_a_tag_is_just_a_name(tmp_path: Path) -> None:
    names = ("$\\frac{", "<script>alert(1)</script>")
    run = fake_run(tmp_path / "r", {}, classes=names)
    with style.theme(web=True):
        svg = style.inline_svg(FIGURES["partition"].draw([run], Choice()).figure, "p")
    assert "<script" not in svg
    assert "&lt;script&gt;" in svg
    assert "var(--ink)" in svg
    assert "#010203" not in svg


def test_the_command(real_runs: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    listed = runner.invoke(app, ["figure", "list", str(real_runs)])
    assert listed.exit_code == 0
    assert all(f"{name:16} yes" in listed.output for name in FIGURES if name not in ("reliability", "privacy"))
    drawn = runner.invoke(app, ["figure", "curves", str(real_runs), "--x", "bytes", "-o", str(tmp_path / "c.png")])
    assert drawn.exit_code == 0, drawn.output
    assert (tmp_path / "c.png").exists()
    for words, complaint in [
        (["figure", "curvs", str(real_runs)], "did you mean 'curves'"),
        (["figure", "curves"], "of which runs?"),
        (["figure", "curves", str(real_runs), "-o", str(tmp_path / "c.gif")], ".svg, .pdf or .png"),
        (["figure", "partition", str(real_runs), "--clients", "0,zebra"], "have no names: choose one by its number"),
        (["figure", "representations", str(real_runs), "--clients", "0,1,2"], "two clients, and 3 were chosen"),
        (["figure", "frequency", str(real_runs), "--shots", "20"], "two whole numbers"),
    ]:
        result = runner.invoke(app, words)
        assert isinstance(result.exception, UserError)
        assert complaint in str(result.exception)


def test_all_figures_in_one_go(tmp_path: Path) -> None:
    fake_run(tmp_path / "r", {}, [record(1, gm=1.0), record(2, gm=2.0)])
    done = CliRunner().invoke(app, ["figure", str(tmp_path / "r"), "-o", str(tmp_path / "figures")])
    assert done.exit_code == 0, done.output
    named = CliRunner().invoke(app, ["figure", "all", str(tmp_path), "-o", str(tmp_path / "figures")])
    assert named.output == done.output
    drawn = {path.name for path in (tmp_path / "figures").iterdir()}
    assert drawn == {f"{name}.{kind}" for name in ("partition", "curves") for kind in ("svg", "png", "csv")}
    assert "convergence      no: no run logged gradient norms" in done.output


def test_a_figure_that_cannot_be_drawn_is_a_user_error_through_the_command(tmp_path: Path) -> None:
    fake_run(tmp_path / "r", {}, [record(1, gm=1.0)])
    result = CliRunner().invoke(app, ["figure", "convergence", str(tmp_path)])
    assert isinstance(result.exception, UserError)
    assert not isinstance(result.exception, FigureUnavailable)
    assert "cannot be drawn from these runs" in str(result.exception)


def test_help_imports_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys, contextlib, io, fednh.cli\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "    fednh.cli.app(['figure', '--help'])\n"
        "print([m for m in ('torch', 'matplotlib', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_shortened_names_stay_apart() -> None:
    long = "the left hind leg of an african elephant"
    assert shortened_apart(["cat", long], 16) == ["cat", "the left hind l…"]
    ends = [f"{long}, seen from {side}" for side in ("above", "below")]
    assert shortened_apart(ends, 16) == ["the lef…m above", "the lef…m below"]
    assert len(set(shortened_apart([f"{long} {k} {long}" for k in range(12)], 16))) == 12


def test_an_axis_names_every_nth_of_many_classes() -> None:
    assert sparse(["a", "b", "c"], 3) == ([0, 1, 2], ["a", "b", "c"])
    assert sparse([str(c) for c in range(200)], 20)[0] == list(range(0, 200, 10))


@pytest.mark.parametrize("count", [3, 200])
def test_long_names_of_classes_break_no_figure(tmp_path: Path, count: int) -> None:
    """No warning (matplotlib's, where names leave no room for the axes), and every panel keeps its size."""
    classes = [f"class {c}, which has a name that is much too long for the side of a picture" for c in range(count)]
    for method in ("fednh", "fedavg"):
        folder = tmp_path / "runs" / method
        fake_run(folder, {"method.name": method}, counts=[[5] * count] * 3, classes=classes)
        card = {"method": {"name": method}, "model": {"name": "mlp"}, "shape": [32], "classes": classes}
        head = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
        card["preprocessing"] = {"scale": 1.0, "mean": [0.0], "std": [1.0]}
        write_model(folder / "models" / "global.safetensors", {"head.weight": head}, card)
    with warnings.catch_warnings(), style.theme():
        warnings.simplefilter("error")
        for name, axes in {"similarity": 2, "partition": 2}.items():
            figure = FIGURES[name].draw(load_runs([tmp_path / "runs"]), Choice()).figure
            figure.savefig(tmp_path / f"{name}.png")
            assert all(ax.get_window_extent().width > 100 for ax in figure.axes[:axes])
            ticks = [text.get_text() for text in figure.axes[0].get_yticklabels()]
            assert len(ticks) == min(count, 20)
            assert len(set(ticks)) == len(ticks)
