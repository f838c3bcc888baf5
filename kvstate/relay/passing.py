"""Passes on what is learned here to the other processes of this host, over a Unix socket.

    taps.py       write down what happens to each rank that is followed here
    passing.py    sends it, and what ranks and stores hold at first
    records.py    the format of what is sent
    reading.py    receives it in another process, and repeats it in that one's index
    relayed.py    one rank there, in the place of a subscriber; relayed_stores.py: the stores

A process that reads says which workers it wants. Each of their ranks is passed on as it is between
two batches, and from then on all that happens to it. All that happens is sent to every process,
which skips ranks that it did not want.

The relay knows ranks, stores and effects of feeds; it decides nothing. The rule: whoever repeats
all records of a rank in order holds what is held here, and trusts it when it is trusted here. A
stream that breaks off is not continued: its reader trusts nothing, and begins again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

import msgspec

from kvstate.errors import DamagedError
from kvstate.relay.holdings import Holding
from kvstate.relay.records import STORES, Beginning, Hello, Kind, StoreBeginning, Wish, encoded
from kvstate.relay.taps import Tap, Taps
from kvstate.rows.writer import joined
from kvstate.steps import Steps

log = logging.getLogger("kvsteer.feed")

# What happens is collected for this long; the more is sent at once, the less each process wakes up.
TICK_SECONDS = 0.02
CHUNK_BYTES = 128 * 1024

# How often counts are passed on, and a sign of life if nothing else is.
COUNTS_SECONDS = 5.0
BEAT_SECONDS = 0.25

# A process that does not read is disconnected; it begins again once it runs.
MAX_UNREAD_BYTES = 256 * 1024 * 1024

# The longest line of a process that reads, and how long it is waited before a rank that cannot be
# passed on now is tried again.
MAX_LINE_BYTES = 64 * 1024
AGAIN_SECONDS = 0.1

# Rows that are one record, which is joined and sent in one step.
ROWS_BYTES = 128 * 1024

# Takes a rank as it is now: its tap, what is known of it, what it holds, and what returns whether
# it is trusted.
TakeRank = Callable[[Tap, Beginning, Holding, Callable[[], bool]], Steps[None]]
# Takes a store as it is now: what is known of it, and what it holds.
TakeStore = Callable[[StoreBeginning, Holding], Steps[None]]
# Passes all ranks of a worker to such a function; returns whether it could.
HandOver = Callable[[str, TakeRank], Awaitable[bool]]
# A store, and the model of the blocks.
StorePlace = tuple[str, str]
# Passes the stores that some workers mount to such a function, but for those that are known.
HandOverStores = Callable[[Collection[str], Collection[StorePlace], TakeStore], Awaitable[None]]


class Passing:
    """Serves the processes that read.

    hand_over: hands over a worker's ranks as they are. hand_over_stores: the stores of workers.
    hello: what a process has to say to be answered.
    """

    def __init__(
        self, taps: Taps, hand_over: HandOver, hand_over_stores: HandOverStores, hello: Hello
    ) -> None:
        self.hello = hello
        self.hand_over = hand_over
        self.hand_over_stores = hand_over_stores
        self.taps = taps
        self._readers: set[_Reader] = set()
        self._chunk: list[bytes] = []
        self._chunk_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._server: asyncio.Server | None = None
        self._beating: asyncio.Task[None] | None = None

    async def start(self, path: Path) -> None:
        """Listens on a path, which no other process serves.

        Raises:
            OSError: it is not possible.
        """
        await asyncio.to_thread(path.unlink, missing_ok=True)
        self.taps.put, self.taps.added = self._put, self._hurry
        self.taps.removed = self._note_removed
        self.taps.note_length = self._note_length
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Reader(self), str(path))
        await asyncio.to_thread(path.chmod, 0o600)
        self._beating = asyncio.create_task(self._beat())

    async def close(self) -> None:
        """Disconnects all processes."""
        self.taps.stop()
        self.taps.put, self.taps.added = lambda _: None, lambda: None
        self.taps.removed = lambda: None
        self.taps.note_length = lambda _: None
        if self._server is not None:
            self._server.close()
        if self._timer is not None:
            self._timer.cancel()
        for reader in list(self._readers):
            reader.close()
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)

    def note_reader(self, reader: "_Reader", *, is_there: bool) -> None:
        """Notes a process that reads from now on, or does not any more."""
        if is_there:
            self._readers.add(reader)
            return
        self._readers.discard(reader)
        if not self._readers:
            self.taps.stop()

    def flush(self) -> None:
        """Sends all that happened so far."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._chunk.append(self.taps.journal.passed_on())
        chunk = b"".join(self._chunk)
        self._chunk.clear()
        self._chunk_bytes = 0
        for reader in list(self._readers) if chunk else ():
            reader.write(chunk)

    def _put(self, record: bytes) -> None:
        some = self.taps.journal.passed_on()
        self._chunk += (some, record)
        self._chunk_bytes += len(some) + len(record)
        self._note_length(0)

    def _note_length(self, length: int) -> None:
        if self._chunk_bytes + length >= CHUNK_BYTES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self.flush)

    def _hurry(self) -> None:
        for reader in self._readers:
            reader.due.set()

    def _note_removed(self) -> None:
        for reader in self._readers:
            reader.doubt_stores()

    async def _beat(self) -> None:
        time = asyncio.get_running_loop().time
        counts_at = time()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            if time() >= counts_at + COUNTS_SECONDS:
                counts_at = time()
                self.taps.refresh()
            self._put(encoded(Kind.BEAT))


