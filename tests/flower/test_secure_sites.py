"""Secure sums with real keys and files: losses, lies of the server, messages again, crashes between two files."""

from __future__ import annotations

import os
import shutil
import signal
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict

from fednh.errors import Refused, UserError
from fednh.flower import secure_site
from fednh.flower.secure_messages import (
    RECORD,
    STAGES,
    Asked,
    CohortSent,
    ConfirmationsSent,
    RevealReply,
    SharesSent,
    SurvivorsSent,
    read_words,
)
from fednh.flower.secure_round import GivenUp
from fednh.io import chain
from fednh.privacy import ledger
from fednh.privacy.grid import STEP, NoisySum
from tests.helpers.counts import count
from tests.helpers.federation import write_site_key
from tests.helpers.secure import ALIKE, Cohorts, without_sender


@pytest.fixture
def three(tmp_path: Path) -> Cohorts:
    return Cohorts(tmp_path)


def same(total: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], sites: int) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(total[name], value, atol=sites * STEP, rtol=1e-7)


def test_the_sum_is_that_of_all_with_samples_and_loss(three: Cohorts) -> None:
    total = three.total()
    assert total.clients == (0, 1, 2)
    assert (total.samples, total.loss_sum) == (30, 7.5)
    same(total.upload, three.of("a", "b", "c"), 3)
    assert total.sent > 0


@pytest.mark.parametrize("stage", STAGES)
def test_a_site_may_be_lost_in_any_stage(stage: str, three: Cohorts) -> None:
    three.lost = {"b": stage}
    total = three.total()
    inside = ("a", "b", "c") if stage in ("survivors", "reveal") else ("a", "c")
    assert total.clients == tuple("abc".index(name) for name in inside)
    same(total.upload, three.of(*inside), len(inside))


@pytest.mark.parametrize("stage", STAGES)
def test_with_too_few_sites_the_sum_is_given_up_and_nothing_more_is_revealed(stage: str, three: Cohorts) -> None:
    three.lost = {"b": stage, "c": stage}
    with pytest.raises(GivenUp, match="and 2 are needed"):
        three.total()
    told = [site for said, site, _ in three.said if said == "reveal"]
    assert told == (["a"] if stage == "reveal" else []), "one share of two gives nothing back"


def test_what_the_server_gets_is_no_upload(three: Cohorts) -> None:
    """Nothing but random words, keys, sealed shares and signatures; the words of a site change with every session."""
    three.total()
    first = three.masked_words()
    three.total(2, 2)
    second = three.masked_words()
    plain = np.rint(three.uploads["a"]["a"].double().numpy() / STEP).astype(np.int64).view(np.uint64)
    assert not np.isin(first["a"], plain).any()
    assert not np.array_equal(first["a"], second["a"])
    for _, _, reply in three.said:
        assert "upload" not in reply
        if "facts" in reply:
            assert set(reply["facts"]) == {"client", "round"}


# --- a server that lies ---------------------------------------------------------------------------------------------


def changed(record: ConfigRecord, **values: Any) -> ConfigRecord:
    return ConfigRecord({**record, **values})


def test_keys_that_are_not_signed_by_the_registered_key_are_refused(three: Cohorts, tmp_path: Path) -> None:
    """A server in the middle: it signs keys of its own with a key that it calls b's."""
    write_site_key(tmp_path / "rogue")
    from fednh.flower import signing
    from fednh.flower.signing import read_site_private
    from fednh.privacy.secure_sum import Secrets, Terms

    secrets = Secrets.draw(np.random.default_rng(0).bytes)
    rogue = secrets.keys("b")
    mine = signing.sign_statement(read_site_private(tmp_path / "rogue/key"), rogue.statement(Terms("fed", 1, 1, 1)))

    def lie(site: str, order: ConfigRecord) -> ConfigRecord:
        sent = CohortSent.read(RecordDict({RECORD: order}))
        put = lambda rows, value: [rows[0], value, rows[2]]  # noqa: E731
        return sent.model_copy(
            update={
                "channels": put(sent.channels, rogue.channel),
                "masks": put(sent.masks, rogue.mask),
                "commitments": put(sent.commitments, rogue.commitment),
                "signatures": put(sent.signatures, mine),
            }
        ).write()

    three.changes["shares"] = lie
    with pytest.raises(GivenUp):
        three.total()
    assert "keys of site b are not signed with its registered key" in three.refused["a"]
    assert "not this site's" in three.refused["b"]


