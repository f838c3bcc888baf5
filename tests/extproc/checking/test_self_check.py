import time
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.checking.evidence import Asked
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
    Effort,
    Watched,
    WorkerCheck,
)
from kvstate.events import AllCleared, BlocksRemoved, BlocksStored
from kvstate.overlap import Prompt, Tokens
from kvstate.wire.zmq_wire import decode_batch

SIZE = 4
REFERENCE = Tokens("I", range(100))


def prompt(seed: int) -> list[int]:
    return Random(seed).sample(range(1_000, 90_000), 40)


def asked(tokens: list[int]) -> Asked:
    return Asked(Prompt("m", Tokens("I", tokens)), 0, [REFERENCE])


def stored(tokens: list[int]) -> BlocksStored:
    """The whole blocks of these tokens, without a parent."""
    blocks = len(tokens) // SIZE
    hashes = [hash((*tokens[: SIZE * (number + 1)],)) & 2**64 - 1 for number in range(blocks)]
    return BlocksStored(list(hashes), None, Tokens("I", tokens[: blocks * SIZE]), SIZE)


class Rehearsal:
    """One worker's check, whose clock advances just enough for each request to be watched."""

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
    other.asked = asked([9, *tokens])  # it differs, but its tokens are found in the other one's
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
    check.stored(0, decode_batch(payloads[0]).events)  # pays the one-time cost of each prompt
    began = time.thread_time()
    batches = [decode_batch(payload) for payload in payloads]
    decoded = time.thread_time()
    for batch in batches:
        check.stored(0, batch.events)
    assert time.thread_time() - decoded < 20 * (decoded - began)


def changed(seed: int) -> list[int]:
    """The same prompt except for one token."""
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
