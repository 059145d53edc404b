"""The documents tell the truth: every command in them can be parsed, and is run, or the document says that it is not.

A block of commands counts as run when this file runs it (RUN), or when its document names the test that does ("run by
`tests/...`"). Otherwise the words "not run by the tests" must stand in the block, or in the document before its first
block: then they hold for all of it. Commands that train are run with fewer rounds, seeds, betas and methods.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fednh.data.sources.builtin import digits
from fednh.methods import METHODS
from tests.helpers.browser import Browser, find
from tests.helpers.process import fednh, parse
from tools import settings_page

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = "not run by the tests"
RUN = (
    "README.md",
    "first-result.md",
    "own-data.md",
    "site-answers.md",
    "running.md",
    "using-models.md",
    "sweeps-and-tables.md",
    "figures-and-report.md",
)
ELSEWHERE = {  # commands that need what only other tests have: the words that must stand in that test
    ("federation", "init"): "tests/flower/test_scaffold.py",
    ("federation", "up"): "tests/helpers/deployment.py",
    ("federation", "certs"): "tests/flower/test_certs.py",
    ("federation", "serve"): "tests/flower/test_certs.py",
    ("federation", "join"): "tests/flower/test_approval.py",
    ("federation", "run"): "tests/flower/test_approval.py",
    ("federation", "approve"): "tests/flower/test_approval.py",
    ("federation", "audit"): "tests/flower/attacks/test_audit_events.py",
    ("federation", "status"): "tests/flower/attacks/test_audit_events.py",
}
# Rows of the tables in docs/method-notes.md with runs on the digits: method, settings, and a column for each seed.
DIGITS = re.compile(
    r"^\| `(\w+)`((?:, `method\.\w+=[\w.]+`)*)(?: \(the default\))? \| (\d[^|]+?) \|(?: ?([^|]*?) ?\|)?$", re.M
)
# Numbers that somebody has measured: times, ratios, memory, accuracies with a decimal, areas under curves.
MEASURED = re.compile(
    r"(?<![\d.,])\d+\.\d+ (?:ms|s|x|GiB|GB|seconds|points)\b|\b\d+ (?:ms\b|seconds of CPU)|\d x as fast"
    r"|(?<![\d.])\d\d\.\d\d?(?: [/|%(]|,)|\b0\.\d{3} \(\d"
)
NAMED = r"\bcommits? ([0-9a-f]{7,40})\b(?: and ([0-9a-f]{7,40}))?(?! of their)"  # "of their repository": another one
REPEATED = (
    r"`make (?:bench|bench-peers|results)`|`python -m benchmarks|\bsoak\s+test|`results/|results(?:-settings)?\.md#"
)
LONG_RUNS = {  # rows of docs/method-notes.md with runs of 200 rounds: their folders on CIFAR-10 and CIFAR-100
    "text: scale from 20, `uniform`, `separated`": ("cifar10-fednh", "cifar100-fednh"),
    "the scale alone from 1": (None, "cifar100-fednh-scale1"),
    "**authors' code: scale from 1, `count`, `orthogonal`**": ("cifar10-fednh-authors-full", "cifar100-fednh-authors"),
    "FedAvg here (paper)": ("cifar10-fedavg", "cifar100-fedavg"),
    "FedPrior here, text's settings": ("cifar10-fedprior", "cifar100-fedprior"),
    "FedPrior here, authors' settings": ("cifar10-fedprior-authors", "cifar100-fedprior-authors"),
    "FedNH here, text's settings": ("cifar10-fednh", "cifar100-fednh"),
    "FedNH here, authors' settings": ("cifar10-fednh-authors-full", "cifar100-fednh-authors"),
}

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


def shorter(words: list[str]) -> list[str]:
    """The same command with less to do."""
    if words[0] == "recommend":
        less = ["--rounds", "1", "--epochs", "1", "--method", "fedavg", "--seeds", "1"]
        return [*words, *less, "--set", "data.folds=2"]
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
    """(method, setting, seed, GM and PM(V) and PM(L)) of the tables in docs/method-notes.md with runs on the digits."""
    found = []
    for method, settings, *columns in DIGITS.findall((ROOT / "docs/method-notes.md").read_text(encoding="utf-8")):
        for seed, cell in enumerate(columns):
            if cell:
                numbers = [float(n) for n in re.findall(r"[\d.]+", cell)]
                found.append((method, " ".join(re.findall(r"`(.+?)`", settings)), seed, numbers))
    return found


def test_the_tables_of_digits_are_read() -> None:
    assert len(digits_rows()) == 19
    assert ("feddbe", "method.kappa=50", 1, [93.7, 91.1, 96.8]) in digits_rows()
    assert ("ditto", "method.personal_sgd=plain method.pull=trained", 0, [97.2, 95.6, 98.0]) in digits_rows()


@pytest.mark.soak
@pytest.mark.parametrize(("method", "setting", "seed", "stated"), digits_rows())
def test_the_numbers_of_the_digits_repeat(
    method: str, setting: str, seed: int, stated: list[float], tmp_path: Path
) -> None:
    """Within half a point: another processor rounds otherwise."""
    args = ["--method", method, "--rounds", "20", "--seed", str(seed)]
    for each in setting.split():
        args += ["--set", each]
    assert fednh(["run", "digits", *args, "--out", str(tmp_path / "r")], tmp_path).code == 0
    summary = json.loads((tmp_path / "r/summary.json").read_text())
    assert [summary[name] for name in ("gm", "pm_v", "pm_l")] == pytest.approx(stated, abs=0.5)


def sections(document: Path) -> list[str]:
    """A document's parts from one heading of the second level to the next; in code "## " is a comment."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.split(r"^(?=## )", text, flags=re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_measured_numbers_name_the_command_that_repeats_them_or_their_commit(document: Path) -> None:
    """The pages of results as a whole are compared with results/ by tests/test_results.py."""
    if document.name in ("results.md", "results-settings.md", "leaderboard.md"):
        return
    for section in sections(document):
        if found := MEASURED.search(section):
            known = re.search(f"{NAMED}|{REPEATED}", section)
            assert known, f"{section.splitlines()[0]}: where does {found[0]!r} come from? Name a command or a commit."


