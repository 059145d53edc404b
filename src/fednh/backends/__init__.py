"""Backends: where the clients of a run are computed. `run_maker` chooses one by name."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Protocol

from fednh import extras
from fednh.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from fednh.callbacks import Callback
    from fednh.config import Config
    from fednh.federated.rounds import RoundLoop
    from fednh.federated.setup import Federation
    from fednh.runs.run_folder import RunFolder

BACKENDS = ("simulator", "ray")


class RunMaker(Protocol):
    """Makes a run that is ready to `run`."""

    def __call__(
        self,
        config: Config,
        federation: Federation,
        folder: RunFolder,
        callback: Callback,
        stop: threading.Event | None = None,
    ) -> RoundLoop: ...


def run_maker(backend: str, address: str | None = None) -> RunMaker:
    """The backend called so: threads of this process, or a Ray cluster; what cannot be is refused at once."""
    if backend not in BACKENDS:
        raise ConfigError(f"the backend {backend!r} is not known{did_you_mean(backend, BACKENDS)}")
    from fednh.backends import threads

    if backend == "simulator":
        if address is not None:
            raise ConfigError(f"the address {address} is a Ray cluster's; choose the backend ray")
        return threads.make_run
    extras.need("ray", "the backend ray")
    from fednh.backends import ray

    ray.check_address(address)
    return partial(threads.make_run, executor=partial(ray.RayCluster, address))
