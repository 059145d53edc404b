"""The report: everything in one file, nothing of the user's taken for markup, and a browser that finds no fault."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fednh.cli import app
from fednh.config import dump, load
from fednh.errors import UserError
from fednh.report.figures import FIGURES
from fednh.report.html import render, sheet_csv, write_report
from fednh.report.load import load_runs
from fednh.report.sheet import Cell, Sheet
from tests.helpers.browser import Browser, find
from tests.helpers.synthetic import DOMAINS, add_outcomes, fake_run, fake_sites, many_runs, person, record

ARTEFACTS = Path(__file__).parents[2] / "artifacts"
needs_browser = pytest.mark.skipif(find() is None, reason="no Chromium here (Debian: apt-get install chromium)")


class Page(HTMLParser):
    """What a browser would load or run, the ids, and the data that the script reads."""

    def __init__(self, text: str):
        super().__init__()
        self.scripts, self.loads, self.ids, self.handlers = 0, list[str](), list[str](), list[str]()
        self.data: Any = None
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.scripts += tag == "script"
        self._inside = "data" if tag == "script" and found.get("id") == "data" else ""
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.loads += [v for n, v in attrs if n in ("src", "href", "xlink:href", "action") and v and v[0] != "#"]

    def handle_data(self, data: str) -> None:
        if self._inside == "data":
            self.data, self._inside = json.loads(data), ""


@pytest.fixture(scope="module")
def report(real_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "report.html"
    done = CliRunner().invoke(app, ["report", str(real_runs), "-o", str(out), "--title", "A small sweep"])
    assert done.exit_code == 0, done.output
    return out


def test_it_loads_nothing_from_anywhere(report: Path) -> None:
    text = report.read_text()
    page = Page(text)
    assert [link for link in page.loads if not link.startswith("data:image/png;base64,")] == []
    assert page.scripts == 2
    assert len(page.ids) == len(set(page.ids))
    assert not re.search(r"@import|url\((?!#)", text)


def test_it_has_the_tables_the_figures_and_how_they_were_made(report: Path) -> None:
    text, page = report.read_text(), Page(report.read_text())
    tables = {"table-accuracy", "table-fairness", "table-cost", "table-paired", "table-runs"}
    assert tables | {f"figure-{name}" for name in FIGURES if name not in ("reliability", "privacy")} <= set(page.ids)
    assert {"curves-round", "curves-bytes", "curves-seconds", "accuracy", "runs", "rounds"} <= set(page.data["csv"])
    assert "A small sweep" in text
    assert "config.toml of FedNH rho=0.1" in text
    assert "<dt>torch</dt>" in text
    assert page.data["csv"]["rounds"].count("\n") == 1 + 7 * 3  # seven runs of three rounds


def test_the_explorer_knows_every_clients_classes_and_pm(tmp_path: Path) -> None:
    people = [person(1, 81.234, [1, 2], pm_v=44.4)]
    fake_run(tmp_path / "r", {"seed": 3}, counts=[(5, 5), (2, 0)], people=people)
    [group] = Page(render(load_runs([tmp_path]), "t")).data["explorer"]
    assert group["label"].endswith("seed 3")
    assert group["counts"] == {"0": [5, 5], "1": [2, 0]}
    [method] = group["methods"]
    assert (method["label"], method["values"]) == ("FedNH", {"pm_l": {"1": 81.23}, "pm_v": {"1": 44.4}})


# Held-out samples of each site: true classes, then what the personal, the global and the local model take them for.
# art: personal 50 of 50, global 30, local 30. cartoon: 2 samples. photo and sketch: all models alike on 4.
LABELS = [0] * 30 + [1] * 20
FOUR = [0, 0, 1, 1]
OUTCOMES = [
    (LABELS, LABELS, [0] * 50, [0] * 50),
    ([0, 1], [0, 1], [0, 0], [1, 1]),
    (FOUR, FOUR, FOUR, FOUR),
    (FOUR, FOUR, FOUR, FOUR),
]


@pytest.fixture(scope="module")
def of_sites(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report on four natural sites without a shared test set."""
    runs = tmp_path_factory.mktemp("sites")
    joint = fake_sites(runs / "fednh", "fednh", [80.0, 60.0, 70.0, 90.0])
    alone = fake_sites(runs / "local", "local", [50.0, 50.0, 50.0, 52.0])
    for client, (label, personal, shared, local) in enumerate(OUTCOMES):
        add_outcomes(joint, client, label, personal, shared)
        add_outcomes(alone, client, label, local, [])
    return render(load_runs([runs]), "Four domains")


