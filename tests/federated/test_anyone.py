from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from fednh.methods.losses import unvmap_any


def test_one_client_answers_for_itself() -> None:
    assert unvmap_any(torch.tensor(True))
    assert not unvmap_any(torch.tensor(False))


def test_inside_a_map_the_answer_is_that_of_all_clients() -> None:
    answers = []

    def work(x: Tensor, shared: Tensor) -> Tensor:
        answers.extend([unvmap_any(x > 2), unvmap_any(x > 3), unvmap_any(shared > 3), unvmap_any(shared > 9)])
        return x * shared

    out = vmap(work, in_dims=(0, None))(torch.arange(4.0), torch.tensor(5.0))
    assert answers == [True, False, True, False]
    assert out.tolist() == [0, 5, 10, 15]
