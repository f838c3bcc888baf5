import time
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.checking.self_check import (
    EFFORT_BURST_SECONDS,
    EFFORT_SHARE,
    GRACE_SECONDS,
    LAST_CHECKED,
    MATCHES_TO_HEAL,
    MAX_CHAINS,
    MAX_PENDING,
    MAX_WATCH_SECONDS,
    MISMATCHES,
    WATCHED_PER_SECOND,
    WATCHED_PER_SECOND_WHILE_WELL,
    Asked,
    Chain,
    Chains,
    Difference,
    Effort,
    Growth,
    Watched,
    WorkerCheck,
    difference,
    explains,
    holds_own,
    is_stored,
    runs_of,
    usable_tokens,
)
from kvstate.events import AllCleared, BlocksRemoved, BlocksStored, Extra, Tokens
from kvstate.overlap import Prompt
from kvstate.wire.zmq_wire import decode_batch

SIZE = 4
REFERENCE = Tokens("I", range(100))


def prompt(seed: int) -> list[int]:
    return Random(seed).sample(range(1_000, 90_000), 40)


def asked(tokens: list[int]) -> Asked:
    return Asked(Prompt("m", Tokens("I", tokens)), 0, [REFERENCE])


def stored(tokens: list[int]) -> BlocksStored:
    """A chain of its own."""
    blocks = len(tokens) // SIZE
    hashes = [hash((*tokens[: SIZE * (number + 1)],)) & 2**64 - 1 for number in range(blocks)]
    return BlocksStored(list(hashes), None, Tokens("I", tokens[: blocks * SIZE]), SIZE)


class Rehearsal:
    """One worker's check, a request a second."""

    def __init__(self) -> None:
        self.check = WorkerCheck()
        self.now = 0.0

    def watch(self, seed: int) -> Watched:
        self.now += 1 / WATCHED_PER_SECOND_WHILE_WELL
        watched = self.check.watch(asked(prompt(seed)), self.now)
        assert watched is not None
        return watched

    def run(self, seed: int, *events: BlocksStored, is_held: bool = False) -> None:
        watched = self.watch(seed)
        self.check.stored(0, events)
        watched.ended_at = self.now
        for due in self.check.due(self.now + GRACE_SECONDS):
            self.check.conclude(due, is_held=is_held)

    def match(self, seed: int) -> None:
        self.run(seed, stored(prompt(seed)))

    def mismatch(self, seed: int) -> None:
        self.run(seed, stored([7, *prompt(seed)]))

    def is_distrusted(self) -> bool:
        return self.check.result.is_distrusted

    @property
    def counts(self) -> tuple[int, int, int]:
        result = self.check.result
        return result.matched, result.mismatched, result.without_evidence


def test_a_request_ends_matched_mismatched_or_without_evidence() -> None:
    one = Rehearsal()
    one.match(1)
    one.mismatch(2)
    one.run(3)
    assert one.counts == (1, 1, 1)
    assert one.check.result.difference == (0, prompt(2)[0], 7, 0)
    assert not one.check.pending


def test_what_the_worker_is_known_to_hold_is_matched() -> None:
    one = Rehearsal()
    one.run(1, is_held=True)
    assert one.counts == (1, 0, 0)


def test_three_mismatches_of_eight_checked_are_needed() -> None:
    one = Rehearsal()
    for seed in range(MISMATCHES - 1):
        one.mismatch(seed)
        one.run(100 + seed)
    for seed in range(LAST_CHECKED - 1):
        one.match(200 + seed)
    one.mismatch(300)
    one.mismatch(301)
    assert one.check.result.mismatched > MISMATCHES
    assert not one.is_distrusted()


def test_three_mismatches_are_enough() -> None:
    one = Rehearsal()
    for seed in range(MISMATCHES):
        one.mismatch(seed)
    assert one.is_distrusted()


def test_enough_matches_in_a_row_heal() -> None:
    one = Rehearsal()
    for seed in range(MISMATCHES):
        one.mismatch(seed)
    for seed in range(MATCHES_TO_HEAL - 1):
        one.match(10 + seed)
    one.mismatch(20)
    for seed in range(MATCHES_TO_HEAL - 1):
        one.match(30 + seed)
    assert one.is_distrusted()
    one.match(40)
    assert not one.is_distrusted()
    one.mismatch(50)
    assert not one.is_distrusted()


