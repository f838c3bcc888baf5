"""The protocol of one ZMTP 3 connection, as SUB or DEALER, without I/O.

Source: ZMTP 3.1 (https://rfc.zeromq.org/spec/37) with the mechanism NULL. Both sides send a
greeting of 64 octets, then the command READY with their Socket-Type. A frame is flags, size (one
octet, or eight if it is long) and body; a message is its frames up to one without MORE. A peer of
ZMTP 3.0 (spec/23) has no heartbeats, and expects a subscription as the message [1, topic].
"""

import struct
from collections.abc import Sequence

from kvstate.errors import WireError

GREETING_BYTES = 64
# The frames of a message: an empty one, topic, number and payload.
MAX_FRAMES = 8
MAX_COMMAND_BYTES = 4096
# The most commands read at once; peers need none but a heartbeat now and then.
MAX_COMMANDS = 64

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_MECHANISM = b"NULL".ljust(20, b"\0")
_LEAST_VERSION = 3
GREETING = (_SIGNATURE + b"\x03\x01" + _MECHANISM).ljust(GREETING_BYTES, b"\0")

_MORE, _LONG, _COMMAND = 1, 2, 4
_SHORT_HEAD, _LONG_HEAD, _MAX_SHORT = 2, 9, 255
_long_size = struct.Struct(">Q")
_TTL_BYTES, _MAX_CONTEXT_BYTES = 2, 16
_MAX_WORDS = 100

# Which kinds of socket may talk to which.
_PEERS = {b"SUB": (b"PUB", b"XPUB"), b"DEALER": (b"ROUTER", b"DEALER", b"REP")}


def message(frames: Sequence[bytes]) -> bytes:
    """Encodes a message for the wire."""
    last = len(frames) - 1
    return b"".join(_frame(_MORE * (at < last), body) for at, body in enumerate(frames))


