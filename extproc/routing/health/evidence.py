"""What speaks against an endpoint: the evidence of each judge, and the rule by which it ejects."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Judge(IntEnum):
    """What can eject an endpoint; the lowest one's reason is shown. None clears another's.

    SLEEP: its metrics say that its engine sleeps. PROBE: its regular health probe. SCRAPES: whether
    it answers when its metrics are read. DOUBTS: the probe of a worker in doubt. ANSWERS: the
    status of its answers to requests.
    """

    SLEEP = 0
    PROBE = 1
    SCRAPES = 2
    DOUBTS = 3
    ANSWERS = 4


class Rule(NamedTuple):
    """When a judge ejects an endpoint, and for how long.

    failures: this many in a row eject it. seconds: how long it is ejected the first time; twice as
    long each time it fails again right afterwards, up to max_seconds. If infinite, only an answer
    ends it. forget_seconds: this long after the last failure, all failures are forgotten.
    """

    failures: int
    seconds: float = math.inf
    max_seconds: float = math.inf
    forget_seconds: float = math.inf


RULES: Mapping[Judge, Rule] = {
    Judge.SLEEP: Rule(1),
    Judge.PROBE: Rule(2),
    Judge.SCRAPES: Rule(3),
    Judge.DOUBTS: Rule(2),  # one is enough if it is certain
    # as many failures as for Envoy's outlier detection
    Judge.ANSWERS: Rule(5, seconds=1.0, max_seconds=30.0, forget_seconds=90.0),
}


@dataclass(slots=True)
class Evidence:
    """What one judge has against an endpoint. Times are seconds of one monotonic clock.

    rule: the judge's. failures: in a row. forgotten_at: until then they count. seconds: how long
    the last ejection takes; 0 if there was none. until: when that ends. reason: why it was ejected.
    """

    rule: Rule
    failures: int = 0
    forgotten_at: float = math.inf
    seconds: float = 0.0
    until: float = -math.inf
    reason: str = ""

    def note_failure(self, now: float) -> bool:
        """Counts a failure; returns whether there are enough of them to eject the endpoint."""
        self.failures += 1
        self.forgotten_at = now + self.rule.forget_seconds
        return self.failures >= self.rule.failures

    def eject(self, reason: str, now: float) -> float:
        """Ejects the endpoint by the judge's rule; returns for how many seconds."""
        self.seconds = min(self.rule.max_seconds, 2.0 * self.seconds or self.rule.seconds)
        self.until, self.reason = now + self.seconds, reason
        return self.seconds
