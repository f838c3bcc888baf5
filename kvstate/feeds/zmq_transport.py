"""ZMQ feeds: a subscription that reconnects by itself, and separate connections for replays.

vLLM and SGLang publish on a PUB socket and answer replays on a ROUTER socket, to which each replay
connects separately, as a DEALER. The request is [empty, first number (8 bytes big-endian)], the
answer is every batch from there on and an end marker; `kvstate.wire.zmq_wire` parses both. There is
no flow control: beyond the 1,000 messages that libzmq queues for a connection, the ROUTER drops
batches and the end marker alike, and a full buffer has 10,000 batches.

So an answer is read as fast as it arrives, independently of the code that applies it, and missing
batches are requested again, each time over a new connection, whose queue is empty. None of an
answer's first messages (`never_dropped`) can have been dropped, so conclusions differ:

    early, a batch does not follow    the missing ones are no longer in the publisher's buffer
    later, a batch does not follow    they may have been dropped: ask again
    an early end marker               the replay is complete
    a late end marker                 batches before it may have been dropped: ask again
    silence after something new       the end marker may have been dropped: ask again
    silence after nothing new         the publisher does not answer

The next request begins with the last batch received, which proves that the publisher is the same.
"""

import asyncio
import os
import socket
from collections import deque
from collections.abc import AsyncGenerator, Callable
from enum import Enum, auto

from kvstate.errors import ReplayError, WireError
from kvstate.events import Batch
from kvstate.feeds.backoff import Backoff
from kvstate.feeds.feed_sources import Recovery, ZmqSource
from kvstate.feeds.transport import (
    Connected,
    Disconnected,
    LoadReport,
    Malformed,
    Signal,
)
from kvstate.feeds.zmq_limits import USUAL, ZmqLimits
from kvstate.feeds.zmtp_connection import ZmtpAddress, ZmtpConnection, place_of
from kvstate.wire.zmq_wire import ends_replay, load_of, parse_frames

NO_REPLAY = "no replay endpoint"

REPLAY_CONNECT_SECONDS = 0.05

# The longest silence for which the end of an answer is waited.
MAX_SILENCE_SECONDS = 1.6

_BATCH_BYTES = 192  # of memory for a batch, besides its payload

# Messages read before other tasks can run; seven more replays may be under way: about 0.1 ms.
MAX_MESSAGES = 16


async def replay_from(
    endpoint: str | None, start: int, limits: ZmqLimits = USUAL
) -> AsyncGenerator[Batch | Malformed]:
    """Requests the batches from `start` on from an endpoint, None if there is none.

    They come in order; a missing one is no longer in the publisher's buffer. One that comes twice
    with different content is from another publisher.

    Raises:
        ReplayError: no answer in time, or the answer is not a replay.
    """
    if endpoint is None:
        raise ReplayError(NO_REPLAY)
    reading = _Reading(endpoint, start, limits)
    reader = asyncio.create_task(reading.read_all())
    try:
        while batches := await reading.take(reader):
            for batch in batches:
                yield batch
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


class _End(Enum):
    """How an answer ended."""

    COMPLETE = auto()
    INCOMPLETE = auto()
    SILENT = auto()


