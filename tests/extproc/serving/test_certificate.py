"""When certificates expire, compared with what a library says."""

import base64
from datetime import UTC, datetime

import pytest
import trustme

from extproc.serving.certificates import expiry_of

AUTHORITY = trustme.CA()


def pem_of(end: datetime) -> bytes:
    return AUTHORITY.issue_cert("router.test", not_after=end).cert_chain_pems[0].bytes()


def der_of(pem: bytes) -> bytes:
    return base64.b64decode(b"".join(pem.strip().splitlines()[1:-1]))


def armoured(der: bytes) -> bytes:
    text = base64.b64encode(der)
    return b"-----BEGIN CERTIFICATE-----\n" + text + b"\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize(
    "end",
    [
        datetime(2031, 2, 3, 4, 5, 6, tzinfo=UTC),
        datetime(2049, 12, 31, 23, 59, 59, tzinfo=UTC),  # the last year with two digits
        datetime(2050, 1, 1, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC),  # RFC 5280: it never expires
    ],
)
def test_the_end_of_the_first_certificate_is_told(end: datetime) -> None:
    other = pem_of(datetime(2030, 1, 1, tzinfo=UTC))
    assert expiry_of(b"a comment\n" + pem_of(end) + other) == end.timestamp()


def test_the_years_of_two_digits_begin_with_1950() -> None:
    der = der_of(pem_of(datetime(2031, 2, 3, 4, 5, 6, tzinfo=UTC)))
    old = der.replace(b"310203040506Z", b"990203040506Z")
    assert expiry_of(armoured(old)) == datetime(1999, 2, 3, 4, 5, 6, tzinfo=UTC).timestamp()


def test_a_certificate_of_version_1_names_no_version() -> None:
    times = b"\x17\x0d200101000000Z\x17\x0d300101000000Z"
    fields = b"\x02\x01\x07" + b"\x30\x00" + b"\x30\x00" + b"\x30" + bytes([len(times)]) + times
    content = b"\x30" + bytes([len(fields)]) + fields
    whole = b"\x30" + bytes([len(content)]) + content
    assert expiry_of(armoured(whole)) == datetime(2030, 1, 1, tzinfo=UTC).timestamp()


def test_every_half_of_a_certificate_is_refused() -> None:
    der = der_of(pem_of(datetime(2031, 1, 1, tzinfo=UTC)))
    for size in range(len(der)):
        with pytest.raises(ValueError, match="cannot be read"):
            expiry_of(armoured(der[:size] or b"\x00"))


@pytest.mark.parametrize(
    ("wrong", "instead"),
    [
        (b"\x17\x0d31", b"\x16\x0d31"),  # another type of string
        (b"310101", b"31\xff\xff01"),
        (b"310101", b"319901"),
    ],
)
def test_a_time_that_is_none_is_refused(wrong: bytes, instead: bytes) -> None:
    der = der_of(pem_of(datetime(2031, 1, 1, tzinfo=UTC)))
    with pytest.raises(ValueError, match="cannot be read"):
        expiry_of(armoured(der.replace(wrong, instead)))


@pytest.mark.parametrize("text", [b"", b"-----BEGIN CERTIFICATE-----", b"\xff"])
def test_what_is_no_certificate_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="no certificate"):
        expiry_of(text)


@pytest.mark.parametrize("content", [b"", b"AAA", b"AAAA", b"MAAA", b"AgEB"])
def test_what_only_looks_like_one_is_refused(content: bytes) -> None:
    text = b"-----BEGIN CERTIFICATE-----\n" + content + b"\n-----END CERTIFICATE-----"
    with pytest.raises(ValueError, match="certificate"):
        expiry_of(text)
