"""Which requests could be keyed, by API, and why the others could not.

A request is keyed if its tokens are known; of others, only texts are compared, or load decides.
"""

from collections import Counter, defaultdict
from typing import Any

from extproc.observing.recent_counts import RecentCounts
from extproc.requests import (
    chat_request,
    completion_request,
    messages_request,
    responses_request,
)
from extproc.requests.request import NOT_INFERENCE

# The names of APIs; all others are one.
APIS = {
    chat_request.PATH: "chat",
    messages_request.PATH: "messages",
    responses_request.PATH: "responses",
    completion_request.PATH: "completions",
}
OTHER = "other"

# The outcome of a request that was keyed; else it is the reason why not.
KEYED = "keyed"


class KeyedCounts:
    """Requests by API and outcome. total: since the router started."""

    def __init__(self) -> None:
        self.total: Counter[tuple[str, str]] = Counter()
        self._recent = RecentCounts[tuple[str, str]]()

    def count(self, path: str, reason: str, at: float, count: int, *, is_keyed: bool) -> None:
        """Counts decisions of one minute that are alike.

        at: seconds of one monotonic clock, which never goes back by a minute or more.
        """
        if reason != NOT_INFERENCE:
            alike = {(APIS.get(path, OTHER), KEYED if is_keyed else reason): count}
            self.total.update(alike)
            self._recent.add(alike, at)

    def recent(self, now: float) -> list[dict[str, Any]]:
        """Returns an entry of GET /apis for each API of the last 15 minutes.

        reasons: why requests were not keyed, with their number, the most frequent first.
        """
        by_api: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for (api, outcome), count in self._recent.total(now).items():
            by_api[api][outcome] += count
        shown = []
        for api in (*APIS.values(), OTHER):
            outcomes = by_api.get(api)
            if outcomes is not None:
                requests, keyed = outcomes.total(), outcomes.pop(KEYED, 0)
                reasons = dict(outcomes.most_common())
                shown.append({"api": api, "requests": requests, "keyed": keyed, "reasons": reasons})
        return shown
