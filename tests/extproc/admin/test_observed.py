from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.admin.observed import (
    KEPT_AT_ONCE,
    KEPT_PER_SECOND,
    LEADING_TOKENS,
    LEAST_TOKENS,
    Figures,
    History,
    Kept,
    Observed,
    Prompts,
    Recent,
    held_on_average,
    prefixes,
    spread,
    summary,
)
from extproc.picking.decision import Split
from kvstate.overlap import Overlap, Prompt
from tests.extproc.admin.decisions import decided, prompt


class Clock:
    """Stands still until it is set."""

    at = 5.0

    def __call__(self) -> float:
        return self.at


HELD = {"a:1": Overlap(16, (1, 0, 0, 0), 0)}


def test_a_request_is_kept_with_its_prompts() -> None:
    observed = Observed(Clock())
    observed.decided(decided(), [prompt(range(32))])
    assert (observed.recent.last, len(observed.prompts.all())) == (1, 1)


def test_of_a_stream_of_requests_so_many_a_second_are_kept() -> None:
    clock = Clock()
    observed = Observed(clock)
    for _ in range(2 * KEPT_AT_ONCE):
        observed.decided(decided(HELD), [])
    assert observed.recent.last == KEPT_AT_ONCE
    for clock.at in (6.0, 5.0):  # the clock may be set back
        for _ in range(KEPT_AT_ONCE):
            observed.decided(decided(HELD), [])
    assert observed.recent.last == KEPT_AT_ONCE + KEPT_PER_SECOND
    observed.sample(10.0, {"a:1": (0, 0)})
    assert observed.history.series("a:1")["prompt_tokens"] == [4 * KEPT_AT_ONCE * 32]


def test_each_step_counts_the_tokens_that_went_to_a_worker() -> None:
    observed = Observed(Clock())
    observed.decided(decided(HELD), [])
    observed.decided(decided(HELD), [])
    for at in (5.0, 10.0):
        observed.sample(at, {"a:1": (1, 7)})
    series = observed.history.series("a:1")
    assert (series["prompt_tokens"], series["predicted_tokens"]) == ([64, 0], [32, 0])
    assert (series["in_flight"], series["blocks"]) == ([1, 1], [7, 7])


def test_each_step_says_what_workers_in_turn_would_have_held() -> None:
    observed = Observed(Clock(), kept_at_once=1)
    for _ in range(3):  # one of them is kept, and represents them all
        observed.decided(decided(HELD), [])
    observed.sample(5.0, {"a:1": (0, 0)})
    series = observed.history.series("a:1")
    assert (series["predicted_tokens"], series["average_tokens"]) == ([48], [24])
    observed.decided(decided(HELD), [])  # not kept, so nothing is known to be saved
    observed.sample(10.0, {"a:1": (0, 0)})
    assert observed.history.series("a:1")["average_tokens"] == [24, 16]


def test_a_worker_that_cannot_be_picked_is_not_taken_in_turn() -> None:
    assert held_on_average(decided(HELD)) == 8
    assert held_on_average(replace(decided(HELD), excluded=("", "draining"))) == 16
    assert held_on_average(decided(names=())) == 0


def test_requests_that_went_nowhere_count_for_no_worker() -> None:
    observed = Observed(Clock())
    observed.decided(decided(names=()), [])
    observed.sample(5.0, {"a:1": (0, 0)})
    assert observed.history.series("a:1")["prompt_tokens"] == [0]


def numbers(recent: Recent, since: int, limit: int = 100) -> list[int]:
    return [kept.number for kept in recent.since(since, limit)]


def test_who_answered_is_noted_as_long_as_the_decision_is_kept() -> None:
    recent, first, second = Recent(decisions=1), decided(), decided()
    recent.add(first, 0.0)
    recent.served(first, "b:1")
    found = recent.find(1)
    assert found is not None
    assert found.served == "b:1"
    recent.add(second, 1.0)
    recent.served(first, "c:1")
    assert [kept.served for kept in recent.since(0)] == [""]


def test_decisions_are_numbered_and_found() -> None:
    recent, decision = Recent(), decided()
    recent.add(decision, 7.0)
    found = recent.find(1)
    assert found is not None
    assert (found.number, found.at, found.decision) == (1, 7.0, decision)


def test_the_oldest_make_room() -> None:
    recent = Recent(decisions=2)
    for at in range(5):
        recent.add(decided(), at)
    assert (numbers(recent, 0), recent.find(3), recent.last) == ([4, 5], None, 5)


