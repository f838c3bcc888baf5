from array import array
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from extproc.picking.sent import LAST_TOKENS, LENGTHS, marks_of, root_key


def shared(one: "array[int]", other: "array[int]") -> int:
    """The number of tokens before the last mark that two prompts share."""
    marks, others = marks_of(1, one), marks_of(1, other)
    lengths = [n for n, a, b in zip(marks.lengths, marks.keys, others.keys, strict=False) if a == b]
    return max(lengths, default=0)


def test_marks_lie_a_ninth_apart_at_most() -> None:
    assert (LENGTHS[0], LENGTHS[-1]) == (64, LAST_TOKENS)
    assert all(later - one <= max(64, one / 8) for one, later in pairwise(LENGTHS))
    assert len(LENGTHS) < 110


def test_a_short_prompt_has_no_mark() -> None:
    assert marks_of(1, array("I", range(64))).keys == ()
    assert marks_of(1, b"").keys == ()


def test_the_last_token_is_left_out() -> None:
    assert marks_of(1, array("I", range(65))).lengths == (64,)


@given(st.integers(0, 3000), st.integers(0, 500))
def test_what_two_prompts_share_is_found_but_for_a_ninth(common: int, more: int) -> None:
    one = array("I", [*range(common), *[7] * (more + 1)])
    other = array("I", [*range(common), *[8] * (more + 1)])
    assert max(0, common - max(64, common / 8)) <= shared(one, other) <= common


def test_text_counts_four_bytes_a_token() -> None:
    assert marks_of(1, b"x" * 260).lengths == (64,)
    assert marks_of(1, b"x" * 259).lengths == ()


def test_namespaces_and_secrets_share_nothing() -> None:
    roots = {
        root_key(1, "m", None),
        root_key(1, "m", "a"),
        root_key(2, "m", None),
        root_key(1, "n"),
    }
    prompt = array("I", range(100))
    assert len({marks_of(root, prompt).keys[0] for root in roots}) == 4
