"""The evaluation of a round, and what is written after the last one: models, predictions, summary."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednh.config import Config
from fednh.federated import checks, evaluate, similarity
from fednh.federated import client as clients
from fednh.federated.evaluate import Personal
from fednh.federated.executor import Replies
from fednh.federated.plan import evaluated_clients, is_evaluated
from fednh.federated.results import Progress
from fednh.federated.setup import ServerSide
from fednh.federated.start import Started
from fednh.interrupt import Meter
from fednh.metric_names import HELD_SHARE
from fednh.runs.model_file import after_rounds
from fednh.runs.run_folder import RunFolder
from fednh.tree import Tree


def close_round(
    config: Config,
    setup: Started,
    server: Tree,
    progress: Progress,
    replies: Replies,
    evaluated: Collection[int],
    in_summary: Collection[int] | None,
    meter: Meter,
    folder: RunFolder,
) -> dict[str, Any]:
    """Add the metrics of the `evaluated` clients to the newest round's record.

    After the last round (`in_summary` says whose personal models the summary is about) models and predictions are
    written too, and the summary is returned; otherwise it is empty.
    """
    started, record, side = time.perf_counter(), progress.records[-1], setup.side
    right = _global_correct(setup, server, progress.round, meter)
    correct = torch.stack(list(right.values())).mean(0) if right else None
    personal = replies.personal_metrics()
    measured, left_out = [p for p in personal if p.client in evaluated], [*side.one_class, *side.few_held]
    record |= evaluate.metrics(correct, setup.total, measured, left_out)
    if in_summary is not None:
        _write_models(config, setup, server, replies, meter, folder, spent(config, progress), progress.round)
        outcomes = {p.client: p.outcomes for p in personal if p.outcomes is not None}
        folder.write_outcomes({k: each.of_rows(side.held_out[k], side.groups) for k, each in outcomes.items()})
        folder.remove_others(person.client for person in personal)
    record["eval_seconds"] = round(time.perf_counter() - started, 4)
    progress.eval_seconds += record["eval_seconds"]
    progress.seconds += time.perf_counter() - started
    if in_summary is None:
        return {}
    counted = [p for p in personal if p.client in in_summary]
    summary = _summary(config, setup, progress, correct, counted)
    return {**summary, **({"networks": by_network(setup, right, counted)} if side.architectures.several else {})}


def _global_correct(setup: Started, server: Tree, round_: int, meter: Meter) -> dict[str, Tensor]:  # (C,)
    """How many test samples of each class the global model gets right, by network; none without model or test set."""
    method, side = setup.method, setup.side
    with checks.with_context(method, f"the global model failed after round {round_}"):
        models = side.architectures.global_models(server)
        if side.test is None:
            return {}
        meter.begin(len(side.test) * len(models))
        return {
            name: evaluate.count_correct(
                clients.guesses(method, side.architectures.nets[name], model, side.test, meter), side.test
            )
            for name, model in models.items()
        }


def by_network(setup: Started, right: Mapping[str, Tensor], clients: Sequence[Personal]) -> dict[str, dict[str, Any]]:
    """The metrics of the clients of each network, and of its global model, where clients have different ones."""
    side, rows = setup.side, dict[str, dict[str, Any]]()
    for name in side.architectures.nets:
        its = [person for person in clients if side.network_of(person.client) == name]
        found = evaluate.metrics(right.get(name), setup.total, its, [*side.one_class, *side.few_held])
        rows[name] = {"clients": len(its), **found}
    return rows


def _write_models(
    config: Config,
    setup: Started,
    server: Tree,
    replies: Replies,
    meter: Meter,
    folder: RunFolder,
    spent: Mapping[str, Any],
    rounds: int,
) -> None:
    """Write the global model, and the Tree that a new client would receive; of each network."""
    method, side, nets = setup.method, setup.side, setup.side.architectures
    models, down = nets.global_models(server), nets.broadcast(server)
    for name, net in nets.nets.items():
        own = folder.shared(name if nets.several else "")
        card = after_rounds(side.cards[name], rounds)
        if spent:
            card["privacy"] = {"level": config.privacy.level, **spent}
        if name in models:
            about = None if nets.several else replies.similarity()  # sites tell it of all networks together
            if side.train is not None and side.trained_on is not None and not spent:  # no account covers it
                meter.begin(similarity.sample_count(method, len(side.trained_on)))
                about = similarity.similarity_quantiles(
                    method, net, models[name], side.train, side.trained_on, config.seed, meter
                )
            folder.write_model(own.global_model, {**net.norm, **models[name]}, {**card, "novelty": about})
        folder.write_model(own.broadcast_model, nets.view(down, name), card)


def _summary(
    config: Config, setup: Started, progress: Progress, correct: Tensor | None, clients: Sequence[Personal]
) -> dict[str, Any]:
    lost = [record["round"] for record in progress.records if record.get("lost")]
    earlier = _comparable(config, progress, {person.client for person in clients})
    warning = fall_after_rise([*earlier, progress.records[-1]])
    metrics = evaluate.final_metrics(correct, setup.total, clients, setup.side.one_class, setup.side.few_held)
    sampled = config.eval.samples and setup.total is not None
    return {
        "method": config.method["name"],
        "data": setup.side.name,
        "seed": config.seed,
        "rounds": progress.round,
        **spent(config, progress),
        **({"test_samples": int(setup.total.sum())} if sampled and setup.total is not None else {}),
        **metrics,
        **evaluate.best([*earlier, metrics]),
        **progress.totals(),
        **({"lost": lost} if lost else {}),
        **({"warning": warning} if warning else {}),
    }


def spent(config: Config, progress: Progress) -> dict[str, Any]:
    """What a summary and a model's metadata say of privacy: nothing, where there is none."""
    if config.privacy.level == "none" or not progress.records:
        return {}
    return {"epsilon": progress.records[-1]["epsilon"], "delta": config.privacy.delta}


