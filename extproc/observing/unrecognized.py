"""Requests that may call a model, but whose paths are no known API's: nothing of them is steered.

Envoy rewrites paths behind the router, or an engine has an API that the router does not know.
"""

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.base.fault import ROUTER, Fault

# There is a fault if so many of the latest requests with a body were not recognized: more than a
# fifth.
LATEST = 60
TOO_MANY = 13

# After this time without one, the latest say nothing of what comes now.
SECONDS = 600.0

# What is shown of a path: words are, what may be somebody's name or id is not.
MAX_CHARACTERS = 80
_WORD = re.compile(r"v[0-9]+[a-z]*|[a-z]+(?:[._-][a-z]+)*")
_MAX_WORD_CHARACTERS = 24


def shape_of(path: str) -> str:
    """Returns what may be shown of a path: its plain words; `*` for each other part."""
    parts = path[: 4 * MAX_CHARACTERS].split("/")
    shown = [
        one if not one or (len(one) <= _MAX_WORD_CHARACTERS and _WORD.fullmatch(one)) else "*"
        for one in parts
    ]
    return "/".join(shown)[:MAX_CHARACTERS]


class UnrecognizedRequests:
    """Counts these requests.

    calls: returns how many requests were taken for a model's call so far. monotonic: seconds.
    total: since the router started.
    """

    def __init__(self, calls: Callable[[], int], monotonic: Callable[[], float]) -> None:
        self._calls = calls
        self._monotonic = monotonic
        self._latest: deque[tuple[int, str]] = deque(maxlen=TOO_MANY)
        self._noted_at = 0.0
        self.total = 0

    def note(self, path: str) -> None:
        """Notes one more, with its path."""
        self.total += 1
        self._noted_at = self._monotonic()
        self._latest.append((self._calls() + self.total, shape_of(path)))

    def faults(self) -> Iterator[Fault]:
        """Yields a fault while too many of the latest requests are not recognized."""
        if len(self._latest) < TOO_MANY or self._monotonic() - self._noted_at > SECONDS:
            return
        since = self._calls() + self.total - self._latest[0][0]
        if since < LATEST:
            ((path, _),) = Counter(path for _, path in self._latest).most_common(1)
            yield Fault(
                "paths-unrecognized",
                ROUTER,
                f"{TOO_MANY} of the last {since + 1} requests with a body have paths of no known"
                f" API, most of them {path}: they are not steered",
            )


class UnrecognizedCollector(Collector):
    """Shows their number at every scrape."""

    def __init__(self, unrecognized: UnrecognizedRequests) -> None:
        self._unrecognized = unrecognized

    def collect(self) -> Iterator[Metric]:
        """Yields the metric family."""
        yield CounterMetricFamily(
            "kvsteer_unrecognized_requests",
            "Requests with a body that may call a model, but whose paths are no known API's",
            value=self._unrecognized.total,
        )
