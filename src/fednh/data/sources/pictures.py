"""What sources of image files share: the settings of decoding, and how images with their labels become a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fednh.data.dataset import Dataset
from fednh.data.groups import numbered_groups, torn
from fednh.data.images import MEAN, STD, Decoded, ImageFile, decode_all
from fednh.data.labels import in_order, numbered
from fednh.data.sources.base import Source
from fednh.data.sources.settings import Fit, OnBad, Size


@dataclass(frozen=True)
class Pictures(Source):
    """A source of image files."""

    size: Size = None
    fit: Fit = "stretch"
    on_bad: OnBad = "refuse"

    def decoded(self, sources: Sequence[ImageFile], names: Sequence[str], where: str) -> Decoded:
        """The images, decoded as the settings say."""
        size = None if self.size is None else (self.size[0], self.size[1])
        return decode_all(sources, names, size, where, self.fit, self.on_bad == "skip")

    def labelled(
        self,
        name: str,
        where: str,
        images: Decoded,
        labels: Sequence[str],
        sites: Sequence[str | None],
        test: Sequence[bool],
        classes: Sequence[str] = (),
        groups: Sequence[str] = (),
    ) -> Dataset:
        """A data set of the images that could be read; labels, sites, parts and groups, if any, are those of all."""
        kept = images.kept
        together = [groups[k] for k in kept] if groups else []
        y, known = numbered([labels[k] for k in kept], classes, where)
        is_test = np.array([test[k] for k in kept])
        places = tuple(in_order({site for k in kept if (site := sites[k]) is not None and not test[k]}))
        number = {site: at for at, site in enumerate(places)}
        place = np.array([number.get(sites[k] or "", -1) for k in kept], np.int64)
        height, width, channels = images.x.shape[1:]
        how = {"kind": "image", "size": [height, width], "channels": channels}
        return Dataset(
            name,
            images.x[~is_test],
            y[~is_test],
            images.x[is_test],
            y[is_test],
            known,
            (MEAN,) * channels,
            (STD,) * channels,
            sites=places,
            site_train=place[~is_test] if places else None,
            site_test=place[is_test] if places and is_test.any() else None,
            group_train=numbered_groups(together)[~is_test] if groups else None,
            warnings=tuple(torn(together, is_test, where)),
            preprocessing=how if self.fit == "stretch" else {**how, "fit": self.fit},
            notes=(*_lost(labels, kept), *images.notes),
        )


def _lost(labels: Sequence[str], kept: Sequence[int]) -> list[str]:
    """Classes of which no image could be read."""
    lost = in_order(set(labels) - {labels[k] for k in kept})
    return [f"no image of the class {', '.join(lost)} could be read"] if lost else []
