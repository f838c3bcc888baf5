"""Simulated workers as a configuration lists them, and a doctor that examines them."""

import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from extproc.config.schema import Config, Envoy, Model, WorkerEvents, WorkerSettings
from kvtools.doctor.doctor import examine
from kvtools.doctor.findings import STEERING, Finding, Severity
from kvtools.doctor.worker_visit import Bounds
from kvtools.simulator import worker as simulated
from kvtools.simulator.server import running
from kvtools.simulator.settings import TINY_MODEL, Settings
from tests.ports import free_port

MODEL = Model("tiny", tokenizer=str(TINY_MODEL))

# A question or a wait may take this long on a busy machine; faults that show as silence take all
# of it.
SECONDS = 10.0
SILENT_SECONDS = 4.0

# Where nothing is published, the wait for events is in vain.
BRIEF = Bounds(listen_seconds=0.2)


def two_free_ports() -> int:
    """A loopback port; a moment ago nobody listened on it or on the next one."""
    while True:
        port = free_port()
        with socket.socket() as next_one, contextlib.suppress(OSError):
            next_one.bind(("127.0.0.1", port + 1))
            return port


def events_of(worker: simulated.SimulatedWorker, **changes: Any) -> WorkerEvents:
    """The configuration of a worker's feed as it really is, with `changes`."""
    events = WorkerEvents(
        zmq=worker.events_endpoint, replay=worker.replay_endpoint, ranks=len(worker.ranks)
    )
    return replace(events, **changes)


def with_events(worker: WorkerSettings, **changes: Any) -> WorkerSettings:
    """A worker whose feed is configured differently."""
    assert isinstance(worker.events, WorkerEvents)
    return replace(worker, events=replace(worker.events, **changes))


def config_of(*workers: WorkerSettings, **changes: Any) -> Config:
    """A configuration of these workers; no Envoy answers at its admin address."""
    config = Config(models=(MODEL,), workers=workers, envoy=Envoy(admin=f"127.0.0.1:{free_port()}"))
    return replace(config, **changes)


@contextlib.asynccontextmanager
async def one_worker(
    **settings: Any,
) -> AsyncIterator[tuple[simulated.SimulatedWorker, WorkerSettings]]:
    """A simulated worker, and its entry in a configuration."""
    async with running(Settings(**settings)) as worker:
        events = events_of(worker) if worker.events_endpoint else None
        yield worker, WorkerSettings(worker.endpoint, events=events)


async def findings_of(
    *workers: WorkerSettings,
    probes: bool = False,
    seconds: float = SECONDS,
    bounds: Bounds = BRIEF,
    **changes: Any,
) -> list[Finding]:
    """What the doctor finds, but for the router, which does not run."""
    config = config_of(*workers, **changes)
    found = await examine(config, seconds, probes=probes, bounds=bounds)
    return [one for one in found if one.check != STEERING]


async def codes_of(*workers: WorkerSettings, **options: Any) -> set[str]:
    """The faults that it finds, by their codes."""
    found = await findings_of(*workers, **options)
    return {one.code for one in found if one.verdict is Severity.WRONG}