def test_a_site_that_is_not_on_the_list_of_peers_is_refused(three: Cohorts, tmp_path: Path) -> None:
    peers = tmp_path / "sites/a/peers"
    peers.write_text("".join(line for line in peers.read_text().splitlines(True) if not line.startswith("c ")))
    three.total()
    assert "no registered key of site 'c'" in three.refused["a"]


def test_without_a_list_of_peers_nothing_is_shared(three: Cohorts, tmp_path: Path) -> None:
    (tmp_path / "sites/a/peers").unlink()
    three.total()
    assert "no list of its peers' keys" in three.refused["a"]
    assert not any(site == "a" for _, site, _ in three.said)


def test_a_damaged_list_of_peers_is_an_error(three: Cohorts, tmp_path: Path) -> None:
    (tmp_path / "sites/a/peers").write_text("b\n")
    with pytest.raises(UserError, match="not NAME and a public key"):
        three.site("a")


def test_a_low_threshold_is_refused(three: Cohorts) -> None:
    three.changes["shares"] = lambda site, order: changed(order, threshold=1)
    with pytest.raises(GivenUp):
        three.total()
    assert "end with 1 of 3 sites" in three.refused["a"]


def test_the_owner_may_ask_for_more_sites(tmp_path: Path) -> None:
    made = Cohorts(tmp_path, **{"allow.sites": 3})
    with pytest.raises(GivenUp):
        made.total()
    assert "at least 3 (allow.sites)" in made.refused["a"]


def test_a_site_that_is_said_to_be_lost_though_it_answered_notices(three: Cohorts) -> None:
    def lie(site: str, order: ConfigRecord) -> ConfigRecord:
        sent = SurvivorsSent.read(RecordDict({RECORD: order}))
        return SurvivorsSent(session=sent.session, sites=sent.sites[:2], signatures=sent.signatures[:2]).write()

    three.changes["survivors"] = lie
    with pytest.raises(GivenUp):
        three.total()
    assert "this site was lost, though" in three.refused["c"]


def test_different_lists_of_survivors_for_different_sites_reveal_nothing(tmp_path: Path) -> None:
    """Asked for both kinds of shares of site e: from a and b of its own mask, from c and d of its key."""
    made = Cohorts(tmp_path, ["a", "b", "c", "d", "e"])

    def lie(site: str, order: ConfigRecord) -> ConfigRecord:
        sent = SurvivorsSent.read(RecordDict({RECORD: order}))
        upto = 5 if site in "ab" else 4
        return SurvivorsSent(session=sent.session, sites=sent.sites[:upto], signatures=sent.signatures[:upto]).write()

    made.changes["survivors"] = lie
    exchange = made.round()
    orders = exchange.open(range(5))
    replies = made.replies("masked", {made.names[client]: order for client, order in orders.items()})
    with pytest.raises(GivenUp):  # the honest part of the server notices first
        exchange.close({made.names.index(name): _masked(reply) for name, reply in replies.items()}, ALIKE)
    signatures = {
        name: bytes(reply[RECORD]["signature"])  # type: ignore[index,arg-type]
        for stage, name, reply in made.said
        if stage == "survivors"
    }
    asked = ConfirmationsSent(
        session=1, sites=sorted(signatures), signatures=[signatures[k] for k in sorted(signatures)]
    )
    assert made.replies("reveal", dict.fromkeys("abcd", asked.write())) == {}
    assert all("sites have signed this list" in made.refused[name] for name in "abcd")


def _masked(reply: RecordDict) -> tuple[Any, bytes]:
    return read_words(reply), bytes(reply[RECORD]["signature"])  # type: ignore[index,arg-type]


def test_both_kinds_of_shares_of_one_site_are_not_told(three: Cohorts) -> None:
    """Once it has told the shares for one list, a site is asked for the same stage with another."""
    three.total()
    asked = ConfirmationsSent(session=1, sites=["a", "b"], signatures=[b"", b""])
    with pytest.raises(Refused, match="was asked before, and differently"):
        three.ask("a", "reveal", asked.write())
    with pytest.raises(Refused, match="was asked before, and differently"):
        three.ask("a", "survivors", SurvivorsSent(session=1, sites=["a", "b"], signatures=[b"", b""]).write())


