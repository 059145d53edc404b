"""The names of metrics in records, summaries and messages, with the labels that people see; all are in percent.

`federated/evaluate.py` says what each of them is.
"""

from __future__ import annotations

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