def test_what_is_another_watched_requests_is_no_evidence() -> None:
    one = Rehearsal()
    ours, other = one.watch(1), one.watch(2)
    tokens = prompt(1)
    other.asked = asked([9, *tokens])  # differs, and its own tokens are in the other's
    whole = stored(tokens)
    rest = BlocksStored(whole.hashes[5:], whole.hashes[4], whole.tokens[20:], SIZE)
    one.check.stored(0, [stored(tokens[:20]), rest])
    one.check.conclude(other, is_held=False)
    assert ours not in one.check.pending
    assert one.counts == (1, 0, 1)


def test_a_conclusion_waits_for_the_grace_but_not_for_ever() -> None:
    one = Rehearsal()
    watched = one.watch(1)
    ends = one.now + MAX_WATCH_SECONDS
    assert one.check.due(ends - 1) == []
    assert one.check.due(ends) == [watched]
    watched.ended_at = one.now + 1
    assert one.check.due(one.now + GRACE_SECONDS) == []
    assert one.check.due(one.now + 1 + GRACE_SECONDS) == [watched]


def test_ranks_and_clears_keep_chains_apart() -> None:
    one = Rehearsal()
    one.watch(1)
    tokens = prompt(1)
    head, tail = stored(tokens[:20]), stored(tokens)
    rest = BlocksStored(tail.hashes[5:], tail.hashes[4], tail.tokens[20:], SIZE)
    one.check.stored(0, [head])
    one.check.stored(1, [rest, BlocksRemoved([1])])
    assert one.counts == (0, 0, 0)
    one.check.stored(0, [AllCleared(), rest])
    assert one.counts == (0, 0, 0)
    one.check.stored(0, [head, rest, BlocksStored([1], None, Tokens("I"), 4, medium="CPU")])
    assert one.counts == (1, 0, 0)


def test_what_was_heard_can_be_forgotten() -> None:
    one = Rehearsal()
    one.watch(1)
    whole = stored(prompt(1))
    one.check.stored(0, [stored(prompt(1)[:20])])
    one.check.forget_chains()
    one.check.stored(0, [BlocksStored(whole.hashes[5:], whole.hashes[4], whole.tokens[20:], SIZE)])
    assert one.counts == (0, 0, 0)


def test_effort_that_is_spent_is_saved_up_to_half_before_more() -> None:
    effort = Effort()
    assert effort.spend(EFFORT_BURST_SECONDS / 2, 0.0)
    assert not effort.spend(EFFORT_BURST_SECONDS / 2, 0.0)
    saved_at = EFFORT_BURST_SECONDS / 2 / EFFORT_SHARE
    assert not effort.may_begin(saved_at - 1)
    assert not effort.spend(0.0, saved_at - 1)
    assert effort.may_begin(saved_at + 1)
    assert effort.spend(EFFORT_BURST_SECONDS / 4, saved_at + 1)
    assert effort.may_begin(saved_at + 2)


def test_who_is_well_is_listened_to_again_when_the_index_holds_nothing() -> None:
    one = Rehearsal()
    for seed in range(LAST_CHECKED):
        one.match(seed)
    assert not one.watch(100).is_heard
    (watched,) = one.check.pending
    one.check.conclude(watched, is_held=True)
    one.run(101)
    assert one.watch(102).is_heard


def test_requests_watched_at_once_and_in_a_row_are_bounded() -> None:
    check = WorkerCheck()
    watched = [check.watch(asked(prompt(seed)), 0.0) for seed in range(MAX_PENDING + 1)]
    assert watched[-1] is None
    assert len(check.pending) == MAX_PENDING
    for one in list(check.pending):
        check.give_up(one)
    assert check.watch(asked(prompt(1)), 0.0) is None


@pytest.mark.parametrize("differs", [False, True])
def test_a_worker_that_is_well_is_watched_seldom(*, differs: bool) -> None:
    check = WorkerCheck()
    for now in range(1_000):
        watched = check.watch(asked(prompt(now)), float(now))
        if watched is not None:
            check.stored(0, [stored([7, *prompt(now)] if differs else prompt(now))])
            if differs:
                check.conclude(watched, is_held=False)
    result = check.result
    seen = result.matched + result.mismatched
    rate = min(1.0, WATCHED_PER_SECOND) if differs else WATCHED_PER_SECOND_WHILE_WELL
    assert 1_000 * rate <= seen <= 1_000 * rate + 2 * MAX_PENDING


