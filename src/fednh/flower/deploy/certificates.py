"""Keys of a federation: a certificate authority of its own, the server's certificate, a key pair for every site.

TLS proves the server's identity to the sites; a site's key proves the site's identity to the server. No existing file
is ever overwritten, except the server's certificate when a renewal is asked for.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fednh.errors import UserError
from fednh.flower.layout import FederationFolder, SiteFolder
from fednh.flower.signing import RESTORE, known_site_key, load_key, public_text, read_orders_private, read_peers
from fednh.io.files import private_folder, write_bytes, write_private

ALWAYS = ("127.0.0.1", "localhost")  # names that every server certificate has
CA_DAYS = 3650
EC = ec.EllipticCurvePrivateKey


def make(folder: Path, sites: Sequence[str], hosts: Sequence[str] = (), days: int = 365) -> list[Path]:
    """Make what is missing, and return what was made."""
    fed, made = FederationFolder(folder), list[Path]()
    if not fed.ca.exists():
        made += _make_ca(fed)
    if not fed.server_certificate.exists():
        made += _issue(fed, hosts, days)
    elif set(hosts) - set(names := _names(_read(fed.server_certificate))):  # a trial's is for this machine only
        made += _issue(fed, [*names, *hosts], days)
    for site in sites:
        made += _make_site(fed, fed.site(site))
    return [*made, *make_orders(folder, sites), *make_peers(folder, sites)]


def make_orders(folder: Path, sites: Sequence[str]) -> list[Path]:
    """Make what is missing of the key with which the server signs orders and its public half for every site."""
    fed, made = FederationFolder(folder), list[Path]()
    if not fed.orders_key.exists():
        write_private(fed.orders_key, _pem(Ed25519PrivateKey.generate()))
        made.append(fed.orders_key)
    public = public_text(read_orders_private(fed.orders_key).public_key()).encode() + b" orders\n"
    for path in (fed.site(site).orders for site in sites):
        if not path.exists():
            write_bytes(path, public)
            made.append(path)
        elif path.read_bytes() != public:
            raise UserError(f"{path} does not belong to {fed.orders_key}; delete it to have it made again")
    return made


def make_peers(folder: Path, sites: Sequence[str]) -> list[Path]:
    """Add to each site's list of peers the other sites whose public keys are here; secure sums need it."""
    fed, made = FederationFolder(folder), list[Path]()
    keys = {site.name: known_site_key(site.public_key) for site in fed.sites_with_keys()}
    for name in sites:
        path = fed.site(name).peers
        before = read_peers(path) if path.exists() else {}
        others = {site: key for site, key in keys.items() if key is not None and site != name}
        if wrong := sorted(site for site, key in before.items() if others.get(site, key) != key):
            raise UserError(
                f"{path} has another key of site {wrong[0]} than {fed.site(wrong[0]).public_key}; find out which is "
                f"right, and delete the line of the wrong one"
            )
        if missing := sorted(others.keys() - before.keys()):
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            write_bytes(path, (text + "".join(f"{site} {others[site]}\n" for site in missing)).encode())
            made.append(path)
    return made


def renew(folder: Path, hosts: Sequence[str] = (), days: int = 365) -> list[Path]:
    """Issue the server's certificate again from the same authority, for the same names and the given ones."""
    fed = FederationFolder(folder)
    if not fed.server_certificate.exists():
        raise UserError(
            f"{fed.server_certificate} does not exist, so it cannot be renewed; leave out --renew to make it"
        )
    return _issue(fed, [*_names(_read(fed.server_certificate)), *hosts], days)


def expires(folder: Path) -> datetime.datetime:
    """When the server's certificate ends."""
    return _read(FederationFolder(folder).server_certificate).not_valid_after_utc


