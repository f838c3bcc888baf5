"""The tokens that a worker's cache saved in the last hour."""

from hypothesis import given
from hypothesis import strategies as st

from extproc.observing.saved_tokens import SavedTokens

NOTES = st.lists(st.tuples(st.floats(0, 4_000), st.integers(0, 10_000)), max_size=30)


@given(NOTES, st.floats(0, 10_000))
def test_total_has_the_tokens_of_the_last_hour_to_the_minute(
    notes: list[tuple[float, int]], start: float
) -> None:
    saved, now, sent = SavedTokens(), start, list[tuple[float, int]]()
    for after, tokens in notes:
        now += after
        saved.note(tokens, now)
        sent.append((now, tokens))
    surely = sum(tokens for at, tokens in sent if now - at < 3_540)
    most = sum(tokens for at, tokens in sent if now - at <= 3_600)
    assert surely <= saved.total(now) <= most
    assert saved.total(now + 3_661) == 0


def test_clock_that_stands_still_or_goes_back_loses_nothing() -> None:
    saved = SavedTokens()
    for now in (100.0, 100.0, 30.0):
        saved.note(5, now)
    assert saved.total(30.0) == 15