def test_sites_are_named_wherever_clients_are(of_sites: str) -> None:
    page = Page(of_sites)
    [group] = page.data["explorer"]
    assert list(group["sites"].values()) == list(DOMAINS)
    assert "<dt>sites</dt><dd>4</dd>" in of_sites
    assert "One site at a time" in of_sites
    assert page.data["csv"]["partition"].splitlines()[:2] == ["client,site,class,samples", "0,art,a,3"]
    assert page.data["csv"]["fairness"].splitlines()[1] == "FedNH,0,0,art,80,False"
    for name in DOMAINS:
        assert f"{name} (n = 7)" in of_sites  # all four distributions, in the legend
    assert "worst: cartoon 60.0" in of_sites


def test_each_site_is_told_which_model_to_use(of_sites: str) -> None:
    """First of all; marked best only where the samples say so; and everything by name."""
    assert Page(of_sites).ids.index("sites") < Page(of_sites).ids.index("tables")
    section = of_sites[of_sites.index('<section id="sites">') : of_sites.index('<section id="tables">')]
    assert "On samples that the site held out: no model was trained on them" in section
    table = section[: section.index("</table>")]
    rows = {
        match[1]: match[0]
        for match in re.finditer(r'<tr><th scope="row".*?data-group="0">(.*?)</a>.*?</tr>', table, re.DOTALL)
    }
    assert list(rows) == list(DOMAINS)
    assert "+40.0 points" in rows["art"]
    assert re.findall(r'class="place1">([\d.]+) <span class="best">', table) == ["100.0"]
    assert "<small>92.9 to 100.0</small>" in rows["art"]  # Wilson, 50 of 50: 50 / (50 + 1.96^2)
    assert '<td data-value="50">50</td>' in rows["art"]
    assert "oo few samples to tell" in rows["cartoon"]
    means = re.findall(r"<td>([\d.]+)</td>", table[table.index("<tfoot>") :])
    assert means == ["60.0", "100.0", "60.0"]  # the other sites hold out fewer than five samples each


def first_screen(text: str) -> str:
    return text[text.index("<body>") : text.index("<nav")]


def test_the_first_screen_answers_for_sites(of_sites: str) -> None:
    """A sentence, and a row a site: art gains 40 points, so its dot is right of zero; nothing else stands there."""
    shown = first_screen(of_sites)
    assert 'class="sentence">Federating helps at 1 of 4 sites (art)' in shown
    rows = re.findall(r'class="row (\w+)"><b>(.*?)</b>.*?class="value">(.*?)</span>', shown)
    assert [(side, name) for side, name, _ in rows] == list(zip(("above", *["level"] * 3), DOMAINS, strict=True))
    assert rows[0][2].startswith("+40.0 (")
    assert "<dl" not in shown
    assert of_sites.index('class="facts"') > of_sites.index('id="clients"')


def test_the_first_screen_answers_for_methods(tmp_path: Path) -> None:
    """FedNH minus FedAvg is 10 on every seed but for 1 point; Local varies by 20 points, so nothing is sure of it."""
    for seed in range(5):
        for method, pm in {"fednh": 80.0, "fedavg": 70.0 + seed % 2, "local": 60.0 + 20 * (seed % 2)}.items():
            fake_run(tmp_path / f"{method}-{seed}", {"method.name": method, "seed": seed}, pm_l=pm, gm=pm - 5)
    shown = first_screen(render(load_runs([tmp_path])))
    assert "<h1>digits: which of 3 methods is best?</h1>" in shown
    assert "FedNH has the best personal models (80.0%): surely better than FedAvg; Local cannot be told" in shown
    found = re.findall(r'class="row (\w+)"><b>(.*?)</b>.*?class="value">(.*?)</span>', shown)
    rows = {name: (side, value) for side, name, value in found[:3]}
    assert rows["FedNH"] == ("level", "80.0%, the best")
    # FedAvg: -9.6 on average, sd 0.548; t(4) at 1 - 0.05 / 2 / 3 pairs is 3.961: 3.961 * 0.548 / sqrt(5) = 0.97
    assert rows["FedAvg"] == ("below", "70.4% (-10.6 to -8.6)")
    assert rows["Local"][0] == "level"


def test_one_seed_and_one_method_are_not_taken_for_more(tmp_path: Path) -> None:
    fake_run(tmp_path / "a", {}, pm_l=80.0)
    alone = first_screen(render(load_runs([tmp_path])))
    assert "FedNH: 80.0% of samples are named rightly by personal models." in alone
    assert 'class="row' not in alone
    fake_run(tmp_path / "b", {"method.name": "fedavg"}, pm_l=70.0)
    both = first_screen(render(load_runs([tmp_path])))
    assert "<h1>digits: FedNH or FedAvg?</h1>" in both
    assert "one seed cannot tell methods apart" in both


