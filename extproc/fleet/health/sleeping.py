"""Which engines sleep, by their metrics: they get no requests while others are awake.

vLLM's sleep mode (POST /sleep and /wake_up; v1/engine/core.py and v1/metrics/loggers.py of 0.33): a
sleeping engine is healthy and accepts requests, but does not answer them. From level 1 on its cache
is dropped. It announces that with the first step after it woke, so until then nothing that it holds
is certain.

Metrics are long, so where they are not scraped, they are read only of workers in doubt, such as one
that has requests and is silent, and of those that sleep.
"""

from collections.abc import Callable, Iterator

import aiohttp

from extproc.base.engine import VLLM
from extproc.base.fault import Fault
from extproc.fleet.asking.engine_metrics import MAX_METRICS_BYTES, sleep_of_metrics
from extproc.fleet.asking.polling import TIMEOUT_SECONDS, Client
from extproc.fleet.records.table import Table
from extproc.fleet.records.worker import Worker
from extproc.routing.health.evidence import Judge
from kvstate.events import Loss

# Time between two reads of the metrics of a worker in doubt that is awake, as far as is known.
AGAIN_SECONDS = 5.0

_OK = 200


class Sleeping:
    """Keeps which workers sleep.

    batches: returns how many batches a worker's feed has sent so far, by its name. changed: is
    called with a worker whose credit may become certain again, or may no longer be. monotonic: the
    clock of the loads.
    """

    def __init__(
        self,
        table: Table,
        batches: Callable[[str], int],
        changed: Callable[[Worker], None],
        monotonic: Callable[[], float],
    ) -> None:
        self._table = table
        self._batches = batches
        self._changed = changed
        self._monotonic = monotonic

    async def ask(self, client: Client, worker: Worker) -> None:
        """Reads the metrics of a worker in doubt that answers, if its engine may sleep."""
        now, upstream, engine = self._monotonic(), worker.upstream, worker.engine
        is_other = engine is not None and engine.name != VLLM
        is_early = not worker.asleep and now - worker.sleep_asked_at < AGAIN_SECONDS
        if upstream is None or is_other or is_early:
            return
        worker.sleep_asked_at = now
        try:
            status, text = await client.get(
                upstream.endpoint, "/metrics", TIMEOUT_SECONDS, MAX_METRICS_BYTES
            )
        except (aiohttp.ClientError, TimeoutError, OSError):
            return  # what it did say still counts
        if status == _OK and worker.upstream is upstream:
            self.note(worker, text)

    def note(self, worker: Worker, metrics: bytes) -> None:
        """Takes the metrics of a worker's engine; those that say nothing of sleep are ignored."""
        found = sleep_of_metrics(metrics)
        if found is None or worker.upstream is None:
            return
        worker.asleep = found.says
        batches, was_void = self._batches(worker.name), worker.void_at is not None
        upstreams, now = self._table.upstreams, self._monotonic()
        if found.says:
            upstreams.eject(worker.upstream, Judge.SLEEP, found.says, now)
        else:
            upstreams.restore(worker.upstream, Judge.SLEEP)
        if found.drops_cache:
            worker.holdings.lose(now, Loss.CLEARED)
            worker.void_at = batches
        elif not found.says and worker.void_at is not None and batches > worker.void_at:
            worker.void_at = None
        if was_void != (worker.void_at is not None):
            self._changed(worker)

    def faults(self) -> Iterator[Fault]:
        """Yields a fault for each worker that sleeps."""
        for worker in self._table:
            if worker.asleep:
                yield Fault("worker-asleep", f"worker {worker.name}", worker.asleep)