class _Reading:
    """Reads a whole replay, in as many answers as it takes."""

    def __init__(self, endpoint: str, start: int, limits: ZmqLimits) -> None:
        self._limits = limits
        self._endpoint = endpoint
        self._start = start
        self._last: Batch | None = None  # the last batch received, in any answer
        self._answer_batches = 0  # batches of the present answer
        self._has_new = False  # whether one of them is new
        self._silence_seconds = limits.silence_seconds
        self._batches: deque[Batch] = deque()
        self._read_bytes = 0
        self._has_room = asyncio.Event()
        self._wake = asyncio.Event()

    async def read_all(self) -> None:
        """Reads until the replay is complete.

        Raises:
            ReplayError: it cannot be completed.
        """
        try:
            while (end := await self._read_answer()) is not _End.COMPLETE:
                if end is _End.SILENT:
                    self._silence_seconds = min(2 * self._silence_seconds, MAX_SILENCE_SECONDS)
        except WireError as error:
            raise ReplayError(str(error)) from None
        finally:
            self._wake.set()

    async def take(self, reader: asyncio.Task[None]) -> list[Batch]:
        """Returns the next batches, none at the end. Raises the error that `read_all` raised."""
        while not self._batches and not reader.done():
            self._wake.clear()
            await self._wake.wait()
        if not self._batches:
            reader.result()
        taken = [self._batches.popleft() for _ in range(min(MAX_MESSAGES, len(self._batches)))]
        self._read_bytes -= sum(map(_size_bytes, taken))
        self._has_room.set()
        return taken

    async def _read_answer(self) -> _End:
        wake = asyncio.Event()
        connection = ZmtpConnection(b"DEALER", lambda _: wake.set(), limits=self._limits)
        self._answer_batches, self._has_new = 0, False
        try:
            await _connect(connection, self._endpoint, self._limits.replay_seconds)
            first = self._start if self._last is None else self._last.sequence
            connection.send([b"", first.to_bytes(8, "big")])
            while messages := await self._messages(connection, wake):
                for message in messages:
                    end = self._judge(parse_frames(message))
                    if end is not None:
                        return end
            return _End.SILENT
        finally:
            connection.give_up("done")

    async def _messages(self, connection: ZmtpConnection, wake: asyncio.Event) -> list[list[bytes]]:
        """Returns messages of an answer; none after a silence that may be its end."""
        await asyncio.sleep(0)  # lets other tasks run, however many messages wait
        while self._read_bytes > self._limits.max_read_bytes:
            self._has_room.clear()
            await self._has_room.wait()
        seconds = self._silence_seconds if self._has_new else self._limits.replay_seconds
        while not (messages := connection.take(MAX_MESSAGES)):
            if connection.is_lost:
                raise ReplayError(connection.fault or "connection lost")
            wake.clear()
            try:
                async with asyncio.timeout(seconds):
                    await wake.wait()
            except TimeoutError:
                if self._has_new:
                    return connection.take(MAX_MESSAGES)  # some may have arrived just now
                raise ReplayError(f"no answer within {seconds:g} s") from None
        return messages

    def _judge(self, batch: Batch) -> _End | None:
        """Keeps a new batch; returns how the answer ended, if it did."""
        last, is_first = self._last, self._answer_batches == 0
        is_early = self._answer_batches < self._limits.never_dropped
        if is_first and last is not None:
            self._compare(batch, last)
            return None
        if ends_replay(batch):
            return _End.COMPLETE if is_early else _End.INCOMPLETE
        if last is not None and batch.sequence <= last.sequence:
            raise ReplayError("its numbers do not ascend")
        if last is not None and batch.sequence > last.sequence + 1 and not is_early:
            return _End.INCOMPLETE
        self._keep(batch)
        return None

    def _compare(self, batch: Batch, last: Batch) -> None:
        """Checks the first message of an answer that was requested from the last batch on."""
        if ends_replay(batch) or batch.sequence != last.sequence:
            raise ReplayError(f"batch {last.sequence} is gone: maybe another publisher")
        self._answer_batches += 1
        if batch.body != last.body:
            self._keep(batch)

    def _keep(self, batch: Batch) -> None:
        self._answer_batches += 1
        self._has_new = True
        self._last = batch
        self._batches.append(batch)
        self._read_bytes += _size_bytes(batch)
        self._wake.set()


async def _connect(connection: ZmtpConnection, endpoint: str, seconds: float) -> None:
    """Connects for a replay, with retries: a starting publisher may open sockets one by one."""
    place = place_of(endpoint)
    if place is None:
        raise ReplayError(f"{endpoint} is neither tcp://host:port nor ipc://path")
    fault = "no answer"
    try:
        async with asyncio.timeout(seconds):
            while not connection.is_ready:
                try:
                    await connection.open(place)
                except OSError as error:
                    is_refused = isinstance(error, ConnectionRefusedError)
                    fault = "connection refused" if is_refused else "no connection"
                    await asyncio.sleep(REPLAY_CONNECT_SECONDS)
                if connection.is_lost:
                    raise ReplayError(connection.fault or "connection lost")
    except TimeoutError:
        when = f"for {seconds:g} s" if fault != "no answer" else f"within {seconds:g} s"
        raise ReplayError(f"{fault} {when}") from None


def _size_bytes(batch: Batch) -> int:
    return (len(batch.body) if isinstance(batch.body, bytes) else 0) + _BATCH_BYTES


CONNECT_SECONDS = 15.0
# On an endpoint that KVSteer binds: peers, other clients, and handshakes under way.
MAX_ACCEPTED = 16

# Signals returned at once.
MAX_SIGNALS = 64

_HANGS_UP = "it ends the connection during the handshake"


