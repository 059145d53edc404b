from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from fednh.core.anyone import anyone


def test_one_client_answers_for_itself() -> None:
    assert anyone(torch.tensor(True))
    assert not anyone(torch.tensor(False))


def test_inside_a_map_the_answer_is_that_of_all_clients() -> None:
    answers = []

    def work(x: Tensor, shared: Tensor) -> Tensor:
        answers.extend([anyone(x > 2), anyone(x > 3), anyone(shared > 3), anyone(shared > 9)])
        return x * shared

    out = vmap(work, in_dims=(0, None))(torch.arange(4.0), torch.tensor(5.0))
    assert answers == [True, False, True, False]
    assert out.tolist() == [0, 5, 10, 15]
