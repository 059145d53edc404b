"""The names of metrics in records, summaries and messages, with the labels that people see; all are in percent.

`federated/evaluate.py` says what each of them is. `RoundRecord` and `RunSummary` are what a run writes down.
"""

from __future__ import annotations

from typing import Any, TypedDict

GM, PM_V, PM_L = "gm", "pm_v", "pm_l"
HELD_MACRO, HELD_SHARE, HELD_GM_MACRO, HELD_GM_SHARE = "held_macro", "held_share", "held_gm_macro", "held_gm_share"
HELD_POOLED, HELD_GM_POOLED = "held_pooled", "held_gm_pooled"

PERSONAL = (PM_V, PM_L)  # of one client's personal model on the test set
TEST_SET = {GM: "GM", PM_V: "PM(V)", PM_L: "PM(L)"}
# On the clients' own held-out samples, which differ by client, so they are never mixed with those on the test set.
HELD_OUT = {
    HELD_SHARE: "own accuracy",
    HELD_MACRO: "all classes alike",
    HELD_GM_SHARE: "global, own accuracy",
    HELD_GM_MACRO: "global, all classes alike",
}
HELD = tuple(HELD_OUT)
POOLED = (HELD_POOLED, HELD_GM_POOLED)  # on the held-out samples of all clients together


def std_of(metric: str) -> str:
    """The summary's standard deviation of a metric over clients."""
    return f"{metric}_std"


def best_of(metric: str) -> str:
    """The summary's highest value of a metric over rounds."""
    return f"{metric}_best"


# --- what a run writes down ------------------------------------------------------------------------------------------


class MetricValues(TypedDict, total=False):
    """Of one client, or means over those that were evaluated; a metric that cannot be had is None or has no key."""

    gm: float | None
    pm_v: float | None
    pm_l: float | None
    held_macro: float | None
    held_share: float | None
    held_gm_macro: float | None
    held_gm_share: float | None
    held_pooled: float
    held_gm_pooled: float


class _RoundRecord(TypedDict):
    round: int
    train_loss: float | None  # mean over the samples of the uploads that were used
    seconds: float
    bytes_up: int
    bytes_down: int
    clients: list[int]  # whose uploads were used
    dropped: list[int]  # who never reported
    refused: list[int]  # whose uploads could not be used
    failed: list[int]  # whose training raised an error


class RoundRecord(_RoundRecord, MetricValues, total=False):
    """A line of metrics.jsonl; the metrics are there in rounds that were evaluated."""

    eval_seconds: float
    gradient_norm: float  # mean of the next, with diagnostics.gradient_norm
    gradient_norms: list[float]
    epsilon: float  # under [privacy]: of all rounds so far, of the client (or of the clients) that spent most
    privacy: dict[str, Any]  # who was asked, and what an answer released
    lost: str  # why a deployed round changed nothing
    late: dict[str, int]  # of the round's clients, those whose uploads came late: by how many rounds


class ClientSummary(MetricValues, total=False):
    """One client in a summary: its personal model's metrics."""

    client: int
    site: str  # its name, where it is a natural site
    samples: int  # training samples
    per_class: list[float | None] | None


class _RunSummary(TypedDict):
    method: str
    data: str
    seed: int
    rounds: int
    clients: list[ClientSummary]
    per_class: list[float | None] | None  # of the global model
    pm_l_std: float | None  # over clients
    bytes_up: int
    bytes_down: int
    dropped: int
    refused: int
    failed: int
    samples: int
    seconds: float
    client_seconds: float
    eval_seconds: float
    samples_per_second: float


class RunSummary(_RunSummary, MetricValues, total=False):
    """What summary.json holds."""

    held_share_std: float | None
    held_pooled_best: float
    held_gm_pooled_best: float
    one_class: list[int]  # sites that held-out means leave out: with a single class ...
    few_held: list[int]  # ... and with very few held-out samples
    epsilon: float  # under [privacy]: of all rounds ...
    delta: float
    test_samples: int  # where eval.samples limits them
    lost: list[int]  # rounds of a deployment that changed nothing
    warning: str
    kept_round: int  # with stop_when: whose models these are ...
    kept_by: dict[str, Any]  # ... and by which metric it was chosen, on held-out samples
    ray: dict[str, int]
    sites: list[dict[str, Any]]  # of a deployment