def _make_ca(fed: FederationFolder) -> list[Path]:
    if fed.ca_key.exists() or fed.server_certificate.exists():
        other = fed.ca_key if fed.ca_key.exists() else fed.server_certificate
        raise UserError(f"{fed.ca} is missing but {other} exists; restore it, or move that away")
    private_folder(fed.certs)
    private_folder(fed.authority)
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fednh federation CA")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)  # signs certificates, lists
    builder = (
        _certificate(name, name, key.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    write_private(fed.ca_key, _pem(key))
    write_bytes(fed.ca, builder.sign(key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM))
    return [fed.ca, fed.ca_key]


def _issue(fed: FederationFolder, hosts: Iterable[str], days: int) -> list[Path]:
    """The server's certificate; its key is made if there is none, else kept."""
    names = list(dict.fromkeys([*ALWAYS, *hosts]))
    authority, made = _read(fed.ca), list[Path]()
    ca_key = load_key(fed.ca_key, EC, "PEM", "bring it back to issue certificates", RESTORE)
    if ca_key.public_key() != authority.public_key():
        raise UserError(f"{fed.ca_key} is not the key of {fed.ca}; restore the pair from a copy")
    if not fed.server_key.exists():
        write_private(fed.server_key, _pem(ec.generate_private_key(ec.SECP384R1())))
        made.append(fed.server_key)
    public = load_key(fed.server_key, EC, "PEM", RESTORE, RESTORE).public_key()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fednh federation server")])
    builder = (
        _certificate(name, authority.subject, public, days)
        .add_extension(x509.SubjectAlternativeName([_name(host) for host in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    write_bytes(fed.server_certificate, builder.sign(ca_key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM))
    return [fed.server_certificate, *made]


def check_away(folder: Path) -> None:
    """Raise if the user who runs the server, and so every app there, could read the authority's key."""
    fed = FederationFolder(folder)
    if fed.ca_key.exists() and os.access(fed.ca_key, os.R_OK):
        raise UserError(
            f"{fed.ca_key} can be read by the user who runs the server, and so by every app; take {fed.authority} "
            "off this machine (it is needed only to issue certificates), or run the server as another user"
        )


def check_complete(folder: Path, sites: Sequence[str]) -> None:
    """Raise if a trial lacks a site's private key, because the site made it itself."""
    for site in sites:
        if not (here := FederationFolder(folder).site(site)).key.exists():
            raise UserError(
                f"{here.key} is not here (the site has made its key itself, and only {here.public_key.name} was sent), "
                "so this machine cannot speak for it; try a federation of which all keys are here: "
                "fednh federation init TRIAL"
            )


def _make_site(fed: FederationFolder, site: SiteFolder) -> list[Path]:
    """A site's key pair in OpenSSH's format, as Flower reads it, and a copy of the authority's certificate."""
    private, public, ca = site.key, site.public_key, site.ca
    private_folder(private.parent)
    made = []
    if not private.exists() and not public.exists():
        key = ec.generate_private_key(ec.SECP384R1())
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
        write_private(private, key.private_bytes(*form))
        write_bytes(public, f"{public_text(key.public_key())} {site.name}\n".encode())
        made += [private, public]
    elif not public.exists():
        raise UserError(f"{public} is missing beside {private}; restore it: ssh-keygen -y -f {private} > {public}")
    if not ca.exists():
        write_bytes(ca, fed.ca.read_bytes())
        made.append(ca)
    elif ca.read_bytes() != fed.ca.read_bytes():
        raise UserError(f"{ca} is of another authority than {fed.ca}; delete it to have it made again")
    return made


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # sites' clocks may be a little behind
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        if not host or any(c in host for c in " /:@"):
            raise ValueError
        return x509.DNSName(host)
    except ValueError:
        raise UserError(f"--host {host!r} is neither a host name (in ASCII) nor an IP address") from None


def _names(certificate: x509.Certificate) -> list[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def _read(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not a PEM certificate; restore it from a copy") from error


def _pem(key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey) -> bytes:
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return key.private_bytes(*form)
