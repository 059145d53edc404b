"""All attacks on some clients of a run, and what came out as plain values."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fednh.attacks import images, membership
from fednh.attacks.images import Images
from fednh.attacks.labels import Labels, infer
from fednh.attacks.membership import LEVELS, MemberScores
from fednh.attacks.simulate import Simulator
from fednh.attacks.target import Target
from fednh.errors import UserError

ATTACKS = ("classes", "membership", "images")
SLOWEST = 1.2e8  # parameters times samples times passes that a made-up upload may cost a minute of computing
FEWEST, MOST = 40, 1000  # public samples that an attack uses
GOOD = 20.0  # decibels from which a reconstruction shows what the sample shows


@dataclass(frozen=True)
class Settings:
    """How much an attack may do. All of its sizes follow from these and the run, none from the clock."""

    attacks: Sequence[str] = ATTACKS
    seed: int = 0
    minutes: float = 5.0  # of computing for each client, roughly; no attack begins after twice that
    public: int | None = None  # samples that the server has; None: as many as the time allows, up to MOST
    limit: int | None = None  # samples of a client that train in the round; None: all

    def check(self) -> None:
        if unknown := [name for name in self.attacks if name not in ATTACKS]:
            raise UserError(f"there is no attack {unknown[0]!r}; there are {', '.join(ATTACKS)}")


@dataclass
class Learnt:
    """What the server learnt of one client."""

    client: int
    name: str
    samples: int
    counts: list[int]
    labels: Labels | None = None
    scores: dict[str, MemberScores] = field(default_factory=dict)
    images: Images | None = None
    notes: list[str] = field(default_factory=list)  # why an attack was left out, in sentences


@dataclass(frozen=True)
class Outcome:
    """Of all clients, with the run's facts."""

    method: str
    round: int
    privacy: dict[str, Any]
    settings: Settings
    clients: list[Learnt]

    def measures(self) -> dict[str, float | None]:
        """Every number by name: means over clients, and tests of membership with one threshold for all clients."""
        out: dict[str, float | None] = {}
        named = [c for c in self.clients if c.labels is not None]
        if named:
            out["classes right"] = _mean([c.labels.classes_right(np.array(c.counts)) for c in named if c.labels])
            out["labels right"] = _mean([c.labels.recovered(np.array(c.counts)) for c in named if c.labels])
        for test in dict.fromkeys(name for c in self.clients for name in c.scores):
            scores = membership.pooled([c.scores[test] for c in self.clients if test in c.scores])
            out[f"{test} AUC"] = scores.auc
            out |= {f"{test} TPR at {level:.1%} FPR": scores.true_positives(level) for level in LEVELS}
        shown = [c.images for c in self.clients if c.images is not None]
        if shown:
            psnr = np.concatenate([each.psnr.numpy() for each in shown])
            guess = np.concatenate([each.guess_psnr.numpy() for each in shown])
            out["PSNR"] = float(psnr.mean())
            out["PSNR of the best public guess"] = float(guess.mean())
            out["images at 20 dB or more"] = float((psnr >= GOOD).mean())
            out["images above the best public guess"] = float((psnr > guess + 1e-6).mean())
        return out

    @property
    def notes(self) -> list[str]:
        return list(dict.fromkeys(note for c in self.clients for note in c.notes))

    def record(self) -> dict[str, Any]:
        """The outcome as JSON."""
        return {
            "method": self.method,
            "round": self.round,
            "privacy": self.privacy,
            "settings": {**asdict(self.settings), "attacks": list(self.settings.attacks)},
            "measures": self.measures(),
            "notes": self.notes,
            "clients": [_client_record(c) for c in self.clients],
        }


def _client_record(c: Learnt) -> dict[str, Any]:
    row: dict[str, Any] = {"client": c.client, "name": c.name, "samples": c.samples, "counts": c.counts}
    if c.labels is not None:
        row |= {"believed_counts": c.labels.counts.tolist(), "classes_read": c.labels.read}
    row["membership"] = {
        test: {
            "auc": s.auc,
            "members": len(s.members),
            "others": len(s.others),
            **{f"tpr_at_{level:g}": s.true_positives(level) for level in LEVELS},
        }
        for test, s in c.scores.items()
    }
    if c.images is not None:
        row["images"] = {"psnr": c.images.psnr.tolist(), "guess_psnr": c.images.guess_psnr.tolist()}
    return {**row, "notes": c.notes}


def attack(targets: Sequence[Target], settings: Settings, tell: Callable[[str], None] = lambda words: None) -> Outcome:
    """All attacks of the settings on these uploads; `tell` is called with what is being done."""
    settings.check()
    first = targets[0]
    done = []
    for target in targets:
        tell(f"attacking the upload of {target.fed.name(target.client)}")
        done.append(_one(target, settings))
    return Outcome(
        method=str(first.config.method["name"]),
        round=first.before.round,
        privacy=first.config.privacy.model_dump(),
        settings=settings,
        clients=done,
    )


def _one(target: Target, settings: Settings) -> Learnt:
    result = Learnt(target.client, target.fed.name(target.client), len(target.part), [int(n) for n in target.counts])
    if not target.upload:
        result.notes.append("its clients upload nothing, so a server learns nothing from them")
        return result
    if target.config.federation.secure:
        result.notes.append(
            "federation.secure: the server gets the sum over all sites and no upload of one; the numbers are those of "
            "the upload that it would get without"
        )
    end = time.monotonic() + 120 * settings.minutes

    def in_time(what: str) -> bool:
        if time.monotonic() < end:
            return True
        result.notes.append(f"{what}: not tried, the time was over; give more --minutes or less --public")
        return False

    most = settings.public or affordable(target, settings.minutes)
    samples = membership.split(target, settings.seed, most)
    simulator = Simulator(target, settings.seed)
    labels = infer(target, simulator, samples.known, min(max(most // 4, 48), 192))
    if "classes" in settings.attacks:
        result.labels = labels
    if "membership" in settings.attacks and in_time("membership"):
        result.scores["gradient"] = membership.whitened(target, simulator, samples, labels)
        by_class = [
            name for name in (*target.method_upload.by_class, *target.method_upload.summed) if name in target.upload
        ]
        if by_class and set(by_class) != set(target.upload) and in_time("prototypes"):
            rows = Simulator(target, settings.seed, by_class)
            result.scores["prototypes"] = membership.whitened(target, rows, samples, labels)
        losses = membership.by_loss(target, samples, labels, settings.seed, 16)
        if losses is None:
            result.notes.append("losses: no whole model is in the upload, so the tests of losses do not apply")
        else:
            result.scores |= {"loss": losses[0], "lira": losses[1]}
    if "images" in settings.attacks and in_time("images"):
        tries = int(np.clip(settings.minutes * 60 * 30, 256, 20_000))
        made = images.reconstruct(target, labels, samples.known, settings.seed, tries)
        if isinstance(made, str):
            result.notes.append(f"images: {made}")
        else:
            result.images = made
    return result


def affordable(target: Target, minutes: float) -> int:
    """How many public samples the time allows, by the work of one made-up upload: the same on every machine."""
    config, n = target.config, len(target.part)
    parameters = sum(value.numel() for value in target.received.values()) + 1
    pixels = target.fed.train.x[0].numel()
    kernels = any(value.ndim == 4 for value in target.received.values())
    passes = 1 if target.fed.method.training_free else config.train.steps or config.train.epochs
    work = parameters * n * passes * (pixels / 16 if kernels else 1)
    return int(np.clip(minutes * SLOWEST * 60 / work / 3, FEWEST, MOST))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
