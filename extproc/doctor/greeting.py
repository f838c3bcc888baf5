"""Looks at what listens on a port, without ZMQ: libzmq does not tell what else answers there."""

import asyncio
import contextlib

from extproc.address import Address
from extproc.doctor.zmtp import MAX_READY_BYTES, NULL, Greeted, mechanism_in, socket_in
from kvstate.wire.zmtp import GREETING, GREETING_BYTES

# Of the time for a look, what may go into waiting for a greeting; a socket that is ZMQ but says no
# more is one all the same.
READY_SECONDS = 1.0


async def greeted(place: Address, seconds: float) -> Greeted:
    """Who answers at a host:port, within some seconds."""
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(place.host, place.port)
    except TimeoutError:
        return Greeted(reason=f"no connection within {seconds:g} s")
    except (OSError, UnicodeError) as error:  # the latter of what can be no host name
        return Greeted(reason=_words(error))
    try:
        writer.write(GREETING)
        return await _answer(reader, seconds)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _answer(reader: asyncio.StreamReader, seconds: float) -> Greeted:
    try:
        async with asyncio.timeout(seconds):
            mechanism = mechanism_in(await reader.readexactly(GREETING_BYTES))
    except (TimeoutError, OSError, asyncio.IncompleteReadError):
        return Greeted()
    if mechanism != NULL:
        return Greeted(mechanism=mechanism)
    try:
        async with asyncio.timeout(min(READY_SECONDS, seconds)):
            return Greeted(mechanism=mechanism, socket=socket_in(await _command(reader)))
    except (TimeoutError, OSError, asyncio.IncompleteReadError):
        return Greeted(mechanism=mechanism)


async def _command(reader: asyncio.StreamReader) -> bytes:
    """The first command: flags, one octet of size, and so many octets."""
    _, size = await reader.readexactly(2)
    return await reader.readexactly(min(size, MAX_READY_BYTES))


def _words(error: OSError | UnicodeError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return getattr(error, "strerror", None) or str(error)
