"""Asks a router whether it is ready, for the probes of containers and Kubernetes.

A probe runs every few seconds, so this speaks just enough HTTP/2 (RFC 9113) and gRPC for one call
of grpc.health.v1.Health/Check, on a blocking socket, and imports next to nothing: a gRPC library
takes several times the CPU time of the rest of the command.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from time import monotonic

from extproc.base.errors import StartError
from extproc.base.fault import NOTE

TIMEOUT_SECONDS = 3.0

_MAX_DETAILS = 300

# Frames: length (3 bytes), type, flags, stream (4 bytes). RFC 9113, section 4.1.
_HEAD_BYTES = 9
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 1, 1, 4, 8
_STREAM = 1

# Longer frames are not allowed unless announced; and no server sends more than this in all.
_MAX_FRAME_BYTES = 16_384
_MAX_FRAMES = 64

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_PATH = b"/grpc.health.v1.Health/Check"

# SETTINGS_HEADER_TABLE_SIZE is 0 (RFC 9113, section 6.5.2): then each block of the answer can be
# decoded by itself.
_NO_TABLE = b"\0\1\0\0\0\0"

# A gRPC message: not compressed, no bytes; HealthCheckRequest of the whole server.
_QUESTION = bytes(5)

# HealthCheckResponse.status, field 1, a varint (grpc/health/v1/health.proto).
_SERVING = b"\x08\x01"
_STATUSES = {b"": "UNKNOWN", b"\x08\x00": "UNKNOWN", b"\x08\x02": "NOT_SERVING"}
_UNKNOWN_SERVICE = "SERVICE_UNKNOWN"

_UNIX = "unix:"


class ClientTls:
    """How to check a router that serves TLS; all but the name are PEM files.

    ca: the authorities that may have issued the router's certificate. name: the name in that
    certificate, if it differs from the host asked. certificate, key: the client's own, if the
    router requires one.
    """

    def __init__(
        self,
        ca: str,
        name: str | None = None,
        certificate: str | None = None,
        key: str | None = None,
    ) -> None:
        self.ca = ca
        self.name = name
        self.certificate = certificate
        self.key = key


class _NoAnswer(Exception):
    """The server did not answer the call; the text says why."""


def fault_of(
    target: str, tls: ClientTls | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> str | None:
    """Returns what is wrong with the gRPC server at a host:port or unix:PATH, None if it serves.

    timeout_seconds: for the whole call.

    Raises:
        StartError: one of the files cannot be read.
    """
    for path in () if tls is None else filter(None, (tls.ca, tls.certificate, tls.key)):
        _check(path)
    try:
        with _connected(target, tls, timeout_seconds) as connection:
            status = _answer(connection, timeout_seconds)
    except TimeoutError:
        return f"{target}: UNAVAILABLE: no answer within {timeout_seconds:g} s"
    except OSError as error:
        # a name that is not found has a number of its own; a TLS error has none
        number = error.errno or 0
        why = os.strerror(number) if number > 0 else error.strerror or str(error)
        if isinstance(error, ConnectionRefusedError):
            why += ": no router listens there"
        return f"{target}: UNAVAILABLE: {' '.join(why.split())[:_MAX_DETAILS]}"
    except _NoAnswer as error:
        return f"{target}: {error}"
    return None if status == _SERVING else f"{target}: {_STATUSES.get(status, _UNKNOWN_SERVICE)}"


# The faults of a router are asked for beside the question that decides, so they must not delay it.
FAULTS_SECONDS = 0.5

_MAX_FAULT_BYTES = 65_536


def faults_at(target: str, timeout_seconds: float = FAULTS_SECONDS) -> list[str]:
    """Returns what a router finds wrong itself, a line each; none if it does not say.

    target: its `metrics.listen`, whose GET /readyz shows the faults behind a first line.
    timeout_seconds: for the whole answer.
    """
    try:
        with _connected(target, None, timeout_seconds) as connection:
            connection.sendall(b"GET /readyz HTTP/1.0\r\nHost: localhost\r\n\r\n")
            answer = _rest(connection, timeout_seconds)
    except (OSError, _NoAnswer):
        return []
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.") or b"text/plain" not in head:
        return []
    lines = body.decode(errors="replace").splitlines()[1:]
    faults = [line for line in lines if not line.startswith(NOTE)]
    return ["".join(filter(str.isprintable, line))[:_MAX_DETAILS] for line in faults]


def _rest(connection: socket.socket, timeout_seconds: float) -> bytes:
    """Returns what comes until the peer closes the connection, or up to a limit."""
    until, read = monotonic() + timeout_seconds, b""
    while len(read) < _MAX_FAULT_BYTES:
        connection.settimeout(max(0.001, until - monotonic()))
        more = connection.recv(_MAX_FAULT_BYTES)
        if not more:
            break
        read += more
    return read


@contextlib.contextmanager
def _connected(
    target: str, tls: ClientTls | None, timeout_seconds: float
) -> Iterator[socket.socket]:
    """Connects to a server, over TLS if that is asked for."""
    host, _, port = target.rpartition(":")
    if target.startswith(_UNIX):
        # gRPC also writes unix:///absolute/path
        family: int = socket.AF_UNIX
        place: object = target.removeprefix(_UNIX).removeprefix("//")
        host = "localhost"
    elif not (host and port.isdecimal()):
        raise _NoAnswer("UNAVAILABLE: it is neither host:port nor unix:PATH")
    else:
        host = host.strip("[]")
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        family, place = found[0][0], found[0][4]
    with socket.socket(family) as plain:
        plain.settimeout(timeout_seconds)
        plain.connect(place)  # type: ignore[arg-type]  # of its family
        if tls is None:
            yield plain
        else:
            with _secured(plain, host, tls) as connection:
                yield connection


def _secured(plain: socket.socket, host: str, tls: ClientTls) -> socket.socket:
    import ssl

    context = ssl.create_default_context(cafile=tls.ca)
    context.set_alpn_protocols(["h2"])
    if tls.certificate is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    return context.wrap_socket(plain, server_hostname=tls.name or host)


def _check(path: str) -> None:
    try:
        with open(path, "rb"):  # noqa: PTH123 - pathlib takes longer to import than this module
            pass
    except OSError as error:
        raise StartError(f"{path}: {error.strerror}") from None


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags))
    return head + stream.to_bytes(4, "big") + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """Encodes a header field that is in no table (RFC 7541, section 6.2.2), without Huffman."""
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def _call() -> bytes:
    """Returns all bytes of the call."""
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": _PATH,
        b":authority": b"localhost",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    block = b"".join(_literal(*field) for field in fields.items())
    return (
        _PREFACE
        + _frame(_SETTINGS, 0, 0, _NO_TABLE)
        + _frame(_HEADERS, _END_HEADERS, _STREAM, block)
        + _frame(_DATA, _END_STREAM, _STREAM, _QUESTION)
    )


def _answer(connection: socket.socket, timeout_seconds: float) -> bytes:
    """Returns the encoded answer to the call."""
    connection.sendall(_call())
    until = monotonic() + timeout_seconds
    data = last_block = b""
    for _ in range(_MAX_FRAMES):
        kind, flags, stream, payload = _read_frame(connection, until)
        if kind == _SETTINGS and not flags & _ACK:
            connection.sendall(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            connection.sendall(_frame(_PING, _ACK, 0, payload))
        elif kind == _GOAWAY:
            raise _NoAnswer("UNAVAILABLE: it closes the connection")
        elif stream == _STREAM and kind == _RST_STREAM:
            raise _NoAnswer("UNAVAILABLE: it refuses the call")
        elif stream == _STREAM and kind == _DATA:
            data += payload[1 : len(payload) - payload[0]] if flags & _PADDED else payload
        elif stream == _STREAM and kind == _HEADERS:
            last_block = payload
        if stream == _STREAM and kind in (_DATA, _HEADERS) and flags & _END_STREAM:
            return _message(data, last_block)
    raise _NoAnswer("UNAVAILABLE: it does not end its answer")


def _message(data: bytes, trailers: bytes) -> bytes:
    """Returns the message of a complete answer, if there is one."""
    length = int.from_bytes(data[1:5], "big")
    if len(data) < 5 or data[0] or len(data) < 5 + length:
        raise _NoAnswer(_why(trailers))
    return data[5 : 5 + length]


def _why(trailers: bytes) -> str:
    """Returns the status and words of a call that failed; this loads a decoder."""
    from extproc._core import header_fields

    try:
        fields = dict(header_fields(trailers))
    except ValueError:
        fields = {}
    number, words = (
        fields.get(name, b"").decode("latin-1") for name in (b"grpc-status", b"grpc-message")
    )
    name = _NAMES[int(number)] if number.isdecimal() and int(number) < len(_NAMES) else "UNKNOWN"
    return ": ".join(filter(None, (name, " ".join(words.split())[:_MAX_DETAILS])))


# The status codes of gRPC, by number.
_NAMES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)


def _read_frame(connection: socket.socket, until: float) -> tuple[int, int, int, bytes]:
    """Returns type, flags, stream and payload of the next frame."""
    head = _read(connection, _HEAD_BYTES, until)
    length = int.from_bytes(head[:3], "big")
    if length > _MAX_FRAME_BYTES:
        raise _NoAnswer("UNAVAILABLE: it is no HTTP/2 server")
    return head[3], head[4], int.from_bytes(head[5:], "big"), _read(connection, length, until)


def _read(connection: socket.socket, length: int, until: float) -> bytes:
    read = b""
    while len(read) < length:
        connection.settimeout(max(0.001, until - monotonic()))
        more = connection.recv(length - len(read))
        if not more:
            raise _NoAnswer("UNAVAILABLE: it ended the connection")
        read += more
    return read
