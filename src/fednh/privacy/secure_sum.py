"""Secure sums: the server learns the sum of the sites' uploads, and nothing else about any of them.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, in the form that
withstands a server that lies. n sites, of which any t (`threshold`, more than half) must reach the end:

  keys        every site makes keys for this round and signs them with its registered key
  shares      it checks everybody's signatures, and gives each site a share of its two seeds, under seal
  masked      it sends  y_u = x_u + PRG(b_u) + sum_{v > u} PRG(s_uv) - sum_{v < u} PRG(s_uv)  (mod 2^64)
              over the sites v whose shares it has, and signs which these are and what it was asked: a server that
              gives the others a model or settings of which it knows what they send would get one x_u
  survivors   the server says whose y_u it has; a site signs one such list a round, if it has t sites or more, itself
              included, and all of them masked with the same sites and were asked the same
  reveal      with t signatures of the same list, a site gives its share of b_u of every survivor u, and of the mask
              seed of every site that was lost before: of no site both

The server takes the masks off the sum of the survivors' y_u. Because 2 t > n, no two lists can both find t signatures,
and no site's seeds can both be joined. If fewer than t sites are left in a stage, the round is given up, and what the
server has says nothing: every y_u still wears a mask of its own.

Not prevented: a site that sends a false upload or false shares (the round is then given up or its sum is wrong), and
t - 1 other sites that collude with the server once t sites remain (n - 2 with all remaining).

Everything here is pure; flower/secure_site.py sends, stores and signs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fednh.errors import Refused
from fednh.privacy import masks, shares
from fednh.privacy.discrete_gaussian import Bytes
from fednh.privacy.grid import Words

FEWEST = 2  # sites in a sum: the sum of one is its upload
Verify = Callable[[str, bytes, bytes], bool]  # (site, statement, signature): whether the site's registered key made it


def threshold(sites: int, min_clients: int) -> int:
    """How many of `sites` must reach the end of a round."""
    return max(min_clients, sites // 2 + 1)


@dataclass(frozen=True)
class Terms:
    """Which round of which run; `number` grows with every attempt."""

    federation: str
    run: int
    round: int
    number: int

    @property
    def digest(self) -> bytes:
        return _digest(self.federation, self.run, self.round, self.number)


@dataclass(frozen=True)
class Keys:
    """What a site makes public for one round."""

    site: str
    channel: bytes
    mask: bytes
    commitment: bytes  # to its self seed
    signature: bytes = b""

    def statement(self, terms: Terms) -> bytes:
        """What the site signs."""
        parts = (self.site, self.channel.hex(), self.mask.hex(), self.commitment.hex())
        return b"fednh mask keys 1" + _digest(terms.digest.hex(), *parts)


@dataclass(frozen=True)
class Cohort:
    """The sites of a round, by name, with their keys."""

    terms: Terms
    keys: tuple[Keys, ...]
    threshold: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.site for each in self.keys)

    @property
    def context(self) -> bytes:
        """A digest of the round and all its keys."""
        rows = [each.statement(self.terms).hex() for each in self.keys]
        return _digest(self.terms.digest.hex(), self.threshold, *rows)

    def of(self, site: str) -> Keys:
        return self.keys[self.place(site)]

    def place(self, site: str) -> int:
        return self.names.index(site)

    def masked_with(self, senders: Sequence[str], asked: bytes) -> bytes:
        """What a site signs beside its masked upload: with whom it is masked, and what all of them were asked."""
        return b"fednh masked 2" + _digest(self.context.hex(), asked.hex(), *senders)

    def agreed(self, survivors: Sequence[str]) -> bytes:
        """What a site signs before it reveals shares: whose uploads are in the sum."""
        return b"fednh survivors 1" + _digest(self.context.hex(), *survivors)

    def check(self, site: str, own: Keys, fewest: int, verify: Verify) -> None:
        """Refuse sites that a site must not share with, and a threshold that protects it too little."""
        if list(self.names) != sorted(set(self.names)):
            raise Refused("the sites of the secure sum are not in the order of their names, or one is there twice")
        if site not in self.names or self.of(site) != own:
            raise Refused("the keys that the server has given to others as this site's are not this site's")
        if not max(FEWEST, fewest) <= self.threshold <= len(self.keys) or 2 * self.threshold <= len(self.keys):
            raise Refused(
                f"the secure sum would end with {self.threshold} of {len(self.keys)} sites; this site asks for at "
                f"least {max(FEWEST, fewest)} (allow.sites), and more than half"
            )
        for each in self.keys:
            if not verify(each.site, each.statement(self.terms), each.signature):
                raise Refused(
                    f"the keys of site {each.site} are not signed with its registered key: somebody may be between the "
                    f"sites, or this site's list of peers is old"
                )


# --- a site ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Secrets:
    """What a site must not tell of one round."""

    mask_seed: bytes
    self_seed: bytes
    channel: bytes

    @classmethod
    def draw(cls, random: Bytes) -> Secrets:
        return cls(random(shares.SECRET), random(shares.SECRET), random(masks.KEY))

    def keys(self, site: str) -> Keys:
        """The public half, not signed yet."""
        public = masks.public_key(self.channel), masks.public_key(masks.mask_key(self.mask_seed))
        return Keys(site, *public, masks.commitment(self.self_seed))


Pair = tuple[bytes, bytes]  # the shares of one site's self seed and mask seed


@dataclass(frozen=True)
class Participant:
    """One site in one round; every step returns the next state, to be stored before anything is sent."""

    site: str
    cohort: Cohort
    secrets: Secrets
    own: Pair | None = None  # its shares of its own seeds
    received: Mapping[str, Pair] = field(default_factory=dict)  # by sender, itself included
    asked: bytes = b""  # a digest of what all sites are asked alike
    survivors: tuple[str, ...] = ()  # that it has signed

    def share(self) -> tuple[Participant, dict[str, bytes]]:
        """Its seeds in shares, one sealed pair for each other site."""
        cohort, number = self.cohort, len(self.cohort.keys)
        selves = shares.split(self.secrets.self_seed, cohort.threshold, number)
        seeds = shares.split(self.secrets.mask_seed, cohort.threshold, number)
        sealed = {
            each.site: masks.seal(
                self.secrets.channel, each.channel, cohort.context, _way(self.site, each.site), selves[k] + seeds[k]
            )
            for k, each in enumerate(cohort.keys)
            if each.site != self.site
        }
        k = cohort.place(self.site)
        return replace(self, own=(selves[k], seeds[k])), sealed

    def receive(self, sealed: Mapping[str, bytes], asked: bytes) -> Participant:
        """Open the shares of the other sites that sent them; these are the sites that it masks its upload with.

        `asked` is a digest of what the order asks of all of them.
        """
        if self.own is None:
            raise Refused("this site has not shared its seeds in this round yet")
        received = {self.site: self.own}
        for sender, content in sealed.items():
            if sender == self.site or sender not in self.cohort.names:
                raise Refused(f"shares of {sender!r}, which is none of the other sites of this round")
            pair = self._opened(sender, content)
            received[sender] = pair[: shares.SECRET], pair[shares.SECRET :]
        if len(received) < self.cohort.threshold:
            raise Refused(f"{len(received)} sites are left in the secure sum, and it needs {self.cohort.threshold}")
        return replace(self, received=received, asked=asked)

    def _opened(self, sender: str, content: bytes) -> bytes:
        keys, context = self.cohort.of(sender), self.cohort.context
        try:
            pair = masks.unseal(self.secrets.channel, keys.channel, context, _way(sender, self.site), content)
        except ValueError as error:
            raise Refused(f"the share of site {sender}: {error}") from None
        if len(pair) != 2 * shares.SECRET:
            raise Refused(f"the share of site {sender} has {len(pair)} bytes")
        return pair

    @property
    def senders(self) -> tuple[str, ...]:
        """The sites whose shares it has, itself included: those that it masks with."""
        return tuple(sorted(self.received))

    def masked(self, words: Words) -> Words:
        """Its summand under all masks."""
        context, size = self.cohort.context, len(words)
        total = words + masks.self_mask(self.secrets.self_seed, context, size)
        private = masks.mask_key(self.secrets.mask_seed)
        for other in self.senders:
            if other != self.site:
                mask = masks.pair_mask(private, self.cohort.of(other).mask, context, size)
                total = total + mask if self.site < other else total - mask
        return total

    def confirm(self, survivors: Sequence[str], signatures: Sequence[bytes], verify: Verify) -> Participant:
        """Agree that these sites are in the sum: once, and only if all masked with the same sites, asked the same.

        `signatures` are the survivors' own, of with whom they are masked and what they were asked.
        """
        chosen = tuple(survivors)
        if self.survivors not in ((), chosen):
            raise Refused("this site has signed another list of survivors in this round: the server says two things")
        if list(chosen) != sorted(set(chosen)) or not set(chosen) <= set(self.senders):
            raise Refused("the list of survivors has sites that this one did not mask with, or one twice")
        if self.site not in chosen:
            raise Refused("the server says that this site was lost, though it has sent its masked upload")
        if len(chosen) < self.cohort.threshold:
            raise Refused(f"{len(chosen)} sites are left in the secure sum, and it needs {self.cohort.threshold}")
        statement = self.cohort.masked_with(self.senders, self.asked)
        for site, signature in zip(chosen, signatures, strict=True):
            if not verify(site, statement, signature):
                raise Refused(
                    f"site {site} has not signed that it was asked the same as this one, and masked its upload with "
                    f"the same sites"
                )
        return replace(self, survivors=chosen)

    def reveal(self, signatures: Mapping[str, bytes], verify: Verify) -> dict[str, bytes]:
        """A share for every site: of a survivor's self seed, of a lost site's mask seed, never of both."""
        if not self.survivors:
            raise Refused("this site has not agreed to a list of survivors in this round")
        statement = self.cohort.agreed(self.survivors)
        agreed = {site for site, signature in signatures.items() if verify(site, statement, signature)}
        if len(agreed & set(self.survivors)) < self.cohort.threshold:
            raise Refused(
                f"{len(agreed & set(self.survivors))} sites have signed this list of survivors, and "
                f"{self.cohort.threshold} must: the server may have told others another one"
            )
        return {site: pair[0 if site in self.survivors else 1] for site, pair in self.received.items()}


def _way(sender: str, receiver: str) -> str:
    return json.dumps([sender, receiver])


def _digest(*parts: str | int) -> bytes:
    return hashlib.sha256(json.dumps(parts).encode()).digest()


# --- the server -----------------------------------------------------------------------------------------------------


def unmasked(
    cohort: Cohort,
    senders: Sequence[str],
    masked: Mapping[str, Words],
    revealed: Mapping[str, Mapping[str, bytes]],
) -> Words:
    """The sum of the survivors' summands; ValueError if too few shares are there, or they are false.

    `senders` masked with one another, `masked` has the survivors' uploads, `revealed` each site's shares by the site
    that they are about.
    """
    first = next(iter(masked.values()))
    total, context, size = np.zeros_like(first), cohort.context, len(first)
    for words in masked.values():
        total = total + words
    for site in senders:
        rows = {cohort.place(holder): given[site] for holder, given in revealed.items() if site in given}
        seed = shares.join(rows, cohort.threshold)
        if site in masked:
            if masks.commitment(seed) != cohort.of(site).commitment:
                raise ValueError(f"the shares of site {site} do not give back its seed: one of them is false")
            total = total - masks.self_mask(seed, context, size)
            continue
        private = masks.mask_key(seed)
        if masks.public_key(private) != cohort.of(site).mask:
            raise ValueError(f"the shares of site {site} do not give back its key: one of them is false")
        for survivor in masked:
            mask = masks.pair_mask(private, cohort.of(survivor).mask, context, size)
            total = total - mask if survivor < site else total + mask
    return total
