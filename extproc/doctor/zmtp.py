"""The first bytes of a ZMQ connection: whether it is ZMQ at all, and which kind of socket.

Source: ZMTP 3.0 (https://rfc.zeromq.org/spec/23). A greeting is 64 octets: signature (0xFF, eight
octets, 0x7F), version, mechanism (20, padded with zeros), as-server, filler. With the mechanism
NULL each peer then sends the command READY, with its Socket-Type among other properties.
"""

from typing import NamedTuple

from kvstate.wire.zmtp import GREETING, GREETING_BYTES

MAX_READY_BYTES = 512
NULL = "NULL"

_READY = b"\x05READY"
_SOCKET_TYPE = b"socket-type"
_LEAST_VERSION = 3


class Greeted(NamedTuple):
    """What answers at a host:port.

    reason: why nobody does, "" if somebody does. mechanism: of its greeting, "" if it is no ZMQ.
    socket: the kind of its socket, "" if it did not tell.
    """

    reason: str = ""
    mechanism: str = ""
    socket: str = ""

    @property
    def is_zmq(self) -> bool:
        """Whether it greets as ZMQ does."""
        return bool(self.mechanism)


def mechanism_in(greeting: bytes) -> str:
    """The security mechanism that a greeting names; "" if this is none of ZMTP 3."""
    if len(greeting) < GREETING_BYTES or greeting[0] != GREETING[0] or not greeting[9] & 1:
        return ""
    if greeting[10] < _LEAST_VERSION:
        return ""
    return greeting[12:32].rstrip(b"\0").decode("ascii", "replace")


def socket_in(frame: bytes) -> str:
    """The Socket-Type of a READY command, with or without its flags and size; "" if it has none."""
    _, found, properties = frame.partition(_READY)
    while found and properties:
        name = properties[1 : 1 + properties[0]]
        size_at = 1 + len(name)
        size = int.from_bytes(properties[size_at : size_at + 4], "big")
        value = properties[size_at + 4 : size_at + 4 + size]
        if name.lower() == _SOCKET_TYPE:
            return value.decode("ascii", "replace")
        properties = properties[size_at + 4 + size :]
    return ""
