from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.checking.evidence import (
    Asked,
    Chain,
    Chains,
    Difference,
    Growth,
    difference,
    explains,
    holds_own,
    is_stored,
    runs_of,
    usable_tokens,
)
from kvstate.events import BlocksStored
from kvstate.overlap import Extra, Prompt, Tokens

SIZE = 4


SHARED = list(range(1_000, 1_040))


def own(seed: int, count: int = 40) -> list[int]:
    return Random(seed).sample(range(5_000, 90_000), count)


def asked(
    tokens: list[int], held: int = 0, lora: str | None = None, salt: str | None = None
) -> Asked:
    """A prompt after another one that begins with the shared part."""
    prompt = Prompt("m", Tokens("I", tokens), lora, salt)
    return Asked(prompt, held, [Tokens("I", SHARED + own(99))])


def chain(tokens: list[int], *, rooted: bool = True, first: Extra = ()) -> Chain:
    whole = len(tokens) // SIZE * SIZE
    return Chain(Tokens("I", tokens[:whole]), SIZE, rooted, None, first)


def found(one: Asked, stored: Chain, begin: int = 0) -> Difference | None:
    growth = Growth(stored, begin)
    return difference(one, growth) if holds_own(one, growth.chain, runs_of(growth)) else None


def test_whole_blocks_can_be_reused_but_for_the_last_token() -> None:
    assert [usable_tokens(Tokens("I", range(n)), 4) for n in (1, 4, 5, 8, 9)] == [0, 0, 4, 4, 8]


def test_our_own_blocks_are_a_match() -> None:
    tokens = SHARED + own(1)
    assert is_stored(asked(tokens), chain([*tokens, 1, 2, 3, 4]))
    assert not is_stored(asked(tokens), chain(tokens[:-8]))
    assert not is_stored(asked(tokens), chain([7, *tokens]))


def test_behind_an_unknown_parent_what_was_not_held_is_a_match() -> None:
    tokens = SHARED + own(1)
    assert is_stored(asked(tokens, held=40), chain(tokens[40:], rooted=False))
    assert not is_stored(asked(tokens, held=36), chain(tokens[40:], rooted=False))
    assert not is_stored(asked(tokens, held=76), chain(tokens[40:], rooted=False))


@pytest.mark.parametrize(
    ("one", "stored"),
    [
        (asked(own(1), salt="a"), chain(own(1))),
        (asked(own(1)), chain(own(1), first=("a",))),
        (asked(own(1), lora="a"), chain(own(1))),
    ],
)
def test_other_namespaces_tell_nothing(one: Asked, stored: Chain) -> None:
    assert not is_stored(one, stored)
    assert not holds_own(one, stored, runs_of(Growth(stored, 0)))


def test_a_salted_prompt_meets_its_own_salt() -> None:
    assert is_stored(asked(own(1), salt="a"), chain(own(1), first=("a",)))


def test_an_inserted_token_is_named_with_both_ids() -> None:
    tokens = SHARED + own(1)
    engines = [*tokens[:5], 77, *tokens[5:]]
    assert found(asked(tokens), chain(engines)) == Difference(5, tokens[5], 77, 5)


def test_a_replaced_token_behind_an_unknown_parent_is_named() -> None:
    tokens = SHARED + own(1)
    engines = [*tokens[:50], 77, *tokens[51:]]
    one = asked(tokens, held=40)
    assert found(one, chain(engines[40:], rooted=False)) == Difference(50, tokens[50], 77, 10)


def test_where_the_held_part_is_not_known_the_place_is_found_by_what_is_ours() -> None:
    tokens = SHARED + own(1)
    engines = [*tokens[:50], 77, *tokens[51:]]
    stored = chain(engines[48:], rooted=False)
    assert found(asked(tokens), stored) == Difference(50, tokens[50], 77, 2)
    assert found(asked(tokens), chain(tokens[48:], rooted=False)) is None


def test_a_shift_whose_place_was_not_seen_is_named_by_the_block_that_is_missing() -> None:
    tokens = SHARED + own(1)
    engines = [77, *tokens]
    stored = chain(engines[40:], rooted=False)
    assert found(asked(tokens, held=8), stored) == Difference(8, tokens[8], None)


