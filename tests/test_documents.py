"""The documents tell the truth: every command in them can be parsed, and is run, or the document says that it is not.

A block of commands counts as run when this file runs it (RUN), or when its document names the test that does ("run by
`tests/...`"). Otherwise the words "not run by the tests" must stand in the block, or in the document before its first
block: then they hold for all of it. Commands that train are run with fewer rounds, seeds, betas and methods.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image

from fednh.cli import app
from fednh.data.sources.builtin import digits
from fednh.methods import METHODS
from forked import fednh
from report.browser import Browser, find

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = "not run by the tests"
RUN = (
    "README.md",
    "first-result.md",
    "own-data.md",
    "running.md",
    "using-models.md",
    "sweeps-and-tables.md",
    "figures-and-report.md",
)
ELSEWHERE = {  # commands that need what only other tests have: the words that must stand in that test
    ("federation", "init"): "tests/flower/test_scaffold.py",
    ("federation", "up"): "tests/flower/federations.py",
    ("federation", "certs"): "tests/flower/test_certs.py",
    ("federation", "serve"): "tests/flower/test_certs.py",
    ("federation", "join"): "tests/flower/test_approval.py",
    ("federation", "run"): "tests/flower/test_approval.py",
    ("federation", "approve"): "tests/flower/test_approval.py",
    ("federation", "audit"): "tests/flower/attacks/test_audit_events.py",
    ("federation", "status"): "tests/flower/attacks/test_audit_events.py",
}
# Rows of the tables in docs/methods.md with runs on the digits.
DIGITS = re.compile(r"^\| `(\w+)`(?:, `(method\.\w+=[\d.]+)`)?(?: \(the default\))? \| (.+?) \| (.*?) ?\|$", re.M)

MAKE = {
    "test": "it runs this file",
    "demo": "test_the_demo",
    "docs": "test_the_site",
    "soak": "the long tests",
    "bench": "a measurement",
    "bench-peers": "a measurement that installs other libraries",
    "dist": "tools/dist.py",
    "results": "a campaign of days",
}


@dataclass(frozen=True)
class Block:
    """A block of shell commands in a document."""

    document: Path
    line: int
    text: str
    stated: bool  # that it is not run
    elsewhere: bool  # another test runs it

    @property
    def commands(self) -> list[list[str]]:
        """Its commands, as words, without comments and prompts."""
        joined = self.text.replace("\\\n", " ")
        lines = [re.sub(r"^\s*\$\s+", "", line) for line in joined.splitlines()]
        return [shlex.split(line, comments=True) for line in lines if shlex.split(line, comments=True)]


def blocks(document: Path) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    first = text.find("```")
    all_stated = NOT_RUN in text[:first].replace("\n", " ")
    named = re.search(r"run by\s+`(tests/[\w/]+\.py)`", text)
    elsewhere = named is not None and document.name in (ROOT / named[1]).read_text(encoding="utf-8")
    found = []
    for match in re.finditer(r"^```(?:sh|console|bash)\b[^\n]*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        stated = all_stated or NOT_RUN in match[1]
        found.append(Block(document, text.count("\n", 0, match.start()) + 1, match[1], stated, elsewhere))
    return found


EVERY = [block for document in DOCUMENTS for block in blocks(document)]


@pytest.mark.parametrize("block", EVERY, ids=lambda b: f"{b.document.name}:{b.line}")
def test_commands_can_be_parsed_and_are_run_or_said_not_to_be(block: Block) -> None:
    for words in block.commands:
        if words[0] == "fednh":
            parse(words[1:])
        elif words[0] == "make":
            assert all(target in MAKE for target in words[1:]), f"{words}: no test says that it runs this"
            continue
        else:
            continue
        other = ELSEWHERE.get((words[1], words[2] if len(words) > 2 else ""))
        if other is not None:
            assert f'"{words[1]}", "{words[2]}"' in (ROOT / other).read_text(encoding="utf-8")
            continue
        known = block.stated or block.elsewhere or block.document.name in RUN
        assert known, f"{block.document.name}:{block.line}: {' '.join(words)} is neither run nor said not to be"


def parse(args: list[str]) -> None:
    """What the command line does before it acts: unknown options, missing arguments and wrong types are errors."""
    group = typer.main.get_command(app)
    context = group.make_context("fednh", list(args))
    while hasattr(group, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, group, left = group.resolve_command(context, rest)
        context = group.make_context(name, left, parent=context)


def shorter(words: list[str]) -> list[str]:
    """The same command with less to do."""
    if words[0] not in ("run", "sweep"):
        return words
    short = list(words)
    for option, most in (("--seed", 1), ("--beta", 1), ("--method", 2)):
        if option in short:
            at = short.index(option) + 1
            short[at] = ",".join(short[at].replace("all", "fednh,fedavg").split(",")[:most])
    for option, value in (("--rounds", "2"), ("--epochs", "1"), ("--clients", "4")):
        if option in short:
            short[short.index(option) + 1] = value
        else:
            short += [option, value]
    return [*short, "--set", "eval.every=1"]  # a curve needs two points


LONG = ("first-result.md", "using-models.md", "sweeps-and-tables.md", "figures-and-report.md")  # run by `make soak`


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.soak) if n in LONG else n for n in RUN])
def test_what_is_shown_works(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All commands of a document, in its order, in one folder that has what the document speaks of."""
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    document = ROOT / name if (ROOT / name).exists() else ROOT / "docs" / name
    done = 0
    for block in blocks(document):
        for words in block.commands:
            if block.stated or words[0] != "fednh" or tuple(words[1:3]) in ELSEWHERE:
                continue
            ended = fednh(shorter(words[1:]), tmp_path / "io")
            assert ended.code == 0, f"{' '.join(words)}: {ended.stderr}"
            done += 1
    assert done > 0


