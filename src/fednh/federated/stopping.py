"""`stop_when`: which round's models a run keeps, and when it ends before its last round.

The choice is made on the clients' held-out samples and depends on nothing but the run's records, so a resumed run
chooses alike. A run that stopped has trained some rounds after the one that it keeps: it goes back to that round, whose
state a copy of the checkpoint holds (runs/checkpoint.py), and ends there as a run of so many rounds does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fednh.config import Config
from fednh.errors import ConfigError, RunError
from fednh.federated.plan import is_evaluated
from fednh.metric_names import HELD_OUT

MOST_ROUNDS_BACK = 90  # for which a real site still has the state of the round that is kept: it keeps 100 (STATES)


@dataclass(frozen=True)
class ChosenRound:
    """The best evaluated round so far, and whether the run should go on in the hope of a better one."""

    round: int
    value: float  # of the metric, in percent
    ends: bool


def choice(config: Config, records: Sequence[Mapping[str, Any]]) -> ChosenRound | None:
    """What the complete records of a run say; None without `stop_when`, or before the first evaluation."""
    rule = config.stop_when
    if rule.metric == "none":
        return None
    evaluated = [record for record in records if is_evaluated(config, record["round"]) and rule.metric in record]
    best, since = None, 0
    for record in evaluated:
        value = record[rule.metric]
        if value is None:
            raise RunError(
                f"round {record['round']}: no client has {rule.metric} ({HELD_OUT[rule.metric]}), which stop_when "
                f"looks at; hold out more samples (data.holdout), or choose another stop_when.metric"
            )
        if best is None or value > best[1] + rule.gain:
            best, since = (record["round"], value), 0
        else:
            since += 1
    return None if best is None else ChosenRound(*best, ends=since >= rule.patience)


def check(config: Config, held_out: bool, simulated: bool) -> None:
    """Refuse a rule that has nothing to look at, or whose round real sites would have forgotten."""
    rule = config.stop_when
    if rule.metric == "none":
        return
    if simulated and not held_out:
        raise ConfigError(
            f"stop_when.metric = {rule.metric!r} needs held-out samples, and no client has any; set data.holdout, 0.2 "
            f"for example"
        )
    if not simulated and (back := rule.patience * config.eval.every) > MOST_ROUNDS_BACK:
        raise ConfigError(
            f"stop_when.patience = {rule.patience} with eval.every = {config.eval.every} may go back {back} rounds, "
            f"and sites keep the states of {MOST_ROUNDS_BACK}; lower one of them"
        )


def told(config: Config, chosen: ChosenRound, rounds: int) -> dict[str, Any]:
    """What the summary says of the choice, of a run that trained so many rounds."""
    return {
        "kept_round": chosen.round,
        "kept_by": {
            "metric": config.stop_when.metric,
            "value": chosen.value,
            "chosen_on": "held-out samples",
            "rounds_trained": rounds,
        },
    }


def sentence(config: Config, chosen: ChosenRound, rounds: int) -> str:
    """The same in words."""
    what = HELD_OUT[config.stop_when.metric]
    return (
        f"the models are those after round {chosen.round} of {rounds}, chosen on held-out samples ({what} "
        f"{chosen.value:.1f}); the choice flatters the accuracy on these samples"
    )