def test_what_stands_before_the_prompt_s_beginning_is_no_place_in_it() -> None:
    tokens = own(1)
    assert found(asked(tokens), chain([1, 2, 3, 4, *tokens], rooted=False)) is None


def test_another_request_that_begins_alike_proves_nothing() -> None:
    one = asked(SHARED + own(1))
    assert found(one, chain(SHARED + own(2))) is None
    assert found(one, chain([77, *SHARED, *own(2)])) is None
    assert found(one, chain(own(2), rooted=False)) is None
    assert found(one, chain([*own(2), *own(1)[:12], *own(3)], rooted=False)) is None


def test_a_beginning_of_our_own_with_another_end_proves_nothing() -> None:
    head = SHARED + own(1)
    assert found(asked(head + own(2)), chain(head + own(3))) is None


def test_what_was_stored_before_proves_nothing() -> None:
    tokens = own(1)
    engines = [77, *tokens]
    assert found(asked(tokens), chain(engines + own(2)), begin=44) is None


def test_before_there_is_another_prompt_nothing_is_a_prompt_s_own() -> None:
    tokens = Tokens("I", own(1))
    lonely = Asked(Prompt("m", tokens), 0, [tokens])
    assert found(lonely, chain([77, *tokens])) is None


def test_a_short_prompt_has_no_runs() -> None:
    assert found(asked([1, 2, 3]), chain([])) is None


TOKEN_LISTS = st.lists(st.integers(0, 40), max_size=120)


@given(TOKEN_LISTS, TOKEN_LISTS, TOKEN_LISTS, st.none() | st.integers(0, 20))
def test_our_own_tokens_never_differ_from_ours(
    tokens: list[int], answer: list[int], before: list[int], held_blocks: int | None
) -> None:
    rooted, start = held_blocks is None, SIZE * (held_blocks or 0)
    one = Asked(Prompt("m", Tokens("I", tokens)), start, [Tokens("I", before)])
    assert found(one, chain((tokens + answer)[start:], rooted=rooted)) is None


@given(st.integers(0, 2**32), st.integers(0, 79), st.integers(0, 6), st.integers(0, 3))
def test_what_is_named_is_the_first_difference(
    seed: int, place: int, inserted: int, removed: int
) -> None:
    tokens = SHARED + own(seed)
    engines = tokens[:place] + own(seed + 1, inserted) + tokens[place + removed :]
    proof = found(asked(tokens), chain(engines))
    if proof is not None:
        assert tokens[: proof.position] == engines[: proof.position]
        assert (proof.ours, proof.engines) == (tokens[proof.position], engines[proof.position])
        assert proof.ours != proof.engines
    elif inserted + removed and place < 60:
        raise AssertionError("not found")


@pytest.mark.parametrize("rooted", [True, False])
def test_a_chain_is_explained_by_a_prompt_that_is_the_same_beyond_the_difference(
    *, rooted: bool
) -> None:
    tokens = SHARED + own(1)
    twin = [*tokens[:50], 77, *tokens[51:]]
    stored = chain([*twin[0 if rooted else 40 :], 8, 8, 8, 8], rooted=rooted)
    differs = found(asked(tokens, held=40), stored)
    assert differs is not None
    for explaining in (twin, [*twin, 8, 8, 8, 8, 9], twin[:55]):
        assert explains(Tokens("I", explaining), stored, differs)
    for other in (tokens, twin[:50], [*twin[:60], 9], [7, *twin], [*twin, 9], []):
        assert not explains(Tokens("I", other), stored, differs)


def test_what_could_lie_in_too_many_places_explains_all() -> None:
    stored = Chain(Tokens("I", [1, 2, 1, 1]), 1, is_rooted=False, lora=None)
    assert not explains(Tokens("I", [1] * 30), stored, Difference(9, 7, 1, 2))
    assert explains(Tokens("I", [1] * 50), stored, Difference(9, 7, 1, 2))


def stored(
    hashes: list[int], parent: int | None, tokens: list[int], size: int = 2, **fields: Any
) -> BlocksStored:
    return BlocksStored(list(hashes), parent, Tokens("I", tokens), size, **fields)


