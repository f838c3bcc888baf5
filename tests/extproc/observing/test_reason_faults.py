from collections import Counter

import pytest

from extproc.base.fault import KINDS
from extproc.observing.reason_faults import CODES, LEAST, MINUTE_SECONDS, ReasonFaults


class Traffic:
    """Requests, some of which are placed for a reason, looked at every five seconds."""

    def __init__(self, reason: str = "unknown_model") -> None:
        self.calls, self.now, self.reason = 0, 100.0, reason
        self.counts: Counter[str] = Counter()
        self.seen = ReasonFaults(lambda: self.calls, self.counts.__getitem__, lambda: self.now)
        assert not [*self.seen.faults()]

    def passing(self, calls: int, such: int, seconds: float = 5.0) -> str:
        self.calls += calls
        self.counts[self.reason] += such
        self.now += seconds
        return "".join(str(one) for one in self.seen.faults())


def test_more_than_a_fifth_of_a_minute_is_a_fault() -> None:
    said = Traffic().passing(LEAST, LEAST // 5 + 1)
    assert said.startswith("5 of the last 20 requests name a model that is not configured")


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("body_not_buffered", "came without their bodies"),
        ("unsupported_compression", "have compressed bodies"),
        ("deadline", "were not tokenized in time"),
        ("template_too_slow", "were not tokenized in time"),
    ],
)
def test_reasons_say_what_is_wrong(reason: str, says: str) -> None:
    assert says in Traffic(reason).passing(LEAST, LEAST)


def test_usual_reasons_are_no_faults() -> None:
    assert not Traffic("nothing_cached").passing(LEAST, LEAST)
    assert set(CODES) <= KINDS.keys()


def test_looks_at_short_intervals_add_up() -> None:
    traffic = Traffic()
    said = [traffic.passing(1, 1, 0.5) for _ in range(LEAST)]
    assert not any(said[:-1])
    assert said[-1]


def test_a_fifth_or_few_requests_are_none() -> None:
    assert not Traffic().passing(LEAST, LEAST // 5)
    assert not Traffic().passing(LEAST - 1, LEAST - 1)


def test_fault_ends_a_minute_after_the_requests() -> None:
    traffic = Traffic()
    assert traffic.passing(LEAST, LEAST)
    assert traffic.passing(0, 0)
    for _ in range(int(MINUTE_SECONDS / 5) + 1):
        said = traffic.passing(0, 0)
    assert not said


def test_requests_before_a_long_pause_are_forgotten() -> None:
    traffic = Traffic()
    assert traffic.passing(LEAST, LEAST)
    assert not traffic.passing(0, 0, 10 * MINUTE_SECONDS)
