"""When certificates expire, compared with when they were made to."""

import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import StartError
from extproc.config.schema import Tls
from extproc.serving.certificates import Certificates, expiry_of

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey

AUTHORITY = trustme.CA()
ENDS = st.datetimes(datetime(1951, 1, 1), datetime(9999, 12, 31), timezones=st.just(UTC))


def context_of(end: datetime) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    first = datetime(1950, 1, 1, tzinfo=UTC)
    AUTHORITY.issue_cert("router.test", not_before=first, not_after=end).configure_cert(context)
    return context


@given(ENDS.map(lambda end: end.replace(microsecond=0)))
def test_expiry_of_reads_expired_and_valid_certificates(end: datetime) -> None:
    assert expiry_of(context_of(end)) == end.timestamp()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_expiry_of_works_with_every_version_of_tls(version: ssl.TLSVersion) -> None:
    end = datetime(2050, 1, 1, tzinfo=UTC)
    context = context_of(end)
    context.maximum_version = context.minimum_version = version
    assert expiry_of(context) == end.timestamp()


KEYS: dict[str, Callable[[], PrivateKey]] = {
    "rsa": lambda: rsa.generate_private_key(65537, 2048),
    "p256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "p521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "ed25519": ed25519.Ed25519PrivateKey.generate,
}


@pytest.mark.parametrize("kind", KEYS)
def test_expiry_of_works_with_every_key_and_purpose(kind: str, tmp_path: Path) -> None:
    end, key = datetime(2020, 1, 1, tzinfo=UTC), KEYS[kind]()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "router.test")])
    for_clients = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 7, datetime(2019, 1, 1), end)
        .add_extension(for_clients, critical=True)
        .sign(key, None if kind == "ed25519" else hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    bare = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    both = tmp_path / "both.pem"
    both.write_bytes(made.public_bytes(pem) + key.private_bytes(pem, *bare))
    tls = Tls(certificate=str(both), key=str(both))
    assert Certificates(tls).current.expires_at == end.timestamp()


def test_certificates_refuse_files_whose_handshake_fails(tmp_path: Path) -> None:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "router.test")])
    key = ec.generate_private_key(ec.SECP256K1())  # no curve of TLS
    begin, end = datetime(2019, 1, 1), datetime(2031, 1, 1)
    made = x509.CertificateBuilder(name, name, key.public_key(), 7, begin, end)
    pem = serialization.Encoding.PEM
    bare = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    both = tmp_path / "both.pem"
    both.write_bytes(
        made.sign(key, hashes.SHA256()).public_bytes(pem) + key.private_bytes(pem, *bare)
    )
    with pytest.raises(StartError, match=r"no client can read it: .* no shared cipher"):
        Certificates(Tls(certificate=str(both), key=str(both)))


def test_expiry_of_the_files_is_known_when_clients_need_a_certificate(tmp_path: Path) -> None:
    end = datetime(2031, 2, 3, 4, 5, 6, tzinfo=UTC)
    identity = AUTHORITY.issue_cert("router.test", not_after=end)
    certificate, key, ca = (tmp_path / name for name in ("certificate", "key", "ca"))
    certificate.write_bytes(b"".join(pem.bytes() for pem in identity.cert_chain_pems))
    identity.private_key_pem.write_to_path(key)
    AUTHORITY.cert_pem.write_to_path(ca)
    assert x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc == end
    tls = Tls(certificate=str(certificate), key=str(key), client_ca=str(ca))
    assert Certificates(tls).current.expires_at == end.timestamp()
