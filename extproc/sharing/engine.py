"""Messages through an engine: Valkey or Redis, which carries them on one channel and keeps none.

One connection both publishes and subscribes (RESP3). The engine's reply to each message that is
published says that it is alive, so a stopped engine is noticed at the next tick, not by a timeout
of TCP. Nothing is published while a reply is overdue, so nothing queues up.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from extproc.address import Meeting
from extproc.errors import StartError
from kvstate.feeds.backoff import Backoff

if TYPE_CHECKING:
    from valkey.asyncio.connection import AbstractConnection

# For a connection, with TLS and its greeting.
CONNECT_SECONDS = 1.0

# A reply that is overdue for so long does not come any more: the connection is made anew.
DEAD_SECONDS = 3.0

# Between two attempts: at first, and at most.
FIRST_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 2.0

# Of what an engine says of an error.
MAX_WORDS = 120

CONNECTING = "not connected yet"
MISSING = "sharing needs the package valkey: install it with pip install 'kvsteer[sharing]'"


class Access(NamedTuple):
    """How an engine is reached. ca: a PEM file, "" for the system's authorities."""

    meeting: Meeting
    channel: str
    username: str = ""
    password: str = ""
    ca: str = ""


class Engine:
    """A connection to an engine, made anew whenever it is lost.

    hear: takes each message of the channel, own ones too, and returns for how many seconds no more
    of them are wanted. opened: is called when messages begin to arrive. answer_seconds: after so
    long without a reply the engine counts as away. fault: why nothing can be told now, "" if it
    can.

    Raises:
        StartError: the client library is not installed.
    """

    def __init__(
        self,
        access: Access,
        hear: Callable[[bytes], float],
        opened: Callable[[], None],
        answer_seconds: float,
    ) -> None:
        try:
            import valkey.asyncio  # noqa: PLC0415 - an extra
        except ImportError:
            raise StartError(MISSING) from None
        self._timeouts = (TimeoutError, valkey.TimeoutError)
        self._access = access
        self._hear = hear
        self._opened = opened
        self._answer_seconds = answer_seconds
        self._connection: AbstractConnection | None = None
        self._unanswered: deque[float] = deque()
        self._told_at = 0.0
        self.fault = CONNECTING

    async def run(self) -> None:
        """Keeps the connection until it is cancelled."""
        retries = Backoff(FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS, random.random)
        while True:
            try:
                await self._listen(retries)
            except Exception as error:  # noqa: BLE001 - whatever it is, the router goes on alone
                self.fault = self._words(error)
            finally:
                await self._close()
            await asyncio.sleep(retries.next_seconds())

    async def tell(self, messages: Sequence[bytes]) -> bool:
        """Publishes messages, if the engine takes any now."""
        connection = self._connection
        if connection is None:
            return False
        now = time.monotonic()
        was_here, self._told_at = now - self._told_at < self._answer_seconds / 2, now
        # after a pause of our own, its reply may have come and is still to be read
        if was_here and self._unanswered and now - self._unanswered[0] > self._answer_seconds:
            self.fault = "the engine does not answer"
            if now - self._unanswered[0] > DEAD_SECONDS:
                await self._close()
            return False
        try:
            async with asyncio.timeout(self._answer_seconds):
                for message in messages:
                    self._unanswered.append(now)
                    packed = connection.pack_command("PUBLISH", self._access.channel, message)
                    await connection.send_packed_command(packed, check_health=False)
        except Exception as error:  # noqa: BLE001 - as above
            self.fault = self._words(error)
            await self._close()
            return False
        return True

    async def _listen(self, retries: Backoff) -> None:
        connection = _connection(self._access)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await connection.connect()  # type: ignore[no-untyped-call]
                await connection.send_command("SUBSCRIBE", self._access.channel)
                await connection.read_response(push_request=True, disable_decoding=True)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        self._connection = connection
        self._opened()
        while True:
            said = await connection.read_response(push_request=True, disable_decoding=True)
            if isinstance(said, list):
                if len(said) == 3 and said[0] == b"message":  # noqa: PLR2004 - kind, channel, text
                    seconds = self._hear(said[2])
                    if seconds:
                        await asyncio.sleep(seconds)
            elif self._unanswered:
                self._unanswered.popleft()
                if self.fault:
                    self.fault = ""
                    retries.reset()
                    self._opened()

    async def _close(self) -> None:
        connection, self._connection = self._connection, None
        self._unanswered.clear()
        if connection is not None:
            await connection.disconnect(nowait=True)

    def _words(self, error: BaseException) -> str:
        """What went wrong, without what could hold a password."""
        said = " ".join(str(error).split())
        if isinstance(error, self._timeouts):
            said = "it does not answer in time"
        password = self._access.password
        return (said.replace(password, "***") if password else said)[:MAX_WORDS]


def _connection(access: Access) -> "AbstractConnection":
    """A connection of the client library that is not opened yet."""
    from valkey.asyncio import connection  # noqa: PLC0415 - an extra

    meeting = access.meeting
    options: dict[str, Any] = {
        "username": access.username or None,
        "password": access.password or None,
        "protocol": 3,
        "socket_timeout": None,
        "socket_connect_timeout": CONNECT_SECONDS,
        "lib_name": None,
        "lib_version": None,
    }
    if meeting.engine is None:
        return connection.UnixDomainSocketConnection(path=meeting.socket, **options)
    host, port = meeting.engine
    if not meeting.is_tls:
        return connection.Connection(host=host, port=port, **options)
    return connection.SSLConnection(
        host=host, port=port, ssl_ca_certs=access.ca or None, ssl_check_hostname=True, **options
    )
