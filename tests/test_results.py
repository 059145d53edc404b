"""docs/results.md is what results/ gives; the campaign starts runs, goes on with them and keeps what can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

import results

ROOT = Path(__file__).parents[1]

TINY = """
[sections]
short = "Short runs\\nOf two methods."

[[run]]
name = "digits-fednh"
preset = "digits"
method = "fednh"
rounds = 1
about = "short"
set = {"partition.clients" = 4, "train.epochs" = 1, "eval.every" = 1}

[[run]]
name = "digits-fednh"
preset = "digits"
method = "fednh"
rounds = 2
about = "short"

[[run]]
name = "digits-local"
preset = "digits"
method = "local"
rounds = 1
about = "short"
"""


def test_the_page_is_what_the_results_give() -> None:
    assert results.PAGE.read_text(encoding="utf-8") == results.page(), "run: make results, or tools/results.py --page"


def test_every_run_of_the_campaign_can_be_parsed_and_has_a_name_of_its_own() -> None:
    from fednh.config import load

    seen: dict[str, tuple[object, ...]] = {}
    for entry in results.campaign():
        what = (entry.preset, entry.method, entry.seed, str(entry.set))
        assert seen.setdefault(entry.name, what) == what, f"two runs are called {entry.name}"
        load(entry.preset, {"method.name": entry.method, "seed": entry.seed, "rounds": entry.rounds, **entry.set})


@pytest.mark.soak
def test_a_campaign_goes_on_where_it_stands(tmp_path: Path) -> None:
    kept, work = tmp_path / "results", tmp_path / "work"
    kept.mkdir()
    (kept / "campaign.toml").write_text(TINY, encoding="utf-8")
    first, longer, other = results.campaign(kept / "campaign.toml")
    for entry in (first, longer):
        assert not results.done(entry, kept)
        assert results.go_on(entry, work) == 0
        results.collect(entry, work, kept)
        assert results.done(entry, kept)
    assert results.rounds_of(kept / "digits-fednh") == 2
    assert sorted(p.name for p in (kept / "digits-fednh").iterdir()) == sorted(str(name) for name in results.KEPT)
    page = results.page(kept)
    assert "## Short runs\n\nOf two methods.\n" in page
    assert "| digits, fednh" in page
    assert "| 2 |" in page
    assert "local" not in page, f"{other.name} has not begun"