def test_chains_that_may_be_about_one_request_are_bounded() -> None:
    one = Rehearsal()
    watched = one.watch(1)
    one.check.stored(0, [stored([number, *prompt(1)]) for number in range(MAX_CHAINS + 5)])
    assert len(watched.grown) == MAX_CHAINS


KINDS = st.sampled_from(("match", "mismatch", "nothing"))


@given(st.lists(KINDS, max_size=40))
def test_it_is_distrusted_by_its_last_checked_requests(kinds: list[str]) -> None:
    one = Rehearsal()
    last: list[str] = []
    distrusted = False
    for seed, kind in enumerate(kinds):
        if kind == "nothing":
            one.run(seed)
        else:
            getattr(one, kind)(seed)
            last = [*last, kind][-LAST_CHECKED:]
            if last.count("mismatch") >= MISMATCHES:
                distrusted = True
            if distrusted and last[-MATCHES_TO_HEAL:] == ["match"] * MATCHES_TO_HEAL:
                distrusted, last = False, []
        assert one.is_distrusted() == distrusted


def test_a_stored_block_costs_little_more_than_its_decoding_however_much_is_watched() -> None:
    check, random = WorkerCheck(), Random(5)
    for _ in range(MAX_PENDING):
        check.watch(asked(random.choices(range(90_000), k=8_192)), 0.0)
    payloads = [
        msgspec.msgpack.encode([1.0, [["BlockStored", [n], n and n - 1, [n] * 16, 16, None]]])
        for n in range(500)
    ]
    check.stored(0, decode_batch(payloads[0]).events)  # what each prompt costs, once
    began = time.thread_time()
    batches = [decode_batch(payload) for payload in payloads]
    decoded = time.thread_time()
    for batch in batches:
        check.stored(0, batch.events)
    assert time.thread_time() - decoded < 20 * (decoded - began)


def changed(seed: int) -> list[int]:
    """The same prompt but for one token."""
    return [*prompt(seed)[:5], 7, *prompt(seed)[6:]]


def test_what_another_prompt_explains_is_no_evidence() -> None:
    one = Rehearsal()
    for seed in range(LAST_CHECKED):
        one.check.placed.add(Tokens("I", changed(seed)), one.now)
        one.run(seed, stored(changed(seed)))
    assert (one.check.result.mismatched, one.check.result.is_distrusted) == (0, False)
    for seed in range(100, 100 + LAST_CHECKED):
        one.check.placed.add(Tokens("I", prompt(seed)), one.now)
        one.run(seed, stored(changed(seed)))
    assert one.check.result.is_distrusted


def test_where_what_was_placed_is_forgotten_there_is_no_evidence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("extproc.checking.self_check.MAX_PLACED_TOKENS", 50)
    one = Rehearsal()
    watched = one.watch(1)
    one.check.placed.add(Tokens("I", range(51)), one.now)
    one.check.stored(0, [stored(changed(1))])
    one.check.conclude(watched, is_held=False)
    assert one.check.result.without_evidence == 1
    one.run(2, stored(changed(2)))
    assert one.check.result.mismatched == 1


def test_prompts_placed_long_ago_are_forgotten_without_harm() -> None:
    one = Rehearsal()
    one.check.placed.add(Tokens("I", prompt(1)), one.now)
    one.now += 3 * MAX_WATCH_SECONDS
    one.check.placed.add(Tokens("I", prompt(2)), one.now)
    one.run(3, stored(changed(3)))
    assert one.check.result.mismatched == 1


SHARED = list(range(1_000, 1_040))


def own(seed: int, count: int = 40) -> list[int]:
    return Random(seed).sample(range(5_000, 90_000), count)


def prompted(
    tokens: list[int], held: int = 0, lora: str | None = None, salt: str | None = None
) -> Asked:
    """A prompt behind another one that has the shared part, too."""
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
    assert is_stored(prompted(tokens), chain([*tokens, 1, 2, 3, 4]))
    assert not is_stored(prompted(tokens), chain(tokens[:-8]))
    assert not is_stored(prompted(tokens), chain([7, *tokens]))


