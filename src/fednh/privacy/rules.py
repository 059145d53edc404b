"""What a level does not allow: settings and methods, each refused in a sentence before anything is computed.

Under level "sample" a method is judged by what it asks for (private_data.py), so that here are only those settings that
would let something leave, or let samples see each other, without a method's doing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fednh.config import Config
from fednh.errors import ConfigError
from fednh.methods.base import Method
from fednh.models.net import Net


@contextmanager
def refusing(method: Mapping[str, Any]) -> Iterator[None]:
    """Turn what the method of these settings may not do into a sentence that names it, and what it could do."""
    try:
        yield
    except ConfigError as error:
        way_out = "" if method.get("aggregation", "sum") == "sum" else "; set method.aggregation = 'sum'"
        name = method["name"]
        raise ConfigError(f"method {name} cannot be used with privacy.level = 'sample': {error}{way_out}") from error


def check(config: Config, method: Method, net: Net) -> None:
    """Refuse settings under which something would leave that no account covers."""
    for setting, wrong, why in _settings(config, net):
        if wrong:
            raise ConfigError(f"privacy.level = {config.privacy.level!r} does not go with {setting}: {why}")
    if config.privacy.level == "client":
        _check_client_level(config, method)


def _settings(config: Config, net: Net) -> list[tuple[str, bool, str]]:
    return [
        (
            "aggregator = 'weighted_mean'",
            config.aggregator == "weighted_mean",
            "numbers of samples would weigh uploads, and no noise hides them; use 'mean'",
        ),
        (
            "diagnostics.gradient_norm",
            config.diagnostics.gradient_norm,
            "norms of gradients leave without noise; leave it out",
        ),
        (
            "train.optimizer_state = 'kept'",
            config.privacy.level == "sample" and config.train.optimizer_state == "kept",
            "steps on noise start anew in every round; leave it at 'fresh'",
        ),
        (
            "model.norm = 'local'",
            config.privacy.level == "sample" and net.stateful,
            "batch statistics let samples look at each other; use a model with group or layer normalisation",
        ),
        (
            "model.norm = 'average'",
            bool(net.statistics),
            "running statistics of batches have no noise of their own; use a model with group or layer normalisation",
        ),
        (
            "a model with random layers such as dropout",
            config.privacy.level == "sample" and net.random,
            "per-sample gradients of these are not supported; set their rate to 0",
        ),
    ]


def _check_client_level(config: Config, method: Method) -> None:
    name, spec = config.method["name"], method.upload
    if config.aggregator != "mean":
        raise ConfigError(
            f"privacy.level = 'client' does not go with aggregator = {config.aggregator!r}: noise is added to the sum "
            f"of clipped moves; use 'mean'"
        )
    if config.bound:
        raise ConfigError(
            "privacy.level = 'client' does not go with bound: which uploads it refuses depends on all of them, and "
            "every move is clipped; leave it out"
        )
    if spec.single or spec.recorded or spec.summed or spec.weight:
        what = "sums over samples" if spec.summed else "weights that clients send" if spec.weight else "single uploads"
        raise ConfigError(
            f"method {name} cannot be used with privacy.level = 'client': its server works on {what}, and only the "
            f"noised mean of clipped moves may be used"
        )