def test_sites_that_are_asked_different_things_end_in_no_sum(three: Cohorts) -> None:
    """With a model of the server's choice, or a learning rate of 0, it would know what the others send."""
    three.alike = {"a": b"another model"}
    assert three.total().clients == (1, 2), "an honest server leaves that site out"
    three.lies = True  # this one takes every signature
    with pytest.raises(GivenUp, match="agreed to the list"):
        three.total(2, 2)
    assert all("has not signed that it was asked the same" in three.refused[name] for name in "abc")
    assert not any(stage == "reveal" for stage, _, _ in three.said[-3:])


def test_a_key_that_is_two_sites_or_a_name_with_two_keys_is_an_error(three: Cohorts, tmp_path: Path) -> None:
    peers, own = tmp_path / "sites/a/peers", (tmp_path / "sites/a/key.pub").read_text()
    good = peers.read_text()
    b, c = good.splitlines()
    for lines in ([b, c, b.replace("b ", "d ", 1)], [b, c, c.replace(c.split(None, 1)[1], b.split(None, 1)[1])]):
        peers.write_text("\n".join(lines))
        with pytest.raises(UserError, match="a name or a key twice"):
            three.site("a")
    peers.write_text(f"{good}d {own}")
    with pytest.raises(UserError, match="this site's own key is that of site d"):
        three.site("a")


def test_a_site_that_is_shown_fewer_senders_does_not_end_in_the_sum(three: Cohorts) -> None:
    """Its masks with the others would be missing; they see it in its signature."""
    three.changes["masked"] = lambda site, order: without_sender(order, "c") if site == "a" else order
    total = three.total()
    assert total.clients == (1, 2)
    same(total.upload, three.of("b", "c"), 2)


# --- messages again, out of order, and crashes ----------------------------------------------------------------------


def opened(made: Cohorts, number: int = 1, round_: int = 1) -> dict[str, ConfigRecord]:
    """The orders to train, after the first two stages."""
    orders = made.round(number, round_).open(range(len(made.names)))
    return {made.names[client]: order for client, order in orders.items()}


def test_every_stage_that_is_asked_again_gets_the_same_reply(three: Cohorts) -> None:
    asked: dict[tuple[str, str], ConfigRecord] = {}
    for stage in STAGES:
        three.changes[stage] = lambda site, order, stage=stage: asked.setdefault((stage, site), order)  # type: ignore[misc]
    three.total()
    computed, said = three.computed, {(stage, site): reply for stage, site, reply in three.said}
    for (stage, site), order in asked.items():
        again = three.ask(site, stage, order)
        assert {name: dict(record) for name, record in again.items()} == {
            name: dict(record) for name, record in said[stage, site].items()
        }
    assert three.computed == computed


def test_a_second_upload_under_the_same_masks_is_refused(three: Cohorts) -> None:
    orders = opened(three)
    three.ask("a", "masked", orders["a"])
    with pytest.raises(Refused, match="was asked before, and differently"):
        three.ask("a", "masked", orders["a"], digest="another order")


@pytest.mark.parametrize("stage", STAGES[1:])
def test_stages_out_of_order_are_refused(stage: str, three: Cohorts) -> None:
    empty: dict[str, Any] = {"session": 1}
    kinds = {
        "shares": CohortSent(**empty, threshold=2, sites=[], channels=[], masks=[], commitments=[], signatures=[]),
        "masked": SharesSent(**empty, senders=[], shares=[]),
        "survivors": SurvivorsSent(**empty, sites=[], signatures=[]),
        "reveal": ConfirmationsSent(**empty, sites=[], signatures=[]),
    }
    with pytest.raises(Refused, match="another secure sum"):
        three.ask("a", stage, kinds[stage].write())
    three.ask("a", "keys", Asked(session=1).write())
    if stage == "shares":
        stage, kinds = "masked", {"masked": kinds["masked"]}
    with pytest.raises(Refused, match="does not follow"):
        three.ask("a", stage, kinds[stage].write())


def test_an_older_session_is_refused_and_a_newer_one_ends_the_other(three: Cohorts) -> None:
    orders = opened(three, 5)
    with pytest.raises(Refused, match="older than the last"):
        three.ask("a", "keys", Asked(session=4).write())
    with pytest.raises(Refused, match="older than the last"):
        three.ask("a", "keys", Asked(session=5).write(), round_=2)
    three.ask("a", "keys", Asked(session=6).write())
    with pytest.raises(Refused, match="another secure sum"):
        three.ask("a", "masked", orders["a"])