def test_behind_an_unknown_parent_what_was_not_held_is_a_match() -> None:
    tokens = SHARED + own(1)
    assert is_stored(prompted(tokens, held=40), chain(tokens[40:], rooted=False))
    assert not is_stored(prompted(tokens, held=36), chain(tokens[40:], rooted=False))
    assert not is_stored(prompted(tokens, held=76), chain(tokens[40:], rooted=False))


@pytest.mark.parametrize(
    ("one", "stored"),
    [
        (prompted(own(1), salt="a"), chain(own(1))),
        (prompted(own(1)), chain(own(1), first=("a",))),
        (prompted(own(1), lora="a"), chain(own(1))),
    ],
)
def test_other_namespaces_tell_nothing(one: Asked, stored: Chain) -> None:
    assert not is_stored(one, stored)
    assert not holds_own(one, stored, runs_of(Growth(stored, 0)))


def test_a_salted_prompt_meets_its_own_salt() -> None:
    assert is_stored(prompted(own(1), salt="a"), chain(own(1), first=("a",)))


def test_an_inserted_token_is_named_with_both_ids() -> None:
    tokens = SHARED + own(1)
    engines = [*tokens[:5], 77, *tokens[5:]]
    assert found(prompted(tokens), chain(engines)) == Difference(5, tokens[5], 77, 5)


def test_a_replaced_token_behind_an_unknown_parent_is_named() -> None:
    tokens = SHARED + own(1)
    engines = [*tokens[:50], 77, *tokens[51:]]
    one = prompted(tokens, held=40)
    assert found(one, chain(engines[40:], rooted=False)) == Difference(50, tokens[50], 77, 10)


def test_where_the_held_part_is_not_known_the_place_is_found_by_what_is_ours() -> None:
    tokens = SHARED + own(1)
    engines = [*tokens[:50], 77, *tokens[51:]]
    stored = chain(engines[48:], rooted=False)
    assert found(prompted(tokens), stored) == Difference(50, tokens[50], 77, 2)
    assert found(prompted(tokens), chain(tokens[48:], rooted=False)) is None


def test_a_shift_whose_place_was_not_seen_is_named_by_the_block_that_is_missing() -> None:
    tokens = SHARED + own(1)
    engines = [77, *tokens]
    stored = chain(engines[40:], rooted=False)
    assert found(prompted(tokens, held=8), stored) == Difference(8, tokens[8], None)


def test_what_stands_before_the_prompt_s_beginning_is_no_place_in_it() -> None:
    tokens = own(1)
    assert found(prompted(tokens), chain([1, 2, 3, 4, *tokens], rooted=False)) is None


def test_another_request_that_begins_alike_proves_nothing() -> None:
    one = prompted(SHARED + own(1))
    assert found(one, chain(SHARED + own(2))) is None
    assert found(one, chain([77, *SHARED, *own(2)])) is None
    assert found(one, chain(own(2), rooted=False)) is None
    assert found(one, chain([*own(2), *own(1)[:12], *own(3)], rooted=False)) is None


def test_a_beginning_of_our_own_with_another_end_proves_nothing() -> None:
    head = SHARED + own(1)
    assert found(prompted(head + own(2)), chain(head + own(3))) is None


def test_what_was_stored_before_proves_nothing() -> None:
    tokens = own(1)
    engines = [77, *tokens]
    assert found(prompted(tokens), chain(engines + own(2)), begin=44) is None


def test_before_there_is_another_prompt_nothing_is_a_prompt_s_own() -> None:
    tokens = Tokens("I", own(1))
    lonely = Asked(Prompt("m", tokens), 0, [tokens])
    assert found(lonely, chain([77, *tokens])) is None


def test_a_short_prompt_has_no_runs() -> None:
    assert found(prompted([1, 2, 3]), chain([])) is None


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
    proof = found(prompted(tokens), chain(engines))
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
    differs = found(prompted(tokens, held=40), stored)
    assert differs is not None
    for explaining in (twin, [*twin, 8, 8, 8, 8, 9], twin[:55]):
        assert explains(Tokens("I", explaining), stored, differs)
    for other in (tokens, twin[:50], [*twin[:60], 9], [7, *twin], [*twin, 9], []):
        assert not explains(Tokens("I", other), stored, differs)


