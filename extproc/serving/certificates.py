"""The TLS files of the gRPC server: loaded together, and reloaded when they change."""

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from extproc.base.errors import StartError
from extproc.base.fault import ROUTER, Fault
from extproc.config.schema import Tls
from kvstate.seldom import is_logged

log = logging.getLogger("kvsteer.extproc")

LOOK_SECONDS = 1.0

# There is a fault if a certificate ends within so many days, as the alert says.
LAST_DAYS = 7

_DAY_SECONDS = 86_400

# Four times the size of all authorities that a system trusts.
MAX_FILE_BYTES = 1024 * 1024

# The ciphers that HTTP/2 allows with TLS 1.2 (RFC 9113, section 9.2.2): ephemeral keys and AEAD.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


@dataclass(frozen=True, slots=True)
class Material:
    """What was made of the TLS files at one time: a matching certificate, key and authorities.

    context: for a server that speaks HTTP/2 over TLS 1.2 or newer. expires_at: seconds since 1970.
    """

    context: ssl.SSLContext
    expires_at: float


class Certificates:
    """The certificates in use, reloaded when the files change.

    current: of the last valid files. fault: what is wrong with the files now, or None.
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

    def faults(self) -> Iterator[Fault]:
        """Yields what is wrong with the files, and a fault once the certificate ends soon."""
        if self.fault is not None:
            yield Fault("tls-files", ROUTER, f"the TLS files cannot be used: {self.fault}")
        days = (self.current.expires_at - time.time()) / _DAY_SECONDS
        if days < LAST_DAYS:
            says = f"ends in {days:.1f} days" if days > 0 else "has ended: nobody can connect"
            yield Fault("tls-ends", ROUTER, f"the TLS certificate {says}")

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
        """Counts a failed handshake; logs it only seldom, since proxies retry."""
        self.failed_handshakes += 1
        if is_logged(self.failed_handshakes):
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
        server_side: bool = False,
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
        found = Path(path).stat()  # of what a link leads to, as Kubernetes mounts secrets
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(options: Tls) -> Material:
    """Returns what is made of the files at one time.

    Raises:
        StartError: a file cannot be read, or the files do not match or change while being read.
    """
    before = _contents(options)
    context, expires_at = _context(options)
    if _contents(options) != before:
        raise StartError("extproc.tls: the files changed while they were read")
    return Material(context, expires_at)


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


def expiry_of(server: ssl.SSLContext) -> float:
    """Returns when the certificate of a server's context expires, in seconds since 1970.

    `ssl` shows no certificate but a peer's, so a client in memory asks for it. The context requires
    no certificate of its clients.

    Raises:
        OSError, ValueError: a handshake with it fails.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE  # it may have expired, or be for another purpose
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (asking, answering, asking, answering, asking):  # TLS 1.2 takes one turn more
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    client.verify_mode = ssl.CERT_REQUIRED  # or the fields would not be shown
    fields = asking.getpeercert()
    return float(ssl.cert_time_to_seconds(str(fields and fields["notAfter"])))


def _context(options: Tls) -> tuple[ssl.SSLContext, float]:
    """Returns the context of a listener, and when its certificate expires, in seconds since 1970.

    Raises:
        StartError: the files cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
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
    try:
        expires_at = expiry_of(context)
    except (OSError, ValueError) as error:
        why = f"{options.certificate}: no client can read it: {error}"
        raise StartError(f"extproc.tls.certificate: {why}") from None
    context.sslobject_class = _Handshaking
    if options.client_ca is not None:
        try:
            context.load_verify_locations(options.client_ca)
        except (OSError, ValueError) as error:
            raise StartError(f"extproc.tls.client_ca: {options.client_ca}: {error}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context, expires_at
