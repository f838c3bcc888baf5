"""Several router processes on one host, and the parent that keeps them running.

Each is a complete router with its own listener and index; Envoy spreads requests over their
addresses. One of them follows the feeds for all (`extproc.running.feed_role`). The parent starts
them, restarts one that ends, forwards signals, and does nothing else, so that little can fail in
it. They share a private directory.
"""

import asyncio
import contextlib
import logging
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from random import random
from typing import NamedTuple, Self

from extproc.base import address
from extproc.base.errors import StartError
from extproc.config.schema import Config
from extproc.config.sections import ALL_PERCENT, SharingSettings
from extproc.running.common_secret import KEYS
from extproc.running.feed_role import LOCK, SOCKET
from extproc.running.hangup import Hangup
from kvstate.feeds.backoff import Backoff

log = logging.getLogger("kvsteer.processes")

# Pauses before an ended process is restarted; after a steady run, the pause is short again.
FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 30.0
STEADY_SECONDS = 60.0

# Used as the exit status if the system cannot start a process; shells use the same.
CANNOT_START = 126

# How often a process checks whether the others are ready, and whether the percentage has changed.
LOOK_SECONDS = 0.1

# The file with the percentage of steered requests, once it was changed.
_SHARE = "steering"

# The most bytes of it that are read.
_MAX_SHARE_BYTES = 64

# Containers with a read-only file system still have this one.
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a directory of its own is made in it


class ProcessMember(NamedTuple):
    """One process among several.

    number: from 0. processes: how many there are. directory: the private directory that they share.
    """

    number: int
    processes: int
    directory: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses the text that `str` returns.

        Raises:
            ValueError: the text has another form.
        """
        number, processes, directory = text.split(":", 2)
        return cls(int(number), int(processes), directory)

    def __str__(self) -> str:
        return f"{self.number}:{self.processes}:{self.directory}"

    def part_of(self, config: Config) -> Config:
        """Returns the configuration of this process: its own addresses and its own report.

        Only the first process writes Envoy's files of endpoints. Each has its own state file, and
        records to its own file, with its part of the configured size. All share their requests: as
        configured, or else through the common directory.
        """
        sharing = config.sharing or SharingSettings(f"{address.DIRECTORY_PREFIX}{self.directory}")
        name = sharing.name and f"{sharing.name}-{self.number}"
        directory = config.envoy.eds_directory if self.number == 0 else None
        report = config.report.file
        if report is not None and self.number:
            report = f"{report}.{self.number}"
        state = config.state
        if state.file is not None and self.number:
            state = replace(state, file=f"{state.file}.{self.number}")
        recorder, probe = config.recorder, config.probe
        if recorder.file is not None and self.number:
            recorder = replace(recorder, file=f"{recorder.file}.{self.number}")
        recorder = replace(recorder, bytes=recorder.bytes // self.processes)
        return replace(
            config,
            extproc=replace(config.extproc, listen=self._own(config.extproc.listen)),
            admin=replace(config.admin, listen=self._own(config.admin.listen)),
            metrics=replace(config.metrics, listen=self._own(config.metrics.listen)),
            probe=probe and replace(probe, listen=self._own(probe.listen)),
            envoy=replace(config.envoy, eds_directory=directory),
            report=replace(config.report, file=report),
            state=state,
            recorder=recorder,
            sharing=replace(sharing, name=name),
        )

    def other_addresses(self, listen: str) -> dict[int, str]:
        """Returns the addresses of the other processes by number; listen: this one's address."""
        host, port = address.parse(listen)
        first = str(address.Address(host, port - address.PORT_STEP * self.number))
        numbers = (number for number in range(self.processes) if number != self.number)
        return {number: address.nth(first, number) for number in numbers}

    def _own(self, listen: str) -> str:
        return address.nth(listen, self.number)

    async def announce(self, is_ready: Callable[[], bool]) -> None:
        """Waits until this process is ready for the first time, and tells the others."""
        while not is_ready():  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(LOOK_SECONDS)
        self._mark(self.number).touch()

    def hindrance(self) -> str:
        """Returns which process has not been ready yet, in words; "" if all have been."""
        for number in range(self.processes):
            if not self.was_ready(number):
                return f"process {number} of {self.processes} is not ready yet"
        return ""

    def was_ready(self, number: int) -> bool:
        """Returns whether a process has ever been ready, even if it restarted since."""
        return self._mark(number).exists()

    def hand_on(self, percent: float) -> None:
        """Tells the other processes the percentage of requests to steer.

        Raises:
            OSError: the file for it cannot be written.
        """
        new = Path(self.directory) / f"{self.number}.{_SHARE}"
        new.write_text(repr(percent))
        new.replace(Path(self.directory) / _SHARE)

    async def follow(
        self, steer: Callable[[float], None], look_seconds: float = LOOK_SECONDS
    ) -> None:
        """Follows the percentage that any process has set last, until it is cancelled.

        Whatever else the file has is ignored. look_seconds: between looks at it.
        """
        last = b""
        while True:
            content = last
            with contextlib.suppress(OSError):  # the percentage has not been changed yet
                content = _beginning(Path(self.directory) / _SHARE)
            if content != last:
                last = content
                percent = _percent_in(content)
                if percent is not None:
                    steer(percent)
            await asyncio.sleep(look_seconds)

    def leave(self) -> None:
        """Removes this process's files, and the directory once it is empty.

        The parent does so normally; this is for a parent that was killed.
        """
        with contextlib.suppress(OSError):  # other processes still use it
            for name in (_SHARE, KEYS, LOCK, SOCKET):
                (Path(self.directory) / name).unlink(missing_ok=True)
            self._mark(self.number).unlink(missing_ok=True)
            Path(self.directory).rmdir()

    def _mark(self, number: int) -> Path:
        return Path(self.directory) / f"{number}.ready"


