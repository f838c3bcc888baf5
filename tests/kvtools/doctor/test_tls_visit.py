"""The router's TLS files: good ones, and ones with an operator's mistakes."""

import dataclasses
from pathlib import Path

import pytest

from extproc.config.schema import Config, ExtProc, Tls
from kvtools.doctor.doctor import visit_tls
from kvtools.doctor.findings import Finding, Severity
from tests.extproc.serving.identities import Identities


def found_in(tls: Tls | None) -> list[Finding]:
    return visit_tls(Config(extproc=ExtProc(tls=tls)))


def codes_of(tls: Tls) -> list[str]:
    return [one.code for one in found_in(tls)]


def test_visit_tls_is_empty_without_tls() -> None:
    assert found_in(None) == []


def test_visit_tls_accepts_matching_files(tmp_path: Path) -> None:
    found = found_in(Identities(tmp_path).tls(is_mutual=True))
    assert [one.verdict for one in found] == [Severity.RIGHT, Severity.RIGHT]


@pytest.mark.parametrize("file", ["tls.crt", "tls.key"])
def test_visit_tls_finds_a_missing_file(tmp_path: Path, file: str) -> None:
    tls = Identities(tmp_path).tls(is_mutual=True)
    (tmp_path / file).unlink()
    (wrong,) = found_in(tls)
    assert (wrong.code, file in wrong.says) == ("tls-certificate", True)


def test_visit_tls_finds_a_key_of_another_certificate(tmp_path: Path) -> None:
    one = Identities(tmp_path)
    one.key_file.write_bytes(one.issue()[1])
    assert codes_of(one.tls()) == ["tls-certificate"]


@pytest.mark.parametrize(("days", "code"), [(-1, "tls-expired"), (13, ""), (15, "")])
def test_visit_tls_finds_an_expiring_certificate(tmp_path: Path, days: int, code: str) -> None:
    one = Identities(tmp_path)
    one.renew(days)
    (found,) = found_in(one.tls())
    verdicts = {-1: Severity.WRONG, 13: Severity.NOTE, 15: Severity.RIGHT}
    assert (found.code, found.verdict) == (code, verdicts[days])


def test_visit_tls_finds_unreadable_authorities_of_clients(tmp_path: Path) -> None:
    one = Identities(tmp_path)
    tls = one.tls(is_mutual=True)
    one.ca_file.write_text("nothing")
    assert codes_of(tls) == ["", "tls-client-ca"]
    one.ca_file.unlink()
    assert codes_of(tls) == ["", "tls-client-ca"]


def test_visit_tls_finds_both_faults_of_one_router(tmp_path: Path) -> None:
    tls = Identities(tmp_path).tls(is_mutual=True)
    nowhere = dataclasses.replace(tls, certificate="nowhere", client_ca="nowhere too")
    assert codes_of(nowhere) == ["tls-certificate", "tls-client-ca"]
