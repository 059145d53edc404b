from __future__ import annotations

import numpy as np
import pytest
import torch

from fednh.data.batches import PADDING, ClientData, Samples, crop_flip, samples_of
from fednh.data.dataset import Dataset
from fednh.errors import UserError
from tests.helpers.tiny import CLIENTS, tiny_dataset


def images(count: int = 5) -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (count, 6, 7, 3), dtype=np.uint8)
    y = np.arange(count, dtype=np.int64) % 2
    return Dataset("toy", x, y, x, y, ("a", "b"), (0.5, 0.4, 0.3), (0.2, 0.1, 0.5), augment="crop_flip")


def test_normalisation_and_layout() -> None:
    data = images()
    x = samples_of(data, "train").floats(torch.from_numpy(data.x_train))
    assert x.shape == (5, 3, 6, 7)
    assert x.is_contiguous(memory_format=torch.channels_last)
    expected = (data.x_train[2, 3, 4, 1] / 255 - 0.4) / 0.1
    assert float(x[2, 1, 3, 4]) == pytest.approx(expected, rel=1e-5)


def test_vectors_are_not_written_to() -> None:
    data = tiny_dataset()
    before = data.x_train.copy()
    samples = samples_of(data, "train")
    samples.floats(samples.x)
    assert np.array_equal(data.x_train, before)


def test_images_stay_uint8_and_are_not_copied() -> None:
    data = images()
    samples = samples_of(data, "train")
    assert samples.x.dtype == torch.uint8
    assert samples.x.data_ptr() == data.x_train.ctypes.data


def test_crop_flip_equals_the_sample_by_sample_way() -> None:
    x = torch.from_numpy(images(64).x_train)
    out = crop_flip(x, torch.Generator().manual_seed(4))
    rng = torch.Generator().manual_seed(4)
    top, left = torch.randint(2 * PADDING + 1, (2, 64, 1), generator=rng)[:, :, 0].tolist()
    flip = torch.randint(2, (64, 1), generator=rng)[:, 0].tolist()
    for i in range(64):
        padded = np.pad(x[i].numpy(), ((4, 4), (4, 4), (0, 0)))
        crop = padded[top[i] : top[i] + 6, left[i] : left[i] + 7]
        expected = crop[:, ::-1] if flip[i] else crop
        assert np.array_equal(out[i].numpy(), expected), i
    assert {*flip} == {0, 1}
    assert {*top} == set(range(9))


def test_only_training_batches_are_augmented() -> None:
    data = images(40)
    assert samples_of(data, "train").augment
    assert not samples_of(data, "test").augment
    assert not samples_of(data, "train", augment="none").augment
    client = ClientData(samples_of(data, "train"), np.arange(40))
    seen = torch.cat([x for x, _, _ in client.batches()])
    torch.testing.assert_close(seen, client.samples.floats(client.samples.x))


def test_vectors_cannot_be_cropped() -> None:
    with pytest.raises(UserError, match="needs images"):
        samples_of(tiny_dataset(), "train", augment="crop_flip")


def test_an_epoch_has_every_sample_once(tiny: Samples) -> None:
    client = ClientData(tiny, CLIENTS[1])
    batches = list(client.shuffled(2))
    assert [len(y) for _, y in batches] == [2, 2, 1]
    rows = torch.cat([x for x, _ in batches])
    expected = tiny.x[client.index]
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, expected.tolist()))


def test_randomness_is_by_address(tiny: Samples) -> None:
    def first_batch(**address: int) -> list[float]:
        return next(ClientData(tiny, CLIENTS[0], **address).shuffled(3))[0].flatten().tolist()

    assert first_batch(seed=1, round_=2, client=3) == first_batch(seed=1, round_=2, client=3)
    others = [first_batch(seed=1, round_=r, client=c) for r in range(4) for c in range(4)]
    assert len({tuple(o) for o in others}) > 8


def test_random_numbers_do_not_depend_on_training(tiny: Samples) -> None:
    a, b = ClientData(tiny, CLIENTS[0]), ClientData(tiny, CLIENTS[0])
    list(a.shuffled(2))
    assert torch.equal(a.random(3), b.random(3))
    assert a.random(3).shape == (3, 6)


def test_counts_and_share(tiny: Samples) -> None:
    client = ClientData(tiny, CLIENTS[0])
    assert client.counts.tolist() == [4, 2, 0, 0]
    torch.testing.assert_close(client.share, torch.tensor([2 / 3, 1 / 3, 0, 0]))


def test_a_drawn_share_is_the_same_at_every_call_and_another_one_in_another_round() -> None:
    samples = samples_of(images(64), "train")  # would be augmented in training

    def drawn(round_: int, share: float) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        data = ClientData(samples, np.arange(10, 50), round_=round_)
        rows = list(data.drawn(share, 9))
        assert all(weight.tolist() == [1.0] * len(y) for _, y, weight in rows)
        again = list(data.drawn(share, 9))
        assert all(
            torch.equal(a, b) for one, two in zip(rows, again, strict=True) for a, b in zip(one, two, strict=True)
        )
        return torch.cat([x for x, _, _ in rows]), torch.cat([y for _, y, _ in rows]), [len(y) for _, y, _ in rows]

    x, y, sizes = drawn(1, 0.5)
    assert sizes == [9, 9, 2]
    plain = samples.floats(samples.x[10:50])
    places = [int((plain == one).flatten(1).all(1).nonzero()) for one in x]  # as they are, each one of the client's
    assert len(set(places)) == 20
    assert places != sorted(places)
    assert y.tolist() == samples.y[10:50][places].tolist()
    assert not torch.equal(x, drawn(2, 0.5)[0])
    assert drawn(1, 0.01)[2] == [1], "at least one"
    assert sum(drawn(1, 1.0)[2]) == 40
