"""The sheets: layout, grouping, places, paper's numbers and cost, checked by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from sys import modules

import pytest

from fednh.errors import UserError
from fednh.methods import METHODS
from fednh.report.groups import lay_out
from fednh.report.load import Run, load_runs
from fednh.report.sheet import Sheet
from fednh.report.tables import (
    accuracy_sheet,
    comparison_sheet,
    cost_sheet,
    fairness_sheet,
    paired_sheet,
    result_sheets,
)
from fednh.runs.run_folder import display_name
from tests.helpers.synthetic import fake_result, three_seeds


@pytest.fixture(scope="module")
def nine(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    return three_seeds(tmp_path_factory.mktemp("nine"))


def texts(sheet: Sheet) -> list[list[str]]:
    return [[cell.text for cell in row] for row in sheet.rows]


def places(sheet: Sheet) -> list[list[int]]:
    return [[cell.place for cell in row] for row in sheet.rows]


def test_methods_are_spelled_as_in_their_files() -> None:
    """A file opens with the name that the method's own paper gives it; the FedNH paper has other names for one."""
    spelled = {name: (modules[cls.__module__].__doc__ or "").partition(":")[0] for name, cls in METHODS.items()}
    assert {name: display_name(name) for name in METHODS} == {**spelled, "feduh": "FedAvg+UH"}


def test_accuracy_has_the_layout_of_table_1(nine: list[Run]) -> None:
    sheet = accuracy_sheet(nine)
    assert sheet.columns == ["method", "GM", "PM(V)", "PM(L)"]
    assert texts(sheet) == [
        ["Local", "–", "41.00 ± 1.00", "70.00 ± 0.00"],
        ["FedAvg", "79.00 ± 1.00", "53.00 ± 1.00", "70.00 ± 0.00"],
        ["FedNH", "82.00 ± 2.00", "50.00 ± 0.00", "70.00 ± 0.00"],
    ]
    assert places(sheet) == [[0, 0, 0, 1], [0, 2, 1, 1], [0, 1, 2, 1]]  # three equal ones are all the best
    assert sheet.title == "Test accuracy in percent; digits, Dir(0.3), 20 clients, 50% a round, 40 rounds"
    assert "n = 3 seeds" in sheet.note


def test_fairness_ranks_the_lowest_spread_first(nine: list[Run]) -> None:
    sheet = fairness_sheet(nine)
    assert sheet.columns == ["method", "PM(L)", "spread", "worst 10%"]
    assert [row[2:] for row in texts(sheet)] == [
        ["30.00 ± 0.00", "40.00 ± 0.00"],
        ["20.00 ± 0.00", "50.00 ± 0.00"],
        ["10.00 ± 0.00", "60.00 ± 0.00"],
    ]
    assert [row[2:] for row in places(sheet)] == [[0, 0], [2, 2], [1, 1]]


def test_an_evenly_bad_method_is_not_the_best_in_spread(tmp_path: Path) -> None:
    """Higher mean first: 40 on every client is even, but 60 and 80 is better for everybody."""
    good, bad = (60.0, 80.0), (40.0, 40.0)
    runs = [
        fake_result(tmp_path / "a", "fednh", 0, 80.0, pm_l=good),
        fake_result(tmp_path / "b", "local", 0, 80.0, pm_l=bad),
    ]
    assert [row[1:] for row in places(fairness_sheet(runs))] == [[2, 0, 2], [1, 0, 1]]  # spreads 0 (Local) and 10
    assert "the higher mean comes first" in fairness_sheet(runs).note
    assert [row[6:8] for row in places(comparison_sheet(runs))] == [[1, 0], [0, 0]]
    even = fake_result(
        tmp_path / "c", "fedavg", 0, 80.0, pm_l=(71.0, 71.0)
    )  # the highest mean and no spread: first in both
    assert [row[2] for row in places(fairness_sheet([even, runs[0]]))] == [1, 0]


def test_worst_tenth_is_the_mean_of_the_lowest_clients(tmp_path: Path) -> None:
    run = fake_result(tmp_path / "a", "fednh", 0, 80.0, pm_l=[10.0, 20.0, *[90.0] * 9])  # eleven: the lowest two
    assert texts(fairness_sheet([run]))[0][3] == "15.00"


def test_cost_is_relative_to_fedavg(nine: list[Run]) -> None:
    sheet = cost_sheet(nine)
    fednh = dict(zip(sheet.columns, texts(sheet)[2], strict=True))
    assert fednh == {
        "method": "FedNH",
        "seconds": "12.0 ± 0.0",
        "client seconds": "6.0 ± 0.0",
        "up a round": "100 B",
        "down a round": "300 B",
        "up in all": "4.0 kB",
        "down in all": "12.0 kB",
        "seconds / FedAvg": "1.20",
        "client seconds / FedAvg": "1.20",
        "bytes / FedAvg": "1.00",
    }


