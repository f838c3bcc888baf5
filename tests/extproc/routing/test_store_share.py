"""What share of a store's tokens a worker is expected to load."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.store_share import FADING_SECONDS, MOST_TOKENS, PRIOR_TOKENS, StoreShare

AMOUNTS = st.integers(-10, 2 * MOST_TOKENS)


def test_worker_that_loads_nothing_is_believed_less_and_tried_again_later() -> None:
    share = StoreShare()
    assert share.share(0.0) == 1.0
    for at in range(20):
        share.note(10_000, 0, float(at))
    assert share.share(20.0) < 0.12
    assert share.share(20.0 + 10 * FADING_SECONDS) > 0.99


def test_worker_that_loads_half_counts_by_half() -> None:
    share = StoreShare()
    for _ in range(100):
        share.note(10_000, 5_000, 5.0)
    assert share.share(5.0) == pytest.approx(0.5, abs=0.02)
    expected = {"share": 0.51, "offered_tokens": 1_000_000, "loaded_tokens": 500_000}
    assert share.as_json(5.0) == expected


def test_one_request_counts_only_so_much() -> None:
    share = StoreShare()
    share.note(100 * MOST_TOKENS, 0, 0.0)
    assert share.share(0.0) == PRIOR_TOKENS / (MOST_TOKENS + PRIOR_TOKENS)


@given(st.lists(st.tuples(AMOUNTS, AMOUNTS, st.floats(-1e6, 1e6)), max_size=20))
def test_share_is_above_zero_and_at_most_one(notes: list[tuple[int, int, float]]) -> None:
    share = StoreShare()
    for offered, loaded, now in notes:
        share.note(offered, loaded, now)
        assert 0.0 < share.share(now) <= 1.0
