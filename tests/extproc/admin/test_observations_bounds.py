"""What the admin page keeps is bounded and shows no tokens, whatever requests come."""

import json

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.admin.prefixes import RecentPrompts, prefixes, spread
from extproc.admin.recent import RecentDecisions, summary
from kvstate.overlap import Overlap
from tests.extproc.admin.decisions import decided, prompt

FIRST_TOKEN = 4_000_000_000  # a number that nothing else has


@given(st.lists(st.integers(0, 30), max_size=30), st.integers(0, 6), st.integers(0, 60))
def test_prompts_stay_within_their_limits_and_keep_the_newest(
    lengths: list[int], most: int, most_tokens: int
) -> None:
    prompts = RecentPrompts(most, most_tokens)
    for number, length in enumerate(lengths):
        prompts.add(prompt(range(number, number + length)))
        kept = [len(one.tokens) for one in prompts.all()]
        assert len(kept) <= most
        assert sum(kept) <= most_tokens
        assert kept == lengths[: number + 1][number + 1 - len(kept) :]


@given(st.lists(st.integers(1, 9), max_size=30), st.integers(1, 6), st.integers(1, 30))
def test_recent_stays_within_its_limits_or_holds_the_newest_alone(
    sizes: list[int], most: int, candidates: int
) -> None:
    recent, some = RecentDecisions(most, candidates), decided()
    for at, size in enumerate(sizes):
        recent.add(
            replace(some, basis=replace(some.basis, workers=[some.basis.workers[0]] * size)), at
        )
        kept = [len(one.decision.basis.workers) for one in recent.newest_after(0)]
        assert len(kept) <= most
        assert sum(kept) <= candidates or len(kept) == 1
        assert kept == sizes[: at + 1][at + 1 - len(kept) :]


@given(st.lists(st.lists(st.integers(0, 2), min_size=16, max_size=20), max_size=6))
def test_prefixes_and_decisions_show_no_tokens(texts: list[list[int]]) -> None:
    asked = [prompt([FIRST_TOKEN + one for one in text]) for text in texts]
    recent = RecentDecisions()
    recent.add(decided({"a:1": Overlap(16, (1, 0, 0, 0), 0)}), 0.0)
    answer = [
        spread(one, {"a:1": Overlap(16, (1, 0, 0, 0), 0)}, 9) for one in prefixes(asked, 7, 99)
    ]
    shown = json.dumps([answer, *map(summary, recent.newest_after(0))])
    assert not any(str(FIRST_TOKEN + one) in shown for one in range(3))
    assert bool(answer) == bool(texts)
