"""Reads what the process that follows the feeds passes on, and repeats it in the index here."""

import asyncio
import logging
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvstate.errors import DamagedError
from kvstate.feeds.turns import Turns
from kvstate.index.core import SPECIAL, Outcome
from kvstate.index.index import Index
from kvstate.index.owner import Owner
from kvstate.relay.records import (
    MARK,
    NO_MARK,
    STORES,
    Hello,
    Kind,
    Mark,
    Record,
    Wish,
    beginning_in,
    record_at,
)
from kvstate.relay.relayed import RelayedRank
from kvstate.relay.relayed_stores import RelayedStores
from kvstate.rows.format import SavedFeed
from kvstate.steps import Steps
from kvstate.stores.stores import Stores

log = logging.getLogger("kvsteer.feed")

# The work of one call of the core: about 0.4 ms.
RUN_WORK = 8_192

# Bytes that wait here, before the other process has to keep what follows.
MAX_WAITING_BYTES = 4 * 1024 * 1024

# The other process says something several times a second; if it does not for so many intervals, it
# hangs. They are counted, since this process's own loop may be late, too: a delay counts as one.
SILENT_SECONDS, MAX_SILENT = 1.0, 3

# Kinds of which number and stamp are those of the rank's last batch from then on.
_MARKING = frozenset({Kind.BATCH, Kind.CHANGES, Kind.TYPED, Kind.FORGET, Kind.END})


class _Worker(NamedTuple):
    ranks: Sequence[RelayedRank]
    model: str


