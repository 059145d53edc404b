"""The plain loop of `benchmarks/plain.py`: one client after another, samples from a DataLoader."""

from __future__ import annotations

import time
from dataclasses import replace

from benchmarks import plain
from benchmarks.peers import work
from fednh.methods.fit import Sgd


def main() -> None:
    job = work.job()
    what = work.WORKS[job.work]
    x, y = work.tensors(what)
    clients = [plain.Vectors(x, y, range(k * what.size, (k + 1) * what.size)) for k in range(what.clients)]
    sgd = Sgd(lr=work.LR, momentum=work.MOMENTUM, weight_decay=0.0, clip=0.0, batch_size=work.BATCH, epochs=job.epochs)
    model = work.network(what)
    plain.round_of(model, clients, replace(sgd, epochs=1))
    before, work.Seen.samples = work.module_loss(model, what), 0
    started = time.perf_counter()
    for _ in range(job.rounds):
        plain.round_of(model, clients, sgd)
    seconds = time.perf_counter() - started
    work.answer(work.versions(), work.Seen.samples, seconds, before, work.module_loss(model, what))


if __name__ == "__main__":
    main()
