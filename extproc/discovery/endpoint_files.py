"""Keeps the files from which Envoy learns the workers' addresses."""

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from extproc.envoy_endpoints import Lane, assignment, lanes_in, path_of

log = logging.getLogger("kvsteer.discovery")

# A directory that cannot be written to is tried again.
TRY_AGAIN_SECONDS = 1.0

Lanes = Mapping[str, Sequence[Lane]]  # by cluster


class EndpointFiles:
    """One file a cluster, each replaced as a whole.

    lanes: of every cluster, as they are now. is_complete: whether every source has given a view;
    until then what an earlier router left in a file is kept besides, since it may know more.
    """

    def __init__(
        self, directory: str, lanes: Callable[[], Lanes], is_complete: Callable[[], bool]
    ) -> None:
        self._directory = directory
        self._lanes = lanes
        self._is_complete = is_complete
        self._left: dict[str, list[Lane]] = {}
        self._written: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.fault = ""

    async def start(self) -> None:
        """Writes them once, then whenever it is told of a change."""
        if not self._is_complete():
            for cluster in self._lanes():
                path = path_of(self._directory, cluster)
                self._left[cluster] = lanes_in(await asyncio.to_thread(_read, path))
        await self._write_all()
        self._task = asyncio.create_task(self._keep_writing())

    async def close(self) -> None:
        """Writes no more; the files stay for Envoy."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def note_change(self) -> None:
        """The lanes may be others now."""
        self._changed.set()

    async def _keep_writing(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._changed.wait(), TRY_AGAIN_SECONDS if self.fault else None
                )
            self._changed.clear()
            await self._write_all()

    async def _write_all(self) -> None:
        fault = ""
        if self._is_complete():
            self._left.clear()
        for cluster, lanes in self._lanes().items():
            known = {lane.endpoint for lane in lanes}
            left = [lane for lane in self._left.get(cluster, ()) if lane.endpoint not in known]
            text = assignment(cluster, [*lanes, *left])
            if self._written.get(cluster) == text:
                continue
            path = path_of(self._directory, cluster)
            try:
                await asyncio.to_thread(_write, path, text)
                self._written[cluster] = text
            except OSError as error:
                fault = f"{path}: cannot be written: {error.strerror}"
        if fault and fault != self.fault:
            log.error("envoy.eds_directory: %s; Envoy knows no new workers", fault)
        self.fault = fault


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _write(path: str, text: str) -> None:
    """Puts a file in its place as a whole, readable for Envoy's user."""
    file, name = tempfile.mkstemp(dir=Path(path).parent, prefix=".kvsteer-")
    try:
        with os.fdopen(file, "w") as writer:
            writer.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
