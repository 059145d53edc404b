"""The cost model's schedule, on cases that can be computed by hand."""

from __future__ import annotations

import pytest

from benchmarks.cost_model import Costs, round_seconds, table, tree

FREE = {"client": 0.0, "job": 0.0, "add": 0.0, "model": 0.0, "link": 1.0, "slots": 1}


def costs(**some: float) -> Costs:
    return Costs(**{**FREE, **some})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("some", "machines", "clients", "seconds"),
    [
        ({"client": 2.0}, 1, 5, 10.0),  # one after another
        ({"client": 2.0}, 5, 5, 2.0),  # all at once
        ({"client": 2.0, "slots": 3}, 2, 7, 4.0),  # six, then one
        ({"add": 0.5}, 4, 6, 3.0),  # the driver adds up six
        ({"job": 0.5}, 4, 6, 3.0),  # the driver hands out six
        ({"model": 1.0}, 2, 4, 5.0),  # a second down to the first machine, then four uploads over one link
        ({"model": 1.0, "slots": 4}, 1, 4, 1.0),  # the driver is on the only machine: nothing comes back over a link
        ({"client": 4.0, "add": 1.0}, 2, 4, 10.0),  # the second pair ends at 8; both are added up then
    ],
)
def test_schedules_by_hand(some: dict[str, float], machines: int, clients: int, seconds: float) -> None:
    assert round_seconds(costs(**some), machines, clients) == pytest.approx(seconds)


def test_more_machines_help_until_the_drivers_link_is_full() -> None:
    c = costs(client=1.0, model=1.0, link=100.0, slots=10)  # 100 uploads a second over the link
    rows = table(c, 1000, (1, 5, 100))
    assert rows[0] == (1, pytest.approx(3600 / 100.01), 1.0)
    assert rows[1][2] == pytest.approx(5, rel=0.05)  # computing takes 20 s, the link 10
    assert rows[2][1] < 3600 / 10  # the link alone takes 10 s
    assert tree(c, 100, 1000) == pytest.approx(1.01 + 1.0)  # ten clients at once, and a sum from each machine
