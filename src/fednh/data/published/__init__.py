"""PUBLISHED: every published data set by name. The command line, the listing, downloads and tests derive from it.

To add one: a file beside this one that describes it (see `base.py`), and a line in the registry.
"""

from __future__ import annotations

from fednh.data.published.base import Published
from fednh.data.published.cifar import CIFAR10, CIFAR100
from fednh.data.published.idx import FASHION_MNIST, MNIST
from fednh.data.published.tinyimagenet import TINYIMAGENET

PUBLISHED: dict[str, Published] = {each.name: each for each in (CIFAR10, CIFAR100, TINYIMAGENET, FASHION_MNIST, MNIST)}

__all__ = ["PUBLISHED", "Published"]
