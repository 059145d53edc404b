"""The natural sites: client k holds what the k-th site of the data holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fednh.data.dataset import Dataset
from fednh.data.partitions.base import Indices, Partition, by_owner
from fednh.errors import UserError
from fednh.words import name_problem


@dataclass(frozen=True)
class BySite(Partition):
    name = "site"
    help = "the sites that the data names: a column, or a folder a site"
    natural = True

    def column(self) -> str:
        return "sites"

    def words(self) -> str:
        return "natural sites"

    def divide(self, data: Dataset, rng: np.random.Generator) -> list[Indices]:
        if data.site_train is None:
            raise UserError(f"partition.name = 'site', but {data.name} does not say which site a sample comes from")
        for site in data.sites:
            if problem := name_problem(site):
                raise UserError(f"{data.name} names a site {site!r}: {problem}; rename it")
        parts = by_owner(data.site_train, len(data.sites))
        for site, part in zip(data.sites, parts, strict=True):
            if len(part) < self.min_samples:
                raise UserError(
                    f"partition: the site {site!r} has only {len(part)} training samples, fewer than "
                    f"{self.min_samples}; leave it out or lower partition.min_samples"
                )
        return parts
