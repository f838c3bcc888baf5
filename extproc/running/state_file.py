"""The state file: what the router knows, so that it is not cold after a restart.

It is read once, before anything else, and then rewritten at intervals and at the stop: to a new
file, in short steps, which replaces the old one when it is whole. A file that cannot be used is
refused, for a reason that is logged; the router then begins as it would without one.
"""

import asyncio
import contextlib
import logging
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstate.errors import DamagedError
from kvstate.feeds.feed import Restoration
from kvstate.fleet import FollowedWorkers
from kvstate.saved import SavedRows
from kvstate.saved_state import SavedState, StateHeader, section_of, sections_of, state_in
from kvstate.sections import Section, Writer

log = logging.getLogger("kvsteer.state")

# The largest file that is read: more than 150 million blocks.
MAX_FILE_BYTES = 4 * 1024**3

# How long a starting router waits until publishers have proven what was restored, and how long if
# another router serves meanwhile; a worker that does not answer by then is uncertain until it does.
PROVING_SECONDS = 1.0
RELIEVING_SECONDS = 20.0

# How often it looks whether they have, and for how long it looks for those that are late.
LOOK_SECONDS = 0.005
# What a look counts for at most: while the process gets no CPU, no answer can be read.
LONGEST_LOOK_SECONDS = 4 * LOOK_SECONDS
LOOK_LATE_SECONDS = 0.5
LATE_SECONDS = 600.0

# Rights of the user alone.
_OWN = 0o600


class Keeper(Protocol):
    """Knows more that outlives a restart, in a section of its own.

    section, version: of what it saves.
    """

    section: str
    version: int

    def saved(self) -> Iterator[bytes]:
        """Yields what it saves now, in pieces that take less than a millisecond each."""

    def restore(self, contents: bytes) -> None:
        """Takes one of these pieces, before any worker is followed.

        Raises:
            ValueError: it is no such thing.
        """

    def note_proven(self, worker: str) -> None:
        """Notes that a worker is the one of which something was saved."""


def read(path: str, layout: str, now: float) -> SavedState | None:
    """Returns what a state file says; None if it cannot be used, which is logged.

    layout: of this process's core. now: seconds since the epoch.
    """
    try:
        state = state_in(_content(path), layout, now)
    except FileNotFoundError:
        log.info("state.file: there is no %s yet", path)
    except OSError as error:
        log.error("state.file: %s cannot be read: %s", path, error.strerror)
    except DamagedError as error:
        log.warning("state.file: %s is not used: %s", path, error)
    else:
        age_seconds = max(0.0, now - state.about.written_at)
        log.info(
            "state.file: %s has %d blocks of %d ranks, as of %.0f s ago",
            path,
            state.block_count,
            state.rank_count,
            age_seconds,
        )
        return state
    return None


def _content(path: str) -> bytes:
    """Returns the content of a file that only this user may have written.

    Raises:
        OSError: it cannot be read.
        DamagedError: another user may have written it.
    """
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(number, "rb") as file:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise DamagedError("it is not a file")
        if found.st_uid != os.geteuid():
            raise DamagedError(f"it belongs to user {found.st_uid}")
        # a volume's group, which Kubernetes gives to its files, is one of the process's own
        is_group_ours = found.st_gid in (os.getegid(), *os.getgroups())
        others = stat.S_IWOTH | (0 if is_group_ours else stat.S_IWGRP)
        if found.st_mode & others:
            raise DamagedError("other users may write to it")
        if found.st_size > MAX_FILE_BYTES:
            raise DamagedError(f"it has more than {MAX_FILE_BYTES} bytes")
        return file.read(MAX_FILE_BYTES)


