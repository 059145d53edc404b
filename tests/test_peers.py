"""The comparison with other libraries: its arithmetic on measurements made up here, what fails, and the document."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.peers.__main__ import PAGE, RESULTS, SECTION, Row, compare, line, page, with_section
from benchmarks.peers.sides import OURS, PEERS, Failed, Side, measure, run
from benchmarks.peers.work import ONE, PROCESSES, THREADS, WORKERS, WORKS, Answer, Job, clients, network

FIRST, OTHER, BROKEN = Side("a", "a", (ONE,)), Side("b", "b", (THREADS, ONE)), Side("c", "c", (THREADS,))


def test_rates_are_the_best_of_the_turns_and_ratios_are_to_the_first_side() -> None:
    seconds = {"a": iter([2.0, 1.0]), "b": iter([8.0, 4.0])}

    def measured(side: Side, job: Job) -> Answer:
        if side.name == "c":
            raise Failed("it was tired")
        if job.epochs == 1:  # the trial
            return Answer({}, 1, {THREADS: 3.0, ONE: 2.0}[job.setting], 2.0, 1.0)
        return Answer({"b": "1.0"}, job.samples, next(seconds[side.name]), 2.0, 1.0)

    first, other, broken = compare("conv2", [FIRST, OTHER, BROKEN], 2, measured)
    assert (first.rate, first.ratio) == (25_000, 1.0)
    assert (other.rate, other.ratio, other.setting) == (6_250, 4.0, ONE)
    assert (broken.rate, broken.words) == (None, "it was tired")
    assert line(other) == f"| b | 6,250 | 4.00 x | at least 1.5 x, reached | {ONE} |"
    assert line(broken) == f"| c | it was tired | | at least 1.5 x | {THREADS} |"


def test_a_ratio_below_the_goal_is_said_to_be_short() -> None:
    assert "**short**" in line(Row("small", "b", ONE, 10.0, 4.9))


def test_a_setting_that_fails_is_left_out() -> None:
    def measured(side: Side, job: Job) -> Answer:
        if job.setting == ONE:
            raise Failed("not in this one")
        return Answer({}, job.samples, 1.0, 2.0, 1.0)

    (row,) = compare("small", [OTHER], 1, measured)
    assert (row.setting, row.words) == (THREADS, "")


def test_a_setting_that_fails_once_is_tried_again() -> None:
    failed: set[Job] = set()

    def measured(side: Side, job: Job) -> Answer:
        if job.setting == ONE and job not in failed:
            failed.add(job)
            raise Failed("the port was taken")
        return Answer({}, job.samples, {THREADS: 2.0, ONE: 1.0}[job.setting], 2.0, 1.0)

    (row,) = compare("small", [OTHER], 1, measured)
    assert (row.setting, row.words) == (ONE, "")
    assert len(failed) == 2  # the trial and the turn


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ({"samples": 24_999, "before": 2.0, "after": 1.0}, "24,999 samples instead of 25,000"),
        ({"samples": 25_000, "before": 2.0, "after": 2.0}, "loss went from 2.000 to 2.000"),
    ],
)
def test_other_work_than_was_asked_for_is_no_figure(
    printed: dict[str, float], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"versions": {}, "seconds": 1.0, **printed})
    monkeypatch.setattr(Side, "command", lambda self, job: [sys.executable, "-c", f"print({text!r})"])
    with pytest.raises(Failed, match=words):
        measure(FIRST, Job("conv2", ONE), 60)


def test_a_command_that_fails_or_takes_too_long_is_told_in_words() -> None:
    with pytest.raises(Failed, match="it failed: out of luck"):
        run([sys.executable, "-c", "import sys; sys.exit('out of luck')"], dict(os.environ), 60)
    began = time.monotonic()
    with pytest.raises(Failed, match=r"longer than 0\.005 minutes"):
        run([sys.executable, "-c", "import time; time.sleep(100)"], dict(os.environ), 0.3)
    assert time.monotonic() - began < 60


def test_a_peer_without_its_interpreter_is_told_in_words_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.peers.sides.PLACE", tmp_path)
    gone = Side("gone", "with_gone", (THREADS, ONE), "gone==1.0")

    def measured(side: Side, job: Job) -> Answer:
        return measure(side, job, 60) if side is gone else Answer({}, job.samples, 1.0, 2.0, 1.0)

    first, broken, other = compare("conv2", [FIRST, gone, OTHER], 1, measured)
    assert broken.words == f"could not run: {tmp_path}/gone/bin/python: No such file or directory"
    assert (first.rate, other.rate) == (25_000, 25_000)


def test_networks_have_the_layers_of_ours() -> None:
    """Shape by shape, so that all sides compute the same."""
    from fednh.models.architectures import MLP, Conv2

    ours = {"conv2": Conv2((3, 32, 32), 10), "small": MLP((64,), 10)}
    for name, work in WORKS.items():
        assert [p.shape for p in network(work).parameters()] == [p.shape for p in ours[name].parameters()]
    assert [len(y) for _, y in clients(WORKS["conv2"])] == [500] * 10


def test_a_section_of_a_document_is_replaced_and_the_others_stay() -> None:
    old = "# Title\n\n## One\n\nold\n\n## Two\n\nstays\n"
    assert with_section(old, "## One\n", "new\n") == "# Title\n\n## One\n\nnew\n\n## Two\n\nstays\n"
    assert with_section("# Title\n", "## One\n", "new\n") == "# Title\n\n## One\n\nnew\n"


def test_the_page_has_every_row_and_the_versions() -> None:
    rows = [
        Row("conv2", OURS.name, WORKERS, 2_000.0, 1.0, {"fednh": "0.1.0", "torch": "2.13.0"}, 2.0, 1.0),
        Row("conv2", "pfl", PROCESSES, 1_000.0, 2.0, {"pfl": "0.6.0", "torch": "2.13.0"}, 2.0, 1.0),
        Row("small", "fluke", words="its environment could not be made: it failed: no network"),
    ]
    result = {"when": "2026-01-31T00:00:00+00:00", "machine": "a processor, AVX9", "busy": True, "turns": 3}
    result["rows"] = [asdict(row) for row in rows]
    text = page(json.loads(json.dumps(result)))
    assert "| **fednh** | 2,000 | | | two workers of one thread |" in text
    assert f"| pfl | 1,000 | 2.00 x | at least 1.5 x, reached | {PROCESSES} |" in text
    assert "| fluke | its environment could not be made: it failed: no network | | at least 5 x |  |" in text
    assert (
        "on 2 cores (a processor, AVX9). Measured on 2026-01-31, while it was busy with other work; the best of 3 turns"
        in " ".join(text.split())
    )
    assert "Versions: fednh 0.1.0, pfl 0.6.0, torch 2.13.0." in text


def test_the_document_says_what_was_measured() -> None:
    """`--docs` writes both; a table without its measurements, or the other way round, is an error."""
    text = PAGE.read_text(encoding="utf-8")
    assert (SECTION in text) == RESULTS.is_file()
    if not RESULTS.is_file():
        pytest.skip("make bench-peers has not been run here")
    result = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert f"{SECTION}\n{page(result)}" in text
    for work in WORKS:
        rows = {row["side"]: row for row in result["rows"] if row["work"] == work}
        assert set(rows) == {side.name for side in (OURS, *PEERS)}
        for row in rows.values():
            assert row["words"] or row["ratio"] == pytest.approx(rows[OURS.name]["rate"] / row["rate"])
            assert row["words"] or row["setting"] in (WORKERS, PROCESSES, THREADS, ONE)
