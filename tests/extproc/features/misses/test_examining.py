import threading
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.features.misses.examining import (
    ADVANCE_SECONDS,
    HERE_BYTES,
    MOST_BYTES,
    MOST_WAITING,
    SHARE,
    Examining,
)
from tests.extproc.settled import at_once


class Clock:
    """A clock that a test sets, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_requests_that_wait_are_bounded_in_number_and_bytes() -> None:
    examining = Examining(Clock())
    assert not examining.admit(MOST_BYTES + 1)
    assert all(examining.admit(1) for _ in range(MOST_WAITING))
    assert not examining.admit(1)
    examining.leave(1)
    assert not examining.admit(MOST_BYTES)
    assert examining.admit(1)


async def test_work_that_took_its_share_waits_for_time_to_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, spent = Clock(), [0.0, ADVANCE_SECONDS + 1.0]
    monkeypatch.setattr("time.thread_time", lambda: spent.pop(0))
    examining = Examining(clock)
    assert examining.admit(1)
    assert await examining.run(lambda: 7, HERE_BYTES + 1) == 7
    assert not examining.admit(1)
    clock.now = 0.9 / SHARE
    assert not examining.admit(1)
    clock.now = 1.1 / SHARE
    assert examining.admit(1)


async def test_short_work_is_done_at_once() -> None:
    examining, here = Examining(), threading.get_ident()
    assert await examining.run(threading.get_ident, HERE_BYTES) == here
    assert await examining.run(threading.get_ident) != here


PIECES = st.lists(st.tuples(st.floats(0, 30), st.floats(0, 0.5)), max_size=40)


@given(PIECES)
def test_no_more_than_its_share_is_used_but_for_the_advance_and_one_piece(
    pieces: list[tuple[float, float]],
) -> None:
    clock, spent = Clock(), 0.0
    examining = Examining(clock)
    for pause, seconds in pieces:
        clock.now += pause
        if not examining.admit(1):
            continue
        with mock.patch("time.thread_time", side_effect=[0.0, seconds]):
            at_once(examining.run(lambda: None, 0))
        examining.leave(1)
        spent += seconds
        assert spent <= ADVANCE_SECONDS + SHARE * clock.now + seconds + 1e-6