def test_cost_without_fedavg_has_no_ratio(tmp_path: Path) -> None:
    sheet = cost_sheet([fake_result(tmp_path / "a", "fednh", 0, 80.0)])
    assert not any("FedAvg" in column for column in sheet.columns)
    other = fake_result(tmp_path / "b", "fedavg", 0, 80.0, rounds=10)  # is no measure for a run of 40 rounds
    both = cost_sheet([fake_result(tmp_path / "c", "fednh", 0, 80.0), other])
    assert texts(both)[1][-3:] == ["–", "–", "–"]


def test_betas_are_columns_and_data_sets_and_participation_are_rows(tmp_path: Path) -> None:
    runs = [
        fake_result(tmp_path / "a", "fednh", 0, 80.0),
        fake_result(tmp_path / "b", "fednh", 0, 85.0, partition__beta=1.0),
        fake_result(tmp_path / "c", "fednh", 0, 60.0, participation__rate=0.1),
        fake_result(tmp_path / "d", "fednh", 0, 40.0, preset="spiral"),
    ]
    sheet = accuracy_sheet(runs)
    assert sheet.columns[:6] == ["data", "participation", "method", "Dir(0.3) GM", "Dir(0.3) PM(V)", "Dir(0.3) PM(L)"]
    gm = sheet.columns.index("Dir(1) GM")
    assert [(*row[:4], row[gm]) for row in texts(sheet)] == [
        ("digits", "10%", "FedNH", "60.00", "–"),
        ("digits", "50%", "FedNH", "80.00", "85.00"),
        ("spiral", "10%", "FedNH", "40.00", "–"),
    ]
    assert not any(place for row in places(sheet) for place in row)  # nobody has a rival in its block


def test_runs_that_differ_in_more_than_the_seed_are_not_averaged(tmp_path: Path) -> None:
    runs = [
        fake_result(tmp_path / "a", "fednh", 0, 80.0),
        fake_result(tmp_path / "b", "fednh", 1, 90.0, rounds=10),
        fake_result(tmp_path / "c", "fedavg", 0, 70.0),
    ]
    sheet = accuracy_sheet(runs)
    assert [row[:2] for row in texts(sheet)] == [
        ["FedAvg, rounds=40", "70.00"],
        ["FedNH, rounds=10", "90.00"],
        ["FedNH, rounds=40", "80.00"],
    ]


def test_swept_hyper_parameters_have_rows(tmp_path: Path) -> None:
    runs = [fake_result(tmp_path / str(rho), "fednh", 0, 80.0, method__rho=rho) for rho in (0.9, 0.1)]
    runs.append(fake_result(tmp_path / "avg", "fedavg", 0, 70.0))
    assert [row[0] for row in texts(accuracy_sheet(runs))] == ["FedAvg", "FedNH, rho=0.1", "FedNH, rho=0.9"]


def test_workers_and_checkpoints_do_not_part_a_group(tmp_path: Path) -> None:
    runs = [
        fake_result(tmp_path / "a", "fednh", 0, 80.0),
        fake_result(tmp_path / "b", "fednh", 1, 90.0, workers=1, checkpoint__every=1, store__memory="1GiB"),
    ]
    assert len(lay_out(runs).groups) == 1


def test_a_seed_counts_once(tmp_path: Path) -> None:
    runs = [fake_result(tmp_path / "a", "fednh", 0, 80.0), fake_result(tmp_path / "b", "fednh", 0, 80.0)]
    sheet = accuracy_sheet(runs)
    assert texts(sheet)[0][1] == "80.00"
    assert "n = 1 seed" in sheet.note
    assert "Left out: 1 run with settings and seed of another one." in sheet.note


def test_unequal_n_is_said_in_each_cell(nine: list[Run], tmp_path: Path) -> None:
    runs = [*nine, fake_result(tmp_path / "per", "fedper", 0, 75.0)]
    rows = {row[0]: row[1] for row in texts(accuracy_sheet(runs))}
    assert rows["FedPer"] == "75.00 (n=1)"
    assert rows["FedNH"] == "82.00 ± 2.00 (n=3)"


def test_paper_stands_beside_what_matches(tmp_path: Path) -> None:
    runs = [
        fake_result(tmp_path / "nh", "fednh", 0, 70.01, preset="cifar10"),
        fake_result(tmp_path / "uh", "feduh", 0, 60.0, preset="cifar10"),  # not in the paper's tables
    ]
    sheet = accuracy_sheet(runs, paper=True)
    assert sheet.columns[1:3] == ["GM", "GM, paper (diff.)"]
    assert [row[2] for row in texts(sheet)] == ["–", "69.01 ± 2.51 (+1.00)"]
    assert "other settings" not in sheet.note
    assert accuracy_sheet(runs).columns == ["method", "GM", "PM(V)", "PM(L)"]


