"""Secure sums without a network: equal to the plain sum, through every loss; what a lying server is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fednh.errors import Refused
from fednh.privacy import masks, shares
from fednh.privacy.grid import Words
from fednh.privacy.secure_sum import Cohort, Keys, Participant, Secrets, Terms, threshold, unmasked

TERMS = Terms("fed", 1, 1, 7)
ASKED = b"what all are asked"


def sign(site: str, statement: bytes) -> bytes:
    """Stands for a signature that nobody else can make."""
    return b"signed by " + site.encode() + statement


def verify(site: str, statement: bytes, signature: bytes) -> bool:
    return signature == sign(site, statement)


def signed(keys: Keys, terms: Terms = TERMS) -> Keys:
    return replace(keys, signature=sign(keys.site, keys.statement(terms)))


@dataclass
class Sum:
    """Sites in one secure sum, and an honest server; `lost`: site -> the stage in which it is lost."""

    words: Mapping[str, Words]
    lost: Mapping[str, str] = field(default_factory=dict)
    least: int = 2

    def __post_init__(self) -> None:
        self.secrets = {site: Secrets.draw(os.urandom) for site in sorted(self.words)}
        keys = tuple(signed(secrets.keys(site)) for site, secrets in self.secrets.items())
        self.cohort = Cohort(TERMS, keys, threshold(len(keys), self.least))
        self.sites = dict[str, Participant]()

    def here(self, *stages: str) -> list[str]:
        """The sites that are lost in none of these stages."""
        return [site for site in self.secrets if self.lost.get(site) not in stages]

    def share(self) -> dict[str, dict[str, bytes]]:
        sealed = {}
        for site, secrets in self.secrets.items():
            self.cohort.check(site, self.cohort.of(site), 2, verify)
            self.sites[site], sealed[site] = Participant(site, self.cohort, secrets).share()
        return sealed

    def mask(self) -> dict[str, Words]:
        sealed, senders = self.share(), self.here("shares")
        for site in senders:
            self.sites[site] = self.sites[site].receive(
                {each: sealed[each][site] for each in senders if each != site}, ASKED
            )
        return {site: self.sites[site].masked(self.words[site]) for site in self.here("shares", "masked")}

    def confirm(self, survivors: Sequence[str]) -> dict[str, bytes]:
        masked = [sign(site, self.cohort.masked_with(self.sites[site].senders, ASKED)) for site in survivors]
        for site in self.here("shares", "masked", "survivors"):
            self.sites[site] = self.sites[site].confirm(survivors, masked, verify)
        return {site: sign(site, self.cohort.agreed(survivors)) for site in self.here("shares", "masked", "survivors")}

    def total(self) -> Words:
        masked = self.mask()
        confirmed = self.confirm(sorted(masked))
        left = [site for site in confirmed if self.lost.get(site) != "reveal"]
        revealed = {site: self.sites[site].reveal(confirmed, verify) for site in left}
        return unmasked(self.cohort, self.here("shares"), masked, revealed)


def some_words(sites: int, size: int = 5, seed: int = 0) -> dict[str, Words]:
    rng = np.random.default_rng(seed)
    return {f"site-{k:02d}": rng.integers(0, 1 << 64, size, np.uint64) for k in range(sites)}


def three() -> Sum:
    return Sum(some_words(3))


@given(st.integers(2, 6), st.data())
@settings(max_examples=15, deadline=None)
def test_the_sum_is_that_of_the_survivors_whoever_is_lost_when(sites: int, data: st.DataObject) -> None:
    words = some_words(sites, seed=sites)
    may = sites - threshold(sites, 2)
    gone = data.draw(st.lists(st.sampled_from(sorted(words)), max_size=may, unique=True))
    stages = st.sampled_from(["shares", "masked", "survivors", "reveal"])
    lost = {site: data.draw(stages) for site in gone}
    inside = [site for site in words if lost.get(site) not in ("shares", "masked")]
    expected = sum((words[site] for site in inside), np.zeros(5, np.uint64))
    assert np.array_equal(Sum(words, lost).total(), expected)


def test_a_masked_upload_of_zeros_looks_like_noise_and_differs_every_time() -> None:
    """Bytes are uniform and uncorrelated between sites, sessions and neighbours, whatever is masked."""
    size = 20_000
    masked = Sum({f"s{k}": np.zeros(size, np.uint64) for k in range(3)}).mask()
    again = Sum({f"s{k}": np.zeros(size, np.uint64) for k in range(3)}).mask()
    rows = [*masked.values(), *again.values()]
    for row in rows:
        counts = np.bincount(np.frombuffer(row.tobytes(), np.uint8), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-6
    signs = np.array([(row >> np.uint64(63)).astype(float) for row in rows])
    assert np.abs(np.corrcoef(signs) - np.eye(len(rows))).max() < 6 / np.sqrt(size)
    assert abs(np.corrcoef(signs[0][1:], signs[0][:-1])[0, 1]) < 6 / np.sqrt(size)


def test_sums_of_fewer_than_all_survivors_look_like_noise_too() -> None:
    size = 20_000
    masked = Sum({f"s{k}": np.zeros(size, np.uint64) for k in range(4)}).mask()
    for some in (["s0", "s1"], ["s0", "s1", "s2"], ["s0", "s1", "s2", "s3"]):
        total = sum((masked[site] for site in some), np.zeros(size, np.uint64))
        counts = np.bincount(np.frombuffer(total.tobytes(), np.uint8), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-6, "the self masks are still on"


# --- a server that lies ---------------------------------------------------------------------------------------------


def test_keys_that_the_server_made_itself_are_refused() -> None:
    """It would sit between two sites, and read their shares."""
    made = three()
    own = signed(Secrets.draw(os.urandom).keys("site-01"))
    forged = replace(own, signature=sign("site-02", own.statement(TERMS)))
    keys = tuple(forged if each.site == "site-01" else each for each in made.cohort.keys)
    with pytest.raises(Refused, match="keys of site site-01 are not signed"):
        Cohort(TERMS, keys, 2).check("site-00", made.cohort.of("site-00"), 2, verify)


def test_keys_of_another_round_are_refused() -> None:
    made, later = three(), replace(TERMS, number=8)
    with pytest.raises(Refused, match="not signed"):
        Cohort(later, made.cohort.keys, 2).check("site-00", made.cohort.of("site-00"), 2, verify)


@pytest.mark.parametrize(
    ("sites", "needed", "words"),
    [(3, 1, "1 of 3 sites"), (4, 2, "2 of 4 sites"), (3, 4, "4 of 3 sites")],
)
def test_a_threshold_that_does_not_protect_is_refused(sites: int, needed: int, words: str) -> None:
    made = Sum(some_words(sites))
    with pytest.raises(Refused, match=words):
        replace(made.cohort, threshold=needed).check("site-00", made.cohort.of("site-00"), 2, verify)


def test_a_site_asks_for_as_many_sites_as_its_owner_says() -> None:
    made = three()
    made.cohort.check("site-00", made.cohort.of("site-00"), 2, verify)
    with pytest.raises(Refused, match=r"at least 3 \(allow\.sites\)"):
        made.cohort.check("site-00", made.cohort.of("site-00"), 3, verify)


def test_a_site_whose_keys_were_swapped_for_others_notices() -> None:
    made = three()
    other = signed(Secrets.draw(os.urandom).keys("site-00"))
    with pytest.raises(Refused, match="not this site's"):
        made.cohort.check("site-00", other, 2, verify)
    twice = Cohort(TERMS, (*made.cohort.keys[:1], *made.cohort.keys), 3)
    with pytest.raises(Refused, match="one is there twice"):
        twice.check("site-00", made.cohort.of("site-00"), 2, verify)


def test_shares_for_somebody_else_or_changed_ones_cannot_be_opened() -> None:
    made = three()
    sealed, site = made.share(), made.sites["site-00"]
    with pytest.raises(Refused, match="cannot be opened"):
        site.receive({"site-01": sealed["site-01"]["site-02"]}, ASKED)
    content = sealed["site-01"]["site-00"]
    with pytest.raises(Refused, match="cannot be opened"):
        site.receive({"site-01": content[:-1] + bytes([content[-1] ^ 1])}, ASKED)
    with pytest.raises(Refused, match="cannot be opened"):
        site.receive({"site-02": content}, ASKED)


def test_below_the_threshold_nothing_is_masked() -> None:
    made = three()
    made.share()
    with pytest.raises(Refused, match="1 sites are left in the secure sum, and it needs 2"):
        made.sites["site-00"].receive({}, ASKED)


def masked_by(made: Sum, survivors: Sequence[str]) -> list[bytes]:
    return [sign(site, made.cohort.masked_with(made.sites[site].senders, ASKED)) for site in survivors]


def test_a_server_that_says_that_a_site_was_lost_is_refused_by_it() -> None:
    made = three()
    made.mask()
    with pytest.raises(Refused, match="this site was lost, though it has sent"):
        made.sites["site-00"].confirm(["site-01", "site-02"], masked_by(made, ["site-01", "site-02"]), verify)


def test_a_list_of_one_survivor_or_of_strangers_is_refused() -> None:
    made = three()
    made.mask()
    with pytest.raises(Refused, match="it needs 2"):
        made.sites["site-00"].confirm(["site-00"], masked_by(made, ["site-00"]), verify)
    with pytest.raises(Refused, match="did not mask with"):
        made.sites["site-00"].confirm(["site-00", "x"], [b"", b""], verify)


def test_a_second_list_of_survivors_is_refused() -> None:
    """It would ask for both kinds of shares of one site."""
    made, every = three(), ["site-00", "site-01", "site-02"]
    made.mask()
    site = made.sites["site-00"].confirm(every, masked_by(made, every), verify)
    with pytest.raises(Refused, match="another list of survivors"):
        site.confirm(every[:2], masked_by(made, every[:2]), verify)


def test_survivors_that_masked_with_other_sites_are_refused() -> None:
    """A server that shows one site fewer senders would isolate it: its mask with the others would be known."""
    made = Sum(some_words(4))
    sealed = made.share()
    names = sorted(made.secrets)
    everybody = {each: sealed[each]["site-00"] for each in names if each != "site-00"}
    site = made.sites["site-00"].receive(everybody, ASKED)
    made.sites["site-01"] = made.sites["site-01"].receive({each: sealed[each]["site-01"] for each in names[2:]}, ASKED)
    three_left = ["site-00", "site-01", "site-02"]
    made.sites["site-02"] = made.sites["site-02"].receive(
        {each: sealed[each]["site-02"] for each in names if each != "site-02"}, ASKED
    )
    signatures = [
        sign("site-00", made.cohort.masked_with(site.senders, ASKED)),
        sign("site-01", made.cohort.masked_with(made.sites["site-01"].senders, ASKED)),
        sign("site-02", made.cohort.masked_with(made.sites["site-02"].senders, ASKED)),
    ]
    with pytest.raises(Refused, match="site site-01 has not signed"):
        site.confirm(three_left, signatures, verify)


def test_shares_are_told_only_when_enough_sites_signed_the_same_list() -> None:
    made, every = Sum(some_words(5)), [f"site-{k:02d}" for k in range(5)]
    made.mask()
    confirmed = made.confirm(every)
    site = made.sites["site-00"]
    with pytest.raises(Refused, match="2 sites have signed this list of survivors, and 3 must"):
        site.reveal({name: confirmed[name] for name in every[:2]}, verify)
    other = {name: sign(name, made.cohort.agreed(every[:4])) for name in every[1:]}
    with pytest.raises(Refused, match="1 sites have signed"):
        site.reveal({**other, "site-00": confirmed["site-00"]}, verify)
    with pytest.raises(Refused, match="2 sites have signed"):  # who is no survivor does not count
        site.reveal({**{name: confirmed[name] for name in every[:2]}, "x": b"signed by x"}, verify)


def test_of_no_site_both_kinds_of_shares_are_told() -> None:
    made = Sum(some_words(3), {"site-02": "masked"})
    masked = made.mask()
    confirmed = made.confirm(sorted(masked))
    told = made.sites["site-00"].reveal(confirmed, verify)
    received = made.sites["site-00"].received
    for site, share in told.items():
        kind = 1 if site == "site-02" else 0
        assert share == received[site][kind]
        assert share != received[site][1 - kind]


def test_before_a_list_is_signed_no_share_is_told() -> None:
    made = three()
    made.mask()
    with pytest.raises(Refused, match="not agreed"):
        made.sites["site-00"].reveal({}, verify)


def test_false_shares_are_noticed_by_the_server() -> None:
    made = three()
    masked = made.mask()
    confirmed = made.confirm(sorted(masked))
    revealed = {site: made.sites[site].reveal(confirmed, verify) for site in confirmed}
    revealed["site-00"]["site-01"] = bytes(shares.SECRET)
    with pytest.raises(ValueError, match="do not give back its seed"):
        unmasked(made.cohort, sorted(masked), masked, {site: revealed[site] for site in ("site-00", "site-01")})


# --- parts ----------------------------------------------------------------------------------------------------------


@given(st.binary(min_size=16, max_size=16), st.integers(1, 5), st.integers(0, 3), st.data())
@settings(max_examples=20, deadline=None)
def test_any_threshold_of_shares_gives_the_secret_back(
    secret: bytes, needed: int, more: int, data: st.DataObject
) -> None:
    made = shares.split(secret, needed, needed + more)
    chosen = data.draw(st.lists(st.integers(0, needed + more - 1), min_size=needed, unique=True))
    assert shares.join({k: made[k] for k in chosen}, needed) == secret
    with pytest.raises(ValueError, match=f"{needed - 1} shares"):
        shares.join({k: made[k] for k in chosen[: needed - 1]}, needed)


def test_fewer_shares_say_nothing() -> None:
    """Two of three shares fit every secret: the first byte of a forged third decides what comes out."""
    made = shares.split(bytes(16), 3, 3)
    found = {shares.join({0: made[0], 1: made[1], 2: bytes([k]) + made[2][1:]}, 3)[0] for k in range(256)}
    assert len(found) == 256


def test_two_sites_agree_on_a_mask_that_nobody_else_knows() -> None:
    one, other, third = (os.urandom(32) for _ in range(3))
    here = masks.pair_mask(one, masks.public_key(other), b"round", 8)
    assert np.array_equal(here, masks.pair_mask(other, masks.public_key(one), b"round", 8))
    assert not np.array_equal(here, masks.pair_mask(third, masks.public_key(one), b"round", 8))
    assert not np.array_equal(here, masks.pair_mask(one, masks.public_key(other), b"later", 8))


def test_a_public_key_with_which_no_secret_can_be_agreed_is_an_error() -> None:
    with pytest.raises(ValueError, match=r".*"):
        masks.pair_mask(os.urandom(32), bytes(32), b"", 1)
