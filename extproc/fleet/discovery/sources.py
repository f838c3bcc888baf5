"""The configured discovery sources, and the one that reads a file of workers.

The modules for DNS and Kubernetes are imported only if they are configured, since they are a good
part of what the router would load.
"""

import asyncio
import logging
from pathlib import Path

from extproc.base.errors import ConfigError
from extproc.config.reader import MAX_FILE_BYTES, parse_workers
from extproc.config.schema import Config
from extproc.fleet.discovery.view import Sighting, Source, SourceReport, listed

log = logging.getLogger("kvsteer.discovery")


def sources_of(config: Config) -> list[Source]:
    """Returns all configured sources, in order of precedence.

    Raises:
        StartError: one needs an extra that is not installed.
    """
    options = config.discovery
    sources: list[Source] = []
    if options.file is not None:
        sources.append(WorkerFile(options.file, config))
    if options.dns:
        from extproc.fleet.discovery.dns_names import DnsNames

        sources += [DnsNames(name) for name in options.dns]
    if options.kubernetes is not None:
        from extproc.fleet.discovery.kubernetes import KubernetesPods

        sources.append(KubernetesPods(options.kubernetes, config))
    return sources


# Time between checks of the file: an added worker must get requests within a second. A check
# costs one stat, which follows the links by which Kubernetes replaces a mounted file.
LOOK_SECONDS = 0.1

_Stamp = tuple[int, int, int, int]
_ABSENT: _Stamp = (0, 0, 0, 0)


class WorkerFile:
    """Reads a file of workers after it has changed and then stayed the same for one check.

    So a file that is overwritten in place, rather than replaced by renaming, is rarely read
    half-written. If it is, that is a fault, and the last good view stays.
    """

    name = "file"

    def __init__(self, path: str, config: Config, look_seconds: float = LOOK_SECONDS) -> None:
        self._path = path
        self._look_seconds = look_seconds
        self._config = config

    async def run(self, report: SourceReport) -> None:
        """Watches the file until it is cancelled."""
        taken: _Stamp | None = None
        before: _Stamp | None = None
        is_good = False
        while True:
            try:
                stamp = await asyncio.to_thread(_stamp, self._path)
                if stamp == taken and is_good:
                    report.confirm()
                elif stamp != taken and (stamp == before or taken is None):
                    taken, is_good = stamp, False  # a fault is reported once, not at each check
                    report.view(await asyncio.to_thread(self._read), "")
                    is_good = True
                before = stamp
            except OSError as error:
                taken, before = _ABSENT, None
                report.fault(f"{self._path}: cannot be read: {error.strerror}")
            except ConfigError as error:
                report.fault(_fault_text(error))
            await asyncio.sleep(self._look_seconds)

    def _read(self) -> tuple[Sighting, ...]:
        with Path(self._path).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError([f"{self._path}: larger than {MAX_FILE_BYTES} bytes"])
        return listed(parse_workers(text, self._path, self._config))


def _stamp(path: str) -> _Stamp:
    status = Path(path).stat()
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def _fault_text(error: ConfigError) -> str:
    first, *rest = error.faults
    faults = "fault" if len(rest) == 1 else "faults"
    return f"{first} (and {len(rest)} more {faults})" if rest else first