class StateFile:
    """The state file of one router.

    path: of the file. state: what it said at the start, None if nothing. about: returns who writes
    it. identity: returns that of a worker's engine, None for an unknown worker. keepers: save and
    restore more. proving_seconds: how long it waits for publishers at most, while the process can
    run. is_handed_over: set once another router writes the file.
    """

    def __init__(
        self,
        path: str,
        interval_seconds: float,
        state: SavedState | None,
        fleet: FollowedWorkers,
        about: Callable[[], StateHeader],
        identity: Callable[[str], str | None],
        keepers: Sequence[Keeper] = (),
        proving_seconds: float = PROVING_SECONDS,
    ) -> None:
        self._proving_seconds = proving_seconds
        self._path = Path(path)
        self._interval_seconds = interval_seconds
        self._unclaimed = {} if state is None else dict(state.ranks)
        self._fleet = fleet
        self._header = about
        self._identity = identity
        self._keepers = keepers
        self._unproven: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._writing = asyncio.Lock()
        self._write_due = asyncio.Event()
        self._fault = ""
        self.is_handed_over = False
        self.outcomes: Counter[Restoration] = Counter()
        self.written_at = 0.0
        self.bytes = 0
        for keeper in keepers:
            for section in () if state is None else state.others.get(keeper.section, ()):
                _hand(keeper, section)
        fleet.take_saved = self.take

    def take(self, worker: str, model: str, ranks: int) -> Mapping[int, SavedRows]:
        """Returns what was saved of a worker's ranks, once, if it is still the same worker."""
        saved = self._unclaimed.pop(worker, {})
        identity = self._identity(worker)
        taken = {
            number: one
            for number, one in saved.items()
            if (one.rank.model, one.rank.ranks, one.rank.identity) == (model, ranks, identity)
        }
        if len(taken) < len(saved):
            log.info("state.file: worker %s has other ranks or another model now", worker)
        if taken:
            self._unproven.add(worker)
        return taken

    async def start(self, is_complete: Callable[[], bool] = lambda: True) -> None:
        """Waits a little until what was restored is certain, then writes at intervals.

        is_complete: returns whether all workers are known that will be soon.
        """
        if self._unproven:
            log.info("state.file: waiting for the publishers of %d workers", len(self._unproven))
        time_of, waited_seconds = asyncio.get_running_loop().time, 0.0
        while self._unproven or (self._unclaimed and not is_complete()):
            self._look()
            if waited_seconds >= self._proving_seconds:
                break
            began_at = time_of()
            await asyncio.sleep(LOOK_SECONDS)
            waited_seconds += min(time_of() - began_at, LONGEST_LOOK_SECONDS)
        if self.outcomes or self._unproven:
            log.info(
                "state.file: %d workers are known again, %d are not, %d have not answered yet",
                self.outcomes[Restoration.PROVEN],
                self.outcomes.total() - self.outcomes[Restoration.PROVEN],
                len(self._unproven),
            )
        self._tasks = [
            asyncio.create_task(self._look_for_late()),
            asyncio.create_task(self._keep_writing()),
        ]

    async def close(self) -> None:
        """Writes the file one last time."""
        async with self._writing:  # what is being written is written to its end
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # if it did not start, or has a successor, what is in the file counts more
        if self._tasks and not self.is_handed_over:
            await self.write()

    def hurry(self) -> None:
        """Has the file written now, since the router is about to stop."""
        self._write_due.set()

    async def write(self) -> None:
        """Writes the file; if it cannot, logs why once, and leaves the old one."""
        new = self._path.with_name(f"{self._path.name}.new")
        async with self._writing:
            try:
                self.bytes = await self._write(new)
                await asyncio.to_thread(new.replace, self._path)
            except OSError as error:
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(new.unlink, missing_ok=True)
                self._say(error.strerror or str(error))
            else:
                self._fault = ""
                self.written_at = time.time()

    async def _write(self, new: Path) -> int:
        """Writes a new file; returns its length."""
        writer = Writer()
        file = await asyncio.to_thread(_create_private, new)
        try:
            await asyncio.to_thread(_begin, file, writer, self._header())
            for keeper in self._keepers:
                for piece in keeper.saved():
                    section = writer.section(keeper.section, keeper.version, piece)
                    await asyncio.to_thread(file.write, section)
            async for saved in self._fleet.saved(lambda worker: self._identity(worker) or ""):
                await asyncio.to_thread(_append, file, writer, saved)
            return await asyncio.to_thread(_end, file, writer)
        finally:
            await asyncio.to_thread(file.close)

    def _look(self) -> None:
        """Notes which workers are proven and caught up by now, and tells the keepers."""
        for worker in list(self._unproven):
            found = self._fleet.restoration(worker)
            if found is Restoration.UNPROVEN or not self._fleet.is_certain(worker):
                continue
            self._unproven.discard(worker)
            self.outcomes[found] += 1
            if found is Restoration.PROVEN:
                for keeper in self._keepers:
                    keeper.note_proven(worker)

    async def _look_for_late(self) -> None:
        until = asyncio.get_running_loop().time() + LATE_SECONDS
        while asyncio.get_running_loop().time() < until:
            await asyncio.sleep(LOOK_LATE_SECONDS)
            self._look()
        if self._unclaimed:
            log.info("state.file: %d of its workers are not in the fleet", len(self._unclaimed))
            self._unclaimed.clear()

    async def _keep_writing(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._write_due.wait(), self._interval_seconds)
            self._write_due.clear()
            if self.is_handed_over:
                return
            try:
                await self.write()
            except Exception:  # the next one may succeed
                log.exception("state.file: %s could not be written", self._path)

    def _say(self, fault: str) -> None:
        if fault != self._fault:
            log.error("state.file: %s cannot be written: %s", self._path, fault)
        self._fault = fault


def _create_private(path: Path) -> BinaryIO:
    """Creates a file that only this user may read."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, _OWN), "wb")


def _hand(keeper: Keeper, section: Section) -> None:
    if section.version != keeper.version:
        return
    try:
        keeper.restore(bytes(section.contents))
    except ValueError as error:
        log.warning("state.file: section %s is not used: %s", section.name, error)


def _begin(file: BinaryIO, writer: Writer, about: StateHeader) -> None:
    file.write(writer.begin())
    file.write(section_of(writer, about))


def _append(file: BinaryIO, writer: Writer, saved: SavedRows) -> None:
    file.writelines(sections_of(writer, saved))


def _end(file: BinaryIO, writer: Writer) -> int:
    file.write(writer.end())
    file.flush()
    os.fsync(file.fileno())
    return file.tell()


class StateCollector(Collector):
    """Shows the state file at every scrape. file: None if none is configured."""

    def __init__(self, file: StateFile | None) -> None:
        self._file = file

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families of the state file."""
        size = GaugeMetricFamily("kvsteer_state_file_bytes", "Size of the state file when written")
        written = GaugeMetricFamily(
            "kvsteer_state_file_written_timestamp_seconds",
            "When the state file was last written, in seconds since the epoch; 0 if never",
        )
        workers = GaugeMetricFamily(
            "kvsteer_state_file_workers",
            "Workers of the state file with which the router started, by what became of them",
            labels=["outcome"],
        )
        if self._file is not None:
            size.add_metric([], self._file.bytes)
            written.add_metric([], self._file.written_at)
            for outcome in (Restoration.PROVEN, Restoration.LOST, Restoration.NONE):
                workers.add_metric([outcome.value], self._file.outcomes[outcome])
        yield from (size, written, workers)
