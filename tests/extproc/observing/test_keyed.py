from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from extproc.observing.keyed import (
    KEYED,
    OTHER,
    KeyedCounts,
)
from extproc.observing.recent_counts import MINUTE_SECONDS, RECENT_MINUTES
from extproc.requests.request import NOT_INFERENCE

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
RECENT_SECONDS = MINUTE_SECONDS * RECENT_MINUTES


def test_requests_are_counted_by_api_and_outcome() -> None:
    counts = KeyedCounts()
    counts.count(CHAT, "overlap", 1.0, 1, is_keyed=True)
    counts.count(CHAT, "no_body", 2.0, 2, is_keyed=False)
    counts.count("/generate", "nothing_cached", 3.0, 1, is_keyed=True)
    counts.count("/v1/models", NOT_INFERENCE, 3.0, 1, is_keyed=False)
    assert counts.total == {("chat", KEYED): 1, ("chat", "no_body"): 2, (OTHER, KEYED): 1}


def test_recent_has_the_most_frequent_reason_first() -> None:
    counts = KeyedCounts()
    for reason, count in (("no_body", 1), ("deadline", 2)):
        counts.count(MESSAGES, reason, 1.0, count, is_keyed=False)
    counts.count(CHAT, "policy_random", 1.0, 1, is_keyed=True)
    assert counts.recent(2.0) == [
        {"api": "chat", "requests": 1, "keyed": 1, "reasons": {}},
        {"api": "messages", "requests": 3, "keyed": 0, "reasons": {"deadline": 2, "no_body": 1}},
    ]
    assert list(counts.recent(2.0)[1]["reasons"]) == ["deadline", "no_body"]


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 3 * RECENT_SECONDS)), max_size=60))
def test_recent_counts_at_least_the_last_fourteen_minutes(
    requests: list[tuple[bool, float]],
) -> None:
    counts = KeyedCounts()
    requests.sort(key=lambda one: one[1])
    for is_keyed, at in requests:
        counts.count(CHAT, "no_body", at, 1, is_keyed=is_keyed)
    now = requests[-1][1] if requests else 0.0
    shown = counts.recent(now)
    found = shown[0]["requests"] if shown else 0
    ages = Counter(now - at < RECENT_SECONDS - MINUTE_SECONDS for _, at in requests)
    within = sum(now - at <= RECENT_SECONDS for _, at in requests)
    assert ages[True] <= found <= within
    assert counts.total.total() == len(requests)
    assert counts.recent(now + RECENT_SECONDS + MINUTE_SECONDS) == []
