"""The state file: what the router knows, so that it is not cold after a restart.

It is read once, before anything else, and then rewritten at intervals and at the stop: to a new
file, in short steps, which replaces the old one when it is whole. A file that cannot be used is
refused, for a reason that is logged; the router then begins as it would without one.
`extproc.running.restored_workers` has what becomes of its content.
"""

import asyncio
import contextlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.running.restored_workers import Keeper, RestoredWorkers
from kvstate.errors import DamagedError
from kvstate.feeds.feed import Restoration
from kvstate.fleet import FollowedWorkers
from kvstate.rows.format import SavedRows, SavedStoreRows, StateHeader
from kvstate.rows.reader import SavedState, state_in
from kvstate.rows.writer import StateWriter

log = logging.getLogger("kvsteer.state")

# The largest file that is read: more than 150 million blocks.
MAX_FILE_BYTES = 4 * 1024**3

# Rights of the user alone.
_OWN = 0o600


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
    """The state file of one router, once it serves.

    path: of the file. about: returns who writes it. identity: returns that of a worker's engine,
    None for an unknown worker. keepers: save more. is_handed_over: set once another router writes
    the file.
    """

    def __init__(
        self,
        path: str,
        interval_seconds: float,
        fleet: FollowedWorkers,
        about: Callable[[], StateHeader],
        identity: Callable[[str], str | None],
        keepers: Sequence[Keeper] = (),
    ) -> None:
        self._path = Path(path)
        self._interval_seconds = interval_seconds
        self._fleet = fleet
        self._header = about
        self._identity = identity
        self._keepers = keepers
        self._task: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self._write_due = asyncio.Event()
        self._fault = ""
        self.is_handed_over = False
        self.written_at = 0.0
        self.bytes = 0

    def start(self) -> None:
        """Writes at intervals from now on."""
        self._task = asyncio.create_task(self._keep_writing())

    async def close(self) -> None:
        """Writes the file one last time."""
        task = self._task
        if task is None:  # it did not start: what is in the file counts more
            return
        async with self._writing:  # what is being written is written to its end
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not self.is_handed_over:  # what its successor writes counts more
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
        writer = StateWriter()
        file = await asyncio.to_thread(_create_private, new)
        try:
            await asyncio.to_thread(file.write, writer.begin(self._header()))
            for keeper in self._keepers:
                for piece in keeper.saved():
                    section = writer.section(keeper.section, keeper.version, piece)
                    await asyncio.to_thread(file.write, section)
            async for saved in self._fleet.rows.saved_ranks(
                lambda worker: self._identity(worker) or ""
            ):
                await asyncio.to_thread(_append, file, writer, saved)
            async for stored in self._fleet.rows.saved_stores():
                await asyncio.to_thread(_append, file, writer, stored)
            return await asyncio.to_thread(_end, file, writer)
        finally:
            await asyncio.to_thread(file.close)

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


def _append(file: BinaryIO, writer: StateWriter, saved: SavedRows | SavedStoreRows) -> None:
    file.writelines(writer.held(saved))


def _end(file: BinaryIO, writer: StateWriter) -> int:
    file.write(writer.end())
    file.flush()
    os.fsync(file.fileno())
    return file.tell()


class StateCollector(Collector):
    """Shows the state file at every scrape.

    file: None if none is configured. restored: None if no worker can begin with anything.
    """

    def __init__(self, file: StateFile | None, restored: RestoredWorkers | None = None) -> None:
        self._file = file
        self._restored = restored

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families of the state file."""
        size = GaugeMetricFamily("kvsteer_state_file_bytes", "Size of the state file when written")
        written = GaugeMetricFamily(
            "kvsteer_state_file_written_timestamp_seconds",
            "When the state file was last written, in seconds since the epoch; 0 if never",
        )
        workers = GaugeMetricFamily(
            "kvsteer_state_file_workers",
            "Workers of which the router knew something at its start, by what became of them",
            labels=["outcome"],
        )
        if self._file is not None:
            size.add_metric([], self._file.bytes)
            written.add_metric([], self._file.written_at)
        if self._restored is not None:
            for outcome in (Restoration.PROVEN, Restoration.LOST, Restoration.NONE):
                workers.add_metric([outcome.value], self._restored.outcomes[outcome])
        yield from (size, written, workers)
