"""Every message of a federation, looked into: what leaves a site is the declared upload and aggregate numbers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fednh.federated.architectures import initial_state
from fednh.federated.checks import declared_upload
from fednh.federated.setup import build_federation
from fednh.flower.protocol import FORMAT, to_arrays, to_tree
from fednh.methods import METHODS
from fednh.runs.model_file import read_model
from tests.helpers.config import small
from tests.helpers.federation import federate, own_sites

FACTS = {"client", "round", "samples", "loss_sum"}
FIGURES = {"samples", "pm_v", "pm_l", "per_class"}
HELD = {"held_macro", "held_share", "held_gm_macro", "held_gm_share"}
PAGE = Path(__file__).parents[2] / "docs" / "what-leaves-a-site.md"


@pytest.mark.parametrize("method", METHODS)
def test_exactly_the_declared_upload_leaves_a_site(method: str, tmp_path: Path) -> None:
    config = small(method, rounds=2, **{"eval.every": 1, "participation.rate": 1.0, "partition.clients": 3})
    fed = build_federation(config)
    declared = declared_upload(fed.method, fed.net, initial_state(fed.method, fed.net, config.seed))
    wire, _ = federate(config, tmp_path)
    kinds = [request.metadata.message_type for request, _ in wire.seen]
    assert kinds == ["query"] * 3 + ["train"] * 6 + ["evaluate"] * 3  # one message a site and round, and one at the end
    for request, reply in wire.seen:
        assert reply is not None
        content, kind = reply.content, request.metadata.message_type
        if kind == "query":
            assert set(content) == {"said", "seal"}
            assert set(content["said"]) == {"format", "site", "number", "task", "audit"}
            continue
        first = kind == "train" and request.metadata.group_id == "1"
        assert set(content) == {"said", "facts", "seal"} | ({"upload"} if kind == "train" else set()) | (
            set() if first else {"figures"}
        )
        assert set(content["said"]) == {"format", "audit"}
        assert content["said"]["format"] == FORMAT
        trained = kind == "train" and not fed.method.training_free
        assert set(content["facts"]) == (FACTS if trained else {"client", "round"})
        if kind == "train":
            upload = to_tree(content["upload"])
            assert {n: (tuple(v.shape), v.dtype) for n, v in upload.items()} == declared
        if not first:
            assert set(content["figures"]) == FIGURES


def test_messages_have_as_many_objects_as_the_page_says(tmp_path: Path) -> None:
    """docs/federation-reference.md: a call for every object."""
    page = (PAGE.parent / "federation-reference.md").read_text(encoding="utf-8")
    told = re.search(r"an order is (\d+)\s+objects and a reply up to (\d+)", page)
    config = small("fednh", rounds=2, **{"eval.every": 1, "participation.rate": 1.0, "partition.clients": 2})
    wire, _ = federate(config, tmp_path)
    trained = [pair for pair in wire.seen if pair[0].metadata.message_type == "train"]
    orders = {len(get_all_nested_objects(order)) for order, _ in trained}
    replies = [len(get_all_nested_objects(reply)) for _, reply in trained if reply is not None]
    assert told is not None
    assert (orders, max(replies)) == ({int(told[1])}, int(told[2]))


def test_a_site_with_data_of_its_own_says_less(tmp_path: Path) -> None:
    """No accuracy by class, which would show its classes; no path; no count but that of samples."""
    wire = own_sites(tmp_path, {"method.name": "fednh"})
    for _, reply in wire.seen:
        assert reply is not None
        for record in reply.content.values():
            if isinstance(record, ConfigRecord):
                assert str(tmp_path) not in str(dict(record))
            if isinstance(record, MetricRecord):
                assert set(record) <= FACTS | {"samples", "novelty"} | HELD


def test_the_global_model_of_sites_with_data_of_their_own_knows_what_is_unlike_all(tmp_path: Path) -> None:
    """Its card has the mean of the quantiles that travelled, each by the site's samples."""
    wire = own_sites(tmp_path, {"method.name": "fednh"})
    told = [r.content["figures"] for _, r in wire.seen if r is not None and "novelty" in r.content.get("figures", {})]
    assert len(told) == 3, "once, at the end, by each"
    total = sum(row["samples"] for row in told)
    low, high = (sum(row["novelty"][k] * row["samples"] for row in told) / total for k in (0, 1))
    about = read_model(tmp_path / "run" / "models" / "global.safetensors")[1].novelty
    assert about is not None
    assert about["quantiles"] == {"0.01": pytest.approx(low, abs=1e-6), "0.05": pytest.approx(high, abs=1e-6)}
    assert (about["samples"], about["sites"]) == (total, 3)
    assert -1 <= low <= high <= 1


