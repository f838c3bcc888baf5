"""What live conversations need of the caches, and who waits for room: GET /contexts."""

from collections.abc import Iterator
from itertools import islice
from math import inf
from typing import Any

from extproc.fleet.workers import Workers
from extproc.routing.claims.claim_table import Holdings
from extproc.routing.claims.line import Line
from extproc.routing.claims.occupancy import Occupancy, occupancy_of
from extproc.serving.router import Router

# Most places of a line that are shown, the first ones.
MOST_PLACES = 20


def contexts_of(router: Router, workers: Workers) -> Iterator[dict[str, Any]]:
    """Yields an entry for each model of which it is known what its caches hold."""
    now, lines = workers.monotonic(), router.ledger.lines
    for one in workers.engines.verifying.models_as_json():
        model = one["model"]
        known = known_caches(workers, model)
        occupancy = occupancy_of(known, now)
        if occupancy is None:
            continue
        more, share = occupancy.missing_workers(len(known)), router.recomputed_share(model)
        line, limit = lines.find(model), lines.limit(model)
        yield {
            "model": model,
            "live_tokens": round(occupancy.live),
            "needed_tokens": round(occupancy.needed),
            "cache_tokens": round(occupancy.room),
            "recomputed_share": None if share is None else round(share, 3),
            "more_workers": more,
            "hold_limit": None if limit == inf else round(limit, 3),
            "waiting": 0 if line is None else len(line),
            "places": [] if line is None else list(_places(line, now)),
            "says": said(occupancy, share, more, line, now),
        }


def known_caches(workers: Workers, model: str) -> list[Holdings]:
    """Returns the records of a model's workers that say how large their caches are."""
    candidates = workers.candidates
    names = [one.name for one in candidates.list_for(model) if not one.excluded]
    records = map(candidates.holdings, names)
    return [one for one in records if one.capacity_tokens]


def _places(line: Line, now: float) -> Iterator[dict[str, Any]]:
    for one in islice(line.known(now), MOST_PLACES):
        yield {
            "conversation": f"{one.key:016x}",
            "tokens": round(one.tokens),
            "seconds": round(one.waited_seconds, 1),
            "is_away": one.is_away,
        }


def said(
    occupancy: Occupancy, recomputed: float | None, more: int, line: Line | None, now: float
) -> str:
    """Returns what an operator is told, "" if no conversation lives."""
    if not occupancy.live:
        return ""
    parts = [f"live contexts fill {occupancy.live / occupancy.room:.0%} of the caches"]
    if recomputed:
        again = f"{recomputed:.0%} of the prompt tokens of 15 minutes"
        parts.append(f"{again} were evicted or left, and computed again")
    if more:
        workers = "worker" if more == 1 else "workers"
        needed = f"those that return need {occupancy.needed / occupancy.room:.0%}"
        parts.append(f"{needed}: {more} more {workers} would hold them")
    waits = [] if line is None else [now - one.order[-1] for one in line.waiting()]
    if waits:
        requests = "request waits" if len(waits) == 1 else "requests wait"
        parts.append(f"{len(waits)} {requests} for room, the longest for {max(waits):.0f} s")
    return "; ".join(parts)
