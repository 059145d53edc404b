"""The layouts of a federation's folder, of a site's folder, and of what a site keeps; and the server's notes.

A federation's folder, as `fednh federation init` writes it:
  pyproject.toml   the app and all settings          sites/NAME/   a folder for every site, to be handed over
  README.md        how to run it on many machines    certs/        made by `fednh federation certs`
  proxy/           nginx before the server           systemd/      the server's unit; a site has its own
  trial/           what `up --local` keeps           run/          the server's run folder (runs/layout.py)
  logs/            of `up --local`                   .flwr/        Flower's own files
A site's folder:
  site.toml   the site's settings and its rules      key, key.pub, ca.crt, orders.pub   its keys, and the server's
  peers       the other sites' public keys
  approved    the apps that may run here             state/        what the site keeps, unless site.toml says where
What a site keeps, HOME being its `state`:
  HOME/audit/SITE.jsonl                                its audit log
  HOME/orders-KEY-SITE.json                            the last order that it took
  HOME/messages-SITE.json                              how many messages of each kind came that asked for nothing new
  HOME/agreed-KEY-SITE.json                            which samples count, and its greeting; delete it to agree anew
  HOME/ledger.jsonl                                    what was released of its data, unless site.toml says where
  HOME/weights.SHA256.safetensors                      weights of a frozen body that the server sent, once
  HOME/secure-KEY-SITE/                                the secure sum that it is in, and the newest summands
  HOME/FEDERATION/SITE/state.round-000007.safetensors  what the client kept after round 7; never leaves this disk
  HOME/FEDERATION/SITE/replaced.round-000007.safetensors  the first of two different ones of round 7
  HOME/FEDERATION/SITE/answer.round-000007.WORK.safetensors  the answer to an order under privacy, to be sent again
  HOME/FEDERATION/SITE/personal.safetensors            its personal model, with its model card
  HOME/FEDERATION/SITE/outcomes.safetensors            what the models make of its held-out samples, one by one
  HOME/FEDERATION/SITE/fingerprint.json                a fingerprint of its data, to notice changes

No other module spells these names.
"""

from __future__ import annotations

import hashlib
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from zlib import crc32

from fednh.federated.results import check_lost
from fednh.runs.layout import FolderLayout, Inside, RunLayout
from fednh.text import one_line

# --- notes: federation.log ------------------------------------------------------------------------------------------


WAITING = "waiting for sites"  # how the note begins that too few sites are there


def add_note(run: Path, text: str) -> None:
    """Add a note about sites to a run folder's log: as JSON, so that no text of a site can forge another line."""
    line = {"time": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}", "text": one_line(text)}
    with RunLayout(run).log_file.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def note_text(line: bytes) -> str:
    """The text of a line of federation.log, safe to print."""
    return one_line(str(json.loads(line)["text"]))


def check_end(run: Path) -> None:
    """Raise if a finished run has rounds that changed nothing: such a run is not a success."""
    check_lost(json.loads(RunLayout(run).summary_file.read_text(encoding="utf-8")))


# --- folders --------------------------------------------------------------------------------------------------------


class FlowerHome(FolderLayout):
    """The folder that FLWR_HOME names: Flower's connections, and files that the programs of one start share."""

    connections_file = Inside("config.toml")
    secret_file = Inside("runtime.secret")
    database_file = Inside("superlink.db")
    lock_file = Inside("up.lock")
    approved_file = Inside("approved")  # in a trial: the app that may run
    proxy = Inside("proxy")


class SiteFolder(FolderLayout):
    """The places in one site's folder, which has the site's name."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.name = path.name
        self.home = FlowerHome(path / ".flwr")

    node_config = Inside("site.toml")
    key = Inside("key")
    public_key = Inside("key.pub")
    ca = Inside("ca.crt")
    orders = Inside("orders.pub")
    peers = Inside("peers")
    approved_file = Inside("approved")
    state = Inside("state")
    unit = Inside("fednh-site.service")


class FederationFolder(FolderLayout):
    """The places in one federation's folder."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.home, self.local_home = FlowerHome(path / ".flwr"), FlowerHome(path / ".flwr/local")

    app_file = Inside("pyproject.toml")
    readme = Inside("README.md")
    ignore_file = Inside(".gitignore")
    unit = Inside("systemd/fednh-server.service")
    database_file = Inside("superlink.db")
    logs = Inside("logs")
    proxy = Inside("proxy")
    run = Inside("run")
    sites = Inside("sites")
    trial = Inside("trial")
    certs = Inside("certs")
    ca = Inside("certs/ca.crt")
    server_certificate = Inside("certs/server.crt")
    server_key = Inside("certs/server.key")
    orders_key = Inside("certs/orders.key")

    @property
    def authority(self) -> Path:
        """The folder of the authority's key, with which one can pose as the server: not where apps run."""
        return self.path.absolute().with_name(f"{self.path.absolute().name}-authority")

    @property
    def ca_key(self) -> Path:
        return self.authority / "ca.key"

    @classmethod
    def of_orders_key(cls, key: Path) -> FederationFolder:
        """The federation's folder that holds this key for orders."""
        return cls(key.parent.parent)

    def site(self, name: str) -> SiteFolder:
        return SiteFolder(self.sites / name)

    def all_sites(self) -> list[SiteFolder]:
        return _sites(self.sites)

    def trial_site(self, name: str) -> SiteFolder:
        """What a trial on this machine keeps of a site."""
        return SiteFolder(self.trial / name)

    def trial_sites(self) -> list[SiteFolder]:
        return _sites(self.trial)

    def sites_with_keys(self) -> list[SiteFolder]:
        """Sites whose public keys are here, whether they have joined yet or not."""
        return [SiteFolder(path.parent) for path in sorted(self.sites.glob(f"*/{SiteFolder.public_key}"))]