def test_paper_says_which_settings_are_not_its_own(tmp_path: Path) -> None:
    run = fake_result(tmp_path / "nh", "fednh", 0, 60.01, preset="cifar10", rounds=20, method__rho=0.5)
    sheet = accuracy_sheet([run], paper=True)
    assert texts(sheet)[0][2] == "69.01 ± 2.51 (-9.00)*"
    assert "rounds=20 (paper: 200); rho=0.5 (paper: 0.9)" in sheet.note.replace("method.", "")


def test_paper_fairness_sets_spread_beside_spread(tmp_path: Path) -> None:
    run = fake_result(tmp_path / "nh", "fednh", 0, 60.0, pm_l=(80.0, 90.0), preset="cifar10")
    row = dict(zip(*((s := fairness_sheet([run], paper=True)).columns, texts(s)[0]), strict=True))
    assert row["PM(L), paper (diff.)"] == "84.63 (+0.37)"
    assert row["spread, paper (diff.)"] == "5.61 (-0.61)"


@pytest.mark.parametrize(
    "settings",
    [{"partition__beta": 0.5}, {"participation__rate": 0.2}, {"partition__name": "iid"}, {"preset": "digits"}],
)
def test_paper_is_silent_where_the_setting_differs(tmp_path: Path, settings: dict[str, object]) -> None:
    run = fake_result(tmp_path / "nh", "fednh", 0, 70.0, **{"preset": "cifar10", **settings})  # type: ignore[arg-type]
    assert accuracy_sheet([run], paper=True).columns == ["method", "GM", "PM(V)", "PM(L)"]


def test_participation_of_the_appendix(tmp_path: Path) -> None:
    run = fake_result(tmp_path / "nh", "fednh", 0, 72.69, preset="cifar10", participation__rate=0.3)
    assert texts(accuracy_sheet([run], paper=True))[0][2] == "72.69 ± 0.43 (+0.00)"


def test_paired_comparison_by_hand(nine: list[Run]) -> None:
    # FedAvg - FedNH in GM: -2 -3 -4, mean -3, sd 1, t = -3 sqrt(3); with two degrees of freedom
    # p = 1 - |t| / sqrt(t^2 + 2) = 0.0351, and the interval is -3 ± 4.3027 / sqrt(3).
    sheet = paired_sheet(nine)
    rows = {(row[0], row[1]): dict(zip(sheet.columns, row, strict=True)) for row in texts(sheet)}
    gm = rows["FedAvg", "GM"]
    assert (gm["n"], gm["difference"], gm["95% interval"]) == ("3", "-3.00", "-5.48 to -0.52")
    assert (gm["effect d"], gm["p"]) == ("-3.00", "0.035")
    assert gm["reading"] == "maybe below (n=3)"
    assert ("Local", "GM") not in rows  # it has no global model
    # PM(V): FedAvg +2 +4 +3 has the same |t|; Local -9 -10 -8 has t = -9 sqrt(3), p = 0.00409; both are doubled.
    assert (rows["FedAvg", "PM(V)"]["p"], rows["Local", "PM(V)"]["p"]) == ("0.070", "0.008")
    assert rows["FedAvg", "PM(V)"]["95% interval"] == "-0.58 to +6.58"  # 3 ± 6.2053 / sqrt(3)
    equal = rows["Local", "PM(L)"]
    assert (equal["difference"], equal["p"], equal["reading"]) == ("+0.00", "1.000", "unclear (n=3)")
    assert "With n = 3, a large p does not show that two methods are equal" in sheet.note


def test_paired_reference_can_be_chosen_and_must_exist(nine: list[Run]) -> None:
    runs = nine
    assert paired_sheet(runs, "fedavg").title.startswith("Paired comparison with FedAvg;")
    assert {row[0] for row in texts(paired_sheet(runs, "FedAvg"))} == {"Local", "FedNH"}
    with pytest.raises(UserError, match="'fedrep' is in none of the runs"):
        paired_sheet(runs, "fedrep")


def test_paired_needs_two_seeds_and_the_same_settings(tmp_path: Path) -> None:
    runs = [fake_result(tmp_path / "a", "fednh", 0, 80.0), fake_result(tmp_path / "b", "fedavg", 0, 70.0)]
    assert paired_sheet(runs).rows == []
    runs += [fake_result(tmp_path / f"c{s}", "fedavg", s, 70.0, rounds=10) for s in (0, 1)]
    assert paired_sheet(runs).rows == []