def test_what_could_lie_in_too_many_places_explains_all() -> None:
    stored = Chain(Tokens("I", [1, 2, 1, 1]), 1, is_rooted=False, lora=None)
    assert not explains(Tokens("I", [1] * 30), stored, Difference(9, 7, 1, 2))
    assert explains(Tokens("I", [1] * 50), stored, Difference(9, 7, 1, 2))


def store(
    hashes: list[int], parent: int | None, tokens: list[int], size: int = 2, **fields: Any
) -> BlocksStored:
    return BlocksStored(list(hashes), parent, Tokens("I", tokens), size, **fields)


def grown(chains: Chains, event: BlocksStored) -> tuple[list[int], int, bool]:
    growth = chains.store(event)
    assert growth is not None
    return growth.chain.tokens.tolist(), growth.begin, growth.chain.is_rooted


def test_a_store_continues_the_chain_of_its_parent() -> None:
    chains = Chains()
    assert grown(chains, store([1, 2], None, [1, 2, 3, 4])) == ([1, 2, 3, 4], 0, True)
    assert grown(chains, store([3], 2, [5, 6])) == ([1, 2, 3, 4, 5, 6], 4, True)
    assert chains.tokens == 6


def test_a_branch_is_a_chain_of_its_own_and_knows_what_stands_before() -> None:
    chains = Chains()
    first = chains.store(store([1, 2], None, [1, 2, 3, 4], lora="a", extras=[("salt",), ()]))
    branch = chains.store(store([9], 1, [7, 8], lora="a"))
    assert first is not None
    assert branch is not None
    assert (branch.chain.tokens.tolist(), branch.begin) == ([1, 2, 7, 8], 2)
    assert (branch.chain.lora, branch.chain.first) == ("a", ("salt",))
    assert first.chain.tokens.tolist() == [1, 2, 3, 4]


def test_what_is_told_again_is_no_branch() -> None:
    chains = Chains()
    chains.store(store([1, 2], None, [1, 2, 3, 4]))
    assert grown(chains, store([2], 1, [3, 4])) == ([1, 2, 3, 4], 2, True)
    assert chains.tokens == 4


def test_behind_an_unknown_parent_the_beginning_is_not_known() -> None:
    chains = Chains()
    event = store([5], 4, [1, 2], extras=[("an image",)])
    growth = chains.store(event)
    assert growth is not None
    assert (growth.chain.is_rooted, growth.chain.first) == (False, ())
    assert grown(chains, store([6], 5, [3, 4])) == ([1, 2, 3, 4], 2, False)


def test_a_hash_is_of_its_group() -> None:
    chains = Chains()
    chains.store(store([1], None, [1, 2], group=0))
    assert grown(chains, store([2], 1, [3, 4], group=1)) == ([3, 4], 0, False)


def test_what_tells_nothing_of_a_prompt_is_left_out() -> None:
    chains = Chains()
    assert chains.store(store([1], None, [1, 2], bigrams=True)) is None
    assert chains.store(store([], None, [])) is None
    assert chains.store(store([1], None, [1, 2], medium="CPU")) is None


def test_a_cleared_rank_has_no_chains() -> None:
    chains = Chains()
    chains.store(store([1], None, [1, 2]))
    chains.clear()
    assert grown(chains, store([2], 1, [3, 4])) == ([3, 4], 0, False)
    assert chains.tokens == 2


def test_what_grew_least_recently_is_forgotten_first() -> None:
    chains = Chains(max_tokens=6)
    chains.store(store([1], None, [1, 2]))
    chains.store(store([2], None, [3, 4]))
    chains.store(store([3], 1, [5, 6]))
    chains.store(store([4], 3, [7, 8]))
    assert grown(chains, store([5], 4, [9, 9])) == ([1, 2, 5, 6, 7, 8, 9, 9], 6, True)
    assert grown(chains, store([6], 2, [1, 1])) == ([1, 1], 0, False)


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
        chains.store(store(hashes, parent, [first] * 2 * blocks))
        assert 0 <= chains.tokens <= max_tokens
        assert len(chains._places) <= max_blocks
        assert chains.tokens == sum(len(chain.tokens) for chain in chains._chains.values())
        assert {id(chain) for chain, _ in chains._places.values()} <= chains._chains.keys()
