from array import array
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from extproc.features.misses.last_prompts import (
    MOST_ALIKE,
    MOST_ENDS,
    LastPrompt,
    LastPrompts,
    Sent,
)

MIB = 1024 * 1024


def a_prompt(tokens: int = 10) -> LastPrompt:
    return LastPrompt(0, array("I", range(tokens)), Sent("w", 1.0))


def test_conversation_is_found_by_the_ends_of_its_last_prompts() -> None:
    prompts = LastPrompts(MIB)
    one = prompts.begin(a_prompt(10), 77)
    prompts.go_on(one, array("I", range(20)), Sent("v", 2.0), 78)
    assert prompts.ended_by(78) == (one, 20)
    assert prompts.ended_by(77) == (one, 10)
    assert (one.sent.worker, one.sent.at, one.turns) == ("v", 2.0, 2)
    assert prompts.ended_by(5) is None


def test_only_the_latest_ends_of_a_conversation_are_known() -> None:
    prompts = LastPrompts(MIB)
    one = prompts.begin(a_prompt())
    for key in (*range(1, MOST_ENDS + 2), MOST_ENDS + 1, 0):
        prompts.go_on(one, one.tokens, one.sent, key)
    assert prompts.ended_by(1) is None
    assert len(one.ends) == MOST_ENDS


def test_an_end_belongs_to_who_reached_it_last() -> None:
    prompts = LastPrompts(MIB)
    one, other = prompts.begin(a_prompt(), 7), prompts.begin(a_prompt(), 7)
    for key in range(10, 10 + MOST_ENDS):
        prompts.go_on(one, one.tokens, one.sent, key)
    assert prompts.ended_by(7) == (other, 10)


def test_conversations_with_a_name_are_found_the_latest_first() -> None:
    prompts = LastPrompts(MIB)
    made = [prompts.begin(a_prompt()) for _ in range(MOST_ALIKE + 2)]
    for one in made:
        prompts.note_names(one, [5, one.number])
    assert list(prompts.find_alike([5, made[-1].number])) == made[:1:-1]
    prompts.note_names(made[-1], [600])
    assert made[-1] not in prompts.find_alike([5])
    assert list(prompts.find_alike([600])) == [made[-1]]


def test_conversation_that_was_silent_for_longest_is_dropped_first() -> None:
    prompts = LastPrompts(10 * a_prompt(1000).size_bytes)
    made = []
    for key in range(1, 13):
        one = prompts.begin(a_prompt(1000), key)
        prompts.note_names(one, [100, key])
        made.append(one)
        prompts.go_on(made[0], made[0].tokens, made[0].sent, 0)
    assert prompts.ended_by(1) == (made[0], 1000)
    assert prompts.ended_by(2) is None
    assert not list(prompts.find_alike([2]))
    assert prompts.dropped > 0
    prompts.note_names(made[1], [55])
    prompts.go_on(made[1], made[1].tokens, made[1].sent, 55)
    assert prompts.ended_by(55) is None


def test_conversation_with_other_tools_in_between_goes_on_as_before() -> None:
    prompts = LastPrompts(MIB)
    one = prompts.begin(a_prompt(10), 77)
    prompts.note_names(one, [5])
    summary, later = a_prompt(12), a_prompt(14)
    prompts.change(summary, 78, one)
    prompts.note_names(summary, [5])
    assert (summary.conversation, summary.turns) == (one.number, 2)
    assert prompts.ended_by(77) == (one, 10)
    assert list(prompts.find_alike([5])) == [summary, one]
    prompts.change(later, 79, summary)
    assert len(prompts) == 2
    assert prompts.ended_by(77) is None
    prompts.change(a_prompt(20), 80, one)
    small = LastPrompts(2 * a_prompt(10).size_bytes)
    grows = small.begin(a_prompt(10))
    small.go_on(grows, a_prompt(5_000).tokens, grows.sent, 81)
    assert (len(small), small.dropped, small.bytes) == (0, 1, 0)
    assert later.conversation == one.number


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "go on", "end", "name", "change"]),
        st.integers(0, 5),
        st.integers(0, 3_000),
    )
)


@given(ACTS)
def test_memory_is_counted_and_bounded_whatever_comes(acts: list[tuple[str, int, int]]) -> None:
    prompts = LastPrompts(40_000)
    made = [prompts.begin(a_prompt(3))]
    for act, which, number in acts:
        one = made[which % len(made)]
        if act == "begin":
            made.append(prompts.begin(a_prompt(number)))
        elif act == "go on":
            prompts.go_on(one, array("I", range(number)), one.sent, 0)
        elif act == "end":
            prompts.go_on(one, one.tokens, one.sent, number % 7)
        elif act == "change":
            made.append(a_prompt(number))
            prompts.change(made[-1], number % 7, one)
        else:
            prompts.note_names(one, [number % 5, number % 3])
        known = {one.number: one for key in range(5) for one in prompts.find_alike([key])}
        ended = [found[0] for key in range(7) if (found := prompts.ended_by(key))]
        known |= {one.number: one for one in ended}
        assert sum(one.size_bytes for one in known.values()) <= prompts.bytes <= 40_000
        assert len(known) <= len(prompts)
        assert all(len(one.ends) <= MOST_ENDS for one in known.values())


@given(st.lists(st.integers(0, 2), max_size=60))
def test_under_a_name_only_the_latest_conversations_are_known(named: list[int]) -> None:
    prompts, latest = LastPrompts(MIB), defaultdict[int, list[LastPrompt]](list)
    for name in named:
        latest[name].append(prompts.begin(a_prompt()))
        prompts.note_names(latest[name][-1], [name])
    for name, made in latest.items():
        assert list(prompts.find_alike([name])) == made[: -MOST_ALIKE - 1 : -1]
