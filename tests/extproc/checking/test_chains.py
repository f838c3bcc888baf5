from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from extproc.checking.self_check import Chains
from kvstate.events import BlocksStored, Tokens


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
