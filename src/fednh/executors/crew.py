"""The near side of a cluster: one actor of Ray a slot, the jobs that they have, and what is done when one is lost.

A slot is what one client reserves (`[ray]` in the config). Every slot of every machine gets an actor, which stays for
the whole run and has at most two jobs: one at work and one waiting. A machine that joins later gets actors too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import ray
from ray import exceptions

from fednh.config import Config
from fednh.config.schema import RayConfig
from fednh.errors import UserError
from fednh.executors.hand import SAME, facts

Ref: TypeAlias = "ray.ObjectRef[Any]"
DEPTH = 2  # jobs of an actor: one at work, one waiting
# The actor or the machine that had a job is gone, or what it computed is: the job can be computed again.
LOST = (
    exceptions.RayActorError,
    exceptions.ObjectLostError,
    exceptions.WorkerCrashedError,
    exceptions.NodeDiedError,
    exceptions.OutOfMemoryError,
)


def _far_side() -> type:
    """The actor's class. It is defined here so that Ray sends it as it is: the machine may lack this package."""

    class FednhClient:
        def join(self, wanted: dict[str, str], keys: Sequence[str], material: Any) -> dict[str, str]:
            """This machine's facts; it gets ready to work if they are as wanted."""
            import socket

            import ray

            here = {"host": socket.gethostname(), "node": ray.get_runtime_context().get_node_id()}
            try:
                from fednh.executors import hand
            except ImportError as error:
                return {**here, "problem": f"{type(error).__name__}: {error}"}
            here = {**hand.facts(), **here}
            if all(here[key] == wanted[key] for key in keys):
                try:
                    self.bench = hand.Bench(ray.get(material[0]))
                except Exception as error:
                    return {**here, "problem": f"{type(error).__name__}: {error}"}
            return here

        def work(self, *job: Any) -> Any:
            return self.bench.work(*job)

    return FednhClient


@dataclass(eq=False)
class Hand:
    """One actor."""

    actor: Any
    joining: Ref | None  # its answer to `join`, until that is there
    about: dict[str, str] = field(default_factory=dict)
    jobs: int = 0

    @property
    def place(self) -> str:
        return f"{self.about.get('host', 'a machine')} (node {self.about.get('node', '')[:8]})"


def needs(settings: RayConfig, device: str) -> dict[str, float]:
    """What one client reserves, by Ray's names."""
    gpus = settings.gpus_per_client
    if gpus is None:
        gpus = 0.0 if device == "cpu" else 1.0
    wanted = {"CPU": settings.cpus_per_client, "GPU": gpus, **settings.resources}
    return {name: float(amount) for name, amount in wanted.items() if amount}


def slots(wanted: Mapping[str, float], machines: Sequence[Mapping[str, float]]) -> int:
    """How many clients fit on these machines at once; a client does not span two of them."""
    return sum(min(int(has.get(name, 0.0) / amount + 1e-9) for name, amount in wanted.items()) for has in machines)


def nodes() -> list[dict[str, Any]]:
    """The machines of the cluster, as Ray tells of them."""
    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return found


def room(config: Config) -> int:
    """How many clients of a run fit on the cluster at once."""
    wanted = needs(config.ray, config.device)
    number = slots(wanted, [node["Resources"] for node in nodes() if node["Alive"]])
    if not number:
        raise UserError(f"no machine of the Ray cluster has room for a client, which needs {in_words(wanted)}")
    return number


def in_words(wanted: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in wanted.items())


class Crew:
    """The actors of one run."""

    def __init__(self, wanted: Mapping[str, float], limit: int, material: Ref, note: Callable[[str], None]):
        """At most `limit` actors; 0: as many as there are slots."""
        self.wanted, self.limit, self.material, self.note = wanted, limit, material, note
        self.hands: list[Hand] = []
        self._refused: set[str] = set()  # nodes that cannot be used
        self._cpus = {facts()["cpu"]}

    @property
    def ready(self) -> list[Hand]:
        return [hand for hand in self.hands if hand.joining is None]

    def call(self) -> int:
        """Start an actor for every slot that has none; returns the number of slots."""
        alive = [node for node in nodes() if node["Alive"] and node["NodeID"] not in self._refused]
        number = slots(self.wanted, [node["Resources"] for node in alive])
        number = min(number, self.limit) if self.limit else number
        for _ in range(number - len(self.hands)):
            actor = _remote(self.wanted).remote()
            mine = {key: facts()[key] for key in SAME}
            self.hands.append(Hand(actor, actor.join.remote(mine, SAME, [self.material])))
        return number

    def assemble(self, number: int, seconds: float, check: Callable[[], None], strict: bool = True) -> None:
        """Wait until `number` actors are ready; when the time is over, those that are there will do."""
        deadline = time.monotonic() + seconds
        while len(self.ready) < number and time.monotonic() < deadline:
            check()
            coming = [hand for hand in self.hands if hand.joining is not None]
            if not coming:
                return
            ray.wait([hand.joining for hand in coming], num_returns=1, timeout=0.1)
            self.welcome(strict)

    def welcome(self, strict: bool = False) -> None:
        """Take in the actors that have answered; one on a machine with other versions is refused."""
        coming = [hand for hand in self.hands if hand.joining is not None]
        if not coming:
            return
        there, _ = ray.wait([hand.joining for hand in coming], num_returns=len(coming), timeout=0)
        for hand in [hand for hand in coming if hand.joining in there]:
            try:
                hand.about = ray.get(cast(Ref, hand.joining))
            except LOST:
                self.forget(hand)
                continue
            hand.joining = None
            if words := _problem(hand):
                if strict:
                    raise UserError(words)
                self._refused.add(hand.about["node"])
                self.dismiss(hand)
                self.note(f"{words}; it is not used")
                continue
            self._look_at_processor(hand)

    def _look_at_processor(self, hand: Hand) -> None:
        cpu = hand.about["cpu"]
        if cpu not in self._cpus:
            self._cpus.add(cpu)
            self.note(
                f"machines have different processors ({', '.join(sorted(self._cpus))}): the last bits of results may "
                f"depend on which of them computes a client"
            )

    def free(self) -> Hand | None:
        """The actor with the fewest jobs, if it can take one more."""
        chosen = min(self.ready, key=lambda hand: hand.jobs, default=None)
        return chosen if chosen is not None and chosen.jobs < DEPTH else None

    def forget(self, hand: Hand) -> None:
        """It is lost: Ray knows that, or will end it when nobody knows it any more."""
        if hand in self.hands:
            self.hands.remove(hand)

    def dismiss(self, hand: Hand) -> None:
        self.forget(hand)
        ray.kill(hand.actor)

    def leave(self) -> None:
        for hand in list(self.hands):
            self.dismiss(hand)


def _remote(wanted: Mapping[str, float]) -> Any:
    others = {name: amount for name, amount in wanted.items() if name not in ("CPU", "GPU")}
    return ray.remote(_far_side()).options(
        num_cpus=wanted.get("CPU", 0),
        num_gpus=wanted.get("GPU", 0),
        resources=others,
        max_restarts=0,
        scheduling_strategy="SPREAD",
    )


def _problem(hand: Hand) -> str | None:
    """Why a machine cannot be used, in a sentence."""
    about, mine = hand.about, facts()
    if words := about.get("problem"):
        return f"the machine {hand.place} cannot compute clients: {words}; install there what is installed here"
    for key in SAME:
        if about[key] != mine[key]:
            if key == "source":
                return f"the machine {hand.place} has another source of fednh {mine['fednh']}; install this machine's"
            return f"the machine {hand.place} has {key} {about[key]}, this one {mine[key]}; install the same versions"
    return None
