"""How many media items of requests prompts are keyed with, by kind."""

from collections import Counter
from typing import Any

from extproc.observing.recent_counts import RecentCounts
from extproc.routing.inputs.query import Media


def shares_of(media: Media) -> Counter[tuple[str, bool]]:
    """Returns how many items of a request are keyed, and are not, by kind.

    Keyed are those up to the first that is not known.
    """
    is_keyed, counts = True, Counter[tuple[str, bool]]()
    for item in media.items:
        is_keyed = is_keyed and item.is_known
        counts[item.kind, is_keyed] += 1
    return counts


def shown(recent: RecentCounts[tuple[str, bool]], now: float) -> list[dict[str, Any]]:
    """Returns the answer of GET /media: an entry for each kind of the last 15 minutes."""
    counts = recent.total(now)
    kinds = sorted({kind for kind, _ in counts})
    return [
        {
            "kind": kind,
            "items": counts[kind, True] + counts[kind, False],
            "keyed": counts[kind, True],
        }
        for kind in kinds
    ]
