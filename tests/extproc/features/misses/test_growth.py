from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from extproc.features.misses.growth import (
    MOST_SENDERS,
    OTHERS,
    SPAN_SECONDS,
    SPANS,
    Growth,
    most_of,
)
from extproc.features.misses.sender import Sender

CLAUDE, CODEX = Sender("m", "claude-cli", ""), Sender("m", "codex", "")


def test_what_came_since_a_time_is_counted_by_sender() -> None:
    growth = Growth()
    growth.add(CODEX, 500, 10.0)
    growth.add(CLAUDE, 3_000, 40.0)
    growth.add(CODEX, 1_000, 70.0)
    assert growth.since(35.0) == {CLAUDE: 3_000, CODEX: 1_000}
    assert growth.since(0.0)[CODEX] == 1_500
    assert most_of(growth.since(35.0)) == (
        "since then 4,000 new tokens came there, 75% of them from claude-cli"
    )
    assert most_of(Counter()) == ""


def test_sender_counts_once_whatever_its_models() -> None:
    other = Sender("another", "codex", "")
    came = Counter({CODEX: 300, other: 300, CLAUDE: 400})
    assert most_of(came).endswith("60% of them from codex")


@given(st.lists(st.tuples(st.integers(0, 3 * MOST_SENDERS), st.floats(0, 3 * 3_600)), max_size=300))
def test_growth_is_bounded(came: list[tuple[int, float]]) -> None:
    growth = Growth()
    for sender, now in sorted(came, key=lambda one: one[1]):
        growth.add(Sender("m", str(sender), ""), 1, now)
    found = growth.since(0.0)
    assert len(found) <= SPANS * (MOST_SENDERS + 1)


def test_too_many_senders_count_as_one() -> None:
    growth = Growth()
    for sender in range(MOST_SENDERS + 5):
        growth.add(Sender("m", str(sender), ""), 2, 1.0)
    assert growth.since(0.0)[OTHERS] == 10
    growth.add(CODEX, 1, SPAN_SECONDS * (SPANS + 2))
    assert growth.since(0.0) == {CODEX: 1}
