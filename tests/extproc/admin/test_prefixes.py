from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from extproc.admin.prefixes import LEADING_TOKENS, LEAST_TOKENS, RecentPrompts, prefixes, spread
from kvstate.overlap import Overlap, Prompt
from tests.extproc.admin.decisions import prompt

SECRET = 12345678


def shapes(prompts: Sequence[Prompt], limit: int = 100) -> list[tuple[int, int]]:
    return [(one.tokens, one.requests) for one in prefixes(prompts, SECRET, limit)]


def test_prefixes_find_a_shared_beginning_once() -> None:
    system = list(range(40))
    asked = [prompt([*system, 100 + user, *range(20)]) for user in range(3)]
    assert shapes(asked) == [(40, 3), (61, 1), (61, 1), (61, 1)]


def test_prefixes_nest_the_turns_of_a_conversation() -> None:
    assert shapes([prompt(range(length)) for length in (20, 50, 80)]) == [(50, 2), (20, 3), (80, 1)]


def test_prefixes_count_equal_prompts_once() -> None:
    assert shapes([prompt(range(30)), prompt(range(30))]) == [(30, 2)]


def test_prefixes_separate_namespaces() -> None:
    asked = [prompt(range(30)), prompt(range(30), "other"), prompt(range(30), salt="s")]
    found = prefixes(asked, SECRET, 10)
    assert [one.requests for one in found] == [1, 1, 1]
    assert len({one.key for one in found}) == 3


def test_prefixes_need_a_whole_block() -> None:
    assert shapes([prompt(range(LEAST_TOKENS - 1))]) == []


def test_prefixes_return_the_first_up_to_the_limit() -> None:
    assert shapes([prompt(range(at, at + 20)) for at in range(5)], limit=2) == [(20, 1), (20, 1)]


def test_prefixes_ask_for_one_token_more() -> None:
    (found, _) = prefixes([prompt(range(32)), prompt(range(48))], SECRET, 10)
    assert (found.tokens, len(found.prompt.tokens)) in {(32, 33), (32, 32)}


def test_prefix_keys_depend_on_the_secret() -> None:
    one, other = (prefixes([prompt(range(30))], secret, 1)[0].key for secret in (1, 2))
    assert one != other


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=12))
def test_prefixes_equal_those_found_by_counting(texts: list[list[int]]) -> None:
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


def test_prompts_evict_the_oldest() -> None:
    kept = RecentPrompts(prompts=2)
    for at in range(4):
        kept.add(prompt([at]))
    assert [one.tokens[0] for one in kept.all()] == [2, 3]


def test_prompts_evict_more_for_a_long_prompt() -> None:
    kept = RecentPrompts(tokens=50)
    for length in (30, 15, 20):
        kept.add(prompt(range(length)))
    assert [len(one.tokens) for one in kept.all()] == [15, 20]


def test_prompts_keep_only_the_beginning_of_a_long_prompt() -> None:
    kept = RecentPrompts()
    kept.add(prompt(range(LEADING_TOKENS + 5)))
    assert len(kept.all()[0].tokens) == LEADING_TOKENS


OVERLAP = Overlap(16, (1, 0, 0, 0), 0)


def test_spread_lists_holders_with_the_fullest_first() -> None:
    (prefix,) = prefixes([prompt(range(32), salt="s")], 1, 1)
    overlaps = {"a": OVERLAP, "b": Overlap(16, (1, 1, 0, 0), 0), "c": Overlap(16, uncertain=2)}
    shown = spread(prefix, overlaps, workers=2)
    assert (shown["tokens"], shown["held_by"], shown["salted"], shown["cut"]) == (
        32,
        3,
        True,
        False,
    )
    assert [holder["name"] for holder in shown["workers"]] == ["b", "a"]
    assert shown["workers"][0]["blocks_by_tier"] == {"device": 1, "host": 1, "disk": 0, "remote": 0}


def test_spread_marks_a_prefix_cut_at_the_limit() -> None:
    (prefix,) = prefixes([prompt(range(LEADING_TOKENS))], 1, 1)
    assert spread(prefix, {}, workers=2)["cut"] is True