class StateFolder(FolderLayout):
    """What a site keeps: the folder that its site.toml calls `state`."""

    def audit_file(self, site: str) -> Path:
        return self.path / "audit" / f"{_safe(site)}.jsonl"

    def audit_files(self) -> list[Path]:
        return sorted(self.path.glob("audit/*.jsonl"))

    def replay_file(self, site: str, key: str) -> Path:
        """The file about the orders that one key signed, named by its fingerprint."""
        return self.path / f"orders-{key}-{_short(site)}.json"

    def tally(self, site: str) -> Path:
        """The file that counts messages, so that the audit log need not have a line for each."""
        return self.path / f"messages-{_short(site)}.json"

    def agreement(self, site: str, key: str) -> Path:
        """The file about what a site has agreed with the federation of this key."""
        return self.path / f"agreed-{key}-{_short(site)}.json"

    def secure(self, site: str, key: str) -> SecureState:
        """What a site keeps of the secure sums of the server with this key."""
        return SecureState(self.path / f"secure-{key}-{_short(site)}")

    ledger_file = Inside("ledger.jsonl")
    weights_lock = Inside(".weights.lock")

    def weights(self, sha256: str) -> Path:
        """The file of the weights with this checksum, received from a server."""
        return self.path / f"weights.{sha256}.safetensors"

    def received_weights(self) -> list[Path]:
        return sorted(self.path.glob("weights.*.safetensors"))

    def torn_weights(self) -> list[Path]:
        """What a process that was killed while it wrote weights left."""
        return list(self.path.glob(".weights.*.tmp"))

    def kept(self, federation: str, site: str) -> KeptState:
        return KeptState(self.path / _safe(federation) / _safe(site))

    def measured(self) -> list[KeptState]:
        """The states that say what became of held-out samples."""
        return [KeptState(path.parent) for path in sorted(self.path.glob(f"*/*/{KeptState.outcomes_file}"))]

    def personal_models(self, federation: str) -> list[Path]:
        return sorted((self.path / _safe(federation)).glob(f"*/{KeptState.personal_model}"))


class KeptState(FolderLayout):
    """What a site keeps of one federation."""

    personal_model = Inside("personal.safetensors")
    outcomes_file = Inside("outcomes.safetensors")
    fingerprint_file = Inside(RunLayout.fingerprint_file.name)

    def state(self, round_: int) -> Path:
        return self.path / f"state.round-{round_:06d}.safetensors"

    def replaced(self, round_: int) -> Path:
        """The first state of a round that was trained again to another one."""
        return self.path / f"replaced.round-{round_:06d}.safetensors"

    def answer(self, round_: int, work: str) -> Path:
        """The stored answer to the order with this digest."""
        return self.path / f"answer.round-{round_:06d}.{work}.safetensors"

    def answers(self) -> list[Path]:
        """The stored answers, those of the earliest rounds first."""
        return sorted(self.path.glob("answer.round-*.safetensors"))

    @staticmethod
    def round_of(path: Path) -> int:
        """The round of a stored answer or state."""
        return int(path.name.split("-")[1].split(".")[0])

    def states(self) -> dict[int, Path]:
        """The states on disk by round, oldest first."""
        paths = sorted(self.path.glob("state.round-*.safetensors"))
        return {self.round_of(path): path for path in paths}


class SecureState(FolderLayout):
    """What a site keeps of secure sums."""

    lock = Inside(".lock")
    session_file = Inside("session.json")
    given_file = Inside("given.json")

    def reply(self, stage: str) -> Path:
        """The reply that was given to a stage of the session."""
        return self.path / f"reply.{stage}"

    def summand(self, order: str, cohort: str) -> Path:
        """What an order's masked upload is made of, in a sum over the cohort with this digest."""
        return self.path / f"summand.{order}.{cohort}"

    def summands(self) -> list[Path]:
        """All of them, the oldest first."""
        return sorted(self.path.glob("summand.*"), key=lambda path: path.stat().st_mtime_ns)


def _sites(folder: Path) -> list[SiteFolder]:
    return [SiteFolder(path.parent) for path in sorted(folder.glob(f"*/{SiteFolder.node_config}"))]


def _short(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def _safe(name: str) -> str:
    """Turn any name into a valid folder name; different names stay different."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip(".")[:100]
    return safe if safe == name else f"{safe or 'x'}-{crc32(name.encode()):08x}"
