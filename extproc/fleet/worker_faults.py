"""What is wrong with workers and their feeds, as faults that an operator should mend."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from extproc.base.fault import WORKERS_AT_ONCE, Fault
from extproc.fleet.records.table import Table
from extproc.fleet.records.worker import Worker
from kvstate.feeds.feed import FeedState
from kvstate.fleet import FollowedWorkers

# A feed may take so long to connect, to replay, or to be complete again.
PATIENCE_SECONDS = 10.0

# The clocks of a worker and the router may differ by so much, delays of the network included.
MAX_LAG_SECONDS = 30.0


class Reasons(Protocol):
    """Why workers have no feed.

    enabled: whether feeds are followed at all.
    """

    enabled: bool

    def reason(self, worker: Worker) -> str:
        """Returns why a worker has no feed, "" if it has one."""


class WorkerFaults:
    """The faults of all workers.

    down: returns why an endpoint gets no requests, "" if it gets any. monotonic: seconds.
    """

    def __init__(
        self,
        table: Table,
        fleet: FollowedWorkers,
        feeds: Reasons,
        down: Callable[[str], str],
        monotonic: Callable[[], float],
    ) -> None:
        self._table = table
        self._fleet = fleet
        self._feeds = feeds
        self._down = down
        self._monotonic = monotonic
        # since when each feed is not what it should be
        self._since: dict[tuple[str, int], float] = {}

    def faults(self) -> Iterator[Fault | None]:
        """Yields what is wrong now; of a worker that does not answer only that."""
        before, self._since = self._since, {}
        for number, worker in enumerate(list(self._table), 1):
            if number % WORKERS_AT_ONCE == 0:
                yield None
            if worker.is_draining or worker.sighting.excluded:
                continue
            about = f"worker {worker.name}"
            if worker.other_endpoints:
                others = ", ".join(worker.other_endpoints[:3])
                says = f"its name leads to {others} as well, which get nothing: all its requests"
                yield Fault("worker-several-addresses", about, f"{says} go to {worker.endpoint}")
            down = self._down(worker.endpoint)
            if down:
                yield Fault("worker-down", about, f"it gets no requests: {down}")
                continue
            yield from self._of_feeds(worker, about, before)
            yield from self._of_blocks(worker, about)

    def _of_feeds(
        self, worker: Worker, about: str, before: dict[tuple[str, int], float]
    ) -> Iterator[Fault]:
        if not self._feeds.enabled or worker.sighting.worker.events is None:
            return
        lag_seconds = self._fleet.feeds.lag_seconds(worker.name)
        if lag_seconds > MAX_LAG_SECONDS:
            says = f"its last events were stamped {lag_seconds:.0f} s before they came"
            yield Fault("clock-differs", about, f"{says}: a clock is wrong, or they are held up")
        if self._fleet.feeds.state(worker.name) is FeedState.LIVE:
            return  # the usual case
        statuses = self._fleet.feeds.statuses(worker.name)
        if not statuses and self._lasts((worker.name, -1), before):
            yield Fault("feed-not-live", about, f"it has no feed: {self._feeds.reason(worker)}")
        for one in statuses:
            is_late = one.state is not FeedState.LIVE
            if is_late and self._lasts((worker.name, one.rank), before):
                whose = f"its feed of rank {one.rank}" if len(statuses) > 1 else "its feed"
                why = f"{whose} is {one.state.value}: {one.reason or 'not connected yet'}"
                is_degraded = one.state is FeedState.DEGRADED
                yield Fault("feed-degraded" if is_degraded else "feed-not-live", about, why)

    def _lasts(self, feed: tuple[str, int], before: dict[tuple[str, int], float]) -> bool:
        """Returns whether a feed has not been live for long."""
        now = self._monotonic()
        since = self._since[feed] = before.get(feed, now)
        return now - since >= PATIENCE_SECONDS

    def _of_blocks(self, worker: Worker, about: str) -> Iterator[Fault]:
        """Yields a fault if the blocks that a feed announces have another size than configured."""
        configured = worker.sighting.worker.block_size
        announced = self._fleet.blocks.block_size(worker.name)
        if None not in (configured, announced) and configured != announced:
            says = f"its blocks have {announced} tokens, but block_size says {configured}"
            yield Fault("block-size-differs", about, f"{says}; the events count")


def discovery_faults(status: list[dict[str, Any]]) -> Iterator[Fault]:
    """Yields a fault for each source of workers that failed. status: as GET /discovery shows it."""
    for one in status:
        if one["fault"]:
            says = f"{one['fault']}; its last list of workers is used"
            yield Fault("discovery-fault", f"discovery {one['source']}", says)