class ZmtpSession:
    """The state of a connection: received bytes not taken yet, and answers to send.

    kind: SUB or DEALER. topic: what a SUB subscribes to. max_message_bytes: of all its frames.
    All reading methods raise WireError if the peer breaks the protocol; nothing more can be read
    then.
    """

    def __init__(
        self,
        kind: bytes,
        max_message_bytes: int,
        topic: bytes = b"",
        *,
        max_commands: int = MAX_COMMANDS,
    ) -> None:
        self.is_ready = False
        self.has_heartbeats = False  # whether the peer answers heartbeats
        # what the peer has sent about itself so far; kept if the handshake then fails
        self.peer_mechanism = ""
        self.peer_kind = ""
        self.commands = 0  # taken since the handshake
        self._kind = kind
        self._topic = topic
        self._max_message_bytes = max_message_bytes
        self._max_commands = max_commands
        self._answers = bytearray(GREETING)
        self._is_greeted = False
        self._buffer = b""  # frames are slices of it, copied once
        self._position = 0
        self._pending = bytearray()
        self._frames: list[bytes] = []
        self._message_bytes = 0

    @property
    def size_bytes(self) -> int:
        """The bytes received and not taken yet."""
        return len(self._buffer) - self._position + len(self._pending)

    def receive(self, data: bytes) -> None:
        """Adds received bytes."""
        self._pending += data

    def answers(self) -> bytes:
        """Returns the bytes to send now; to be called at the beginning and after each read."""
        answers = bytes(self._answers)
        self._answers.clear()
        return answers

    def ping(self) -> None:
        """Sends a heartbeat, if the peer's version has heartbeats."""
        if self.is_ready and self.has_heartbeats:
            self._answers += _frame(_COMMAND, b"\x04PING" + bytes(_TTL_BYTES))

    def shake(self) -> bool:
        """Continues the handshake; returns whether it is complete."""
        if not self._is_greeted and self._has(GREETING_BYTES):
            self._receive_greeting(self._take(GREETING_BYTES))
        while self._is_greeted and not self.is_ready:
            read = self._read(MAX_COMMAND_BYTES)
            if read is None:
                break
            self._receive_handshake(*read)
        return self.is_ready

    def take(self) -> list[bytes] | None:
        """Returns the next message; None if it is incomplete, or follows too many commands."""
        until = self.commands + self._max_commands
        while self.commands < until:
            read = self._read(self._max_message_bytes - self._message_bytes)
            if read is None:
                return None
            flags, body = read
            if flags & _COMMAND:
                self.commands += 1
                self._command(body)
                continue
            self._frames.append(body)
            self._message_bytes += len(body)
            if not flags & _MORE:
                frames, self._frames, self._message_bytes = self._frames, [], 0
                return frames
            if len(self._frames) >= MAX_FRAMES:
                raise WireError(f"message of more than {MAX_FRAMES} frames")
        return None

    def _receive_greeting(self, greeting: bytes) -> None:
        if greeting[0] != _SIGNATURE[0] or not greeting[9] & 1:
            raise WireError("it does not speak ZMTP")
        if greeting[10] < _LEAST_VERSION:
            raise WireError(f"ZMTP {greeting[10]}, which is too old")
        self.peer_mechanism = _printable(greeting[12:32].rstrip(b"\0"))
        if greeting[12:32] != _MECHANISM:
            raise WireError("it requires a security mechanism")
        self._is_greeted = True
        self.has_heartbeats = greeting[10:12] >= b"\x03\x01"
        socket_type = b"\x0bSocket-Type" + struct.pack(">I", len(self._kind)) + self._kind
        identity = b"\x08Identity" + bytes(4)
        self._answers += _frame(_COMMAND, b"\x05READY" + socket_type + identity)

    def _receive_handshake(self, flags: int, body: bytes) -> None:
        if not flags & _COMMAND:
            raise WireError("message before the handshake")
        name, data = _named(body)
        if name == b"ERROR":
            raise WireError(_refusal(data))
        if name != b"READY":
            raise WireError("another command than READY in the handshake")
        kind = _properties(data).get(b"socket-type", b"")
        self.peer_kind = _printable(kind)
        if kind not in _PEERS[self._kind]:
            wanted = _PEERS[self._kind][0].decode()
            raise WireError(f"its socket is {self.peer_kind or 'none'}, not {wanted}")
        self.is_ready = True
        if self._kind == b"SUB" and self.has_heartbeats:
            self._answers += _frame(_COMMAND, b"\x09SUBSCRIBE" + self._topic)
        elif self._kind == b"SUB":
            self._answers += message([b"\x01" + self._topic])

    def _command(self, body: bytes) -> None:
        if len(body) > MAX_COMMAND_BYTES:
            raise WireError("command of too many bytes")
        name, data = _named(body)
        if name == b"PING":
            context = data[_TTL_BYTES : _TTL_BYTES + _MAX_CONTEXT_BYTES]
            self._answers += _frame(_COMMAND, b"\x04PONG" + context)
        elif name == b"ERROR":
            raise WireError(_refusal(data))

    def _read(self, max_bytes: int) -> tuple[int, bytes] | None:
        """Returns flags and body of the next frame; None if it is incomplete."""
        if not self._has(_SHORT_HEAD):
            return None
        flags, head_bytes, size = (
            self._buffer[self._position],
            _SHORT_HEAD,
            self._buffer[self._position + 1],
        )
        if flags > (_COMMAND | _LONG | _MORE) or (flags & _COMMAND and flags & _MORE):
            raise WireError("frame with unknown flags")
        if flags & _LONG:
            head_bytes = _LONG_HEAD
            if not self._has(head_bytes):
                return None
            (size,) = _long_size.unpack_from(self._buffer, self._position + 1)
        if size > max_bytes:
            raise WireError("frame of too many bytes")
        if not self._has(head_bytes + size):
            return None
        self._position += head_bytes
        return flags, self._take(size)

    def _has(self, size: int) -> bool:
        """Whether this many octets wait; if so, joins them in one piece."""
        if len(self._buffer) - self._position >= size:
            return True
        if self.size_bytes < size:
            return False
        self._buffer = self._buffer[self._position :] + bytes(self._pending)
        self._position = 0
        self._pending.clear()
        return True

    def _take(self, size: int) -> bytes:
        start, self._position = self._position, self._position + size
        return self._buffer[start : self._position]


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) <= _MAX_SHORT:
        return bytes((flags, len(body))) + body
    return bytes((flags | _LONG,)) + _long_size.pack(len(body)) + body


def _named(command: bytes) -> tuple[bytes, bytes]:
    """Returns name and data of a command."""
    if not command or len(command) <= command[0]:
        raise WireError("command without a name")
    return command[1 : 1 + command[0]], command[1 + command[0] :]


def _properties(data: bytes) -> dict[bytes, bytes]:
    """Parses the metadata of a READY; names are case-insensitive."""
    found: dict[bytes, bytes] = {}
    while data:
        value_at = 1 + data[0] + 4
        size = int.from_bytes(data[1 + data[0] : value_at], "big")
        if len(data) < value_at + size:
            raise WireError("metadata that is cut off")
        found[data[1 : 1 + data[0]].lower()] = data[value_at : value_at + size]
        data = data[value_at + size :]
    return found


def _refusal(data: bytes) -> str:
    return f"it refuses: {_printable(data[1:])}"


def _printable(words: bytes) -> str:
    """Returns the beginning of the peer's data, as text."""
    return words[:_MAX_WORDS].decode("ascii", "replace")
