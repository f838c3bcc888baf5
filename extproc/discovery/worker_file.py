"""A watched file of workers, in the form of the configuration's list."""

import asyncio
from pathlib import Path

from extproc.config import Config
from extproc.config.reader import MAX_FILE_BYTES, parse_workers
from extproc.discovery.sources import Report
from extproc.discovery.view import Found, listed
from extproc.errors import ConfigError

# A worker that is added is to get requests within a second. A look costs one stat, and follows the
# links by which Kubernetes replaces a mounted file.
LOOK_SECONDS = 0.1

_Stamp = tuple[int, int, int, int]
_ABSENT: _Stamp = (0, 0, 0, 0)


class WorkerFile:
    """Reads a file whenever it changed and has then kept still for one look.

    So a writer that does not write anew and rename is mostly not met in its midst; what is met half
    written is a fault, and the last good view stays.
    """

    name = "file"

    def __init__(self, path: str, config: Config) -> None:
        self._path = path
        self._config = config

    async def run(self, report: Report) -> None:
        """Looks at the file until it is cancelled."""
        taken: _Stamp | None = None
        before: _Stamp | None = None
        is_good = False
        while True:
            try:
                stamp = await asyncio.to_thread(_stamp, self._path)
                if stamp == taken and is_good:
                    report.confirm()
                elif stamp != taken and (stamp == before or taken is None):
                    taken, is_good = stamp, False  # what is faulty is told once, not at every look
                    report.view(await asyncio.to_thread(self._read), "")
                    is_good = True
                before = stamp
            except OSError as error:
                taken, before = _ABSENT, None
                report.fault(f"{self._path}: cannot be read: {error.strerror}")
            except ConfigError as error:
                report.fault(_shown(error))
            await asyncio.sleep(LOOK_SECONDS)

    def _read(self) -> tuple[Found, ...]:
        with Path(self._path).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError([f"{self._path}: larger than {MAX_FILE_BYTES} bytes"])
        return listed(parse_workers(text, self._path, self._config))


def _stamp(path: str) -> _Stamp:
    status = Path(path).stat()
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def _shown(error: ConfigError) -> str:
    first, *rest = error.faults
    faults = "fault" if len(rest) == 1 else "faults"
    return f"{first} (and {len(rest)} more {faults})" if rest else first
