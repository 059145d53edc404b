"""Ray itself: joining a cluster or starting one on this machine, and noticing that it is gone."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from math import ceil
from typing import Any

from fednh import extras
from fednh.config import Config
from fednh.errors import UserError
from fednh.storage.run_folder import worker_count

PATIENCE = 10.0  # seconds that the cluster's head may be out of reach
LEAVING = 20.0  # seconds for Ray to shut down
AROUND = {
    "RAY_USAGE_STATS_ENABLED": "0",  # a run tells nobody about itself
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # silences a warning about the future
}
OWN = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # "no cluster of several machines": Ray listens on 127.0.0.1 alone
QUIET: Any = {"logging_level": logging.CRITICAL, "log_to_driver": False}
JOINED = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3600"}  # `Pulse` notices earlier; Ray would end this process


def check(address: str | None) -> None:
    """Refuse at once what cannot work."""
    extras.need("ray", "--backend ray")
    if address and "://" in address:
        raise UserError(
            f"--address {address} is for Ray's client; run fednh on a machine of the cluster and give HOST:PORT"
        )


def where(address: str | None) -> str | None:
    """The cluster to join: as asked for, else as RAY_ADDRESS says; None: start Ray on this machine."""
    given = os.environ.get("RAY_ADDRESS") or None
    return given if address in (None, "auto") and given else address


def own_cpus(config: Config) -> int:
    """How many CPUs Ray has, where a run starts it on this machine."""
    return ceil(worker_count(config) * (config.ray.cpus_per_client or 1))


@contextlib.contextmanager
def connected(address: str | None, cpus: int) -> Iterator[Pulse]:
    """Ray while a run lasts: the cluster at `address`, or one of this machine alone with so many CPUs."""
    check(address)
    address = where(address)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with _environment({**AROUND, **(OWN if address is None else JOINED)}):
        import ray

        _silence()
        try:
            if address is None:
                ray.init("local", num_cpus=cpus, include_dashboard=False, **QUIET)
            else:
                _reach(address)
                ray.init(address, **QUIET)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            ray.shutdown()
            raise UserError(_refusal(address, error)) from error
        finally:
            if threading.current_thread() is threading.main_thread():
                for number, handler in handlers.items():  # Ray's own would end the run without saving
                    signal.signal(number, handler)
    pulse = Pulse(ray.get_runtime_context().gcs_address)
    pulse.environment = OWN if address is None else {}
    try:
        yield pulse
    finally:
        pulse.end()
        if pulse.gone():
            atexit.register(_end_at_once)  # Ray's own way out speaks to the head, and would crash
        else:
            _within(LEAVING, ray.shutdown)


class Pulse(threading.Thread):
    """Looks after the head of the cluster; `lost` is set when it has been out of reach for a while."""

    environment: Mapping[str, str] = {}  # of other processes that join the cluster

    def __init__(self, address: str, patience: float = PATIENCE):
        super().__init__(daemon=True, name="ray-pulse")
        self.address, self.patience = address, patience
        self.lost, self._over = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        seen = time.monotonic()
        while not self._over.wait(self.patience / 10):
            if reachable(self.address, self.patience):
                seen = time.monotonic()
            elif time.monotonic() - seen > self.patience:
                self.lost.set()
                return

    def gone(self) -> bool:
        """Whether the head cannot be reached now: Ray ends a process that asks it for anything."""
        return self.lost.is_set() or not reachable(self.address, self.patience)

    def end(self) -> None:
        self._over.set()


def reachable(address: str, seconds: float) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), seconds).close()
    except OSError:
        return False
    return True


def _reach(address: str) -> None:
    """Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and not reachable(address, 5.0):
        raise ConnectionError("nothing answers there")


def _refusal(address: str | None, error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0].rstrip(".")
    if address is None:
        return f"Ray cannot be started on this machine: {reason}"
    if "ersion" in reason:
        return f"the Ray cluster at {address} has other versions than this machine: {' '.join(str(error).split())}"
    return (
        f"the Ray cluster at {address} cannot be joined: {reason}; `ray status` shows whether it runs, and this "
        f"machine must be one of it (ray start --address=HOST:PORT)"
    )


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Ray is configured by the environment; what the user has set holds."""
    mine = {key: value for key, value in settings.items() if key not in os.environ}
    os.environ |= mine
    try:
        yield
    finally:
        for key in mine:
            os.environ.pop(key, None)


def _silence() -> None:
    """Ray prints what it learns about lost machines on standard output, which is the run's: the run says it itself."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None
    logging.getLogger("ray").setLevel(logging.CRITICAL)


def _end_at_once() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _within(seconds: float, leave: Callable[[], None]) -> None:
    """A cluster whose head is gone may not answer any more: do not wait for it forever."""
    thread = threading.Thread(target=leave, daemon=True)
    thread.start()
    thread.join(seconds)
