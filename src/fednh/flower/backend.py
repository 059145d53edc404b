"""`fednh run --backend flower`: the config on Flower's simulation engine, with Ray actors as clients.

It runs on this machine, or on the Ray cluster at RAY_ADDRESS. On a cluster the run folder must be on a disk that all
machines share, and each machine needs the same fednh and the data.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fednh import extras
from fednh.core.progress import Watcher
from fednh.errors import UserError
from fednh.storage.run_folder import RunFolder, worker_count

if TYPE_CHECKING:
    from fednh.config import Config
    from fednh.core.federation import Federation

PATIENCE = 7 * 24 * 3600.0  # seconds: a simulated client may take very long


def check() -> None:
    """Raise at once if Flower or Ray is not installed."""
    extras.need("flower", "--backend flower", "ray")


def simulate(
    config: Config, federation: Federation, folder: RunFolder, watcher: Watcher, stop: threading.Event
) -> None:
    """Run all rounds of a config that the folder does not have yet; one virtual node for every client."""
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    from fednh.flower.client_app import client_app
    from fednh.flower.executor import Manner, rounds

    manner = Manner(PATIENCE, len(federation.parts), simulated=True, pause=0.02)
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        rounds(config, grid, folder, watcher, manner, stop, federation).run()

    sites = client_app(home=folder.clients.absolute(), run=folder.path.absolute())
    resources = {"num_cpus": 1, "num_gpus": 0.0 if config.device == "cpu" else 1.0}
    with _quiet(), _ray(config):
        run_simulation(server_app, sites, len(federation.parts), backend_config={"client_resources": {**resources}})


@contextmanager
def _ray(config: Config) -> Iterator[None]:
    """Start Ray or join its cluster; shut down at the end. Ray's SIGTERM handler would end the run without saving."""
    import ray

    handler, path = signal.getsignal(signal.SIGTERM), os.environ.get("PYTHONPATH")
    cpus = None if os.environ.get("RAY_ADDRESS") else worker_count(config)
    os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(p).absolute()) for p in sys.path)  # for actors started here
    try:
        ray.init(num_cpus=cpus, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
        signal.signal(signal.SIGTERM, handler)
        yield
    except ConnectionError as error:
        raise UserError(f"the Ray cluster at RAY_ADDRESS={os.environ.get('RAY_ADDRESS')} cannot be reached") from error
    finally:
        ray.shutdown()
        os.environ.pop("PYTHONPATH")
        os.environ |= {} if path is None else {"PYTHONPATH": path}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Flower's log: the run's own watcher reports progress."""
    log = logging.getLogger("flwr")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)
