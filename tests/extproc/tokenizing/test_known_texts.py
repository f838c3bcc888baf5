from array import array

from hypothesis import given
from hypothesis import strategies as st

from extproc.tokenizing.text_encoder import Cut, KnownTexts
from kvstate.overlap import Tokens


def ids_of(text: str) -> Tokens:
    return array("I", map(ord, text))


def remembered(texts: KnownTexts, text: str, *cuts: int) -> None:
    """Remembers a text, with one id per character, and cuts at tokens of two characters."""
    known = texts.find(text)
    texts.remember(text, known, ids_of(text), [Cut(at, at + 2, at) for at in cuts])


def new_from(texts: KnownTexts, text: str) -> int:
    return texts.find(text).new_from


def test_find_knows_a_whole_text() -> None:
    texts = KnownTexts(1 << 20)
    remembered(texts, "x" * 300)
    known = texts.find("x" * 300)
    assert known.is_whole
    assert known.ids == ids_of("x" * 300)


def test_find_knows_a_continued_text_up_to_its_last_cut() -> None:
    texts = KnownTexts(1 << 20)
    remembered(texts, "x" * 300, 100, 290)
    assert new_from(texts, "x" * 300 + "more") == 290


def test_find_knows_a_changed_text_up_to_the_cut_before() -> None:
    texts = KnownTexts(1 << 20)
    remembered(texts, "x" * 600, 100, 280, 290, 400)
    assert new_from(texts, "x" * 291 + "y" * 400) == 280
    assert new_from(texts, "x" * 292 + "y" * 400) == 290


def test_find_knows_a_shortened_text_up_to_the_cut_before() -> None:
    texts = KnownTexts(1 << 20)
    remembered(texts, "x" * 600, 100, 280, 400)
    assert new_from(texts, "x" * 399) == 280


def test_find_knows_no_short_or_other_texts() -> None:
    texts = KnownTexts(1 << 20)
    remembered(texts, "x" * 255)
    remembered(texts, "y" * 300, 10)
    assert not texts.find("x" * 255).is_whole
    assert new_from(texts, "z" * 300) == 0
    assert len(texts) == 1


def test_find_compares_texts_beyond_their_hash() -> None:
    texts = KnownTexts(1 << 20)
    remembered(texts, "x" * 100 + "y" * 400, 20, 120)  # a sample holds only the last characters
    known = texts.find("z" * 100 + "y" * 400)
    assert known.like is not None
    assert not known.is_whole
    assert not known.cuts


def test_remember_replaces_the_text_that_is_continued() -> None:
    texts = KnownTexts(1 << 20)
    remembered(texts, "x" * 300, 290)
    remembered(texts, "x" * 400, 290, 390)
    assert len(texts) == 1
    assert new_from(texts, "x" * 500) == 390


def test_remember_keeps_texts_with_a_common_beginning_distinct() -> None:
    texts = KnownTexts(1 << 20)
    for end in ("a", "b"):
        remembered(texts, "x" * 600 + end * 1_000, 590, 1_500)
    assert len(texts) == 2
    assert new_from(texts, "x" * 600 + "a" * 2_000) == 1_500
    assert new_from(texts, "x" * 600 + "b" * 2_000) == 1_500


def test_remember_keeps_texts_without_cuts_distinct() -> None:
    texts = KnownTexts(1 << 20)
    for text in ("x" * 300, "x" * 301):
        remembered(texts, text)
    assert len(texts) == 2


def test_remember_keeps_a_text_of_two_threads_once() -> None:
    texts = KnownTexts(1 << 20)
    known = texts.find("x" * 300)
    texts.remember("x" * 300, known, ids_of("x" * 300), [])
    texts.remember("x" * 300, known, ids_of("x" * 300), [])
    assert len(texts) == 1


def test_remember_keeps_a_turn_whose_predecessor_was_forgotten() -> None:
    texts = KnownTexts(21_000)
    remembered(texts, "x" * 800, 790)
    known = texts.find("x" * 801)
    for letter in "abcd":
        remembered(texts, letter * 800)
    texts.remember("x" * 801, known, ids_of("x" * 801), known.cuts)
    assert new_from(texts, "x" * 900) == 790


def test_least_recently_found_text_is_evicted_first() -> None:
    texts = KnownTexts(21_000)
    for letter in ("a", "b", "c"):
        remembered(texts, letter * 800)
    texts.find("a" * 800)
    for letter in ("d", "e"):
        remembered(texts, letter * 800)
    known = [letter for letter in "abcde" if texts.find(letter * 800).is_whole]
    assert known == ["a", "c", "d", "e"]


def test_common_beginning_of_a_forgotten_text_is_still_found() -> None:
    texts = KnownTexts(32_000)
    remembered(texts, "x" * 300 + "a" * 1_000, 1_290)
    remembered(texts, "x" * 300 + "b" * 1_000, 1_290)
    texts.find("x" * 300 + "a" * 1_000)
    for letter in ("c", "d", "e"):
        remembered(texts, letter * 1_000)
    assert new_from(texts, "x" * 300 + "b" * 1_000) == 0
    assert new_from(texts, "x" * 300 + "a" * 1_001) == 1_290


def test_oversized_text_is_not_kept() -> None:
    texts = KnownTexts(20_000)
    remembered(texts, "x" * 2_000)
    assert len(texts) == 0
    assert texts.size_bytes == 0


@given(
    st.lists(
        st.tuples(st.sampled_from("a"), st.integers(0, 3_000), st.integers(0, 900)), max_size=30
    )
)
def test_memory_stays_within_its_bound_and_known_ids_are_right(
    turns: list[tuple[str, int, int]],
) -> None:
    texts = KnownTexts(60_000)
    text = ""
    for letter, length, keep in turns:
        text = text[:keep] + letter * length
        known = texts.find(text)
        start = known.new_from
        assert known.ids[:start] == ids_of(text[:start])
        remembered(texts, text, *range(50, max(50, len(text) - 2), 100))
        assert texts.size_bytes <= 60_000
    assert (texts.size_bytes == 0) == (len(texts) == 0)
