"""The router, with a watch that measures for how long something holds up its event loop.

The watch runs on the loop again and again, and writes to the file the CPU seconds that the thread
used between two runs, where they are more than a pause that nobody notices. Other work on the
machine does not lengthen them.
"""

import asyncio
import resource
import time
from pathlib import Path
from typing import IO

from extproc.running import event_loop

LOOK_SECONDS = 0.002
NOTICED_SECONDS = 0.01


class Watch:
    """Watches a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, file: IO[str]) -> None:
        self._loop, self._file = loop, file
        self._cpu_seconds = time.thread_time()
        loop.call_soon(self._look)

    def _look(self) -> None:
        before, self._cpu_seconds = self._cpu_seconds, time.thread_time()
        if self._cpu_seconds - before > NOTICED_SECONDS:
            self._file.write(f"{self._cpu_seconds - before}\n")
        self._loop.call_later(LOOK_SECONDS, self._look)


def watching(path: str) -> None:
    """Makes the router's event loop be watched."""
    make = event_loop.new_event_loop
    file = Path(path).open("a", buffering=1)  # noqa: SIM115 - open as long as the process runs

    def made() -> asyncio.AbstractEventLoop:
        loop = make()
        Watch(loop, file)
        return loop

    event_loop.new_event_loop = made


def watching_with_few_files(path: str, files: str) -> None:
    """The same, in a process that may open no more than this many files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(files), int(files)))
    watching(path)