def test_an_order_that_is_asked_for_again_is_masked_anew_with_the_same_noise(three: Cohorts) -> None:
    """As after a crash of the server: the sum is the same to the bit, and nothing is computed again."""
    three.paid, three.noisy = True, [NoisySum(("a",), 3.0, 1.0)]
    first, words = three.total(1), three.masked_words()
    again, others = three.total(2), three.masked_words()
    assert torch.equal(first.upload["a"], again.upload["a"])
    assert not np.array_equal(words["a"], others["a"])
    assert three.computed == 3
    assert not torch.allclose(first.upload["a"], three.of("a", "b", "c")["a"], atol=1e-3), "there is noise in it"


def test_the_noise_of_an_order_that_is_no_longer_kept_is_not_drawn_again(three: Cohorts, tmp_path: Path) -> None:
    three.paid = True
    three.total(1)
    for file in (tmp_path / "sites/a/state").glob("secure-*/summand.*"):
        file.unlink()
    with pytest.raises(GivenUp):
        three.total(2)
    assert "leaves no more" in three.refused["a"]
    assert "over other sites before" in three.refused["b"]


def test_noise_for_one_threshold_is_in_no_sum_with_another(tmp_path: Path) -> None:
    """A fifth of the noise each in a round that is given up, then three of five sites: 3/5 of the variance."""
    made = Cohorts(tmp_path, list("abcde"), least=5)
    made.paid, made.noisy = True, [NoisySum(("a",), 3.0, 1.0)]
    for name, order in opened(made).items():
        made.ask(name, "masked", order)
    made.least, made.lost = 3, {"d": "masked", "e": "masked"}
    with pytest.raises(GivenUp):
        made.total(2)
    assert all("ends with another number" in made.refused[name] for name in "abc")
    made.least, made.lost = 5, {}
    same({"b": made.total(3).upload["b"]}, {"b": made.of(*"abcde")["b"]}, 5)


