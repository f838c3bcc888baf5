"""The compiled numbers of a load against those in Python, to the last bit."""

import contextlib
import gc
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc._core import LoadNumbers, Pace
from extproc.routing.load.speed import Speed
from tests.oracles.routing.load_numbers import PlainNumbers, PlainPace

NAMES = [name for name in PlainNumbers.__slots__ if not name.startswith("_")]
RATE, WINDOW = 8_000.0, 10.0


def step(
    numbers: LoadNumbers | PlainNumbers, pace: Pace | PlainPace, rng: Random, now: float
) -> list[object]:
    """Changes numbers at random; returns what was queued before, and all numbers."""
    pace.pace, tokens = 0.2 + rng.random(), rng.choice((0.0, 9_000 * rng.random()))
    kind = rng.randrange(7)
    left = 0.0
    if kind <= 1:
        left = numbers.begin(tokens, now, RATE, WINDOW)
    elif kind == 2:
        numbers.leave(tokens, rng.random() < 0.5)
    elif kind == 3:
        numbers.end(now, RATE, WINDOW)
    elif kind == 4:
        numbers.shared, numbers.shared_tokens = rng.randrange(9), rng.randrange(2**50)
    elif kind == 5:
        more = rng.choice((0, rng.randrange(99_999)))
        reported = (rng.randrange(-3, 4), rng.randrange(-(2**40), 2**40), more, more / 3)
        numbers.share(*reported, now, RATE, WINDOW, 4 * RATE * WINDOW)
    else:
        numbers.bound(tokens, now, WINDOW)
    looks = [numbers.backlog(now + 0.1, RATE), numbers.lately(now + 0.1, WINDOW)]
    told_by_us = numbers.reported(now + 0.1, RATE, WINDOW)
    return [left, *looks, *told_by_us, *[getattr(numbers, name) for name in NAMES]]


@given(st.integers(0, 2**32), st.integers(1, 20))
def test_numbers_are_the_same_compiled_and_in_python(seed: int, steps: int) -> None:
    paces = PlainPace(), Pace()
    both = PlainNumbers(paces[0]), LoadNumbers(paces[1])
    rngs, clock, now = (Random(seed), Random(seed)), Random(seed + 1), 5.0
    for _ in range(steps):
        now += clock.choice((-0.1, 0.0, 0.01, 3.0))
        plain = step(both[0], paces[0], rngs[0], now)
        assert plain == step(both[1], paces[1], rngs[1], now)


TOKENS = st.floats(0, 1e9)


@given(st.lists(TOKENS, max_size=4), st.integers(0, 2**40), TOKENS)
def test_estimate_of_the_queue_is_bounded_by_what_is_not_known_to_be_computed(
    booked: list[float], shared: int, estimate: float
) -> None:
    numbers = LoadNumbers(Pace())
    for tokens in booked:
        numbers.begin(tokens, 1.0, RATE, WINDOW)
    numbers.shared_tokens = shared
    numbers.bound(estimate, 1.0, WINDOW)
    most = numbers.booked_tokens + numbers.shared_tokens
    assert numbers.backlog(1.0, RATE) == min(estimate, most)


def test_numbers_are_only_of_a_pace() -> None:
    wrong: Any = PlainPace()
    with pytest.raises(TypeError, match="Pace"):
        LoadNumbers(wrong)
    with pytest.raises(TypeError):
        LoadNumbers(Pace()).end("now", RATE, WINDOW)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="wants 3 arguments"):
        LoadNumbers(Pace()).end(1.0, RATE)  # type: ignore[call-arg]


def test_numbers_that_do_not_fit_are_refused_and_change_nothing() -> None:
    numbers = LoadNumbers(Pace())
    for requests, booked in ((2**63, 0), (2**62, 2**62), (2**62, 2**62)):
        with contextlib.suppress(OverflowError):
            numbers.share(requests, booked, 0.0, 0.0, 1.0, RATE, WINDOW, 1.0)
    assert (numbers.shared, numbers.shared_tokens) == (2**62, 2**62)


def test_numbers_in_a_cycle_are_collected() -> None:
    speed: Speed[Any] = Speed()
    speed.waiting[LoadNumbers(speed)] = (1.0, True)
    del speed
    assert gc.collect() > 0
