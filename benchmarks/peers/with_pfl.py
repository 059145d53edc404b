"""pfl: federated averaging on its simulated backend; by `torchrun` where two processes share a round's clients."""

from __future__ import annotations

import time
from functools import partial

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.model.pytorch import PyTorchModel
from torch import Tensor

from benchmarks.peers import work


class Network(work.Network):
    """What pfl calls in a step."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, float]:
        return {}


def main() -> None:
    job = work.job()
    what = work.WORKS[job.work]
    torch.manual_seed(0)
    network = Network(what)
    sgd = partial(torch.optim.SGD, momentum=work.MOMENTUM)
    model = PyTorchModel(network, sgd, torch.optim.SGD(network.parameters(), lr=1.0))
    users = [PyTorchTensorDataset(client) for client in work.clients(what)]
    data = FederatedDataset(users.__getitem__, MinimizeReuseUserSampler(range(what.clients)))
    backend = SimulatedBackend(data, data)

    def run(rounds: int, epochs: int) -> None:
        settings = NNAlgorithmParams(
            central_num_iterations=rounds + 1,
            evaluation_frequency=rounds + 1,
            train_cohort_size=what.clients,
            val_cohort_size=None,
        )
        training = NNTrainHyperParams(local_num_epochs=epochs, local_learning_rate=work.LR, local_batch_size=work.BATCH)
        algorithm = FederatedAveraging()
        algorithm._current_central_iteration = 1  # the first one, 0, would be evaluated
        algorithm.run(settings, backend, model, training, send_metrics_to_platform=False)

    network.train()
    run(1, 1)
    before, work.Seen.samples = work.module_loss(network, what), 0
    started = time.perf_counter()
    run(job.rounds, job.epochs)
    seconds = time.perf_counter() - started
    seen = torch.tensor([float(work.Seen.samples)])
    pytorch_ops.distributed.all_reduce([seen])
    if pytorch_ops.distributed.global_rank == 0:
        after = work.module_loss(network, what)
        work.answer(work.versions("pfl"), int(seen), seconds, before, after)


if __name__ == "__main__":
    main()