class _Reader(asyncio.Protocol):
    """One process that reads. due: set when there may be something to hand over."""

    def __init__(self, passing: Passing) -> None:
        self.due = asyncio.Event()
        self._passing = passing
        self._transport: asyncio.Transport | None = None
        self._behind: bytearray | None = None  # what has to follow the beginning that is being sent
        self._line = b""
        self._is_welcome = False
        self._wanted: set[str] = set()
        self._heard: set[str] = set()
        self._given: dict[str, list[Tap]] = {}
        self._stores: set[StorePlace] = set()  # that it has, and all that happened to them since
        self._task: asyncio.Task[None] | None = None

    def write(self, data: bytes) -> None:
        """Sends bytes, behind the beginning that is being sent if there is one."""
        if self._behind is None:
            self._send(data)
        else:
            self._behind += data
            self._limit(len(self._behind))

    def _send(self, data: bytes | bytearray) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(data)
        self._limit(self._transport.get_write_buffer_size())

    def _limit(self, unread: int) -> None:
        """Disconnects the process if it does not read what it is sent."""
        if unread > MAX_UNREAD_BYTES:
            log.warning("a process does not read what is passed on to it")
            self.close()

    def doubt_stores(self) -> None:
        """Notes that a worker may have changed stores without this process knowing."""
        self._stores.clear()

    def close(self) -> None:
        """Disconnects it."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Part of asyncio.Protocol."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Part of asyncio.Protocol."""
        *lines, self._line = (self._line + data).split(b"\n")
        try:
            for line in lines:
                self._take(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, DamagedError):
            self.close()
        if len(self._line) > MAX_LINE_BYTES:
            self.close()

    def connection_lost(self, _: Exception | None) -> None:
        """Part of asyncio.Protocol."""
        if self._task is not None:
            self._task.cancel()
        for worker in self._heard:
            self._passing.taps.hear(worker, more=-1)
        self._passing.note_reader(self, is_there=False)

    def _take(self, line: bytes) -> None:
        if not self._is_welcome:
            if msgspec.json.decode(line, type=Hello) != self._passing.hello:
                log.warning("another process has another version: it follows the feeds itself")
                raise DamagedError("another version")
            self._is_welcome = True
            self.write(encoded(Kind.HELLO))
            self._passing.note_reader(self, is_there=True)
            self._task = asyncio.create_task(self._hand_over())
            return
        wish = msgspec.json.decode(line, type=Wish)
        if wish.is_heard:
            if wish.worker not in self._heard:
                self._heard.add(wish.worker)
                self._passing.taps.hear(wish.worker, more=1)
            return
        self._given.pop(wish.worker, None)  # it may be wanted again
        if wish.is_wanted:
            self._wanted.add(wish.worker)
            self.due.set()
        else:
            self._wanted.discard(wish.worker)
            self.doubt_stores()

    async def _hand_over(self) -> None:
        """Hands over what is wanted as soon as it is followed here."""
        while True:
            await self.due.wait()
            self.due.clear()
            is_missing = False
            begun: list[str] = []
            for worker in list(self._wanted):
                present = self._passing.taps.of(worker)
                if present is None or self._given.get(worker) is present:
                    continue
                if await self._passing.hand_over(worker, self._beginning_rank):
                    self._given[worker] = present
                    begun.append(worker)
                else:
                    is_missing = True
            if begun:  # what their batches do to stores is passed on from now on
                await self._passing.hand_over_stores(begun, self._stores, self._beginning_store)
            if is_missing:
                await asyncio.sleep(AGAIN_SECONDS)
                self.due.set()

    def _beginning_rank(
        self, tap: Tap, beginning: Beginning, holding: Holding, trusted: Callable[[], bool]
    ) -> Steps[None]:
        """Sends a rank as it is; what happens to the others meanwhile follows it.

        If the rank is not followed any more at the end, the process that reads learns that.
        """
        if beginning.shares:
            self.doubt_stores()
        last = encoded(Kind.GONE, tap.number)
        try:
            self._begin_alone(encoded(Kind.BEGIN, tap.number, msgspec.msgpack.encode(beginning)))
            yield from self._sending(tap.number, holding)
            if tap in (self._passing.taps.of(tap.worker) or ()):
                status = tap.begin(trusted=trusted())
                last = encoded(Kind.END, tap.number, status, tap.mark)
        finally:
            self._end_alone(last)

    def _beginning_store(self, beginning: StoreBeginning, holding: Holding) -> Steps[None]:
        place = beginning.store, beginning.model
        self._stores.add(place)  # it may be doubted again from now on
        last = b""
        try:
            self._begin_alone(encoded(Kind.STORE, STORES, msgspec.msgpack.encode(beginning)))
            yield from self._sending(STORES, holding)
            last = encoded(Kind.STORED, STORES)
        finally:
            if not last:
                self._stores.discard(place)
            self._end_alone(last)

    def _begin_alone(self, first: bytes) -> None:
        self._passing.flush()  # the others need all of it; this one begins behind it
        self._send(first)
        self._behind = bytearray()

    def _end_alone(self, last: bytes) -> None:
        behind, self._behind = self._behind, None
        self._send(last)
        if behind:
            self._send(behind)

    def _sending(self, number: int, holding: Holding) -> Steps[None]:
        for rows in joined(holding.rows, ROWS_BYTES):
            self._send(encoded(Kind.ROWS, number, rows))
            yield
        for orphans in holding.orphans:
            self._send(encoded(Kind.ORPHANS, number, orphans))
            yield
