from hypothesis import given
from hypothesis import strategies as st

from extproc._core import Budget
from extproc.serving.stream import SMALL_BYTES, SMALL_PIECES, CollectedBody
from extproc.serving.stream_answers import MAX_ECHO_BYTES

PIECES = st.lists(st.binary(max_size=4) | st.binary(min_size=SMALL_BYTES, max_size=SMALL_BYTES + 4))


def collected(*pieces: bytes) -> CollectedBody:
    one = CollectedBody(Budget(10**9))
    for piece in pieces:
        one.add(piece)
    return one


@given(PIECES)
def test_collected_body_joins_its_pieces_and_returns_them_once(pieces: list[bytes]) -> None:
    one = collected(*pieces)
    assert one.size_bytes == len(b"".join(pieces))
    assert one.join() == b"".join(pieces)
    assert b"".join(one.take()) == b"".join(pieces)
    assert (one.take(), one.size_bytes) == ([], 0)


def test_collected_body_does_not_copy_a_single_piece() -> None:
    piece = b"x" * SMALL_BYTES
    one = collected(piece)
    assert one.join() is piece
    assert one.take()[0] is piece


def test_collected_body_keeps_few_pieces_of_a_body_sent_bytewise() -> None:
    one = collected(*[b"x"] * 10_000)
    assert len(one.take()) <= 10_000 // SMALL_PIECES + 1


def test_joined_piece_fits_into_one_echo() -> None:
    assert SMALL_BYTES * SMALL_PIECES <= MAX_ECHO_BYTES


def test_budget_bounds_all_collected_bodies_until_they_are_taken() -> None:
    budget = Budget(5)
    first, second = CollectedBody(budget), CollectedBody(budget)
    assert first.add(b"abc")
    assert not second.add(b"def")
    assert second.join() == b"def"
    assert second.take() == [b"def"]
    assert budget.used_bytes == 3
    first.take()
    assert budget.used_bytes == 0
