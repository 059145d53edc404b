"""The cost model's schedule, on cases that can be computed by hand."""

from __future__ import annotations

import pytest

from benchmarks.cost_model import Costs, round_seconds, table

FREE = {"client": 0.0, "job": 0.0, "add": 0.0, "model": 0.0, "link": 1.0, "slots": 1}


def costs(**some: float) -> Costs:
    return Costs(**{**FREE, **some})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("some", "machines", "clients", "seconds"),
    [
        ({"client": 2.0}, 1, 5, 10.0),  # one after another
        ({"client": 2.0}, 5, 5, 2.0),  # all at once
        ({"client": 2.0, "slots": 3}, 2, 7, 4.0),  # six, then one
        ({"job": 0.5}, 4, 6, 3.0),  # the driver hands out six
        ({"add": 0.5}, 1, 4, 4 * 0.5 + 4 * 0.5),  # each writes its upload, and one adds up four
        ({"add": 1.0, "slots": 32}, 1, 32, 1 + 16 + 2),  # two groups at once, then their two sums
        ({"client": 9.0, "model": 1.0}, 2, 4, 2 + 18 + 2 + 1),  # down, two clients each, two uploads move, the sum
        ({"model": 1.0, "slots": 4}, 1, 4, 1.0),  # the driver is on the only machine: nothing comes back over a link
        (
            {"client": 9.0, "model": 1.0, "slots": 16},
            2,
            32,
            2 + 9 + 1 + 1,
        ),  # a group a machine: one sum moves to the other, then home
        ({"state": 1.0}, 4, 4, 4 + 1),  # four states down, one after another; the last one comes back
        ({"state": 1.0}, 1, 4, 0.0),  # the driver is on the only machine
    ],
)
def test_schedules_by_hand(some: dict[str, float], machines: int, clients: int, seconds: float) -> None:
    assert round_seconds(costs(**some), machines, clients) == pytest.approx(seconds)


def test_more_machines_help_until_the_drivers_link_is_full() -> None:
    c = costs(client=100.0, model=1.0, link=10.0, slots=10)
    rows = table(c, 1000, (1, 10, 100, 1000))
    assert rows[0] == (1, pytest.approx(3600 / 10_000.1), 1.0)
    assert rows[1][2] == pytest.approx(10, rel=0.05)
    assert rows[2][2] == pytest.approx(10_000 / 115, rel=0.1)  # ten seconds to send to all
    assert rows[3][1] < 3600 / 100  # the link alone takes that long
    kept = table(costs(client=100.0, model=1.0, state=1.0, link=10.0, slots=10), 1000, (100,))
    assert 3600 / kept[0][1] > 200  # a thousand states down take 100 s
