"""When a certificate ends to be valid: the one thing that `ssl` does not tell of a server's own.

Source: RFC 5280, sections 4.1 and 4.1.2.5 (the fields of a certificate, and its times), X.690,
sections 8.1 and 10.1 (DER).
"""

import base64
import binascii
import re
from datetime import UTC, datetime

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----([A-Za-z0-9+/=\s]+)-----END CERTIFICATE-----")

_SEQUENCE = 0x30
_VERSION = 0xA0
_UTC_TIME = 0x17
_TIME_KINDS = (_UTC_TIME, 0x18)  # and GeneralizedTime

# Before it in the certificate are its number, the algorithm and the issuer.
_VALIDITY_AT = 3
_LONG_FORM = 0x80


def expiry_of(pem: bytes) -> float:
    """The end of the first certificate of a PEM text, in seconds since 1970.

    Raises:
        ValueError: there is none that can be read.
    """
    found = _PEM.search(pem)
    if found is None:
        raise ValueError("no certificate in it")
    try:
        der = base64.b64decode(found[1])
        content = _content(_content(der, _SEQUENCE), _SEQUENCE)
        fields = _elements(content)
        before_validity = _VALIDITY_AT + (fields[0][0] == _VERSION)
        _, (kind, end) = _elements(_of_kind(fields[before_validity], _SEQUENCE))
        return _time(kind, end.decode("ascii"))
    except (binascii.Error, IndexError, ValueError):
        raise ValueError("a certificate in it cannot be read") from None


def _content(der: bytes, kind: int) -> bytes:
    return _of_kind(_elements(der)[0], kind)


def _of_kind(element: tuple[int, bytes], kind: int) -> bytes:
    found, content = element
    if found != kind:
        raise ValueError("not DER of a certificate")
    return content


def _elements(der: bytes) -> list[tuple[int, bytes]]:
    """Kind and content of what follows one after another."""
    found, at = [], 0
    while at < len(der):
        kind, size, at = der[at], der[at + 1], at + 2
        if size & _LONG_FORM:
            digits = size & ~_LONG_FORM
            size, at = int.from_bytes(der[at : at + digits], "big"), at + digits
        if at + size > len(der):
            raise ValueError("cut off")
        found.append((kind, der[at : at + size]))
        at += size
    return found


def _time(kind: int, text: str) -> float:
    if kind not in _TIME_KINDS:
        raise ValueError("not a time")
    if kind == _UTC_TIME:  # years of two digits, 1950 to 2049
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
