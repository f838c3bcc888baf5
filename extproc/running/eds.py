"""Keeps the files from which Envoy reads the workers' addresses up to date with the fleet."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from extproc.base.atomic_file import READABLE_BY_ALL, replace_file
from extproc.config.schema import Config
from extproc.config.sections import MIRROR
from extproc.envoy.endpoint_files import (
    Lane,
    assignment,
    cluster_names,
    lanes_in,
    path_of,
    prefill_cluster,
)
from extproc.fleet.discovery.discovery import Discovery
from extproc.fleet.workers import Workers

log = logging.getLogger("kvsteer.discovery")

Lanes = Mapping[str, Sequence[Lane]]  # by cluster
Unplaced = Collection[str] | None


class EndpointFiles:
    """Files for Envoy, one for each cluster, each replaced as a whole.

    lanes: returns the current lanes of every cluster. unplaced: returns the endpoints of workers
    whose cluster is not known yet; None while not all workers are known. Lanes that an earlier
    router wrote are kept for these workers: Envoy must not lose a worker because the router
    restarted. next_change: returns an event that is set at the next change after the call.
    again_seconds: before a failed write is tried again.
    """

    def __init__(
        self,
        directory: str,
        lanes: Callable[[], Lanes],
        unplaced: Callable[[], Unplaced],
        next_change: Callable[[], asyncio.Event],
        again_seconds: float = 1.0,
    ) -> None:
        self._again_seconds = again_seconds
        self._directory = directory
        self._lanes = lanes
        self._unplaced = unplaced
        self._former_lanes: dict[str, list[Lane]] = {}
        self._written_lanes: dict[str, frozenset[Lane]] = {}
        self._next_change = next_change
        self._changed = next_change()
        self._task: asyncio.Task[None] | None = None
        self.fault = ""

    async def start(self) -> None:
        """Writes all files, and again after every change."""
        self._changed = self._next_change()
        for cluster in self._lanes():
            path = path_of(self._directory, cluster)
            self._former_lanes[cluster] = await asyncio.to_thread(_read, path)
        await self._write()
        self._task = asyncio.create_task(self._keep_writing())

    async def close(self) -> None:
        """Stops writing; leaves the files to Envoy."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _keep_writing(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._changed.wait(), self._again_seconds if self.fault else None
                )
            self._changed = self._next_change()
            await self._write()

    async def _write(self) -> None:
        """Writes the files that have changed; a failed write is tried again later."""
        try:
            fault = await self._write_changed()
        except Exception as error:
            log.exception("envoy.eds_directory: the files cannot be written")
            fault = f"the files cannot be written: {type(error).__name__}"
        if fault and fault != self.fault:
            log.error("envoy.eds_directory: %s; Envoy does not see new workers", fault)
        self.fault = fault

    async def _write_changed(self) -> str:
        fault = ""
        for cluster, lanes in self._lanes_to_write().items():
            if self._written_lanes.get(cluster) == lanes:
                continue
            path = path_of(self._directory, cluster)
            try:
                await asyncio.to_thread(_put, path, cluster, lanes)
                self._written_lanes[cluster] = lanes
            except OSError as error:
                fault = f"cannot write {path}: {error.strerror}"
        return fault

    def _lanes_to_write(self) -> dict[str, frozenset[Lane]]:
        """Returns the lanes to write; drops earlier ones that need not be kept any longer."""
        unplaced = self._unplaced()
        found: dict[str, frozenset[Lane]] = {}
        for cluster, lanes in self._lanes().items():
            known = {lane.endpoint for lane in lanes}
            left = [
                lane
                for lane in self._former_lanes.get(cluster, ())
                if lane.endpoint not in known and (unplaced is None or lane.endpoint in unplaced)
            ]
            self._former_lanes[cluster] = left
            found[cluster] = frozenset((*lanes, *left))
        return found


def _read(path: str) -> list[Lane]:
    try:
        return lanes_in(Path(path).read_bytes())
    except OSError:
        return []


def _put(path: str, cluster: str, lanes: Iterable[Lane]) -> None:
    content = assignment(cluster, lanes).encode()
    replace_file(path, content, READABLE_BY_ALL, is_durable=False)


def _lanes(endpoints: Iterable[tuple[str, bool]]) -> list[Lane]:
    return [Lane(endpoint, is_open) for endpoint, is_open in endpoints]


def endpoint_files(
    config: Config, directory: str, workers: Workers, discovery: Discovery
) -> EndpointFiles:
    """Returns what writes one file for each model's cluster, once it is started."""
    clusters = cluster_names(model.name for model in config.models)

    def lanes() -> Mapping[str, Sequence[Lane]]:
        now = workers.lanes.answering()
        found = {name: _lanes(now.get(model, [])) for model, name in clusters.items()}
        if config.disaggregation.mode == MIRROR:
            now = workers.lanes.prefill()
            for model, name in clusters.items():
                found[prefill_cluster(name)] = _lanes(now.get(model, []))
        return found

    def unplaced() -> Collection[str] | None:
        return workers.lanes.unplaced() if discovery.is_complete else None

    return EndpointFiles(directory, lanes, unplaced, workers.candidates.next_change)
