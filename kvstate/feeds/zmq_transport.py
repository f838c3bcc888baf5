"""ZMQ feeds: a subscription that mends itself; replays are asked for apart from it.

vLLM and SGLang publish on a PUB socket; messages are parsed by `kvstate.wire.zmq_wire`.
"""

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Callable

from kvstate.errors import WireError
from kvstate.feeds.backoff import Backoff
from kvstate.feeds.feed_sources import ZmqSource
from kvstate.feeds.feed_terms import Recovery
from kvstate.feeds.transport import (
    UNREACHED_SECONDS,
    Batch,
    Connected,
    Disconnected,
    Malformed,
    Signal,
)
from kvstate.feeds.zmq_replay import replay_from
from kvstate.feeds.zmtp_connection import Connection, Place, place_of
from kvstate.wire.zmq_wire import parse_frames

CONNECT_SECONDS = 15.0
RECONNECT_SECONDS = (0.05, 2.0)
BIND_RETRY_SECONDS = (0.5, 10.0)
# On an endpoint that we bind: peers, strangers, and those whose handshake is under way.
MAX_ACCEPTED = 16

# Signals handed on at once.
MAX_SIGNALS = 64

_HANGS_UP = "it ends the connection during the handshake"


class ZmqTransport:
    """A subscription to one rank.

    Messages do not name their sender: where we bind, an endpoint with two publishers is not
    believed, and with the second gone the first counts as a new connection.

    chance: 0 to 1, for the jitter of tries to open it.
    """

    def __init__(self, source: ZmqSource, chance: Callable[[], float] = lambda: 0.5) -> None:
        self._source = source
        self._chance = chance
        self._topic = source.topic.encode()
        self._accepted: set[Connection] = set()
        self._peers: list[Connection] = []
        self._changes: list[Signal] = []
        self._wake = asyncio.Event()
        self._keeper = self._start()

    @property
    def recovery(self) -> Recovery:
        """A replay, if the source names an endpoint for it."""
        return Recovery.NONE if self._source.replay is None else Recovery.REPLAY

    async def receive(self) -> list[Signal]:
        """All signals that wait, at least one, up to `MAX_SIGNALS` of messages.

        Nothing waits after something was taken, or a cancellation would lose signals.
        """
        await asyncio.sleep(0)  # a publisher that always has something does not keep the loop
        while not (signals := self._waiting()):
            self._wake.clear()
            if self._keeper.done():
                keeper, self._keeper = self._keeper, self._start()
                keeper.result()
            await self._wake.wait()
        return signals

    def replay(self, start: int) -> AsyncGenerator[Batch | Malformed]:
        """Asks for the batches from `start` on; each replay has a connection of its own."""
        return replay_from(self._source.replay, start)

    async def close(self) -> None:
        """Closes the subscription."""
        self._keeper.cancel()
        await asyncio.wait([self._keeper])

    def _waiting(self) -> list[Signal]:
        """What happened and was not told yet, in the order in which it happened."""
        signals, self._changes = self._changes, []
        if len(self._peers) == 1:
            messages = self._peers[0].take(MAX_SIGNALS)
            signals += [_signal(each) for each in messages if each[0].startswith(self._topic)]
        return signals

    def _start(self) -> asyncio.Task[None]:
        keeper = asyncio.create_task(self._keep())
        keeper.add_done_callback(lambda _: self._wake.set())
        return keeper

    def _changed(self, connection: Connection) -> None:
        was_peer = connection in self._peers
        if connection.is_lost:
            self._accepted.discard(connection)
        if was_peer and connection.is_lost:
            self._peers.remove(connection)
            self._changes.append(self._told(connection.fault))
        elif not was_peer and connection.is_ready:
            self._peers.append(connection)
            self._changes.append(self._told(""))
        self._wake.set()

    def _told(self, fault: str) -> Signal:
        count = len(self._peers)
        if count == 1:
            return Connected()
        if count == 0:
            return Disconnected(f"connection given up: {fault}") if fault else Disconnected()
        reason = f"{count} publishers connect to this endpoint; each rank needs its own"
        return Disconnected(reason)

    async def _keep(self) -> None:
        """Keeps the subscription open until it is cancelled."""
        place = place_of(self._source.events)
        try:
            if place is None:
                self._tell(f"{self._source.events} is neither tcp://host:port nor ipc://path")
                await asyncio.get_running_loop().create_future()
            elif self._source.binds:
                await self._keep_bound(place)
            else:
                await self._keep_connected(place)
        finally:
            for connection in [*self._accepted]:
                connection.give_up("closed")

    async def _keep_connected(self, place: Place) -> None:
        retries = Backoff(*RECONNECT_SECONDS, self._chance)
        time = asyncio.get_running_loop().time
        began_at, told, was_ready = time(), "", False
        while True:
            connection = self._connection()
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await connection.open(place)
                fault = f"what answers there is no ZMQ publisher: {connection.fault or _HANGS_UP}"
            except OSError as error:  # a time-out is one, too
                fault = f"cannot connect: {_reason(error)}"
                connection.give_up("no connection")
            if connection.is_ready:
                retries.reset()
                await connection.lost.wait()
            was_ready = was_ready or connection.was_ready
            if not was_ready and fault != told and time() - began_at >= UNREACHED_SECONDS:
                told = fault
                self._tell(fault)
            self._accepted.discard(connection)
            await asyncio.sleep(retries.next_seconds())

    async def _keep_bound(self, place: Place) -> None:
        loop = asyncio.get_running_loop()
        retries = Backoff(*BIND_RETRY_SECONDS, self._chance)
        host = None if place.host == "*" else place.host
        while True:
            try:
                if place.path:
                    server = await loop.create_unix_server(
                        self._connection, place.path, start_serving=False
                    )
                else:
                    server = await loop.create_server(
                        self._connection, host, place.port, start_serving=False
                    )
            except OSError as error:
                why = os.strerror(error.errno) if error.errno else str(error)
                self._tell(f"cannot bind {self._source.events}: {why}")
                await asyncio.sleep(retries.next_seconds())
                continue
            try:
                await server.start_serving()
                await loop.create_future()
            finally:
                server.close()

    def _connection(self) -> Connection:
        connection = Connection(b"SUB", self._changed, self._topic)
        if len(self._accepted) >= MAX_ACCEPTED:
            connection.give_up("too many connections")
        self._accepted.add(connection)
        return connection

    def _tell(self, fault: str) -> None:
        self._changes.append(Disconnected(fault))
        self._wake.set()


def _reason(error: OSError) -> str:
    """Why a connection could not be opened, without the address."""
    if isinstance(error, socket.gaierror):
        return error.strerror or "its name is not known"
    if error.errno:
        return os.strerror(error.errno)
    return str(error) or f"no answer in {CONNECT_SECONDS:g} s"


def _signal(message: list[bytes]) -> Signal:
    try:
        frames = parse_frames(message)
    except WireError:
        return Malformed()
    return Batch(frames.sequence, frames.payload)
