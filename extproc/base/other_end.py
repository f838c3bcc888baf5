"""Who is at the other end of a connection."""

import asyncio
import socket
import struct

_CREDENTIALS = "3i"  # process, user and group: SO_PEERCRED of unix(7)


def peer_name(transport: asyncio.BaseTransport) -> str:
    """Returns the address at the other end, or the user of its process; "" without a socket."""
    connected = transport.get_extra_info("socket")
    if connected is None:
        return ""
    if connected.family == socket.AF_UNIX:
        return f"user {user_of(connected)}"
    address = transport.get_extra_info("peername")
    return str(address[0]) if address else ""


def user_of(connected: socket.socket) -> int:
    """Returns the user of the process at the other end of a Unix socket (SO_PEERCRED, unix(7))."""
    size = struct.calcsize(_CREDENTIALS)
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    user: int = struct.unpack(_CREDENTIALS, raw)[1]
    return user