def grown(chains: Chains, event: BlocksStored) -> tuple[list[int], int, bool]:
    growth = chains.store(event)
    assert growth is not None
    return growth.chain.tokens.tolist(), growth.begin, growth.chain.is_rooted


def test_a_store_continues_the_chain_of_its_parent() -> None:
    chains = Chains()
    assert grown(chains, stored([1, 2], None, [1, 2, 3, 4])) == ([1, 2, 3, 4], 0, True)
    assert grown(chains, stored([3], 2, [5, 6])) == ([1, 2, 3, 4, 5, 6], 4, True)
    assert chains.tokens == 6


def test_a_branch_is_a_chain_of_its_own_and_knows_what_stands_before() -> None:
    chains = Chains()
    first = chains.store(stored([1, 2], None, [1, 2, 3, 4], lora="a", extras=[("salt",), ()]))
    branch = chains.store(stored([9], 1, [7, 8], lora="a"))
    assert first is not None
    assert branch is not None
    assert (branch.chain.tokens.tolist(), branch.begin) == ([1, 2, 7, 8], 2)
    assert (branch.chain.lora, branch.chain.first) == ("a", ("salt",))
    assert first.chain.tokens.tolist() == [1, 2, 3, 4]


def test_what_is_told_again_is_no_branch() -> None:
    chains = Chains()
    chains.store(stored([1, 2], None, [1, 2, 3, 4]))
    assert grown(chains, stored([2], 1, [3, 4])) == ([1, 2, 3, 4], 2, True)
    assert chains.tokens == 4


def test_behind_an_unknown_parent_the_beginning_is_not_known() -> None:
    chains = Chains()
    event = stored([5], 4, [1, 2], extras=[("an image",)])
    growth = chains.store(event)
    assert growth is not None
    assert (growth.chain.is_rooted, growth.chain.first) == (False, ())
    assert grown(chains, stored([6], 5, [3, 4])) == ([1, 2, 3, 4], 2, False)


def test_a_hash_is_of_its_group() -> None:
    chains = Chains()
    chains.store(stored([1], None, [1, 2], group=0))
    assert grown(chains, stored([2], 1, [3, 4], group=1)) == ([3, 4], 0, False)


def test_what_tells_nothing_of_a_prompt_is_left_out() -> None:
    chains = Chains()
    assert chains.store(stored([1], None, [1, 2], bigrams=True)) is None
    assert chains.store(stored([], None, [])) is None
    assert chains.store(stored([1], None, [1, 2], medium="CPU")) is None


def test_a_cleared_rank_has_no_chains() -> None:
    chains = Chains()
    chains.store(stored([1], None, [1, 2]))
    chains.clear()
    assert grown(chains, stored([2], 1, [3, 4])) == ([3, 4], 0, False)
    assert chains.tokens == 2


def test_what_grew_least_recently_is_forgotten_first() -> None:
    chains = Chains(max_tokens=6)
    chains.store(stored([1], None, [1, 2]))
    chains.store(stored([2], None, [3, 4]))
    chains.store(stored([3], 1, [5, 6]))
    chains.store(stored([4], 3, [7, 8]))
    assert grown(chains, stored([5], 4, [9, 9])) == ([1, 2, 5, 6, 7, 8, 9, 9], 6, True)
    assert grown(chains, stored([6], 2, [1, 1])) == ([1, 1], 0, False)


EVENTS = st.lists(
    st.tuples(st.integers(0, 9), st.none() | st.integers(0, 9), st.integers(1, 3)), max_size=40
)


@given(EVENTS, st.integers(0, 20), st.integers(0, 8))
def test_it_never_takes_more_than_its_limits(
    events: list[tuple[int, int | None, int]], max_tokens: int, max_blocks: int
) -> None:
    chains = Chains(max_tokens, max_blocks)
    for first, parent, blocks in events:
        hashes = [(first + number) % 10 for number in range(blocks)]
        chains.store(stored(hashes, parent, [first] * 2 * blocks))
        assert 0 <= chains.tokens <= max_tokens
        assert len(chains._places) <= max_blocks
        assert chains.tokens == sum(len(chain.tokens) for chain in chains._chains.values())
        assert {id(chain) for chain, _ in chains._places.values()} <= chains._chains.keys()