class Reading:
    """The ranks of this process that are followed by another one.

    stores: those that workers share. hello: who reads. is_connected: whether the other process has
    answered, and not gone since.
    """

    def __init__(self, index: Index, stores: Stores, turns: Turns, hello: Hello) -> None:
        self.is_connected = False
        self._index = index
        self._stores = RelayedStores(stores)
        self._turns = turns
        self._hello = hello
        self._workers: dict[str, _Worker] = {}
        self._numbers: dict[RelayedRank, int] = {}
        self._ranks: list[RelayedRank | None] = []
        self._owners = array("I")  # by number, for `Core.apply_run`
        self._marks = bytearray()
        self._has_special = False
        self._outcome: Outcome | None = None  # of the record that is next
        self._heard: set[str] = set()  # of which the other process knows that tokens are needed
        self._unchanged = asyncio.Lock()  # held while anything changes, or is saved
        self._stream: _Stream | None = None
        self._is_closed = False

    def add(self, worker: str, model: str, ranks: Sequence[RelayedRank]) -> None:
        """Reads a worker's ranks from now on."""
        self._workers[worker] = _Worker(ranks, model)
        self._wish(worker, is_wanted=True)

    def remove(self, worker: str) -> None:
        """Does not read a worker's ranks any more."""
        gone = self._workers.pop(worker, None)
        if gone is not None:
            for rank in gone.ranks:
                self._forget_number(rank)
            self._wish(worker, is_wanted=False)

    def position(self, rank: RelayedRank) -> SavedFeed | None:
        """Returns where a rank's feed was after its last batch here, None if that is not known."""
        number = self._numbers.get(rank)
        return None if number is None else rank.position(*self._mark(number))

    async def save(self, rank: RelayedRank, steps: Callable[[], Steps[None]]) -> SavedFeed | None:
        """Visits a rank to save it, while nothing changes; returns where its feed is then.

        If the rank is removed meanwhile, the steps end early.
        """
        async with self._unchanged:
            at = self.position(rank)
            if at is not None:
                await self._turns.run(rank.working(steps()))
            return at

    async def follow(self, path: Path) -> bool:
        """Reads until the other process is gone, or was not there; returns whether it was.

        Raises:
            DamagedError: what it passes on cannot be used here; nothing of it counts any more.
        """
        stream = _Stream(self._take_at_once)
        loop = asyncio.get_running_loop()
        try:
            await loop.create_unix_connection(lambda: stream, str(path))
        except OSError:
            return False
        self._stream, self._outcome = stream, None
        if self._is_closed:  # while it connected
            stream.close()
        try:
            stream.send(self._hello)
            self._heard.clear()
            for worker in self._workers:
                self._wish(worker, is_wanted=True)
            await self._read(stream)
            return self.is_connected
        except BaseException:  # in the midst of a record, perhaps
            self._forget_numbers()
            raise
        finally:
            stream.close()
            self._stream = None
            self._lose()

    def close(self) -> None:
        """Ends `follow`, once what came is repeated; it does not begin again."""
        self._is_closed = True
        if self._stream is not None:
            self._stream.close()

    async def _read(self, stream: "_Stream") -> None:
        while await stream.is_left():
            async with self._unchanged:
                data = stream.left()
                stream.put_back(data[await self._take(data) :])

    def _take_at_once(self, data: bytes) -> tuple[int, bool]:
        """Repeats what the core can, unless something else is under way.

        Returns where the rest begins, and whether `_take` is needed for it: it is not for a record
        of which only a part came.
        """
        if self._unchanged.locked() or not self._turns.begin():
            return 0, True
        self._note_special()
        at, is_moving = 0, True
        while is_moving and not self._turns.is_over():
            begin = at
            at, self._outcome = self._run_core(data, begin)
            is_moving = self._outcome is None and at > begin
        return at, self._outcome is not None or _is_due(data, at)

    def _run_core(self, data: bytes, at: int) -> tuple[int, Outcome | None]:
        return self._index.core.apply_run(data, at, self._owners, self._marks, RUN_WORK)

    async def _take(self, data: bytes) -> int:
        """Repeats all whole records; returns where the rest begins."""
        at = 0
        self._note_special()
        while True:
            if self._turns.is_over():
                await self._turns.next()
            begin, outcome, self._outcome = at, self._outcome, None
            if outcome is None:
                at, outcome = self._run_core(data, at)
            if outcome is None and at > begin:
                continue  # it may have stopped for its work alone
            record = record_at(data, at)
            if record is None:
                return at
            await self._turns.run(self._taking(record, outcome))
            at += record.size

    def _taking(self, record: Record, outcome: Outcome | None) -> Steps[None]:
        if record.kind in (Kind.HELLO, Kind.BEAT):
            self.is_connected = True
            return
        if record.rank == STORES:
            yield from self._stores.taking(record)
            return
        if record.kind == Kind.BEGIN:
            self._begin(record)
        rank = self._ranks[record.rank] if record.rank < len(self._ranks) else None
        if rank is None:
            return
        yield from rank.taking(record, outcome)
        if self._numbers.get(rank) != record.rank:
            return  # it was removed meanwhile
        if record.kind in _MARKING:
            MARK.pack_into(self._marks, record.rank * MARK.size, *record.mark)
        if record.kind == Kind.GONE:
            self._forget_number(rank)
        else:
            self._owners[record.rank] = self._owner(rank)

    def _begin(self, record: Record) -> None:
        """Notes the number of a rank that begins, if it is read here."""
        beginning = beginning_in(record.payload)
        worker = self._workers.get(beginning.worker)
        if worker is None or (worker.model, len(worker.ranks)) != (
            beginning.model,
            beginning.ranks,
        ):
            return
        rank = worker.ranks[beginning.rank]
        self._forget_number(rank)
        while len(self._ranks) <= record.rank:
            self._ranks.append(None)
            self._owners.append(0)
            self._marks += MARK.pack(*NO_MARK)
        self._ranks[record.rank] = rank
        self._numbers[rank] = record.rank
        self._owners[record.rank] = self._owner(rank)

    def _owner(self, rank: RelayedRank) -> int:
        """Returns what the core needs to know of a rank."""
        number = rank.owner.number + 1
        if not rank.owner.is_special:
            return number
        self._has_special = True
        return number | SPECIAL

    def _note_special(self) -> None:
        """Notes which ranks' batches have to be decoded one by one now."""
        if self._index.is_heard or self._has_special:
            self._has_special = False
            for rank, number in self._numbers.items():
                self._owners[number] = self._owner(rank)
                self._hear(rank.owner)

    def _hear(self, owner: Owner) -> None:
        """Asks for the tokens of what a worker stores from now on, once any of them are needed."""
        if owner.is_heard and owner.worker not in self._heard:
            self._heard.add(owner.worker)
            self._wish(owner.worker, is_wanted=True, is_heard=True)

    def _mark(self, number: int) -> Mark:
        return Mark(*MARK.unpack_from(self._marks, number * MARK.size))

    def _forget_number(self, rank: RelayedRank) -> None:
        number = self._numbers.pop(rank, None)
        if number is not None:
            self._ranks[number] = None
            self._owners[number] = 0
            MARK.pack_into(self._marks, number * MARK.size, *NO_MARK)

    def _forget_numbers(self) -> None:
        for rank in list(self._numbers):
            self._forget_number(rank)

    def _wish(self, worker: str, *, is_wanted: bool, is_heard: bool = False) -> None:
        if self._stream is not None:
            self._stream.send(Wish(worker, is_wanted, is_heard))

    def _lose(self) -> None:
        """Notes that the other process is gone."""
        self.is_connected = False
        for worker in self._workers.values():
            for rank in worker.ranks:
                rank.lose("the process that follows the feeds is gone")