class ZmqTransport:
    """A subscription to one rank.

    Messages do not name their sender: an endpoint that KVSteer binds is not trusted while it has
    two publishers; when the second is gone, the first counts as a new connection.

    chance: 0 to 1, for the jitter of tries to open it.
    """

    def __init__(
        self,
        source: ZmqSource,
        chance: Callable[[], float] = lambda: 0.5,
        limits: ZmqLimits = USUAL,
    ) -> None:
        self._limits = limits
        self._source = source
        self._chance = chance
        self._topic = source.topic.encode()
        self._accepted: set[ZmtpConnection] = set()
        self._peers: list[ZmtpConnection] = []
        self._changes: list[Signal] = []
        self._load: ZmtpConnection | None = None  # for load reports
        self._wake = asyncio.Event()
        self._keeper = self._start()

    @property
    def recovery(self) -> Recovery:
        """By replay, if the source has an endpoint for it."""
        return Recovery.NONE if self._source.replay is None else Recovery.REPLAY

    @property
    def why_lost(self) -> str:
        """What is not there if the source has no such endpoint."""
        return NO_REPLAY

    async def receive(self) -> list[Signal]:
        """Waits for signals, and returns them; of messages, up to `MAX_SIGNALS`.

        It does not wait after removing a signal, so that a cancellation loses none.
        """
        await asyncio.sleep(0)  # a publisher that always has messages must not block the loop
        while not (signals := self._waiting()):
            self._wake.clear()
            if self._keeper.done():
                keeper, self._keeper = self._keeper, self._start()
                keeper.result()
            await self._wake.wait()
        return signals

    def replay(self, start: int) -> AsyncGenerator[Batch | Malformed]:
        """Requests the batches from `start` on; each replay has its own connection."""
        return replay_from(self._source.replay, start, self._limits)

    async def close(self) -> None:
        """Closes the subscription."""
        self._keeper.cancel()
        await asyncio.wait([self._keeper])

    def _waiting(self) -> list[Signal]:
        """Returns the signals not returned yet, in order."""
        signals, self._changes = self._changes, []
        if len(self._peers) == 1:
            messages = self._peers[0].take(MAX_SIGNALS)
            signals += [_signal(each) for each in messages if each[0].startswith(self._topic)]
        if self._load is not None and (messages := self._load.take(MAX_SIGNALS)):
            signals.append(_load_signal(messages[-1]))  # only the newest report matters
        return signals

    def _start(self) -> asyncio.Task[None]:
        keeper = asyncio.create_task(self._keep_both())
        keeper.add_done_callback(lambda _: self._wake.set())
        return keeper

    def _note_change(self, connection: ZmtpConnection) -> None:
        was_peer = connection in self._peers
        if connection.is_lost:
            self._accepted.discard(connection)
        if was_peer and connection.is_lost:
            self._peers.remove(connection)
            self._changes.append(self._news_of_peers(connection.fault))
        elif not was_peer and connection.is_ready:
            self._peers.append(connection)
            self._changes.append(self._news_of_peers(""))
        self._wake.set()

    def _news_of_peers(self, fault: str) -> Signal:
        count = len(self._peers)
        if count == 1:
            return Connected()
        if count == 0:
            return Disconnected(f"connection given up: {fault}") if fault else Disconnected()
        reason = f"{count} publishers connect to this endpoint; each rank needs its own"
        return Disconnected(reason)

    async def _keep_both(self) -> None:
        """Keeps the subscriptions open until it is cancelled."""
        place = None if self._source.load is None else place_of(self._source.load)
        if place is None:
            await self._keep()
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep())
            group.create_task(self._keep_load(place))

    async def _keep_load(self, place: ZmtpAddress) -> None:
        """Keeps the subscription to load reports open; a failure is not reported."""
        retries = Backoff(*self._limits.reconnect_seconds, self._chance)
        while True:
            connection = self._load = ZmtpConnection(
                b"SUB", lambda _: self._wake.set(), limits=self._limits
            )
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await connection.open(place)
                if connection.is_ready:
                    retries.reset()
                    await connection.lost.wait()
            except OSError:  # includes a time-out
                pass
            finally:
                connection.give_up("closed")
            await asyncio.sleep(retries.next_seconds())

    async def _keep(self) -> None:
        """Keeps the subscription to events open until it is cancelled."""
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

    async def _keep_connected(self, place: ZmtpAddress) -> None:
        retries = Backoff(*self._limits.reconnect_seconds, self._chance)
        time = asyncio.get_running_loop().time
        began_at, reported, was_ready = time(), "", False
        while True:
            connection = self._connection()
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await connection.open(place)
                fault = f"what answers there is no ZMQ publisher: {connection.fault or _HANGS_UP}"
            except OSError as error:  # includes a time-out
                fault = f"cannot connect: {_reason(error)}"
                connection.give_up("no connection")
            if connection.is_ready:
                retries.reset()
                await connection.lost.wait()
            was_ready = was_ready or connection.was_ready
            if (
                not was_ready
                and fault != reported
                and time() - began_at >= self._limits.unreached_seconds
            ):
                reported = fault
                self._tell(fault)
            self._accepted.discard(connection)
            await asyncio.sleep(retries.next_seconds())

    async def _keep_bound(self, place: ZmtpAddress) -> None:
        loop = asyncio.get_running_loop()
        retries = Backoff(*self._limits.bind_retry_seconds, self._chance)
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

    def _connection(self) -> ZmtpConnection:
        connection = ZmtpConnection(b"SUB", self._note_change, self._topic, self._limits)
        if len(self._accepted) >= MAX_ACCEPTED:
            connection.give_up("too many connections")
        self._accepted.add(connection)
        return connection

    def _tell(self, fault: str) -> None:
        self._changes.append(Disconnected(fault))
        self._wake.set()


def _reason(error: OSError) -> str:
    """Returns why a connection could not be opened, without the address."""
    if isinstance(error, socket.gaierror):
        return error.strerror or "its name is not known"
    if error.errno:
        return os.strerror(error.errno)
    return str(error) or f"no answer in {CONNECT_SECONDS:g} s"


def _signal(message: list[bytes]) -> Signal:
    try:
        return parse_frames(message)
    except WireError:
        return Malformed()


def _load_signal(message: list[bytes]) -> Signal:
    try:
        return LoadReport(load_of(message))
    except WireError:
        return Malformed(is_load=True)
