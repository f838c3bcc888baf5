"""The TLS files: which new ones are adopted, and which are not."""

import asyncio
import shutil
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from extproc.base.errors import StartError
from extproc.config.schema import Tls
from extproc.serving.certificates import MAX_FILE_BYTES, Certificates
from tests.extproc.serving.identities import Identities
from tests.waiting import until


@pytest.fixture
def identities(tmp_path: Path) -> Identities:
    return Identities(tmp_path)


def test_start_error_names_missing_and_mismatched_files(
    identities: Identities, tmp_path: Path
) -> None:
    there = identities.tls()
    with pytest.raises(StartError, match=r"extproc\.tls\.key: .*missing: No such file"):
        Certificates(Tls(certificate=there.certificate, key=str(tmp_path / "missing")))
    with pytest.raises(StartError, match="are no certificate with its key"):
        Certificates(Tls(certificate=there.certificate, key=there.certificate))
    other = tmp_path / "other.key"
    other.write_bytes(identities.issue()[1])
    with pytest.raises(StartError, match="KEY_VALUES_MISMATCH"):
        Certificates(Tls(certificate=there.certificate, key=str(other)))
    (tmp_path / "empty").write_bytes(b"")
    large = tmp_path / "large"
    large.write_bytes(bytes(MAX_FILE_BYTES + 1))
    with pytest.raises(StartError, match=r"extproc\.tls\.key: .*large: larger than"):
        Certificates(Tls(certificate=there.certificate, key=str(large)))
    empty = str(tmp_path / "empty")
    with pytest.raises(StartError, match=r"extproc\.tls\.client_ca"):
        Certificates(Tls(certificate=there.certificate, key=there.key, client_ca=empty))


def test_key_with_a_password_is_refused_without_a_prompt(
    identities: Identities,
) -> None:
    key = load_pem_private_key(identities.key_file.read_bytes(), None)
    identities.key_file.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    )
    with pytest.raises(StartError, match="are no certificate with its key"):
        Certificates(identities.tls())


async def test_look_adopts_a_new_pair(identities: Identities) -> None:
    certificates = Certificates(identities.tls())
    before = certificates.current
    await certificates.look()
    assert certificates.current is before
    identities.renew()
    await certificates.look()
    assert certificates.current is not before


async def test_look_ignores_half_a_pair_and_logs_it_once(
    identities: Identities, caplog: pytest.LogCaptureFixture
) -> None:
    certificates = Certificates(identities.tls())
    before = certificates.current
    certificate, key = identities.issue()
    identities.certificate_file.write_bytes(certificate)
    for _ in range(3):
        await certificates.look()
    assert certificates.current is before
    assert "MISMATCH" in (certificates.fault or "")
    assert caplog.text.count("the new TLS files cannot be used, keeping the previous ones") == 1
    identities.key_file.write_bytes(key)
    await certificates.look()
    assert certificates.current is not before
    assert certificates.fault is None


@pytest.mark.parametrize("text", [b"", b"-----BEGIN CERTIFICATE-----\nMIIB", b"\xff" * 5000])
async def test_look_keeps_the_certificate_when_files_vanish_or_break(
    identities: Identities, text: bytes
) -> None:
    certificates = Certificates(identities.tls(is_mutual=True))
    before = certificates.current
    for file in (identities.certificate_file, identities.key_file, identities.ca_file):
        content = file.read_bytes()
        file.write_bytes(text)
        await certificates.look()
        assert certificates.fault
        file.unlink()
        await certificates.look()
        assert "No such file" in (certificates.fault or "")
        assert certificates.current is before
        file.write_bytes(content)
        await certificates.look()
        before = certificates.current
        assert certificates.fault is None


async def test_look_on_a_signal_reads_unchanged_files(identities: Identities) -> None:
    certificates = Certificates(identities.tls())
    before = certificates.current
    await certificates.look(anyway=True)
    assert certificates.current is not before


async def test_look_follows_a_secret_mounted_as_a_link_to_a_folder(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    for folder in (first, second):
        folder.mkdir()
        Identities(folder)
    link = tmp_path / "data"
    link.symlink_to(first)
    certificates = Certificates(Tls(certificate=str(link / "tls.crt"), key=str(link / "tls.key")))
    before = certificates.current
    following = asyncio.create_task(certificates.follow())
    (tmp_path / "next").symlink_to(second)
    (tmp_path / "next").rename(link)
    await until(lambda: certificates.current is not before, "the new files are used")
    following.cancel()
    shutil.rmtree(first)


async def test_look_adopts_a_certificate_of_another_key_type(identities: Identities) -> None:
    issued = identities.authority.issue_cert("router.test", key_type=trustme.KeyType.RSA)
    identities.certificate_file.write_bytes(issued.cert_chain_pems[0].bytes())
    identities.key_file.write_bytes(issued.private_key_pem.bytes())
    assert Certificates(identities.tls()).current.expires_at > 0


async def test_files_that_cannot_be_used_are_a_fault_until_they_can(
    identities: Identities,
) -> None:
    certificates = Certificates(identities.tls())
    assert list(certificates.faults()) == []
    kept = identities.key_file.read_bytes()
    identities.key_file.write_bytes(b"no key")
    await certificates.look(anyway=True)
    (found,) = certificates.faults()
    assert found.code == "tls-files"
    assert found.says.startswith("the TLS files cannot be used: extproc.tls")
    identities.key_file.write_bytes(kept)
    await certificates.look(anyway=True)
    assert list(certificates.faults()) == []


@pytest.mark.parametrize(
    ("days", "says"),
    [(6, "ends in 6.0 days"), (-1, "has ended: nobody can connect"), (8, "")],
)
def test_certificate_that_ends_soon_is_a_fault(
    identities: Identities, days: int, says: str
) -> None:
    identities.renew(days)
    found = [one.says for one in Certificates(identities.tls()).faults()]
    assert found == ([f"the TLS certificate {says}"] if says else [])
