"""Keeps a report in a file, so that it survives the router's restart."""

import asyncio
import contextlib
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from extproc.errors import ReportError
from extproc.observing.report import MAX_BYTES, Period, Report, read, written

log = logging.getLogger("kvsteer.report")

WRITE_SECONDS = 60.0

# Periods that are encoded in one go, on the loop that picks: under a millisecond.
AT_ONCE = 16


async def encoded(report: Report, now: float) -> bytes:
    """Returns the report as it is written, encoded in turns: picks are made between them."""
    parts: list[bytes] = []
    for period in list(report.periods(now)):
        parts.append(msgspec.json.encode(period))
        if len(parts) % AT_ONCE == 0:
            await asyncio.sleep(0)
    return written(parts)


class ReportFile:
    """The file of one report, which is read once and then replaced as a whole.

    A file that cannot be read is put aside. What fails is logged and never stops the router.

    clock: seconds since 1970.
    """

    def __init__(
        self,
        path: str,
        report: Report,
        clock: Callable[[], float] = time.time,
        write_seconds: float = WRITE_SECONDS,
    ) -> None:
        self._path = path
        self._report = report
        self._clock = clock
        self._write_seconds = write_seconds
        self._written = report.settled
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.fault = ""

    async def start(self) -> None:
        """Adds what the file holds to the report, and begins to write it."""
        try:
            periods = await asyncio.to_thread(_read, self._path)
        except ReportError as error:
            log.error(
                "report.file: %s %s: kept as %s.broken; a new report begins",
                *(self._path, error, self._path),
            )
            with contextlib.suppress(OSError):  # else it is replaced with the next report
                await asyncio.to_thread(Path(self._path).replace, f"{self._path}.broken")
        except OSError as error:
            log.error("report.file: %s cannot be read: %s", self._path, error.strerror)
        else:
            self._report.merge(periods, self._clock())
        self._task = asyncio.create_task(self._keep_writing())

    async def close(self) -> None:
        """Writes the report a last time."""
        self._closing.set()
        if self._task is not None:
            await self._task

    async def _keep_writing(self) -> None:
        is_last = False
        while not is_last:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), self._write_seconds)
            is_last = self._closing.is_set()
            await self._write()

    async def _write(self) -> None:
        """Writes the report if any request was over since; what fails is tried again."""
        now = self._clock()
        self._report.settle(now)
        settled = self._report.settled
        if settled == self._written:
            return
        fault = ""
        try:
            await asyncio.to_thread(_replace, self._path, await encoded(self._report, now))
            self._written = settled
        except OSError as error:
            fault = f"{self._path} cannot be written: {error.strerror}"
        except Exception as error:
            log.exception("report.file: the report cannot be written")
            fault = f"the report cannot be written: {type(error).__name__}"
        if fault and fault != self.fault:
            log.error("report.file: %s; a restart would lose the report", fault)
        self.fault = fault


@contextlib.asynccontextmanager
async def kept(path: str | None, report: Report) -> AsyncIterator[None]:
    """Keeps a report in a file, if there is one, until the block ends."""
    if path is None:
        yield
        return
    file = ReportFile(path, report)
    await file.start()
    try:
        yield
    finally:
        await file.close()


def _read(path: str) -> list[Period]:
    if not Path(path).exists():
        return []
    if not Path(path).is_file():  # reading a pipe would wait for its writer
        raise ReportError("is no file")
    with Path(path).open("rb") as file:
        return read(file.read(MAX_BYTES + 1))


def _replace(path: str, text: bytes) -> None:
    """Replaces a file as a whole; only its owner may read it."""
    file, name = tempfile.mkstemp(dir=Path(path).parent, prefix=".kvsteer-")
    try:
        with os.fdopen(file, "wb") as writer:
            writer.write(text)
            writer.flush()
            os.fsync(file)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
