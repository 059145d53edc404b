"""What a secure sum costs: `python -m benchmarks.secure_sums`. Processor seconds of the cryptography, and bytes.

All sites of a round are in this process, with real keys and their files, without Flower. For each number of sites: what
one site and the server compute, and what a site sends and receives beside the model, in a round in which one site is
lost after it has shared its secrets.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from flwr.app import ConfigRecord, RecordDict

from fednh.federated.checks import form_of
from fednh.flower import compat
from fednh.flower.secure_messages import RECORD
from tests.helpers import secure
from tests.helpers.secure import ALIKE, Cohorts, masked

SITES, NUMBERS = (3, 10, 30), 1_000_000


class Measured(Cohorts):
    """Cohorts that count what sites compute, send and receive."""

    seconds, up, down = 0.0, 0, 0

    def replies(
        self, stage: str, orders: Mapping[str, ConfigRecord], round_: int = 1, digest: str = ""
    ) -> dict[str, RecordDict]:
        started = time.process_time()
        replies = super().replies(stage, orders, round_, digest)
        self.seconds += time.process_time() - started
        self.down += sum(len(compat.pack(RecordDict({RECORD: order}))) for order in orders.values())
        self.up += sum(len(compat.pack(reply)) for reply in replies.values())
        return replies


def measure(sites: int, numbers: int) -> str:
    """A row of the table."""
    secure.FORM = form_of({"a": torch.zeros(numbers)})
    with tempfile.TemporaryDirectory() as folder:
        made = Measured(Path(folder), [f"site-{k:02d}" for k in range(sites)])
        made.uploads = {name: {"a": torch.randn(numbers)} for name in made.names}
        made.lost = {made.names[-1]: "masked"}
        started = time.process_time()
        exchange = made.round()
        orders = exchange.open(range(sites))
        replies = made.replies("masked", {made.names[client]: order for client, order in orders.items()})
        total = exchange.close({made.names.index(name): masked(reply) for name, reply in replies.items()}, ALIKE)
        server = time.process_time() - started - made.seconds
    assert len(total.clients) == sites - 1
    up, down = made.up / sites, made.down / sites
    return f"| {sites} | {made.seconds / sites:.2f} | {server:.2f} | {up:,.0f} | {down:,.0f} |"


if __name__ == "__main__":
    print(f"{NUMBERS:,} numbers, {4 * NUMBERS:,} bytes as float32; a lost site counts in the averages")
    print("| sites | s a site | s of the server | bytes up a site | bytes down a site, beside the model |")
    print("|---|---|---|---|---|")
    for number in SITES:
        print(measure(number, NUMBERS), flush=True)
