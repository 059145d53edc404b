"""`fednh table` in every format, as a person or a program gets it."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from fednh.cli import app
from fednh.errors import UserError
from fednh.report.sheet import Cell, Sheet, to_latex, to_markdown, to_rich
from tests.helpers.synthetic import fake_result, three_seeds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    three_seeds(place)
    return place


def table(*words: object) -> str:
    result = CliRunner().invoke(app, ["table", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_markdown(folder: Path) -> None:
    lines = table(folder, "--format", "markdown").splitlines()
    assert lines[:7] == [
        "**Test accuracy in percent; digits, Dir(0.3), 20 clients, 50% a round, 40 rounds**",
        "",
        "| method | GM | PM(V) | PM(L) |",
        "| :-- | --: | --: | --: |",
        "| Local | – | 41.00 ± 1.00 | **70.00 ± 0.00** |",
        "| FedAvg | <u>79.00 ± 1.00</u> | **53.00 ± 1.00** | **70.00 ± 0.00** |",
        "| FedNH | **82.00 ± 2.00** | <u>50.00 ± 0.00</u> | **70.00 ± 0.00** |",
    ]
    assert "| FedAvg | GM | 3 | -3.00 | -5.48 to -0.52 | -3.00 | 0.035 | maybe below (n=3) |" in lines
    assert sum(line.startswith("**") for line in lines) == 4  # accuracy, fairness, cost, paired


def test_latex(folder: Path) -> None:
    text = table(folder, "--format", "latex")
    assert (
        r"    FedAvg & \underline{79.00 $\pm$ 1.00} & \textbf{53.00 $\pm$ 1.00} & \textbf{70.00 $\pm$ 0.00} \\" in text
    )
    assert "50\\% a round" in text
    tables = re.findall(r"\\begin\{table\}.*?\\end\{table\}", text, re.DOTALL)
    assert [re.search(r"\\label\{(.*?)\}", t).group(1) for t in tables] == [  # type: ignore[union-attr]
        "tab:accuracy",
        "tab:fairness",
        "tab:cost",
        "tab:paired",
    ]
    for one in tables:
        columns = re.search(r"\\begin\{tabular\}\{([lr]+)\}", one)
        assert columns is not None
        body = one[one.index("\\toprule") : one.index("\\bottomrule")]
        rows = [line for line in body.splitlines() if line.endswith("\\\\")]
        assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {len(columns.group(1))}
        assert one.count("{") == one.count("}")
        assert one.isascii()  # pdflatex needs no input encoding for it


def test_csv_has_a_line_for_each_method_setting_and_metric(folder: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(table(folder, "--format", "csv", "--reference", "fednh"))))
    found = {(row["method"], row["metric"]): row for row in rows}
    assert len(rows) == len(found) == 3 * 8 - 1  # Local has no GM
    gm = found["fedavg", "gm"]
    setting = ("data", "partition", "beta", "clients", "participation", "rounds", "n", "seeds")
    assert [gm[key] for key in setting] == ["digits", "dirichlet", "0.3", "20", "0.5", "40", "3", "0 1 2"]
    assert (float(gm["mean"]), float(gm["std"])) == pytest.approx((79.0, 1.0))
    assert (gm["reference"], gm["pairs"]) == ("FedNH", "3")
    assert float(gm["p"]) == pytest.approx(1 - 27**0.5 / 29**0.5)
    assert float(found["fednh", "bytes_down"]["mean"]) == 12000
    assert found["fednh", "gm"]["reference"] == ""  # it is the reference
    assert "rho=0.9" in found["fednh", "gm"]["settings"]


def test_csv_paper_columns(tmp_path: Path) -> None:
    fake_result(tmp_path / "nh", "fednh", 0, 70.01, pm_l=(80.0, 90.0), preset="cifar10")
    rows = {r["metric"]: r for r in csv.DictReader(io.StringIO(table(tmp_path, "--format", "csv", "--paper")))}
    gm, spread = rows["gm"], rows["pm_l_std"]
    assert (gm["paper_mean"], gm["paper_std"]) == ("69.01", "2.51")
    assert float(gm["paper_difference"]) == pytest.approx(1.0)
    assert spread["paper_mean"] == "5.61"
    assert rows["seconds"]["paper_mean"] == ""


def test_rich_marks_best_and_second(folder: Path) -> None:
    from fednh.report.load import load_runs
    from fednh.report.tables import accuracy_sheet

    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system="standard", legacy_windows=False)
    console.print(to_rich(accuracy_sheet(load_runs([folder])), console.width))
    assert "\x1b[1m82.00 ± 2.00\x1b[0m" in out.getvalue()
    assert "\x1b[4m79.00 ± 1.00\x1b[0m" in out.getvalue()


def test_the_terminal_breaks_no_number_at_120_columns(folder: Path) -> None:
    text = table(folder)
    for part in ("-5.48 to -0.52", "12.0 kB", "82.00 ± 2.00", "40.00 ± 0.00"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 120


def on_terminal(sheet: Sheet, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(to_rich(sheet, width))
    return out.getvalue().splitlines()


def test_columns_that_do_not_fit_go_on_below_and_no_number_is_broken() -> None:
    """Borders and padding take three characters a column: of 25, a method and one number fit."""
    rows = [[Cell("FedNH", "FedNH"), *(Cell(f"{n}0.00 ± 1.00", float(n)) for n in (1, 2, 3))]]
    lines = on_terminal(Sheet("s", "title", ["method", "GM", "PM(V)", "PM(L)"], rows, "note"), 25)
    assert [re.findall(r"[\w().±]+(?: ± [\d.]+)?", line) for line in lines if "FedNH" in line] == [
        ["FedNH", "10.00 ± 1.00"],
        ["FedNH", "20.00 ± 1.00"],
        ["FedNH", "30.00 ± 1.00"],
    ]
    assert sum("method" in line for line in lines) == 3
    assert max(map(len, lines)) <= 25
    assert sum("FedNH" in line for line in on_terminal(Sheet("s", "", ["method", "GM"], [rows[0][:2]]), 25)) == 1


def test_long_names_make_room_for_numbers() -> None:
    rows = [[Cell(name := "a-run-with-a-very-long-name", name), Cell("123456789.00", 1.0)]]
    lines = on_terminal(Sheet("s", "title", ["run", "GM"], rows), 25)
    assert any("123456789.00" in line for line in lines)
    shown = "".join(re.sub(r"[^\w-]", "", line.strip("│ ").partition("│")[0]) for line in lines if line.startswith("│"))
    assert shown == name


def test_short(folder: Path) -> None:
    text = table(folder, "--short", "--format", "markdown")
    assert text.count("| FedNH | digits |") == 3
    assert "fairness: standard deviation of PM(L) over clients" in text


def test_reference_that_is_not_there(folder: Path) -> None:
    with pytest.raises(UserError, match="reference = 'ditto' is in none of the runs"):
        CliRunner().invoke(app, ["table", str(folder), "--reference", "ditto"], catch_exceptions=False)


@given(st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), min_size=1), st.integers(0, 2))
def test_any_text_is_escaped(text: str, place: int) -> None:
    sheet = Sheet("x", text, ["method"], [[Cell(text, text, place)]], text)
    rows = [line for line in to_markdown(sheet).splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) == 2 for row in rows)
    body = to_latex(sheet).split("\\midrule\n")[1].split("\\bottomrule")[0]
    assert not re.search(r"(?<!\\)(?:\\\\)*[&%#_]", body.removesuffix("\\\\\n    "))
    assert text.strip() in "".join(line.strip() for line in on_terminal(sheet, 10_000)) or not text.strip()
    plain = re.sub(r"\\text(?:backslash|asciitilde|asciicircum|less|greater|bf)\b|\\underline|\\\\\s*$", "", body)
    assert len(re.findall(r"(?<!\\)\{", plain)) == len(re.findall(r"(?<!\\)\}", plain))
