"""Several router processes on one host: the part of each, and the parent that keeps them running.

Each is a whole router, with a listener, an index and feeds of its own; Envoy spreads requests over
their addresses. The parent starts them, starts one anew that ends, hands signals on, and does
nothing else, so that there is little in it that could fail. A private directory is what they have
in common.
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
from pathlib import Path
from random import random
from typing import NamedTuple, Self

from extproc import address
from extproc.config.schema import Config
from extproc.config.sections import Sharing
from extproc.errors import StartError
from kvstate.feeds.backoff import Backoff

log = logging.getLogger("kvsteer.processes")

# The pause before a process that ended is started anew; one that ran for so long ended by chance.
FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 30.0
STEADY_SECONDS = 60.0

# In place of a status, where the system has no room for a process; as shells have it.
CANNOT_START = 126

# A process looks so often whether the others are ready, and whether one was told something.
LOOK_SECONDS = 0.1

# The file that says how many of a hundred requests are steered, once that was changed.
_SHARE = "steering"

# Containers without a writable file system have this one.
_SHARED_MEMORY = "/dev/shm"  # noqa: S108


class Member(NamedTuple):
    """The part of one process among several.

    number: from 0. processes: how many there are. directory: what they have in common, and nobody
    else has.
    """

    number: int
    processes: int
    directory: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads what `str` wrote.

        Raises:
            ValueError: it is nothing of that kind.
        """
        number, processes, directory = text.split(":", 2)
        return cls(int(number), int(processes), directory)

    def __str__(self) -> str:
        return f"{self.number}:{self.processes}:{self.directory}"

    def part_of(self, config: Config) -> Config:
        """Returns the configuration of this process: its own addresses and its own report.

        Envoy's files of endpoints are kept by the first process alone. Each records to a file of
        its own, and has its part of the room for it. All share their requests: as it is configured,
        else in the directory that they have in common.
        """
        sharing = config.sharing or Sharing(f"{address.DIRECTORY_PREFIX}{self.directory}")
        name = sharing.name and f"{sharing.name}-{self.number}"
        directory = config.envoy.eds_directory if self.number == 0 else None
        report = config.report.file
        if report is not None and self.number:
            report = f"{report}.{self.number}"
        recorder = config.recorder
        if recorder.file is not None and self.number:
            recorder = replace(recorder, file=f"{recorder.file}.{self.number}")
        recorder = replace(recorder, bytes=recorder.bytes // self.processes)
        return replace(
            config,
            extproc=replace(config.extproc, listen=self._own(config.extproc.listen)),
            admin=replace(config.admin, listen=self._own(config.admin.listen)),
            metrics=replace(config.metrics, listen=self._own(config.metrics.listen)),
            envoy=replace(config.envoy, eds_directory=directory),
            report=replace(config.report, file=report),
            recorder=recorder,
            sharing=replace(sharing, name=name),
        )

    def others(self, listen: str) -> dict[int, str]:
        """Returns where the other processes listen, by number; listen: where this one does."""
        host, port = address.parse(listen)
        first = str(address.Address(host, port - address.PORT_STEP * self.number))
        numbers = (number for number in range(self.processes) if number != self.number)
        return {number: address.nth(first, number) for number in numbers}

    def _own(self, listen: str) -> str:
        return address.nth(listen, self.number)

    async def announce(self, is_ready: Callable[[], bool]) -> None:
        """Tells the others once this process is ready for the first time."""
        while not is_ready():  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(LOOK_SECONDS)
        self._mark(self.number).touch()

    def hindrance(self) -> str:
        """Returns which process has never been ready yet, in words; "" if all were."""
        for number in range(self.processes):
            if not self.was_ready(number):
                return f"process {number} of {self.processes} is not ready yet"
        return ""

    def was_ready(self, number: int) -> bool:
        """Returns whether a process was ready once, however often it was started since."""
        return self._mark(number).exists()

    def hand_on(self, percent: float) -> None:
        """Tells the other processes how many of a hundred requests are steered.

        Raises:
            OSError: they cannot be told.
        """
        new = Path(self.directory) / f"{self.number}.{_SHARE}"
        new.write_text(repr(percent))
        new.replace(Path(self.directory) / _SHARE)

    async def follow(self, steer: Callable[[float], None]) -> None:
        """Steers as many requests as any process was told last, until it is cancelled."""
        last = ""
        while True:
            told = last
            with contextlib.suppress(OSError):  # nobody has told anything yet
                told = (Path(self.directory) / _SHARE).read_text()
            if told != last:
                last = told
                with contextlib.suppress(ValueError):
                    steer(float(told))
            await asyncio.sleep(LOOK_SECONDS)

    def leave(self) -> None:
        """Removes what is left of this process, and with the last one the directory.

        That is the parent's to do, but for one that was killed.
        """
        with contextlib.suppress(OSError):  # others are still there
            (Path(self.directory) / _SHARE).unlink(missing_ok=True)
            self._mark(self.number).unlink(missing_ok=True)
            Path(self.directory).rmdir()

    def _mark(self, number: int) -> Path:
        return Path(self.directory) / f"{number}.ready"


class Processes:
    """The parent of some processes, until it is told to stop.

    command: that of a process, by its number. count: how many. was_ready: whether a process ever
    was ready.
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
        """Runs them all until a signal ends them; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._forward, signal.SIGHUP)
        await asyncio.gather(*(self._keep(number) for number in range(self._count)))
        return self._status

    def _stop(self) -> None:
        """Has all of them drain and end; asked again, at once."""
        self._stopping.set()
        self._forward(signal.SIGTERM)

    def _forward(self, number: signal.Signals) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    async def _keep(self, number: int) -> None:
        """Starts one process, and anew whenever it ends."""
        backoff = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, random)
        while not self._stopping.is_set():
            began = time.monotonic()
            status = await self._run(number)
            if self._stopping.is_set():
                self._status = self._status or (1 if status else 0)
                return
            is_steady = time.monotonic() - began >= STEADY_SECONDS
            if status > 0 and not (is_steady or self._was_ready(number)):
                # it has said why, and would say so again
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

        Returns its status, below 0 where a signal ended it, or `CANNOT_START`.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command(number),
                stdin=asyncio.subprocess.PIPE,  # ends with this process, however it ends
                start_new_session=True,  # a terminal's signals come from here alone
            )
        except OSError as error:  # no memory or no process is left: that may pass
            log.error("process %d cannot be started: %s", number, error.strerror)
            return CANNOT_START
        self._running[number] = process
        log.info("process %d of %d runs with pid %d", number, self._count, process.pid)
        if self._stopping.is_set():  # it was told to stop before this one could be told
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
        StartError: there is no directory that they could have in common.
    """
    with _directory() as directory:

        def command(number: int) -> list[str]:
            member = str(Member(number, count, directory))
            start = [sys.executable, "-m", "extproc", "serve", "--config", path]
            return [*start, "--processes", str(count), "--member", member]

        def was_ready(number: int) -> bool:
            return Member(number, count, directory).was_ready(number)

        return await Processes(command, count, was_ready).run()


@contextlib.contextmanager
def _directory() -> Iterator[str]:
    """A directory that only this user may use."""
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
