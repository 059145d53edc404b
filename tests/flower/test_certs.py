"""Keys: a chain that verifies, files that only their owner reads, nothing overwritten, a renewal that sites accept."""

from __future__ import annotations

import datetime
import socket
import ssl
import stat
import subprocess
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fednh.errors import UserError
from fednh.flower.deploy import certificates, scaffold
from tests.helpers.process import Process, fednh

SITES = ["site-1", "site-2"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A federation's folder, as far as keys are concerned."""
    for site in SITES:
        (tmp_path / "sites" / site).mkdir(parents=True)
        (tmp_path / "sites" / site / "site.toml").write_text(f'site = "{site}"\n')
    return tmp_path


def authority(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-authority")


def shake_hands(folder: Path, trust: Path, name: str) -> None:
    """A TLS connection over the loopback to a server with this certificate, from somebody who trusts `trust`."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "certs/server.crt", folder / "certs/server.key")
    client = ssl.create_default_context(cafile=str(trust))
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            try:
                server.wrap_socket(connection, server_side=True).close()
            except OSError:
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with socket.create_connection(listening.getsockname(), timeout=10) as raw:
                client.wrap_socket(raw, server_hostname=name).close()
        finally:
            thread.join(10)


def test_the_chain_verifies_for_every_name_and_no_other(folder: Path) -> None:
    certificates.make(folder, SITES, ["fl.example.org", "10.1.2.3", "::1"])
    for name in ("127.0.0.1", "localhost", "fl.example.org", "10.1.2.3", "::1"):
        shake_hands(folder, folder / "sites/site-1/ca.crt", name)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(folder, folder / "sites/site-1/ca.crt", "other.example.org")


def test_another_authority_is_not_trusted(folder: Path, tmp_path: Path) -> None:
    certificates.make(folder, SITES)
    certificates.make(tmp_path / "other", [])
    with pytest.raises(ssl.SSLCertVerificationError, match="certificate verify failed"):
        shake_hands(folder, tmp_path / "other/certs/ca.crt", "localhost")


def test_private_files_are_the_owners_alone_and_pairs_match(folder: Path) -> None:
    certificates.make(folder, SITES)
    private = [
        authority(folder) / "ca.key",
        folder / "certs/server.key",
        *(folder / "sites" / s / "key" for s in SITES),
    ]
    for path in private:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    for path in (folder / "certs", authority(folder), *(folder / "sites" / s for s in SITES)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    assert not (folder / "certs/ca.key").exists(), "apps run here"
    publics = set()
    for site in SITES:
        key = load_ssh_private_key((folder / "sites" / site / "key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        text = (folder / "sites" / site / "key.pub").read_bytes()
        assert load_ssh_public_key(text) == key.public_key()
        publics.add(text)
    assert len(publics) == 2
    assert not list(folder.rglob("*.tmp"))


def test_flower_takes_the_keys(folder: Path) -> None:
    from flwr.cli.supernode.register import try_load_public_key

    certificates.make(folder, SITES)
    assert try_load_public_key(folder / "sites/site-1/key.pub")


def test_a_second_time_makes_only_what_is_missing(folder: Path) -> None:
    made = certificates.make(folder, SITES)
    before = {path: path.read_bytes() for path in made}
    assert certificates.make(folder, SITES) == []
    (folder / "sites/site-3").mkdir()
    new = certificates.make(folder, [*SITES, "site-3"])
    assert {path.parent.name for path in new if path.name != "peers"} == {"site-3"}
    peers = {path for path in new if path.name == "peers"}  # the others learn of the new site, and nothing else
    assert {path.parent.name for path in peers} == {*SITES, "site-3"}
    after = {path: path.read_bytes() for path in made}
    assert {path for path in made if after[path] != before[path]} <= peers
    assert all(after[path].startswith(before[path]) for path in made)


def test_a_site_may_have_brought_its_own_public_key(folder: Path) -> None:
    (folder / "sites/site-1/key.pub").write_text("ecdsa-sha2-nistp384 AAAA hers\n")
    certificates.make(folder, SITES)
    assert (folder / "sites/site-1/key.pub").read_text() == "ecdsa-sha2-nistp384 AAAA hers\n"
    assert not (folder / "sites/site-1/key").exists()
    assert (folder / "sites/site-1/ca.crt").exists()


def test_a_server_whose_user_can_read_the_authoritys_key_does_not_start(folder: Path, tmp_path: Path) -> None:
    scaffold.write(tmp_path / "fed", 1, [], {})
    serve = ["federation", "serve", str(tmp_path / "fed")]
    assert "certs/server.crt does not exist" in fednh(serve, tmp_path / "io").stderr
    certificates.make(tmp_path / "fed", ["site-1"])
    ended = Process(serve, tmp_path / "io").wait(60)
    assert ended.code == 2
    assert f"{tmp_path}/fed-authority/ca.key can be read by the user who runs the server" in ended.stderr


def test_a_key_that_a_site_made_itself_ends_a_trial_in_one_sentence(tmp_path: Path) -> None:
    scaffold.write(tmp_path / "fed", 2, [], {})
    key = tmp_path / "theirs"
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", key], check=True)
    key.with_suffix(".pub").rename(tmp_path / "fed/sites/site-2/key.pub")
    ended = fednh(["federation", "up", str(tmp_path / "fed"), "--local"], tmp_path / "io")
    assert ended.code == 2
    assert "sites/site-2/key is not here (the site has made its key itself" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_renewal_keeps_authority_key_and_names(folder: Path) -> None:
    certificates.make(folder, SITES, ["fl.example.org"], days=2)
    old = x509.load_pem_x509_certificate((folder / "certs/server.crt").read_bytes())
    authority = (folder / "certs/ca.crt").read_bytes()
    assert certificates.renew(folder, ["10.0.0.7"], days=30) == [folder / "certs/server.crt"]
    new = x509.load_pem_x509_certificate((folder / "certs/server.crt").read_bytes())
    assert (folder / "certs/ca.crt").read_bytes() == authority
    assert new.serial_number != old.serial_number
    assert new.public_key() == old.public_key()
    left = certificates.expires(folder) - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=29) < left <= datetime.timedelta(days=30)
    for name in ("localhost", "fl.example.org", "10.0.0.7"):
        shake_hands(folder, folder / "sites/site-1/ca.crt", name)


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "key"
    certificates.write_private(path, b"mine")
    with pytest.raises(UserError, match="never overwritten"):
        certificates.write_private(path, b"yours")
    assert path.read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d: (authority(d) / "ca.key").unlink(), "ca.key cannot be read: No such file"),
        (lambda d: (authority(d) / "ca.key").write_text("nonsense"), "ca.key is not an unencrypted PEM private key"),
        (lambda d: (d / "certs/ca.crt").write_text("nonsense"), "ca.crt is not a PEM certificate"),
        (lambda d: (d / "certs/server.crt").unlink(), "so it cannot be renewed"),
        (lambda d: (authority(d) / "ca.key").write_bytes((d / "certs/server.key").read_bytes()), "is not the key of"),
    ],
)
def test_what_is_lost_or_damaged_is_named(spoil: object, words: str, folder: Path, tmp_path: Path) -> None:
    certificates.make(folder, SITES)
    spoil(folder)  # type: ignore[operator]
    ended = fednh(["federation", "certs", str(folder), "--renew"], tmp_path / "io")
    assert ended.code == 2
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_command_says_what_it_made_and_until_when(folder: Path, tmp_path: Path) -> None:
    ended = fednh(["federation", "certs", str(folder), "--host", "fl.example.org", "--days", "10"], tmp_path / "io")
    assert ended.code == 0, ended.stderr
    assert f"made {folder / 'certs/server.crt'}" in ended.stdout
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=10)
    assert f"valid until {until:%Y-%m-%d}" in ended.stdout
    ended = fednh(["federation", "certs", str(folder)], tmp_path / "io")
    assert "nothing was made" in ended.stdout
    ended = fednh(["federation", "certs", str(folder), "--host", "new.example.org"], tmp_path / "io")
    assert ended.code == 0, ended.stderr
    for name in ("localhost", "fl.example.org", "new.example.org"):
        shake_hands(folder, folder / "sites/site-1/ca.crt", name)
    for bad in ("a b", "", "https://x", "münchen.de"):
        ended = fednh(["federation", "certs", str(folder), "--renew", "--host", bad], tmp_path / "io")
        assert ended.code == 2, bad
        assert "neither a host name" in ended.stderr