class _Stream(asyncio.Protocol):
    """The bytes that the other process sends.

    take: repeats what it can of them at once; see `Reading._take_at_once`.
    """

    def __init__(self, take: Callable[[bytes], tuple[int, bool]]) -> None:
        self._take = take
        self._transport: asyncio.Transport | None = None
        self._waiting = bytearray()
        self._wake = asyncio.Event()
        self._is_left = False  # something for another task, which has to precede what comes
        self._is_silent = False  # since the present interval began
        self._is_paused = self._is_lost = False

    def send(self, line: Hello | Wish) -> None:
        """Sends a line."""
        if self._transport is not None:
            self._transport.write(msgspec.json.encode(line) + b"\n")

    async def is_left(self) -> bool:
        """Waits for bytes that are not repeated at once; False at the end, or if nothing comes."""
        silent = 0
        while not self._is_left and not self._is_lost:
            self._wake.clear()
            self._is_silent = True
            try:
                async with asyncio.timeout(SILENT_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                silent = silent + 1 if self._is_silent else 0
            if silent == MAX_SILENT:
                log.warning("the process that follows the feeds hangs")
                return False
        return self._is_left

    def left(self) -> bytes:
        """Returns these bytes; what comes from then on waits until the rest is put back."""
        left = bytes(self._waiting)
        self._waiting.clear()
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return left

    def put_back(self, rest: bytes) -> None:
        """Puts back the beginning of a record."""
        self._is_left = bool(self._waiting)
        self._waiting[:0] = rest

    def close(self) -> None:
        """Closes the connection."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Part of asyncio.Protocol."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Part of asyncio.Protocol."""
        self._is_silent = False
        if not self._is_left:
            if self._waiting:
                data = bytes(self._waiting) + data
                self._waiting.clear()
            at, self._is_left = self._take(data)
            data = data[at:]
        self._waiting += data
        if not self._is_left:
            return
        self._wake.set()
        if len(self._waiting) > MAX_WAITING_BYTES and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def connection_lost(self, _: Exception | None) -> None:
        """Part of asyncio.Protocol."""
        self._is_lost = True
        self._wake.set()


def _is_due(data: bytes, at: int) -> bool:
    """Whether a whole record begins at a byte, or none that can be."""
    try:
        return record_at(data, at) is not None
    except DamagedError:
        return True
