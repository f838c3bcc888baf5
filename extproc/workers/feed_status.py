"""A feed as GET /workers shows it."""

from typing import Any

import msgspec

from kvstate.fleet import FeedStatus, ReportedLoad


def feed_shown(status: FeedStatus) -> dict[str, Any]:
    """One rank's feed."""
    return {
        "rank": status.rank,
        "state": status.state.value,
        "reason": status.reason,
        "last_sequence": status.last_sequence,
        "blocks": status.blocks,
        "uncertain_blocks": status.uncertain_blocks,
        "orphans": status.orphans,
        "gaps": status.gaps,
        "replays": status.replays,
        "restarts": status.restarts,
        "lag_seconds": round(status.lag_seconds, 6),
        "load": None if status.load is None else _load(status.load),
        "counts": dict(status.counts),
    }


def _load(reported: ReportedLoad) -> dict[str, Any]:
    return {**msgspec.to_builtins(reported.load), "age_seconds": round(reported.age_seconds, 3)}
