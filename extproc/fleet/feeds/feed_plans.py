"""Which feed of a worker should be followed."""

from extproc.base import address
from extproc.config.feed_kinds import at_address
from extproc.config.schema import AUTO, WorkerEvents
from extproc.fleet.records.worker import FeedPlan, Worker


def feed_plan(worker: Worker, model: str | None) -> FeedPlan | None:
    """Returns a worker's feed as it should be followed, None if it has none.

    model: that the worker serves. None also if that is unknown, or its host name is not resolved.
    """
    found, upstream = worker.sighting, worker.upstream
    events = found.worker.events
    if not model or upstream is None:
        return None
    if events != AUTO and not isinstance(events, WorkerEvents):
        return None
    if worker.place.is_ip:
        return FeedPlan(model, events, found.identity, found.adapters)
    host = address.parse(upstream.endpoint).host
    if isinstance(events, WorkerEvents):
        events = at_address(events, worker.place.host, host)
    return FeedPlan(model, events, found.identity, found.adapters, host)
