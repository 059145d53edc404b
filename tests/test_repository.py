"""The files around the package: workflows, citation and issue forms are valid and say what is so."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from check_jsonschema.cli import main as check_jsonschema
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import fednh
from tools.index_page import index_page

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))
SCHEMAS = [
    *((file, schema) for file in WORKFLOWS for schema in ("github-workflows", "github-workflows-require-timeout")),
    *((file, "github-issue-forms") for file in FORMS),
    (ROOT / ".github/ISSUE_TEMPLATE/config.yml", "github-issue-config"),
    (ROOT / "CITATION.cff", "citation-file-format"),
]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize(("file", "schema"), SCHEMAS, ids=lambda value: getattr(value, "name", value))
def test_files_are_valid(file: Path, schema: str) -> None:
    kind = "custom" if schema.endswith("require-timeout") else "vendor"
    ended = CliRunner().invoke(check_jsonschema, ["--builtin-schema", f"{kind}.{schema}", str(file)])
    assert ended.exit_code == 0, ended.output


def test_there_are_workflows_and_forms() -> None:
    assert [file.name for file in WORKFLOWS] == ["release.yml", "test.yml"]
    assert [file.name for file in FORMS] == ["bug.yml", "idea.yml"]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflows_call_make_targets_that_exist(file: Path) -> None:
    jobs = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"]
    called = [step["run"] for job in jobs.values() for step in job["steps"] if step.get("run", "").startswith("make ")]
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert called
    assert {command.removeprefix("make ") for command in called} <= targets


def test_tests_run_on_every_python_that_is_promised() -> None:
    matrix = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))["jobs"]["unit"][
        "strategy"
    ]
    promised = [line.rpartition(" ")[2] for line in PYPROJECT["classifiers"] if "Python :: 3." in line]
    assert matrix["matrix"]["python"] == promised
    assert PYPROJECT["requires-python"] == f">={promised[0]}"


def test_what_is_pinned_can_be_installed_on_the_oldest_python() -> None:
    """Debian 12 has 3.11.2, and a package may want 3.11.5."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    oldest = {"python_version": "3.11", "python_full_version": "3.11.0"}
    there = {pin.name: str(pin.specifier) for pin in pins if pin.marker is None or pin.marker.evaluate(oldest)}
    refused = [
        f"{found.name} {found.version} wants Python {found.metadata.get('Requires-Python')}"
        for found in distributions()
        if there.get(found.name) == f"=={found.version}"
        and "3.11.0" not in SpecifierSet(found.metadata.get("Requires-Python") or "")
    ]
    assert refused == []


def test_the_citation_is_of_this_version_and_of_the_paper() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == fednh.__version__
    (paper,) = cited["references"]
    assert [person["family-names"] for person in paper["authors"]] == ["Dai", "Chen", "Li", "Heinecke", "Sun", "Xu"]
    assert (paper["year"], paper["volume"], paper["issue"], paper["start"], paper["end"]) == (2023, 37, 6, 7314, 7322)


README = """\
A [page](docs/page.md#part), ![a picture](docs/a.png) and [another site](https://arxiv.org/abs/1).

![Two words
of a figure](docs/b.svg)

```python
x[0](y)  # no link
```
"""


def test_the_index_page_links_into_the_repository() -> None:
    page = index_page(README, "https://example.org/us/fednh/", "1.2.3")
    there = "https://example.org/us/fednh"
    assert f"[page]({there}/blob/v1.2.3/docs/page.md#part), ![a picture]({there}/raw/v1.2.3/docs/a.png) and" in page
    assert f"of a figure]({there}/raw/v1.2.3/docs/b.svg)" in page
    assert "[another site](https://arxiv.org/abs/1).\n" in page
    assert "x[0](y)  # no link\n" in page


def test_an_index_page_without_an_address_has_no_dead_link() -> None:
    page = index_page(README, None, "1.2.3")
    assert page.startswith("A page,  and [another site](https://arxiv.org/abs/1).\n\n```python\nx[0](y)")
    assert "source distribution" in page


def test_no_relative_link_of_the_readme_reaches_the_index_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "](docs/" in readme
    page = index_page(readme, "https://example.org", "1")
    targets = re.findall(r"\]\(([^)]*)\)", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
    assert [target for target in targets if not target.startswith("https://")] == []
