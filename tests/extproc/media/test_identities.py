from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.media.identities import (
    MAX_IDENTIFIER_LETTERS,
    MAX_RUNS,
    MAX_TOKENS,
    MOST_USED,
    Identities,
    Identity,
)
from kvstate.overlap import Tokens


def made(tokens: Tokens, identifier: str | None = "cat") -> Identity | None:
    return Identity.of(identifier, tokens, 0, is_whole=True)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=50))
def test_identity_keeps_its_ids(tokens: list[int]) -> None:
    identity = made(array("I", tokens))
    assert identity is not None
    assert (list(identity.tokens), identity.count) == (tokens, len(tokens))
    assert identity.name == "cat"


@pytest.mark.parametrize(
    ("tokens", "identifier"),
    [
        (array("I"), "cat"),
        (array("I", [1]) * (MAX_TOKENS + 1), "cat"),
        (array("I", range(MAX_RUNS + 1)), "cat"),
        (array("I", [1]), "c" * (MAX_IDENTIFIER_LETTERS + 1)),
    ],
)
def test_identity_is_no_larger_than_an_item(tokens: Tokens, identifier: str) -> None:
    assert made(tokens, identifier) is None


def test_identity_without_a_name_is_its_own_id() -> None:
    identity = made(array("I", [5, 5]), None)
    assert identity is not None
    assert identity.name == 5


def table(items: int) -> tuple[Identities, Identity]:
    identity = made(array("I", [1, 1, 1]))
    assert identity is not None
    return Identities(items * identity.size_bytes), identity


def test_table_forgets_the_least_recently_used() -> None:
    known, identity = table(2)
    known.put(b"a", identity)
    known.put(b"b", identity)
    assert known.find(b"a") == identity
    known.put(b"c", identity)
    assert (known.find(b"a"), known.find(b"b"), len(known)) == (identity, None, 2)


def test_table_forgets_what_is_dropped_and_frees_its_memory() -> None:
    known, identity = table(4)
    known.put(b"a", identity)
    known.put(b"a", identity)
    known.find(b"a")
    known.drop(b"a")
    known.drop(b"b")
    known.put(b"c", identity)
    assert (known.find(b"a"), known.size_bytes) == (None, identity.size_bytes)


def test_table_is_bounded_whatever_is_put_and_used() -> None:
    known, identity = table(100)
    for number in range(10 * MOST_USED):
        known.put(str(number % 999).encode(), identity)
        known.find(str(number % 7).encode())
    assert len(known) <= 100
    assert known.size_bytes <= 100 * identity.size_bytes