def test_sites_with_a_shared_test_set_get_an_answer_about_methods(tmp_path: Path) -> None:
    fake_run(tmp_path / "r", {"partition.name": "site"}, sites=DOMAINS[:2])
    text = render(load_runs([tmp_path]), "t")
    assert "data.holdout = 0.2" in first_screen(text)
    assert 'id="sites"' not in text


def test_a_federation_of_real_sites_is_called_by_its_sites(tmp_path: Path) -> None:
    """Its config has a partition that nobody used, and its server neither counts nor samples."""
    run = fake_sites(tmp_path / "fednh", "fednh", [80.0, 60.0], data="csv:/home/me/rows.csv")
    run.layout.config_file.write_text(dump(load("digits", {"partition.clients": 20})))
    run.layout.partition_file.write_text(json.dumps({"classes": ["a", "b"], "counts": []}))
    named = {"sites": [{"client": k, "site": name, "rounds": 2} for k, name in enumerate(DOMAINS[:2])]}
    run.layout.summary_file.write_text(json.dumps({**run.summary, **named}))
    text = render(load_runs([tmp_path]))
    assert "rows, 2 sites, 100% a round" in text or "rows, 2 sites, 50% a round" in text
    for word in ("Dir(0.3)", "Dirichlet(0.3)", "20 clients", "/home/me"):
        assert word not in text[: text.index('id="how"')]


def test_classes_and_confusions_of_each_site(of_sites: str) -> None:
    """Global model at art: takes all 50 for class a, of which 30 are right: a recall 100, precision 60; b recall 0."""
    data = Page(of_sites).data
    rows = [line.split(",") for line in data["csv"]["sites-classes"].splitlines()]
    assert rows[0][:6] == ["site", "class", "training samples", "held-out samples", "few", "local only: recall"]
    assert rows[1] == ["art", "a", "3", "30", "", "100.0", "60.0", "100.0", "100.0", "100.0", "60.0"]
    assert rows[2] == ["art", "b", "4", "20", "", "0.0", "–", "100.0", "100.0", "0.0", "–"]
    assert rows[3][3:5] == ["1", "few"]
    assert ">1 few</td>" in of_sites
    [group] = data["explorer"]
    art = group["held"]["clients"]["0"]
    assert (art["n"], art["held"], art["few"], art["leader"]) == (50, [30, 20], [False, False], "personal")
    shared = next(model for model in art["models"] if model["label"] == "global")
    assert shared["confusion"] == [0, 0, 30, 1, 0, 20]  # true, taken for, samples
    assert (shared["recall"], shared["precision"]) == ([100.0, 0.0], [60.0, None])
    assert group["held"]["clients"]["1"]["few"] == [True, True]


def test_what_does_not_apply_to_sites_is_not_shown(of_sites: str) -> None:
    """There is no shared test set and no super-class, so nothing explains their metrics and boxes."""
    shown = of_sites[: of_sites.index("<details><summary>Figures that these runs do not allow")]
    for word in ("PM(V)", "PM(L)", "Boxes", "super-class.", "client 0"):
        assert word not in shown
    assert (
        "Who loses when a class is rare: no personal model was measured by class on a test set that all clients share"
        in of_sites
    )


def test_means_come_before_spread_in_the_page(of_sites: str) -> None:
    """FedNH 75 on average, Local 50.5 but more evenly: Local's spread is not the best, and FedNH is drawn first."""
    table = of_sites[of_sites.index('id="table-held-out"') :]
    assert re.findall(r'class="place(\d)">(11\.18|0\.87)<', table[: table.index("</table>")]) == [
        ("0", "0.87"),
        ("0", "11.18"),
    ]
    drawn = of_sites[of_sites.index('id="figure-fairness"') :]
    assert drawn.index(">FedNH<") < drawn.index(">Local<")


HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


def test_users_text_is_text(tmp_path: Path) -> None:
    """Class names, the data set's name, folder names and the title are users' own."""
    folder = tmp_path / "<script>alert(3)<"
    classes = (f"a{HOSTILE}", "</script><script>alert(4)</script>")
    records = [record(1, gm=1.0), record(2, gm=2.0)]
    fake_run(folder / f"run{HOSTILE[:9]}", {}, records, classes=classes, people=[person(0, 5, [1, 2])], data=HOSTILE)
    text = render(load_runs([folder]), HOSTILE)
    page = Page(text)
    assert page.scripts == 2
    assert page.handlers == []
    assert [link for link in page.loads if not link.startswith("data:image/png;base64,")] == []
    assert page.data["explorer"][0]["classes"] == list(classes)


