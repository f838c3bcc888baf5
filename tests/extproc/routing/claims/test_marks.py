from array import array
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from extproc.requests.outline import beginning_of
from extproc.routing.claims.marks import (
    KEY_BYTES,
    LAST_TOKENS,
    LENGTHS,
    marks_of,
    marks_of_outline,
    root_key,
    unpacked,
)


def shared(one: "array[int]", other: "array[int]") -> int:
    """The number of tokens before the last mark that two prompts share."""
    marks, others = marks_of(1, one), marks_of(1, other)
    both = zip(marks.lengths, unpacked(marks.keys), unpacked(others.keys), strict=False)
    return max([length for length, key, same in both if key == same], default=0)


def test_marks_lie_a_ninth_apart_at_most() -> None:
    assert (LENGTHS[0], LENGTHS[-1]) == (64, LAST_TOKENS)
    assert all(later - one <= max(64, one / 8) for one, later in pairwise(LENGTHS))
    assert len(LENGTHS) < 110


def test_short_prompt_has_no_mark() -> None:
    assert marks_of(1, array("I", range(64))).keys == b""
    assert marks_of(1, array("I")).keys == b""


def test_marks_of_leaves_out_the_last_token() -> None:
    assert marks_of(1, array("I", range(65))).lengths == (64,)


@given(st.integers(0, 3000) | st.integers(0, 60_000), st.integers(0, 500))
def test_marks_find_the_common_prefix_but_for_a_ninth(common: int, more: int) -> None:
    one = array("I", [*range(common), *[7] * (more + 1)])
    other = array("I", [*range(common), *[8] * (more + 1)])
    missed = common - shared(one, other)
    assert 0 <= missed < (common / 9 if common >= 512 else 64)


def test_outline_has_a_mark_where_each_digest_ends() -> None:
    one = beginning_of(b"x" * 3_000)
    marks = marks_of_outline(1, one)
    assert marks.lengths == tuple(length // 4 for length in one.lengths)
    assert len(set(unpacked(marks.keys))) == len(one.digests) > 1
    assert set(unpacked(marks.keys)).isdisjoint(unpacked(marks_of_outline(2, one).keys))


def test_root_keys_of_namespaces_and_secrets_differ() -> None:
    roots = {
        root_key(1, "m", None),
        root_key(1, "m", "a"),
        root_key(2, "m", None),
        root_key(1, "n"),
    }
    prompt = array("I", range(100))
    assert len({marks_of(root, prompt).keys[:KEY_BYTES] for root in roots}) == 4
