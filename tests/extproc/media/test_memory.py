"""Media items that outlive a restart of the router."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.media.identities import MAX_RUNS, MAX_TOKENS, Identity
from extproc.media.item_report import ItemReport
from extproc.media.knowledge import MediaKnowledge
from extproc.media.memory import ITEMS_AT_ONCE, MediaMemory
from kvstate.overlap import FIRST_WIDE_TOKEN


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


CAT = Identity("CAT", ((90, 6), (91, 1)), 1)
TURNING = Identity(None, ((90, 1), (tuple(range(FIRST_WIDE_TOKEN, FIRST_WIDE_TOKEN + 4)), 9)), 1)


def restarted(before: MediaKnowledge, secret: bytes = b"k") -> MediaKnowledge:
    after = MediaKnowledge(secret)
    memory = MediaMemory(after)
    for piece in MediaMemory(before).saved():
        memory.restore(piece)
    memory.note_proven("w")
    return after


def test_items_are_known_after_a_restart_in_the_same_order() -> None:
    before = MediaKnowledge(b"k")
    for number in range(ITEMS_AT_ONCE + 2):
        before.identities.put(key(number), TURNING if number % 2 else CAT)
    before.identities.find(key(0))
    after = restarted(before)
    assert after.identities.items() == before.identities.items()
    assert after.identities.ordered_keys()[-1] == key(0)


def test_items_of_many_runs_are_saved_in_several_pieces() -> None:
    before = MediaKnowledge(b"k")
    rows = tuple([(90 + row % 2, 1) for row in range(MAX_RUNS)])
    for number in range(3):
        before.identities.put(key(number), Identity("ROWS", rows))
    assert len(list(MediaMemory(before).saved())) == 3
    assert len(restarted(before).identities) == 3


@pytest.mark.parametrize(
    "identity", [Identity(b"bytes", ((90, 6),)), Identity("CAT", ((90, 6),), is_whole=False)]
)
def test_item_that_is_not_told_to_others_is_not_saved(identity: Identity) -> None:
    before = MediaKnowledge(b"k")
    before.identities.put(key(1), identity)
    assert len(restarted(before).identities) == 0


def test_items_of_another_secret_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    before = MediaKnowledge(b"k")
    for number in range(ITEMS_AT_ONCE + 1):
        before.identities.put(key(number), CAT)
    assert len(restarted(before, b"other").identities) == 0
    assert len(caplog.records) == 1


@given(st.binary(max_size=60) | st.just(b"\x91" * 4000))
def test_damaged_piece_is_refused_or_adds_sound_items(content: bytes) -> None:
    after = MediaKnowledge(b"k")
    try:
        MediaMemory(after).restore(content)
    except ValueError:
        return
    assert all(0 < one.count <= MAX_TOKENS for _, one in after.identities.items())


def test_item_that_no_engine_has_is_refused() -> None:
    (piece,) = MediaMemory(MediaKnowledge(b"k")).saved()
    tag, _ = msgspec.msgpack.decode(piece)
    long = ItemReport(key(1), "CAT", ((90, MAX_TOKENS), (91, 1)))
    with pytest.raises(ValueError, match="no engine"):
        MediaMemory(MediaKnowledge(b"k")).restore(msgspec.msgpack.encode([tag, [long]]))