def prepare(folder: Path) -> None:
    """Photographs sorted by site and class, a site's own file, and a config: what the documents' examples are about."""
    data = digits()
    for i in range(240):
        site = ("art", "cartoon", "photo", "sketch")[i % 4]
        path = folder / "photos" / site / f"digit-{data.classes[data.y_train[i]]}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((data.x_train[i, ..., 0] * (255 / 16)).astype(np.uint8)).save(path)
    arrays = {"x_train": data.x_train[:200], "y_train": data.y_train[:200], "x_test": data.x_test[:50]}
    np.savez(folder / "site.npz", **arrays, y_test=data.y_test[:50])
    (folder / "my.toml").write_text("rounds = 2\n[partition]\nclients = 4\n")


@pytest.mark.soak
def test_the_example_program(tmp_path: Path) -> None:
    """docs/example.md is one program."""
    text = (ROOT / "docs/example.md").read_text(encoding="utf-8")
    program = "\n".join(re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert "by the global model" in ended.stdout
    assert "noise taken for unknown" in ended.stdout


@pytest.mark.soak
def test_the_novelty_experiment(tmp_path: Path) -> None:
    script = str(ROOT / "docs/examples/novelty.py")
    args = [sys.executable, script, "digits", "--rounds", "2", "--samples", "800"]
    ended = subprocess.run(args, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert '"auroc_similarity": 0.' in ended.stdout


def test_the_comparison_counts_our_methods() -> None:
    counted = re.search(
        r"^\| \*\*fednh\*\* .*\| (\d+), ", (ROOT / "docs/comparison.md").read_text(), flags=re.MULTILINE
    )
    assert counted is not None
    assert int(counted[1]) == len(METHODS)


def test_the_demo() -> None:
    """The commands behind `make demo` can be parsed; the same kinds are run above."""
    recipe = re.findall(r"\$\(BIN\)/python -m fednh (.*)", (ROOT / "Makefile").read_text())
    assert len(recipe) >= 3
    for line in recipe:
        parse(shlex.split(line))


def test_the_site(tmp_path: Path) -> None:
    """What `make docs` does: strict, so that a broken link or a page that is in no menu is an error."""
    args = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "-d",
        str(tmp_path / "site"),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # about the theme's successor; as in the Makefile
    ended = subprocess.run(args, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert "WARNING" not in ended.stderr
    home = (tmp_path / "site/index.html").read_text()
    loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]+)"', home)
    assert [url for url in loaded if "canonical" not in url] == [], "nothing is loaded from anywhere"
    reference = (tmp_path / "site/reference.html").read_text()
    assert "predict_proba" in reference
    assert 'class="fednh-map"' in (tmp_path / "site/what-is-this.html").read_text(), "the figure is part of the page"
    assert "Who holds what" in (tmp_path / "site/notebooks/ten-minutes.html").read_text()


@pytest.mark.soak
@pytest.mark.skipif(find() is None, reason="no Chromium here (Debian: apt-get install chromium)")
def test_every_page_of_the_site_in_a_browser(tmp_path: Path) -> None:
    """As `make docs` builds it, with executed notebooks: no page has an error or is wider than its window."""
    site, environment = tmp_path / "site", {**os.environ, "NO_MKDOCS_2_WARNING": "1", "FEDNH_EXECUTE": "1"}
    args = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(site)]
    ended = subprocess.run(args, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr
    pages = [page for page in sorted(site.rglob("*.html")) if page.name != "404.html"]
    assert len(pages) >= 20
    with Browser(tmp_path / "profile") as browser:
        for page in pages:
            for width in (1280, 400):
                browser.open(page, width=width)
                shown = browser.run("[document.documentElement.scrollWidth, document.querySelectorAll('h1').length]")
                assert shown[0] <= width, f"{page.name} is {shown[0]} wide in a window of {width}"
                assert shown[1] == 1, page.name
        assert browser.errors == []
        browser.open(site / "notebooks/ten-minutes.html")
        assert browser.run("document.querySelectorAll('article img').length") == 5


def digits_rows() -> list[tuple[str, str, int, list[float]]]:
    """(method, setting, seed, GM and PM(V) and PM(L)) of the tables in docs/methods.md with runs on the digits."""
    text = (ROOT / "docs/methods.md").read_text().partition("## FedDBE: how strong")[2]
    found = []
    for method, setting, *columns in DIGITS.findall(text):
        for seed, cell in enumerate(columns):
            if cell:
                found.append((method, setting, seed, [float(n) for n in re.findall(r"[\d.]+", cell)]))
    return found


def test_the_tables_of_digits_are_read() -> None:
    assert len(digits_rows()) == 12
    assert ("feddbe", "method.kappa=50", 1, [93.7, 91.1, 96.8]) in digits_rows()


@pytest.mark.soak
@pytest.mark.parametrize(("method", "setting", "seed", "stated"), digits_rows())
def test_the_numbers_of_the_digits_repeat(
    method: str, setting: str, seed: int, stated: list[float], tmp_path: Path
) -> None:
    """Within half a point: another processor rounds otherwise."""
    args = ["--method", method, "--rounds", "20", "--seed", str(seed), *(["--set", setting] if setting else [])]
    assert fednh(["run", "digits", *args, "--out", str(tmp_path / "r")], tmp_path).code == 0
    summary = json.loads((tmp_path / "r/summary.json").read_text())
    assert [summary[name] for name in ("gm", "pm_v", "pm_l")] == pytest.approx(stated, abs=0.5)
