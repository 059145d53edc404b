"""fednh.testing: one round of every method on two tiny clients, and its own example."""

from __future__ import annotations

import doctest

import pytest
import torch

from fednh import testing
from fednh.methods import METHODS, base
from fednh.testing import one_round, tiny_clients


def test_the_example_runs() -> None:
    assert doctest.testmod(testing) == (0, 3)


def test_the_method_in_the_base_docstring_runs() -> None:
    assert doctest.testmod(base) == (0, 3)


@pytest.mark.parametrize("name", METHODS)
def test_one_round_of_every_method(name: str) -> None:
    played = one_round(METHODS[name]())
    assert {n: v.shape for n, v in played.after.items()} == {n: v.shape for n, v in played.before.items()}
    x = played.clients[0].samples.x
    assert played.method.scores(played.net, played.personal(0), x).shape == (6, 3)


def test_fedavg_is_the_mean_of_two_gradient_descents() -> None:
    played = one_round(METHODS["fedavg"]())
    uploads = [result.upload or {} for result in played.results]
    for name, value in played.after.items():
        torch.testing.assert_close(value, (uploads[0][name] + uploads[1][name]) / 2)
        assert not torch.equal(uploads[0][name], uploads[1][name])


def test_neither_tiny_client_has_all_classes() -> None:
    _, clients = tiny_clients()
    assert [data.counts.tolist() for data in clients] == [[2, 1, 0], [0, 2, 1]]