@pytest.mark.parametrize("gone", ["secure-*", "secure-*/given.json"])
def test_what_is_lost_beside_the_ledger_brings_no_other_noise_and_no_other_sum(
    gone: str, three: Cohorts, tmp_path: Path
) -> None:
    """A folder from a backup, or a key of the server that is new: the ledger knows with which noise, in which sum."""
    three.paid, three.noisy = True, [NoisySum(("a",), 3.0, 1.0)]
    first = three.total(1)
    for path in (tmp_path / "sites").glob(f"*/state/{gone}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    three.lost = {"c": "masked"}
    with pytest.raises(GivenUp):
        three.total(2)
    why = "left with other noise" if gone == "secure-*" else "summed up over other sites before"
    assert all(why in three.refused[name] for name in "ab")
    three.lost = {}
    if gone != "secure-*":
        assert torch.equal(three.total(3).upload["a"], first.upload["a"])


def test_the_ledger_names_the_noise_before_anything_leaves(three: Cohorts, monkeypatch: pytest.MonkeyPatch) -> None:
    three.paid, three.noisy = True, [NoisySum(("a",), 3.0, 1.0)]
    orders, done = opened(three), ledger.append

    def torn(*args: Any, **more: Any) -> Any:
        raise OSError("the power is gone")

    monkeypatch.setattr(ledger, "append", torn)
    with pytest.raises(OSError, match="power"):
        three.ask("a", "masked", orders["a"])
    monkeypatch.setattr(ledger, "append", done)
    said = three.ask("a", "masked", orders["a"])
    (row,) = chain.read(three.folder / "sites/a/state/ledger.jsonl").lines
    assert (row["event"], row["work"]) == ("summed", "order-1")
    assert said["said"]["ledger"] == f"1:{row['hash']}"  # type: ignore[index]
    three.total(2)
    events = [row["event"] for row in chain.read(three.folder / "sites/a/state/ledger.jsonl").lines]
    assert events == ["summed", "agreed"]


def test_one_order_is_summed_up_over_one_set_of_sites_only(three: Cohorts) -> None:
    """Two sums over different sites could be subtracted, and would leave one site's upload."""
    three.total(1)
    three.lost = {"c": "masked"}
    with pytest.raises(GivenUp, match="agreed"):
        three.total(2)
    assert "summed up over other sites before" in three.refused["a"]
    three.lost = {"c": "keys"}
    with pytest.raises(GivenUp):
        three.total(3)
    assert "has left for a sum over other sites" in three.refused["a"]
    three.lost = {}
    same(three.total(4).upload, three.of("a", "b", "c"), 3)


def test_a_new_order_may_be_summed_up_over_other_sites(three: Cohorts) -> None:
    three.total(1)
    three.lost = {"c": "keys"}
    same(three.total(2, round_=2).upload, three.of("a", "b"), 2)


@pytest.mark.parametrize("call", range(4))
def test_a_crash_before_any_file_is_complete_loses_nothing(
    call: int, three: Cohorts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a masked upload is made four files are written: whichever is lost, the same words come out afterwards."""
    three.paid, three.noisy = True, [NoisySum(("a",), 3.0, 1.0)]
    orders, written, write = opened(three), [0], secure_site.write_bytes

    def torn(*args: Any, **more: Any) -> str:
        written[0] += 1
        if written[0] == call + 1:
            raise OSError("the power is gone")
        return write(*args, **more)

    monkeypatch.setattr(secure_site, "write_bytes", torn)
    with pytest.raises(OSError, match="power"):
        three.ask("a", "masked", orders["a"])
    monkeypatch.setattr(secure_site, "write_bytes", write)
    first = read_words(three.ask("a", "masked", orders["a"]))
    assert np.array_equal(first, read_words(three.ask("a", "masked", orders["a"])))
    assert three.computed == (2 if call == 0 else 1)


MOMENTS = {
    "when the summand is there": (secure_site.SecureSite, "_keep"),
    "when the ledger has its line": (ledger.Ledger, "settle"),
    "when the order is remembered": (secure_site.SecureSite, "_remember"),
    "when the reply is stored": (secure_site.SecureSite, "_done"),
}


@pytest.mark.parametrize("anew", [False, True], ids=["same session", "new session"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_while_an_upload_is_masked_lets_out_one_noise(
    moment: str, anew: bool, three: Cohorts, monkeypatch: pytest.MonkeyPatch
) -> None:
    three.paid, three.noisy = True, [NoisySum(("a",), 3.0, 1.0)]
    orders, (kind, name) = opened(three), MOMENTS[moment]
    work = getattr(kind, name)

    def killed() -> None:
        def done(*args: Any, **more: Any) -> None:
            work(*args, **more)
            os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(kind, name, done)  # in the fork alone
        three.ask("a", "masked", orders["a"])

    child = get_context("fork").Process(target=killed)
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    (file,) = three.folder.glob("sites/a/state/secure-*/summand.*")
    noised = file.read_bytes()
    if anew:
        three.total(2)
    else:
        first = read_words(three.ask("a", "masked", orders["a"]))
        assert np.array_equal(first, read_words(three.ask("a", "masked", orders["a"])))
    assert file.read_bytes() == noised
    events = [row["event"] for row in chain.read(three.folder / "sites/a/state/ledger.jsonl").lines]
    assert events == ["summed", "agreed"][: 1 + anew]
    count("kills survived")


def test_a_training_that_is_not_finite_adds_nothing(three: Cohorts) -> None:
    three.uploads["b"]["a"] = torch.tensor([1.0, float("nan"), 0.0])
    total = three.total()
    assert total.clients == (0, 2)
    assert "not finite" in three.refused["b"]


def test_secrets_are_gone_once_shares_are_told(three: Cohorts, tmp_path: Path) -> None:
    three.total()
    (file,) = (tmp_path / "sites/a/state").glob("secure-*/session.json")
    assert '"secrets":null' in file.read_text()
    assert '"participant":null' in file.read_text()


def test_a_damaged_file_is_an_error_that_says_what_to_do(three: Cohorts, tmp_path: Path) -> None:
    three.total()
    (file,) = (tmp_path / "sites/a/state").glob("secure-*/given.json")
    file.write_text("{")
    orders = opened(three, 2)
    with pytest.raises(UserError, match=r"given\.json is damaged; restore it"):
        three.ask("a", "masked", orders["a"])


def test_false_shares_of_a_site_end_the_round(three: Cohorts, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = secure_site.SecureSite._reveal

    def false(self: Any, session: Any, asked: Any) -> Any:
        session, told = reply(self, session, asked)
        wrong = [bytes(16) for _ in told.shares] if self.site == "b" else told.shares  # type: ignore[attr-defined]
        return session, RevealReply(sites=told.sites, shares=wrong)  # type: ignore[attr-defined]

    monkeypatch.setattr(secure_site.SecureSite, "_reveal", false)
    with pytest.raises(GivenUp, match="one of them is false"):
        three.total()
