"""The TLS files of the gRPC server: loaded together, and reloaded when they change.

It also finds when a certificate expires, which `ssl` does not report for a server's own.

Source: RFC 5280, sections 4.1 and 4.1.2.5 (the fields of a certificate, and its times), X.690,
sections 8.1 and 10.1 (DER).
"""

import asyncio
import base64
import binascii
import logging
import os
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from extproc.config.schema import Tls
from extproc.errors import StartError

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----([A-Za-z0-9+/=\s]+)-----END CERTIFICATE-----")

_SEQUENCE = 0x30
_VERSION = 0xA0
_UTC_TIME = 0x17
_TIME_KINDS = (_UTC_TIME, 0x18)  # and GeneralizedTime

# The index of the validity: the serial number, the algorithm and the issuer come before it.
_VALIDITY_AT = 3
_LONG_FORM = 0x80


def expiry_of(pem: bytes) -> float:
    """Returns when the first certificate of a PEM text expires, in seconds since 1970.

    Raises:
        ValueError: no certificate in it can be read.
    """
    found = _PEM.search(pem)
    if found is None:
        raise ValueError("no certificate in it")
    try:
        der = base64.b64decode(found[1])
        content = _der_content(_der_content(der, _SEQUENCE), _SEQUENCE)
        fields = _elements(content)
        before_validity = _VALIDITY_AT + (fields[0][0] == _VERSION)
        _, (kind, end) = _elements(_of_kind(fields[before_validity], _SEQUENCE))
        return _time(kind, end.decode("ascii"))
    except (binascii.Error, IndexError, ValueError):
        raise ValueError("a certificate in it cannot be read") from None


def _der_content(der: bytes, kind: int) -> bytes:
    return _of_kind(_elements(der)[0], kind)


def _of_kind(element: tuple[int, bytes], kind: int) -> bytes:
    found, content = element
    if found != kind:
        raise ValueError("not DER of a certificate")
    return content


def _elements(der: bytes) -> list[tuple[int, bytes]]:
    """Returns the kind and content of consecutive elements."""
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
    if kind == _UTC_TIME:  # two-digit years, 1950 to 2049
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


log = logging.getLogger("kvsteer.extproc")

LOOK_SECONDS = 1.0

# Four times the size of all authorities that a system trusts.
MAX_FILE_BYTES = 1024 * 1024

# The ciphers that HTTP/2 allows with TLS 1.2 (RFC 9113, section 9.2.2): ephemeral keys and AEAD.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


@dataclass(frozen=True, slots=True)
class Material:
    """The content of the TLS files at one time: a matching certificate, key and authorities.

    context: for a server that speaks HTTP/2 over TLS 1.2 or newer. expires_at: seconds since 1970.
    """

    certificate: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext
    expires_at: float


class Certificates:
    """The certificates in use, reloaded when the files change.

    current: the last valid content of the files. fault: what is wrong with the files now, or None.
    failed_handshakes: failed handshakes that the server knows of.

    Raises:
        StartError: the files cannot be used.
    """

    def __init__(self, options: Tls) -> None:
        self.fault: str | None = None
        self.failed_handshakes = 0
        self._options = options
        self._looking = asyncio.Lock()
        self._stamps = _stamps(options)
        self.current = _read(options)

    async def follow(self) -> None:
        """Checks the files for changes every second until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    def note_failed(self, error: ssl.SSLError) -> None:
        """Counts a handshake that failed with a TLS error."""
        why = error.reason or type(error).__name__
        if isinstance(error, ssl.SSLCertVerificationError):
            why = f"the client's certificate: {error.verify_message}"
        self.note_unfinished(why)

    def note_unfinished(self, why: str) -> None:
        """Counts a failed handshake; logs only the 1st, 2nd, 4th and so on, since proxies retry."""
        self.failed_handshakes += 1
        if self.failed_handshakes & (self.failed_handshakes - 1) == 0:
            log.warning("TLS handshake failed: %s (%d so far)", why, self.failed_handshakes)

    async def look(self, *, anyway: bool = False) -> None:
        """Loads the files if they changed; keeps the previous content if the new cannot be used.

        anyway: reads the files even if they look unchanged.
        """
        async with self._looking:
            stamps = _stamps(self._options)
            if stamps == self._stamps and not anyway:
                return
            self._stamps = stamps
            try:
                self.current = await asyncio.to_thread(_read, self._options)
            except StartError as error:
                self.fault = str(error)
                log.error("the new TLS files cannot be used, keeping the previous ones: %s", error)
                return
            self.fault = None
            log.info("TLS files reloaded")


class _Handshaking(ssl.SSLObject):
    """One connection; failed is called with the reason if its handshake fails."""

    failed: Callable[[ssl.SSLError], None]

    def do_handshake(self) -> None:
        """Continues the handshake, and reports a failure; called by asyncio."""
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            self.failed(error)
            raise


class ChangingContext(ssl.SSLContext):
    """The context of a listener: each connection gets the current context when it is accepted.

    Each context keeps its own sessions, so that no session outlives the authorities that accepted
    its client.
    """

    # set by __init__, since __new__ is the base class's
    _certificates: Certificates

    def __new__(cls, _: Certificates) -> Self:
        """Creates a context for a server."""
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, certificates: Certificates) -> None:
        self._certificates = certificates

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,  # noqa: FBT001, FBT002 - as the base class has it
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Returns the TLS side of a new connection, with the current context; called by asyncio."""
        context = self._certificates.current.context
        made = context.wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        if isinstance(made, _Handshaking):
            made.failed = self._certificates.note_failed
        return made


def _stamps(options: Tls) -> list[tuple[int, int, int] | None]:
    """Returns values that change with each file; None for a file that does not exist."""
    return [_stamp(path) for path in (options.certificate, options.key, options.client_ca) if path]


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - of what a link leads to, as Kubernetes mounts secrets
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(options: Tls) -> Material:
    """Returns the files' content at one time.

    Raises:
        StartError: a file cannot be read, or the files do not match or change while being read.
    """
    before = _contents(options)
    context = _context(options)
    try:
        expires_at = expiry_of(before[0])
    except ValueError as error:
        raise StartError(f"extproc.tls.certificate: {options.certificate}: {error}") from None
    if _contents(options) != before:
        raise StartError("extproc.tls: the files changed while they were read")
    certificate, key, client_ca = before
    return Material(certificate, key, client_ca, context, expires_at)


def _contents(options: Tls) -> tuple[bytes, bytes, bytes | None]:
    client_ca = None if options.client_ca is None else _content("client_ca", options.client_ca)
    return _content("certificate", options.certificate), _content("key", options.key), client_ca


def _content(key: str, path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise StartError(f"extproc.tls.{key}: {path}: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise StartError(f"extproc.tls.{key}: {path}: larger than {MAX_FILE_BYTES} bytes")
    return content


def _context(options: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sslobject_class = _Handshaking
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(["h2"])
    try:
        # a password is given, or OpenSSL would ask for one at the terminal
        context.load_cert_chain(options.certificate, options.key, password="")
    except (OSError, ValueError) as error:
        both = f"{options.certificate} and {options.key}"
        raise StartError(f"extproc.tls: {both} are no certificate with its key: {error}") from None
    if options.client_ca is not None:
        try:
            context.load_verify_locations(options.client_ca)
        except (OSError, ValueError) as error:
            raise StartError(f"extproc.tls.client_ca: {options.client_ca}: {error}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context
