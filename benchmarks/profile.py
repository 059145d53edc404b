"""Where the time of a CIFAR-10 round goes: `python -m benchmarks.profile` trains one FedNH client under a profiler."""

from __future__ import annotations

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.speed import federation, images
from fednh import machine
from fednh.data.batches import ClientData
from fednh.federated import client
from fednh.methods.fit import Sgd
from fednh.seeding import torch_rng

GROUPS = {
    "convolutions, backward": ("convolution_backward",),
    "convolutions, forward": ("mkldnn_convolution",),
    "pooling": ("max_pool2d",),
    "linear layers": ("aten::mm", "aten::addmm"),
    "ReLU": ("threshold_backward", "clamp_min"),
    "optimiser and clipping": ("aten::add_", "aten::mul_", "linalg_vector_norm", "_foreach"),
    "batches: indexing, crop, flip, normalise": ("aten::index", "index_select", "aten::copy_", "constant_pad"),
}


def main() -> None:
    machine.keep_freed()
    torch.set_num_threads(1)
    _, fed = federation(images(512, 32), np.arange(512).reshape(1, -1), **{"method.name": "fednh"})
    server = fed.method.init(fed.net, torch_rng(0, "init"))

    def one_client() -> None:
        client.update(fed.method, fed.net, {}, server, ClientData(fed.train, fed.parts[0], 0, 1, 0), Sgd())

    one_client()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        one_client()
    took: dict[str, float] = dict.fromkeys([*GROUPS, "everything else"], 0.0)
    for event in seen.key_averages():
        place = next((g for g, names in GROUPS.items() if any(n in event.key for n in names)), "everything else")
        took[place] += event.self_cpu_time_total
    total = sum(took.values())
    for place, microseconds in took.items():
        print(f"{place:45s} {100 * microseconds / total:5.1f}%")
    print(f"{'a client of 512 images, 5 epochs':45s} {total / 1e6:5.2f} s")


if __name__ == "__main__":
    main()