def test_many_candidates_count_as_many_decisions() -> None:
    recent = Recent(candidates=5)
    for at in range(5):
        recent.add(decided(), at)
    assert numbers(recent, 0) == [4, 5]


def test_the_newest_is_kept_however_large_it_is() -> None:
    recent = Recent(candidates=1)
    recent.add(decided(), 0.0)
    assert numbers(recent, 0) == [1]


def test_only_what_is_new_is_told_and_no_more_than_asked_for() -> None:
    recent = Recent()
    for at in range(5):
        recent.add(decided(), at)
    assert (numbers(recent, 3), numbers(recent, 5), numbers(recent, 0, 2)) == ([4, 5], [], [4, 5])


def test_a_number_of_an_earlier_router_begins_anew() -> None:
    recent = Recent()
    recent.add(decided(), 0.0)
    assert numbers(recent, 900) == [1]


def test_what_was_never_made_is_not_found() -> None:
    recent = Recent()
    assert recent.find(1) is None
    recent.add(decided(), 0.0)
    assert (recent.find(0), recent.find(2)) == (None, None)


BUSY = Figures(in_flight=2, blocks=10, prompt_tokens=100, predicted_tokens=40)
IDLE = Figures(0, 5, 0, 0)


def test_steps_are_told_in_their_order() -> None:
    history = History(steps=3)
    history.sample(1.0, {"a": BUSY})
    history.sample(2.0, {"a": IDLE})
    assert (history.times(), history.series("a")["blocks"]) == ([1.0, 2.0], [10.0, 5.0])


def test_only_the_last_steps_are_kept() -> None:
    history = History(steps=2)
    for at in range(5):
        history.sample(at, {"a": Figures(at, 0, 0, 0)})
    assert (history.times(), history.series("a")["in_flight"]) == ([3.0, 4.0], [3.0, 4.0])


def test_the_fleet_is_the_sum_of_its_workers() -> None:
    history = History()
    history.sample(1.0, {"a": BUSY, "b": BUSY})
    assert {name: values[0] for name, values in history.series("").items()} == {
        "in_flight": 4,
        "blocks": 20,
        "prompt_tokens": 200,
        "predicted_tokens": 80,
        "average_tokens": 0,
    }
    assert history.names() == ["a", "b"]


def test_a_worker_has_no_past_before_it_came_and_none_after_it_went() -> None:
    history = History()
    history.sample(1.0, {"a": BUSY})
    history.sample(2.0, {"b": IDLE})
    assert (history.series("b")["blocks"], history.series("a")["blocks"]) == (
        [None, 5.0],
        [None, None],
    )


def test_an_empty_fleet_has_a_history_of_nothing() -> None:
    history = History()
    history.sample(1.0, {})
    assert (history.names(), history.series("")["blocks"]) == ([], [None])


SECRET = 12345678


def shapes(prompts: Sequence[Prompt], limit: int = 100) -> list[tuple[int, int]]:
    return [(one.tokens, one.requests) for one in prefixes(prompts, SECRET, limit)]


def test_a_shared_beginning_is_one_prefix() -> None:
    system = list(range(40))
    asked = [prompt([*system, 100 + user, *range(20)]) for user in range(3)]
    assert shapes(asked) == [(40, 3), (61, 1), (61, 1), (61, 1)]


def test_turns_of_a_conversation_lie_inside_each_other() -> None:
    assert shapes([prompt(range(length)) for length in (20, 50, 80)]) == [(50, 2), (20, 3), (80, 1)]


def test_equal_prompts_are_one_prefix() -> None:
    assert shapes([prompt(range(30)), prompt(range(30))]) == [(30, 2)]


def test_prompts_of_other_namespaces_share_nothing() -> None:
    asked = [prompt(range(30)), prompt(range(30), "other"), prompt(range(30), salt="s")]
    found = prefixes(asked, SECRET, 10)
    assert [one.requests for one in found] == [1, 1, 1]
    assert len({one.key for one in found}) == 3


def test_what_fills_no_block_is_no_prefix() -> None:
    assert shapes([prompt(range(LEAST_TOKENS - 1))]) == []


def test_only_the_first_are_told() -> None:
    assert shapes([prompt(range(at, at + 20)) for at in range(5)], limit=2) == [(20, 1), (20, 1)]