def _beginning(file: Path) -> bytes:
    """Returns as many bytes of a file as a percentage may have, and one more."""
    with file.open("rb") as stream:
        return stream.read(_MAX_SHARE_BYTES + 1)


def _percent_in(text: bytes) -> float | None:
    """Returns the percentage in a text, None if it is none from 0 to 100."""
    try:
        percent = float(text) if len(text) <= _MAX_SHARE_BYTES else nan
    except ValueError:
        return None
    return percent if 0.0 <= percent <= ALL_PERCENT else None


class Processes:
    """Runs several processes until a signal stops them.

    command: returns the command of a process, by its number. count: how many processes. was_ready:
    returns whether a process has ever been ready.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        count: int,
        was_ready: Callable[[int], bool],
    ) -> None:
        self._command = command
        self._count = count
        self._was_ready = was_ready
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._status = 0

    async def run(self) -> int:
        """Runs all processes until a signal ends them; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        hangup = Hangup()

        def hang_up() -> None:
            if hangup.is_end:
                self._stop()
            else:
                self._forward(signal.SIGHUP)

        loop.add_signal_handler(signal.SIGHUP, hang_up)
        await asyncio.gather(*(self._keep(number) for number in range(self._count)))
        return self._status

    def _stop(self) -> None:
        """Makes all processes drain and end; a second call makes them end at once."""
        self._stopping.set()
        self._forward(signal.SIGTERM)

    def _forward(self, number: signal.Signals) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    async def _keep(self, number: int) -> None:
        """Starts one process, and restarts it whenever it ends."""
        backoff = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, random)
        while not self._stopping.is_set():
            began = time.monotonic()
            status = await self._run(number)
            if self._stopping.is_set():
                # a process that has not yet begun to listen for signals is ended by the one sent
                has_failed = status not in (0, -signal.SIGTERM)
                self._status = self._status or int(has_failed)
                return
            is_steady = time.monotonic() - began >= STEADY_SECONDS
            if status > 0 and not (is_steady or self._was_ready(number)):
                # it has logged the reason, and would fail again
                self._status = status
                log.error("process %d does not start: stopping all others", number)
                self._stop()
                return
            if is_steady:
                backoff.reset()
            pause = backoff.next_seconds()
            log.error("process %d %s: restarting it in %.1f s", number, _end(status), pause)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    async def _run(self, number: int) -> int:
        """Runs a process once.

        Returns its exit status, negative if a signal ended it, or `CANNOT_START`.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command(number),
                stdin=asyncio.subprocess.PIPE,  # closed when this process ends, however it ends
                start_new_session=True,  # only this process forwards a terminal's signals
            )
        except OSError as error:  # out of memory or processes: that may pass
            log.error("process %d cannot be started: %s", number, error.strerror)
            return CANNOT_START
        self._running[number] = process
        log.info("process %d of %d runs with pid %d", number, self._count, process.pid)
        if self._stopping.is_set():  # stopped while this one was starting
            process.send_signal(signal.SIGTERM)
        try:
            return await process.wait()
        finally:
            del self._running[number]


def _end(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


async def serve(path: str, count: int) -> int:
    """Runs routers with one configuration file until a signal ends them; returns the exit status.

    Raises:
        StartError: no common directory can be created.
    """
    with _directory() as directory:

        def command(number: int) -> list[str]:
            member = str(ProcessMember(number, count, directory))
            start = [sys.executable, "-m", "extproc", "serve", "--config", path]
            return [*start, "--processes", str(count), "--member", member]

        def was_ready(number: int) -> bool:
            return ProcessMember(number, count, directory).was_ready(number)

        return await Processes(command, count, was_ready).run()


@contextlib.contextmanager
def _directory() -> Iterator[str]:
    """Creates a directory that only this user may use."""
    for place in (None, _SHARED_MEMORY):
        try:
            made = tempfile.TemporaryDirectory(
                prefix="kvsteer-", dir=place, ignore_cleanup_errors=True
            )
        except OSError:
            continue
        with made as directory:
            yield directory
        return
    raise StartError("extproc.processes: no temporary directory can be written to: set TMPDIR")
