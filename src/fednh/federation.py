"""What a run works on, made from its config: the samples, who holds them, the network and the method."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fednh.config import Config, PartitionConfig
from fednh.data import partition
from fednh.data.batches import Samples, samples_of
from fednh.data.dataset import Dataset
from fednh.data.sources import default_folder, load
from fednh.errors import UserError
from fednh.methods import Method
from fednh.models import Net, build_net
from fednh.seeding import numpy_rng


@dataclass(frozen=True)
class Federation:
    """Nothing here changes during a run, and all methods with the same seed share it."""

    dataset: Dataset
    train: Samples
    test: Samples
    parts: list[partition.Indices]  # client -> indices into `train`
    net: Net
    method: Method

    def class_counts(self) -> list[list[int]]:
        """Training samples of each class (columns) on every client (rows)."""
        y, width = self.dataset.y_train, self.dataset.num_classes
        return [np.bincount(y[part], minlength=width).tolist() for part in self.parts]

    def card(self, config: Config) -> dict[str, Any]:
        """What a saved model must say about itself to be used elsewhere."""
        data = self.dataset
        return {
            "method": config.method,
            "model": {**self.net.card, "args": config.model.args},
            "shape": data.shape,
            "classes": data.classes,
            "preprocessing": {"scale": data.scale, "mean": data.mean, "std": data.std},
            "trained_on": {"data": data.name, "seed": config.seed, "rounds": config.rounds},
        }


def network(config: Config, shape: tuple[int, ...], num_classes: int) -> Net:
    """The network that a config describes, for samples of this shape."""
    m = config.model
    return build_net(m.name, shape, num_classes, m.args, head=m.head, norm=m.norm, weights=m.weights)


def load_data(config: Config) -> Dataset:
    """The samples that a config names."""
    return load(config.data.name, Path(config.data.dir).expanduser() if config.data.dir else default_folder())


def build_federation(config: Config, dataset: Dataset | None = None) -> Federation:
    """Load, divide and check everything that a run needs; bad input is found here, before anything is written.

    Who builds several federations of the same data may load them once and pass them.
    """
    check_device(config.device)
    data = dataset or load_data(config)
    return Federation(
        dataset=data,
        train=samples_of(data, "train", config.data.augment, config.device),
        test=samples_of(data, "test", device=config.device),
        parts=split(data.y_train, config.partition, config.seed),
        net=network(config, data.shape, data.num_classes),
        method=config.build_method(),
    )


def split(labels: partition.Indices, how: PartitionConfig, seed: int) -> list[partition.Indices]:
    """The clients' indices. Depends on the seed and the partition settings only: not on the method."""
    rng = numpy_rng(seed, "partition")
    k, least = how.clients, how.min_samples
    match how.name:
        case "dirichlet":
            return partition.dirichlet(labels, k, rng, how.beta, least, how.min_classes)
        case "iid":
            return partition.iid(labels, k, rng, least)
        case "classes":
            return partition.classes(labels, k, rng, how.classes_per_client, least)
        case "shards":
            return partition.shards(labels, k, rng, how.shards_per_client, least)
        case "quantity":
            return partition.quantity(labels, k, rng, how.beta, least)


def check_device(device: str) -> None:
    try:
        float(torch.zeros(1, device=device).add_(1))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"device = {device!r} cannot be used here: {reason}") from error