def test_of_several_settings_the_default_one_is_the_reference(tmp_path: Path) -> None:
    runs = [
        fake_result(tmp_path / f"{rho}-{seed}", "fednh", seed, 100 * rho + seed * seed, method__rho=rho)
        for rho in (0.5, 0.9)
        for seed in (0, 1)
    ]
    sheet = paired_sheet(runs)
    assert sheet.title.startswith("Paired comparison with FedNH, rho=0.9")
    assert {row[0] for row in texts(sheet)} == {"FedNH, rho=0.5"}
    assert texts(sheet)[0][-1] == "below, untested"  # -40 on both seeds: there is no spread to test against


def test_six_seeds_are_enough_to_say_it(tmp_path: Path) -> None:
    runs = []
    for seed in range(6):
        runs.append(fake_result(tmp_path / f"nh{seed}", "fednh", seed, 80.0))
        runs.append(fake_result(tmp_path / f"avg{seed}", "fedavg", seed, 79.0 - seed))
    row = dict(zip((sheet := paired_sheet(runs)).columns, texts(sheet)[0], strict=True))
    assert (row["p"], row["reading"]) == ("0.006", "below")  # -1 to -6: t = -3.5 / sqrt(3.5 / 6) = -4.58, df 5
    assert "With n" not in sheet.note


def test_the_folds_of_a_seed_are_one_run(tmp_path: Path) -> None:
    """Seed 0: 80 and 70 in two folds, seed 1: 90 and 80: 75 and 85, mean 80, standard deviation sqrt(50)."""
    for seed in (0, 1):
        for fold in (0, 1):
            value = 80.0 + 10 * seed - 10 * fold
            fake_result(tmp_path / f"{seed}{fold}", "fednh", seed, value, data__folds=2, data__fold=fold)
    sheet = accuracy_sheet(load_runs([tmp_path]))
    assert texts(sheet)[0][1] == "80.00 ± 7.07"
    assert "n = 2 seeds" in sheet.note


def test_short_comparison_has_a_row_a_run(nine: list[Run]) -> None:
    sheet = comparison_sheet(nine[:3])
    assert sheet.columns == ["method", "data", "seed", "rounds", "GM", "PM(V)", "PM(L)", "fairness", "samples/s"]
    assert texts(sheet)[0] == ["FedNH", "digits", "0", "40", "80.00", "50.00", "70.00", "10.00", "200"]
    assert places(sheet) == [[0, 0, 0, 0, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 1, 0, 0]]


def test_held_out_samples_of_all_clients_together(tmp_path: Path) -> None:
    """Last and best round of personal and global models; Local has no global one. Natural sites have no such table."""
    whole = {"held_share": 50.0, "held_pooled": 60.0, "held_pooled_best": 70.0}
    shared = {"held_gm_pooled": 30.0, "held_gm_pooled_best": 40.0}
    runs = [
        replace(run, summary={**run.summary, **values, "gm": None, "pm_v": None, "pm_l": None})
        for run, values in (
            (fake_result(tmp_path / "a", "local", 0, None), whole),
            (fake_result(tmp_path / "b", "fedavg", 0, None), whole | shared),
        )
    ]
    held, pooled = result_sheets(runs)
    assert (held.name, pooled.name) == ("held-out", "pooled")
    assert pooled.columns == ["method", "PM, last round", "PM, best round", "GM, last round", "GM, best round"]
    assert texts(pooled) == [["Local", "60.00", "70.00", "–", "–"], ["FedAvg", "60.00", "70.00", "30.00", "40.00"]]
    sites = fake_result(tmp_path / "c", "fedavg", 0, None, partition__name="site")
    sites = replace(sites, summary={**sites.summary, **whole, "gm": None, "pm_v": None, "pm_l": None})
    assert [sheet.name for sheet in result_sheets([sites])] == ["held-out"]


def test_what_a_run_has_spent_is_beside_it_unless_all_spent_the_same(nine: list[Run]) -> None:
    """A title must not promise privacy of runs that have none."""

    def private(run: Run, epsilon: float) -> Run:
        privacy = run.config.privacy.model_copy(update={"level": "sample", "epsilon": 8.0})
        return replace(
            run, config=run.config.model_copy(update={"privacy": privacy}), summary={**run.summary, "epsilon": epsilon}
        )

    said = "epsilon 7.98 a sample, delta 1e-05"
    mixed = accuracy_sheet([private(run, 7.98) if run.method == "fedavg" else run for run in nine])
    assert "epsilon" not in mixed.title
    assert [row[0] for row in texts(mixed) if said in row[0]] == [
        row[0] for row in texts(mixed) if row[0].startswith("FedAvg")
    ]
    assert sum(said in row[0] for row in texts(mixed)) == 1
    alike = accuracy_sheet([private(run, 7.98) for run in nine])
    assert alike.title.endswith(f"40 rounds, {said}")
    assert [row[0] for row in texts(alike)] == ["Local", "FedAvg", "FedNH"]