def page_row(method: str) -> list[str]:
    """The cells of a method's row on the page: methods, upload, classes, what stays of the personal model."""
    rows = [line.split("|")[1:-1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    (row,) = [cells for cells in rows if f"`{method}`" in cells[0] and len(cells) == 4]
    return row


def names(cell: str) -> set[str]:
    return set(re.findall(r"`([a-z]+)`", cell))


@pytest.mark.parametrize("method", METHODS)
def test_the_page_names_every_upload(method: str) -> None:
    """docs/what-leaves-a-site.md against what methods declare; class counts only where it says so."""
    config = small(method)
    fed = build_federation(config)
    declared = declared_upload(fed.method, fed.net, initial_state(fed.method, fed.net, config.seed))
    assert names(page_row(method)[1]) == {name.partition(".")[0] for name in declared}


@pytest.mark.parametrize("method", METHODS)
def test_the_page_names_what_stays_of_a_personal_model(method: str) -> None:
    """Parts that the server neither sent nor received. The second round: some methods start to personalise then."""
    import torch

    from fednh.data.batches import ClientData
    from fednh.federated.aggregate import accumulator
    from fednh.federated.client import personal_model, update

    config = small(method)
    fed = build_federation(config)
    server = initial_state(fed.method, fed.net, config.seed)
    kept, sgd, data = fed.method.enroll(server), config.fit_settings(1), ClientData(fed.train, fed.parts[0])
    for _ in range(2):
        down = fed.method.broadcast(server)
        result = update(fed.method, fed.net, kept, down, data, sgd)
        uploads = accumulator("mean", server, 0.0, fed.method)
        uploads.add(result.upload, result.samples)
        kept, server = result.keep, fed.method.aggregate(server, uploads.uploads())
    model = personal_model(fed.method, fed.net, kept, down, data, sgd, how=config.personal)
    known = [*result.upload.values(), *down.values()]
    stays = {name for name, value in model.items() if not any(torch.equal(value, other) for other in known)}
    assert names(page_row(method)[3]) == {name.partition(".")[0] for name in stays}


def test_uniform_prototypes_carry_no_counts() -> None:
    """FedNH: class means do not depend on how many samples stand behind them, unless aggregation = "count"."""
    import torch

    from fednh.data.batches import ClientData
    from fednh.federated.client import update
    from fednh.methods.fit import Sgd

    for aggregation in ("uniform", "count"):
        config = small("fednh", **{"method.aggregation": aggregation, "partition.clients": 3})
        fed = build_federation(config)
        state = initial_state(fed.method, fed.net, config.seed)
        once, twice = (
            update(
                fed.method, fed.net, {}, state, ClientData(fed.train, np.tile(fed.parts[0], n)), Sgd(lr=1e-12)
            ).upload
            for n in (1, 2)
        )
        same = torch.allclose(once["prototypes"], twice["prototypes"], atol=1e-5)
        assert same == (aggregation == "uniform")


def test_trees_travel_as_they_are() -> None:
    """Numbers without axes, whole numbers, empty trees, other memory orders."""
    import torch

    from tests.helpers.compare import identical

    tree = {
        "scale": torch.tensor(20.0),
        "seed": torch.tensor(7),
        "conv": torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        "none": torch.zeros(0, 3),
    }
    back = to_tree(to_arrays(tree))
    identical(dict(sorted(tree.items())), back)
    assert back["conv"].is_contiguous(memory_format=torch.channels_last)
    assert to_tree(ArrayRecord()) == {}


def test_nothing_else_leaves(tmp_path: Path) -> None:
    """The last thing before a reply is sent: a record that no page names stays here."""
    from flwr.app import RecordDict

    from fednh.errors import Refused
    from fednh.flower.client_app import finalize_reply

    harmless = RecordDict({"said": ConfigRecord({"format": FORMAT})})
    assert set(finalize_reply(harmless, None, None)) == {"said"}
    with pytest.raises(Refused, match="a reply would hold 'samples', which is not among what leaves a site"):
        finalize_reply(RecordDict({**harmless, "samples": MetricRecord({"x": 1.0})}), None, None)