def test_a_prompt_is_asked_for_one_token_behind_the_prefix() -> None:
    (found, _) = prefixes([prompt(range(32)), prompt(range(48))], SECRET, 10)
    assert (found.tokens, len(found.prompt.tokens)) in {(32, 33), (32, 32)}


def test_a_key_tells_nothing_without_the_secret() -> None:
    one, other = (prefixes([prompt(range(30))], secret, 1)[0].key for secret in (1, 2))
    assert one != other


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=12))
def test_prefixes_are_those_that_counting_finds(texts: list[list[int]]) -> None:
    start = list(range(10, 10 + LEAST_TOKENS))
    asked = [[*start, *text] for text in texts]
    found = {
        (tuple(one.prompt.tokens[: one.tokens]), one.requests)
        for one in prefixes([prompt(one) for one in asked], SECRET, 10_000)
    }
    assert found == counted(asked)


def counted(asked: list[list[int]]) -> set[tuple[tuple[int, ...], int]]:
    """Prefixes that end a prompt or continue in different ways, with their numbers of prompts."""
    nodes = set()
    for length in range(LEAST_TOKENS, max(map(len, asked), default=0) + 1):
        for head in {tuple(one[:length]) for one in asked if len(one) >= length}:
            behind = [one for one in asked if tuple(one[:length]) == head]
            if len({tuple(one[length : length + 1]) for one in behind}) > 1 or any(
                len(one) == length for one in behind
            ):
                nodes.add((head, len(behind)))
    return nodes


def test_the_oldest_prompts_make_room() -> None:
    kept = Prompts(prompts=2)
    for at in range(4):
        kept.add(prompt([at]))
    assert [one.tokens[0] for one in kept.all()] == [2, 3]


def test_long_prompts_make_more_room() -> None:
    kept = Prompts(tokens=50)
    for length in (30, 15, 20):
        kept.add(prompt(range(length)))
    assert [len(one.tokens) for one in kept.all()] == [15, 20]


def test_only_the_beginning_of_a_long_prompt_is_kept() -> None:
    kept = Prompts()
    kept.add(prompt(range(LEADING_TOKENS + 5)))
    assert len(kept.all()[0].tokens) == LEADING_TOKENS


OVERLAP = Overlap(16, (1, 0, 0, 0), 0)


def test_a_summary_says_where_and_why_and_nothing_of_the_prompt() -> None:
    told = summary(Kept(3, 1.23456, decided({"b:1": OVERLAP})))
    assert (told["id"], told["at"], told["worker"], told["reason"]) == (3, 1.235, "b:1", "overlap")
    assert (told["predicted_tokens"], told["prompt_tokens"], told["candidates"]) == (16, 32, 2)
    assert told["pick"] == ["b:1", "a:1"]


def test_a_summary_names_who_computes_the_prompt() -> None:
    prefill = decided(names=("p:1",))
    made = replace(decided(), split=Split(prefill, "it costs less"))
    assert [summary(Kept(1, 0.0, one))["prefill"] for one in (made, decided())] == ["p:1", None]


def test_a_decision_without_a_pick_is_told_too() -> None:
    told = summary(Kept(1, 0.0, decided(names=())))
    assert (told["pick"], told["worker"], told["verdict"]) == ([], "", "no_override")


def test_a_prefix_is_told_with_its_holders_the_fullest_first() -> None:
    (prefix,) = prefixes([prompt(range(32), salt="s")], 1, 1)
    overlaps = {"a": OVERLAP, "b": Overlap(16, (1, 1, 0, 0), 0), "c": Overlap(16, uncertain=2)}
    told = spread(prefix, overlaps, workers=2)
    assert (told["tokens"], told["held_by"], told["salted"], told["cut"]) == (32, 3, True, False)
    assert [holder["name"] for holder in told["workers"]] == ["b", "a"]
    assert told["workers"][0]["blocks_by_tier"] == {"device": 1, "host": 1, "disk": 0, "remote": 0}


def test_a_prefix_that_may_go_on_says_so() -> None:
    (prefix,) = prefixes([prompt(range(LEADING_TOKENS))], 1, 1)
    assert spread(prefix, {}, workers=2)["cut"] is True


def test_an_answer_is_noted_with_its_request() -> None:
    observed = Observed(Clock())
    decision = decided()
    observed.decided(decision, [])
    observed.served(decision, "9.9.9.9:1")
    (kept,) = observed.recent.since(0)
    assert kept.served == "9.9.9.9:1"