def _comparable(config: Config, progress: Progress, measured: set[int]) -> list[dict[str, Any]]:
    """The records of the rounds before the last that measured exactly these clients."""
    members, records = set[int](), []
    for record in progress.records[:-1]:
        members |= set(record["clients"])
        if is_evaluated(config, record["round"]) and set(evaluated_clients(config, record, members)) == measured:
            records.append(record)
    return records


def fall_after_rise(records: Sequence[Mapping[str, Any]]) -> str | None:
    """A warning, where the training loss still fell but the accuracy on held-out samples is clearly below its best.

    Clearly: by two points and twice the noise, which is how much the accuracy jumps from one evaluation to the next.
    """
    rows = [
        (row["round"], row["train_loss"], row[HELD_SHARE])
        for row in records
        if row.get(HELD_SHARE) is not None and row.get("train_loss") is not None
    ]
    if len(rows) < 4:
        return None
    rounds, losses, accuracies = (np.array(column) for column in zip(*rows, strict=True))
    best = int(np.argmax(accuracies))
    drop, noise = accuracies[best] - accuracies[-1], float(np.median(np.abs(np.diff(accuracies))))
    if len(rows) - best < 3 or losses[-1] >= losses[best] or drop < max(2.0, 2 * noise):
        return None
    return (
        f"held-out accuracy was best after round {rounds[best]} ({accuracies[best]:.1f}) and fell to "
        f"{accuracies[-1]:.1f}, while the training loss still fell ({losses[best]:.2f} to {losses[-1]:.2f}): fewer "
        "rounds may do better"
    )


def client_rows(summary: Mapping[str, Any], side: ServerSide) -> list[dict[str, Any]]:
    """The summary's rows by client, with the sites' names, where they have some, and networks, where these differ."""
    names = dict(enumerate(side.sites)) | {site["client"]: site["site"] for site in summary.get("sites", ())}
    several = side.architectures.several
    return [
        {
            "client": row["client"],
            **({"site": names[row["client"]]} if row["client"] in names else {}),
            **({"network": side.network_of(row["client"])} if several else {}),
            **row,
        }
        for row in summary["clients"]
    ]
