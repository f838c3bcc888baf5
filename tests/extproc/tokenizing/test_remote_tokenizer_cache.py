from hypothesis import given
from hypothesis import strategies as st

from extproc.tokenizing.remote_tokenizer import TokenCache, key_of
from kvstate.overlap import Tokens


def tokens(count: int) -> Tokens:
    return Tokens("I", range(count))


def test_cache_finds_tokens_until_they_are_evicted() -> None:
    cache = TokenCache(1_000)
    a, b, c = (key_of(name) for name in (b"a", b"b", b"c"))
    cache.keep(a, tokens(1))
    cache.keep(b, tokens(2))
    assert cache.find(a) == tokens(1)
    cache.keep(c, tokens(100))
    assert (cache.find(b), cache.find(c)) == (None, tokens(100))


def test_cache_ignores_oversized_and_known_tokens() -> None:
    cache = TokenCache(300)
    cache.keep(b"a", tokens(1))
    cache.keep(b"a", tokens(2))
    cache.keep(b"b", tokens(1_000))
    assert (cache.find(b"a"), cache.find(b"b")) == (tokens(1), None)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 300))), st.integers(0, 3_000))
def test_cache_stays_within_its_limit(kept: list[tuple[int, int]], limit: int) -> None:
    cache = TokenCache(limit)
    for name, count in kept:
        cache.keep(key_of(bytes([name])), tokens(count))
        assert 0 <= cache.bytes <= limit


def test_key_of_differs_for_other_questions() -> None:
    assert len({key_of(bytes([n])) for n in range(256)}) == 256