def test_a_sheet_as_csv() -> None:
    sheet = Sheet("x", "X", ["method", "GM"], [[Cell("a, b"), Cell("1.00 ± 0.10", 1.0, 1)]])
    assert sheet_csv(sheet) == 'method,GM\n"a, b",1.00 ± 0.10\n'


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    fake_run(tmp_path / "r", {}, [record(1, gm=1.0)])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_report(load_runs([tmp_path]), tmp_path / "file" / "report.html", "t")


@needs_browser
def test_a_pdf_is_a_pdf(real_runs: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(real_runs), "-o", str(tmp_path / "report.pdf")])
    assert done.exit_code == 0, done.output
    content = (tmp_path / "report.pdf").read_bytes()
    assert content.startswith(b"%PDF-")
    assert content.rstrip().endswith(b"%%EOF")
    assert [path.name for path in tmp_path.iterdir()] == ["report.pdf"]


def test_what_is_no_page_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_run(tmp_path / "r", {}, [record(1, gm=1.0)])
    monkeypatch.setenv("PATH", "")
    for name, words in {
        "report.pdf": "Chromium prints a report as PDF and is not",
        "report.docx": ".html or .pdf",
    }.items():
        done = CliRunner().invoke(app, ["report", str(tmp_path / "r"), "-o", str(tmp_path / name)])
        assert isinstance(done.exception, UserError)
        assert words in str(done.exception)
        assert not (tmp_path / name).exists()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as page:
        yield page


@needs_browser
def test_in_a_browser(report: Path, browser: Browser) -> None:
    browser.open(report)
    column = "[...document.querySelectorAll('#table-accuracy tbody tr')].map(r => r.cells[{}].textContent)"
    names = browser.run(column.format(0))
    button = "document.querySelectorAll('#table-accuracy thead button')[{}]"
    browser.run(button.format(3) + ".click()")  # PM(L), the largest first
    values = [float(text.split()[0]) for text in browser.run(column.format(3))]
    assert values == sorted(values, reverse=True)
    browser.run(button.format(3) + ".click()")
    assert [float(text.split()[0]) for text in browser.run(column.format(3))] == sorted(values)
    browser.run(button.format(0) + ".click()")
    assert browser.run(column.format(0)) == sorted(names)

    browser.run("(s => { s.value = 3; s.dispatchEvent(new Event('change')); })(document.getElementById('pick-client'))")
    assert browser.run("document.getElementById('client-says').textContent").startswith("Client 3 holds ")
    assert browser.run("document.querySelectorAll('#client-pm_l i').length") == 4  # FedAvg, FedProto, FedNH twice
    browser.run("document.getElementById('later').click()")
    assert browser.run("document.getElementById('client-says').textContent").startswith("Client 4 holds ")

    shown = "[...document.querySelectorAll('#figure-curves figure')].map(f => f.checkVisibility())"
    assert browser.run(shown) == [True, False, False]
    browser.run("document.querySelectorAll('#figure-curves [role=tab]')[1].click()")
    assert browser.run(shown) == [False, True, False]

    background = "getComputedStyle(document.body).backgroundColor"
    light = browser.run(background)
    browser.run("document.getElementById('theme').click()")
    assert browser.run(background) != light

    saved = (
        "new Promise(done => { URL.createObjectURL = b => { b.text().then(done); return '#'; };"
        "document.querySelector('[data-csv=accuracy]').click(); })"
    )
    assert browser.run(saved).startswith("method,GM,PM(V),PM(L)\n")
    assert browser.errors == []


def site_pages(folder: Path) -> Path:
    """Two hundred sites, each with 30 held-out samples of three classes, and two methods."""
    names = [f"Plant {k + 1}" for k in range(200)]
    rng, runs = np.random.default_rng(0), folder / "runs"
    joint = fake_sites(runs / "fednh", "fednh", rng.uniform(40, 90, 200).tolist(), names)
    alone = fake_sites(runs / "local", "local", rng.uniform(30, 70, 200).tolist(), names)
    for client in range(200):
        label, *guessed = rng.integers(0, 2, (4, 30)).tolist()
        add_outcomes(joint, client, label, guessed[0], guessed[1])
        add_outcomes(alone, client, label, guessed[2], [])
    write_report(load_runs([runs]), folder / "report.html", "Two hundred plants")
    return folder / "report.html"


