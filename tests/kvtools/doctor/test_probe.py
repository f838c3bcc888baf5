import msgspec
import pytest

from kvstate.events import AllCleared, BlocksStored, EventBatch, OtherGroupStored
from kvstate.overlap import Tokens
from kvtools.doctor.findings import Subject
from kvtools.doctor.probe import MessageSummary, judge_groups, judge_heard

NOW = 1000.0


Numbered = tuple[int, bytes | EventBatch]


def stored(*tokens: int, rank: int | None = 0, stamp: float = NOW) -> EventBatch:
    event = BlocksStored([1], None, Tokens("I", tokens), len(tokens))
    return EventBatch(stamp, [event, AllCleared()], rank)


def hearing(*batches: Numbered, rank: int = 0, is_live: bool = True) -> MessageSummary:
    heard = MessageSummary(rank, is_live=is_live)
    for sequence, body in batches:
        heard.count_message()
        heard.take(sequence, body, NOW)
    return heard


def codes_in(heard: MessageSummary) -> list[str]:
    return [one.code for one in judge_heard(Subject("worker"), [heard])]


def test_judge_heard_is_empty_without_batches() -> None:
    assert codes_in(hearing()) == []


def test_heard_batch_gives_block_size_clock_and_rank() -> None:
    heard = hearing((0, stored(1, 2, stamp=NOW + 9)), (1, stored(3, 4, stamp=NOW + 7)))
    heard.take(2, stored(5, 6, stamp=NOW + 8), NOW)
    assert (heard.block_sizes, heard.ahead_seconds, heard.ranks) == ({2}, 7.0, {0})


def test_heard_batch_is_decoded_from_the_wire() -> None:
    payload = msgspec.msgpack.encode([NOW, [["BlockStored", [7], None, [3, 4], 2]], None])
    assert hearing((0, payload)).block_sizes == {2}


def test_heard_batches_left_out_count_as_missing() -> None:
    assert hearing((0, stored(1)), (3, stored(1))).missing == 2
    assert hearing((5, stored(1)), (6, stored(1))).missing == 0


def test_heard_prompt_is_held_by_its_stored_parts() -> None:
    heard = hearing((0, stored(1, 2, 3, 4)), (1, stored(5, 6, 7, 8)))
    assert heard.holds(Tokens("I", range(1, 20)))
    assert not heard.holds(Tokens("I", range(100, 120)))


def test_heard_bytes_between_two_tokens_are_no_part() -> None:
    heard = hearing((0, stored(0x01000000)))
    assert not heard.holds(Tokens("I", [0x00000100, 0]))


def test_heard_message_that_is_no_batch_is_unreadable() -> None:
    assert codes_in(hearing((0, b"\xc1"))) == ["feed-unreadable"]
    heard = hearing()
    heard.unreadable += 1
    assert codes_in(heard) == ["feed-unreadable"]


def test_heard_events_of_another_rank_are_mixed_up() -> None:
    assert codes_in(hearing((0, stored(1)), rank=1)) == ["", "ranks-mixed-up", ""]
    assert codes_in(hearing((0, stored(1, rank=None)), rank=1)) == ["", ""]


def test_heard_clock_is_judged_by_live_batches_only() -> None:
    late = (0, stored(1, stamp=NOW - 60))
    assert codes_in(hearing(late)) == ["", "clock-skew"]
    assert codes_in(hearing(late, is_live=False)) == [""]


def test_heard_messages_beyond_the_limit_are_a_flood() -> None:
    heard = MessageSummary(0, is_live=True, max_messages=1)
    for _ in range(2):
        heard.count_message()
    assert codes_in(heard) == ["feed-flooded"]


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([], []),
        ([(4, 9)], ["windows: hits end at multiples of 4 tokens"]),
        ([(6, 1)], ["states: hits end at multiples of 12 tokens"]),
        ([(4, 1), (4, 9)], ["states: hits", "windows: hits"]),
        ([(4, 9), (4, 0)], ["nothing of it is certain"]),
    ],
)
def test_judge_groups_notes_what_a_hybrid_reuses(
    groups: list[tuple[int, int]], words: list[str]
) -> None:
    others = [OtherGroupStored(1, [1], size, reach) for size, reach in groups]
    heard = hearing((0, stored(1, 2, 3, 4)), (1, EventBatch(NOW, [*others])))
    notes = [one.says for one in judge_groups(Subject("worker"), [heard])]
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))