def test_commits_that_documents_name_are_in_the_history() -> None:
    ended = subprocess.run(["git", "rev-list", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    shallow = subprocess.run(
        ["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    if ended.returncode or shallow.stdout.strip() != "false":
        pytest.skip("the history is not here")
    short = {commit[:7]: commit for commit in ended.stdout.split()}
    named = 0
    for document in DOCUMENTS:
        for found in re.finditer(NAMED, " ".join(document.read_text(encoding="utf-8").split())):
            for commit in filter(None, found.groups()):
                assert short.get(commit[:7], "").startswith(commit), (
                    f"{document.name}: no commit {commit} in the history"
                )
                named += 1
    assert named > 20


def test_the_table_of_benchmarks_is_what_make_bench_wrote() -> None:
    result = json.loads((ROOT / "benchmarks/results.json").read_text(encoding="utf-8"))
    text = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    for row in result["rows"]:
        unit, sign = f" {row['unit']}".rstrip(), "at most" if row["at_most"] else "at least"
        mark = "reached" if row["reached"] else "**short**"
        assert f"| {row['name']} | {row['value']:.2f}{unit} | {sign} {row['goal']:g}{unit} | {mark} |" in text
    assert f"commit {result['environment']['commit'][:7]}" in text


def test_numbers_of_long_runs_are_those_of_results() -> None:
    """In docs/method-notes.md GM, PM(V) / PM(L) and, if there is a fourth, the spread; in the README GM alone."""

    def of(run: str, *names: str) -> list[str]:
        summary = json.loads((ROOT / "results" / run / "summary.json").read_text(encoding="utf-8"))
        return [f"{summary[name]:.1f}" for name in names]

    text = (ROOT / "docs/method-notes.md").read_text(encoding="utf-8")
    for row, runs in LONG_RUNS.items():
        line = next(line for line in text.splitlines() if line.startswith(f"| {row} |"))
        for run, cell in zip(runs, line.split("|")[2:4], strict=True):
            stated = re.findall(r"\d+\.\d", cell.partition("(")[0])
            assert stated == (of(run, "gm", "pm_v", "pm_l", "pm_l_std")[: len(stated)] if run else []), (row, run)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = {
        "FedAvg": ("cifar10-fedavg", "cifar100-fedavg"),
        "FedPer": ("cifar10-fedper", "cifar100-fedper"),
        "FedNH": ("cifar10-fednh-authors-full", "cifar100-fednh-authors"),
        "FedPrior (ours)": ("cifar10-fedprior-authors", "cifar100-fedprior-authors"),
    }
    for row, runs in shown.items():
        cells = next(line for line in readme.splitlines() if line.startswith(f"| {row} |")).split("|")
        assert [cells[2].strip(), cells[4].strip()] == [of(run, "gm")[0] for run in runs], row
    gains = next(line for line in readme.splitlines() if line.startswith("| gain of FedPrior over FedNH")).split("|")
    for k, (ours, other) in zip((2, 4), zip(shown["FedPrior (ours)"], shown["FedNH"], strict=True), strict=True):
        pair = [json.loads((ROOT / "results" / run / "summary.json").read_text()) for run in (ours, other)]
        told = ", ".join(f"{pair[0][name] - pair[1][name]:+.1f}" for name in ("gm", "pm_v", "pm_l"))
        assert gains[k].strip() == told


def test_the_page_of_settings_is_that_of_the_schema() -> None:
    """`python -m tools.settings_page` writes it."""
    assert settings_page.PAGE.read_text(encoding="utf-8") == settings_page.page()


def test_the_federation_reference_has_the_keys_of_a_site() -> None:
    """The models that read site.toml write its tables: `python tools/settings_page.py`."""
    assert settings_page.REFERENCE.read_text(encoding="utf-8") == settings_page.reference()
    assert "| `allow.rounds` |" not in settings_page.site_tables()
    assert "| `rounds` | most that the site trains in all" in settings_page.site_tables()


def test_presets_with_the_authors_way_are_told_on_the_methods_page() -> None:
    """The rows that say "presets:" have what the paper's presets have in their tables [methods.NAME], and no more."""
    text = (ROOT / "docs/method-notes.md").read_text(encoding="utf-8")
    told = {
        method.lower(): dict(re.findall(r'`(\w+) = "(\w+)"`', cell))
        for method, cell in re.findall(r"^\| (\w+) \|[^|]*\| presets: ([^|]*) \|$", text, flags=re.MULTILINE)
    }
    for name in ("cifar10", "cifar100", "tinyimagenet"):
        preset = tomllib.loads((ROOT / f"src/fednh/config/presets/{name}.toml").read_text(encoding="utf-8"))
        assert preset["methods"] == told, name


def test_most_methods_are_as_short_as_the_comparison_says() -> None:
    """Lines of code: without blank lines, comments and docstrings."""
    counted = []
    for name in METHODS:
        source = (ROOT / f"src/fednh/methods/{name}.py").read_text(encoding="utf-8")
        docstrings = set[int]()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        lines = enumerate(source.splitlines(), 1)
        counted.append(sum(bool(re.match(r"\s*[^\s#]", line)) and i not in docstrings for i, line in lines))
    most = re.search(
        r"most have (\d+) lines of code or fewer", (ROOT / "docs/comparison.md").read_text(encoding="utf-8")
    )
    assert most is not None
    assert sum(lines <= int(most[1]) for lines in counted) > 0.6 * len(counted)
    assert f"{len(METHODS)} [methods](docs/methods.md) in all" in (ROOT / "README.md").read_text(encoding="utf-8")