@needs_browser
@pytest.mark.soak
def test_two_hundred_sites_in_a_browser(tmp_path: Path, browser: Browser) -> None:
    """A site is found by typing; its name leads to it; the matrix follows the model; nothing is wider than the page."""
    report = site_pages(tmp_path)
    browser.open(report)
    typed = "(i => {{ i.value = {!r}; i.dispatchEvent(new Event('input')); }})(document.querySelector({!r}))"
    every = "[...document.querySelectorAll('#table-sites tbody tr')]"
    rows = every + ".filter(r => r.checkVisibility()).map(r => r.cells[0].textContent)"
    assert len(browser.run(rows)) == 200
    browser.run(typed.format("plant 17", "#table-sites [data-find]"))
    assert browser.run(rows) == ["Plant 17", *(f"Plant {k}" for k in range(170, 180))]
    browser.run("document.querySelector('a[data-client=\"172\"]').click()")
    assert browser.run("document.getElementById('client-says').textContent").startswith(
        "Plant 173 holds 7 training samples"
    )
    heading = "[...document.querySelectorAll('#client-held h3')].map(h => h.textContent)"
    assert browser.run(heading)[0] == "Its 30 held-out samples, class by class"
    choose = "(s => { s.value = 'local only'; s.dispatchEvent(new Event('change')); })"
    browser.run(choose + "(document.getElementById('pick-model'))")
    assert browser.run(heading)[1] == "What is taken for what: local only"
    cells = "[...document.querySelectorAll('table.confusion td')].map(c => Number(c.textContent) || 0)"
    assert sum(browser.run(cells)) == 30
    browser.run(typed.format("plant 200", "#find-client"))
    assert browser.run("document.getElementById('client-says').textContent").startswith("Plant 200 holds ")
    assert browser.run("document.querySelector('#pick-model').value") == "local only"  # the choice stays
    for look in ({}, {"dark": True}, {"width": 390, "height": 844}):
        browser.open(report, **look)
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        assert browser.run("document.querySelector('#table-sites .tall').clientHeight <= innerHeight")
    assert browser.errors == []


@needs_browser
@pytest.mark.soak
def test_sites_whose_samples_only_they_know(tmp_path: Path, browser: Browser) -> None:
    """A federation's server has the sites' names and accuracies, and neither counts nor single samples."""
    run = fake_sites(tmp_path / "runs" / "fednh", "fednh", [80.0, 60.0])
    run.layout.partition_file.write_text(json.dumps({"classes": ["a", "b"], "counts": []}))
    named = {"sites": [{"client": k, "site": name, "rounds": 2} for k, name in enumerate(DOMAINS[:2])]}
    run.layout.summary_file.write_text(json.dumps({**run.summary, **named}))
    write_report(load_runs([tmp_path / "runs"]), tmp_path / "report.html", "A federation")
    browser.open(tmp_path / "report.html")
    assert "only the site knows" in browser.run("document.getElementById('client-says').textContent")
    assert browser.run("[...document.querySelectorAll('#pick-client option')].map(o => o.textContent)") == [
        "art",
        "cartoon",
    ]
    assert browser.errors == []


@pytest.mark.soak
@needs_browser
def test_it_fits_a_phone_and_follows_the_systems_colours(report: Path, browser: Browser) -> None:
    for name, look in {
        "light": {},
        "dark": {"dark": True},
        "phone": {"width": 390, "height": 844},
        "phone-dark": {"width": 390, "height": 844, "dark": True},
    }.items():
        browser.open(report, **look)
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        browser.screenshot(ARTEFACTS / f"report-{name}.png", whole=True)
        ink = browser.run("getComputedStyle(document.querySelector('#figure-curves svg text')).fill")
        assert (ink == "rgb(163, 171, 183)") == ("dark" in name), ink  # the page's muted ink, light or dark
    assert browser.errors == []


@pytest.mark.soak
def test_forty_runs_stay_small_and_open_at_once(tmp_path: Path) -> None:
    many_runs(tmp_path / "runs", hostile="<b>")
    size = write_report(load_runs([tmp_path / "runs"]), tmp_path / "report.html", "Forty runs")
    assert size < 10e6
    if find() is None:
        pytest.skip(f"{size / 1e6:.1f} MB is small enough; no Chromium here to load it with")
    with Browser(tmp_path / "profile") as page:
        took = []
        for _ in range(3):  # the quickest counts: other work may share the cores
            page.open(tmp_path / "report.html")
            took.append(page.run("performance.getEntriesByType('navigation')[0].loadEventEnd"))
        print(f"{size / 1e6:.1f} MB, loaded in {min(took):.0f} ms")
        assert 0 < min(took) < 2000
        assert page.errors == []
