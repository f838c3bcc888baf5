"""Which of several processes on a host follows the feeds: one for all of them.

The one that holds a lock on a file in their common directory leads: it follows the feeds, and
passes on what it learns (`kvstate.relay`). The others read. The system frees the lock when its
holder ends, however it ends; then another leads, and continues where the first was. A process that
gets nothing from a leader for long follows the feeds itself, as if it were alone.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstate.errors import DamagedError
from kvstate.fleet import FollowedWorkers
from kvstate.index.index import saved_layout
from kvstate.relay.passing import Passing
from kvstate.relay.reading import Reading
from kvstate.relay.records import VERSION, Hello
from kvstate.relay.taps import Taps

log = logging.getLogger("kvsteer.processes")

# In the common directory: what the leader locks, and where it listens.
LOCK, SOCKET = "feeds.lock", "feeds.sock"

# How often a process without a leader looks for one, and how long before it follows the feeds
# itself: a leader that ends is replaced at once, so one that is not there for so long hangs.
LOOK_SECONDS = 0.05
ALONE_SECONDS = 10.0


class Role(StrEnum):
    """What a process does for the feeds."""

    LEADING = "leading"
    READING = "reading"
    ALONE = "alone"


class FeedRole:
    """The role of one process.

    directory: common to all. wants: returns whether this process follows feeds at all now.
    alone_seconds: how long it waits for a leader before it follows them itself.
    """

    def __init__(
        self,
        directory: str,
        fleet: FollowedWorkers,
        wants: Callable[[], bool],
        alone_seconds: float = ALONE_SECONDS,
    ) -> None:
        self.role = Role.READING
        self._fleet = fleet
        self._wants = wants
        self._alone_seconds = alone_seconds
        self._lock = Path(directory) / LOCK
        self._socket = Path(directory) / SOCKET
        self._held: int | None = None
        self._hello = Hello(VERSION, saved_layout(), _proof(fleet.secret))
        self._taps = fleet.subscriptions.taps = Taps(fleet.index.core)
        self._passing = Passing(
            self._taps, fleet.rows.copy_ranks, fleet.rows.copy_stores, self._hello
        )
        self._reading: Reading | None = None
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Finds its first role; to be called before any worker is followed."""
        if self._take_lock():
            await self._lead()
        else:
            self._reading = self._fleet.relayed.read(self._hello)
        self._task = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Ends its role; a reading process keeps what it knows."""
        self._is_closing = True
        task = self._task
        if task is None:
            return
        if self._reading is None:
            task.cancel()
        else:
            self._reading.close()
        await asyncio.gather(task, return_exceptions=True)
        await self._passing.close()
        self._free_lock()

    async def _keep(self) -> None:
        try:
            if self._reading is not None:
                await self._read(self._reading)
            while not self._is_closing:
                await self._relieve()
                await asyncio.sleep(LOOK_SECONDS)
        except Exception:
            log.exception("the feeds cannot be shared with the other processes any more")

    async def _relieve(self) -> None:
        """Leads if nobody does, and stops if it does not follow feeds any more."""
        if self.role is Role.ALONE and self._wants() and self._take_lock():
            await self._lead()
        elif self.role is Role.LEADING and not self._wants():
            log.info("process follows no feeds any more: another one may pass them on")
            await self._passing.close()
            self._free_lock()
            self.role = Role.ALONE

    async def _read(self, reading: Reading) -> None:
        """Reads until this process has to follow the feeds itself."""
        time = asyncio.get_running_loop().time
        heard_at = time()
        while not self._is_closing:
            if self._wants() and self._take_lock():
                log.info("this process follows the feeds from now on")
                break
            is_refused = False
            try:
                if await reading.follow(self._socket):
                    heard_at = time()
            except DamagedError as error:
                log.warning("what another process passes on cannot be used: %s", error)
                is_refused = True
            if not self._wants():
                heard_at = time()
            if is_refused or time() - heard_at > self._alone_seconds:
                log.warning("no other process passes on the feeds: this one follows them itself")
                break
            await asyncio.sleep(LOOK_SECONDS)
        if self._is_closing:
            return
        self._reading = None
        await self._fleet.relayed.take_over()
        if self._held is None:
            self.role = Role.ALONE
        else:
            await self._lead()

    async def _lead(self) -> None:
        self.role = Role.LEADING
        await self._passing.start(self._socket)

    def _take_lock(self) -> bool:
        """Returns whether this process holds the lock now."""
        number = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(number)
            return False
        self._held = number
        return True

    def _free_lock(self) -> None:
        if self._held is not None:
            with contextlib.suppress(OSError):
                os.close(self._held)
            self._held = None


def _proof(secret: int) -> str:
    """Returns what shows that two processes have the same secret, without revealing it."""
    return hashlib.sha256(b"kvsteer feeds" + secret.to_bytes(8, "big")).hexdigest()


class FeedRoleCollector(Collector):
    """Shows at every scrape which role this process has; none without others."""

    def __init__(self, feed_role: FeedRole | None) -> None:
        self._feed_role = feed_role

    def collect(self) -> Iterator[Metric]:
        """Yields the metric family of the role."""
        roles = GaugeMetricFamily(
            "kvsteer_process_role",
            "1 for what this process does for the feeds of several: leading, reading or alone",
            labels=["role"],
        )
        if self._feed_role is not None:
            for role in Role:
                roles.add_metric([role.value], float(self._feed_role.role is role))
        yield roles
