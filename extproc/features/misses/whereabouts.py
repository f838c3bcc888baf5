"""What became of the tokens that a worker held of a conversation, and why it went elsewhere."""

from collections.abc import Callable, Mapping

from extproc.features.misses.growth import Growth, most_of
from extproc.features.misses.last_prompts import Sent
from extproc.features.misses.partition import Cause
from extproc.features.misses.verdicts import clock_time
from extproc.routing.claims.claim_table import Holdings
from extproc.routing.decision import Decision
from kvstate.events import Loss
from kvstate.overlap import Prompt

_OF_LOSS = {Loss.RESTARTED: Cause.RESTARTED, Loss.CLEARED: Cause.CLEARED}

# Returns when a worker last removed the block of a prompt behind so many of its blocks.
RemovedAt = Callable[[str, Prompt, int], float | None]


def why_gone(
    last: Sent,
    prompt: Prompt,
    held: int,
    block: int,
    record: Holdings | None,
    removed_at: RemovedAt,
    growth: Mapping[str, Growth],
    since_epoch: float,
) -> tuple[Cause, str]:
    """Returns why a worker no longer holds what it got of a conversation, and more in words.

    last: where the conversation's last prompt went. held: how many tokens of the new one it still
    holds. record: the worker's, None if it is no longer among the workers. since_epoch: the seconds
    from 1970 to the beginning of the monotonic clock.
    """
    if record is None:
        return Cause.GONE, f"{last.worker} is no longer among the workers"
    if record.lost_at >= last.at:
        return _lost(last, record, since_epoch)
    at = removed_at(last.worker, prompt, held // block)
    if at is not None and at >= last.at:
        came = growth[last.worker].since(last.at) if last.worker in growth else None
        words = [f"by {last.worker} at {clock_time(at + since_epoch)} UTC"]
        words += filter(None, [most_of(came)] if came is not None else [])
        return Cause.EVICTED, "; ".join(words)
    if not last.is_stored:
        return Cause.NOT_STORED, ""
    return Cause.UNKNOWN, "" if at is None else "it was removed before the last turn"


def _lost(last: Sent, record: Holdings, since_epoch: float) -> tuple[Cause, str]:
    if record.lost_by is None:
        return Cause.GONE, f"{last.worker} was given up as dead"
    when = clock_time(record.lost_at + since_epoch)
    return _OF_LOSS[record.lost_by], f"{last.worker}, {when} UTC"


def why_elsewhere(decision: Decision, before: str, worker: str) -> str:
    """Returns why a request did not go to the worker that got the one before it, in words.

    before: that worker. worker: the one that answered.
    """
    if worker != decision.worker:
        return f"the proxy sent it to {worker}; the pick was {decision.worker}"
    basis = decision.basis
    names = [one.name for one in basis.workers]
    if before not in names:
        return f"{before} is no longer among the workers"
    at = names.index(before)
    if basis.excluded[at]:
        return f"{before} was left out: {basis.excluded[at]}"
    if decision.worker not in names:
        return ""
    theirs, ours = basis.costs[at], basis.costs[names.index(decision.worker)]
    if theirs is None or ours is None:
        return f"{before} was not compared"
    return (
        f"{before} had more to do: a cost of {theirs:,.0f} tokens there,"
        f" {ours:,.0f} at {decision.worker}"
    )
