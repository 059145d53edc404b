"""Identities at the server: it signs its orders, and knows which public key belongs to which site.

A site's key is `sites/NAME/key.pub` in the federation's folder; if that file does not exist, the first key that the
site uses. A key belongs to one site, and a site has one key, until somebody changes that by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from flwr.app import RecordDict

from fednh.config import Config
from fednh.flower import keys, signing
from fednh.flower.layout import FederationFolder
from fednh.flower.mailbox import Letter
from fednh.storage.files import expanded


@dataclass
class Identity:
    """The server's key, and the sites'."""

    signer: signing.OrderSigner
    federation: str
    run: int
    folder: FederationFolder | None = None  # the federation's folder, with its sites' keys
    keys: dict[str, str] = field(default_factory=dict)  # site -> its public key

    def sign(self, letter: Letter, content: RecordDict) -> tuple[Letter, RecordDict]:
        """A letter with its counter, and its content with a seal."""
        letter = replace(letter, counter=self.signer.next())
        return letter, self.signer.sign(content, self._envelope(letter))

    def opened(self, letter: Letter, content: RecordDict) -> tuple[RecordDict, str, str]:
        """The records of a reply, its site and that site's key; ValueError if the signature does not prove it."""
        site, key = signing.check_reply(content, self._envelope(letter))
        if letter.site and key != self.keys.get(site):
            raise ValueError("it is signed by another key than the site's")
        return signing.unsealed(content), site, key

    def claim(self, site: str, key: str) -> str | None:
        """Assign a key to a site; returns the reason if that is not possible, else None."""
        if (known := self._known(site)) is not None and known != key:
            return f"a node with another key than that of site {site} says that it is site {site}; it is left out"
        if others := sorted(name for name in {*self.keys, *self._filed()} - {site} if self._known(name) == key):
            return f"a node with the key of site {others[0]} says that it is site {site}; it is left out"
        self.keys[site] = key
        return None

    def owner(self, fingerprint: str) -> str | None:
        """The site whose key has this fingerprint; None if no such key is known."""
        filed = {name: self._known(name) or "" for name in self._filed()}
        known = filed | self.keys
        return next((site for site, key in known.items() if keys.fingerprint(key) == fingerprint), None)

    def _known(self, site: str) -> str | None:
        """The site's key in the federation's folder; else the first that it used."""
        filed = None
        if self.folder is not None and signing.is_plain(site):
            filed = signing.known_site_key(self.folder.site(site).public_key)
        return filed or self.keys.get(site)

    def _filed(self) -> list[str]:
        """Sites whose keys are in the federation's folder, whether they have joined yet or not."""
        return [] if self.folder is None else [site.name for site in self.folder.sites_with_keys()]

    def _envelope(self, letter: Letter) -> signing.Envelope:
        where = (letter.kind, str(letter.round), letter.node, letter.site, letter.counter)
        return signing.Envelope(self.federation, self.run, *where)


def of_server(config: Config, run: int) -> Identity:
    """The identity of a deployed server; its keys lie where `fednh federation certs` puts them."""
    given, folder = config.federation.key, config.federation.folder
    assert folder is not None
    key = expanded(given) if given else FederationFolder(Path(folder).parent).orders_key
    signer = signing.OrderSigner(signing.read_orders_private(key))
    return Identity(signer, config.federation.name, run, FederationFolder.of_orders_key(key))
