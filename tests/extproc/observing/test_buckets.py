from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.observing.buckets import Buckets, TracedValue


def test_bucket_includes_its_bound() -> None:
    buckets = Buckets([1, 2])
    for value in (1, 1.5, 2, 3):
        buckets.observe(value)
    assert buckets.cumulative() == [("1.0", 1, None), ("2.0", 3, None), ("+Inf", 4, None)]
    assert buckets.total == 7.5


def test_bucket_shows_its_last_traced_observation() -> None:
    buckets = Buckets([1])
    seen = TracedValue("4bf9", 5.0, 12.0)
    buckets.observe(5.0)
    buckets.show(TracedValue("before", 2.0, 11.0))
    buckets.show(seen)
    assert buckets.cumulative() == [("1.0", 0, None), ("+Inf", 1, seen)]


@given(st.lists(st.floats(0, 10)), st.sets(st.floats(0, 10), max_size=32).map(sorted))
def test_bucket_counts_all_values_up_to_its_bound(values: list[float], bounds: list[float]) -> None:
    buckets, at_once = Buckets(bounds), Buckets(bounds)
    for value in values:
        buckets.observe(value)
    at_once.observe_all(list(values))
    assert at_once.counts == buckets.counts
    assert at_once.total == pytest.approx(buckets.total)
    counts = [count for _, count, _ in buckets.cumulative()]
    assert counts == [sum(value <= bound for value in values) for bound in bounds] + [len(values)]
    assert len(buckets.counts) == bisect_left(bounds, float("inf")) + 1


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 10))))
def test_span_is_counted_by_its_length(spans: list[tuple[int, int]]) -> None:
    at_once, one_by_one = Buckets([1, 5]), Buckets([1, 5])
    at_once.observe_spans([start for start, _ in spans], [end for _, end in spans])
    for start, end in spans:
        one_by_one.observe(end - start)
    assert at_once.cumulative() == one_by_one.cumulative()
    assert at_once.total == one_by_one.total
