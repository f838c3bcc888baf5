"""A limited call returns its answer, or fails by the limit that it met."""

import pytest

from tests.limited import limited

LIMITS = {"gibibytes": 2, "cpu_seconds": 1}


def spin() -> None:
    """Takes CPU for ever."""
    while True:
        pass


def length_of(size: int) -> int:
    """Takes memory."""
    return len(bytearray(size))


def test_limited_returns_the_answer() -> None:
    assert limited(length_of, 1 << 20, **LIMITS, wait_seconds=60) == 1 << 20


def test_limited_fails_when_the_cpu_is_used_up() -> None:
    with pytest.raises(AssertionError, match=r"it ended with -\d"):
        limited(spin, **LIMITS, wait_seconds=60)


def test_limited_fails_when_memory_is_refused() -> None:
    with pytest.raises(AssertionError, match="it ended with 1"):
        limited(length_of, 3 << 30, **LIMITS, wait_seconds=60)


def test_limited_gives_up_after_its_time() -> None:
    with pytest.raises(AssertionError, match=r"not within 0\.1 s"):
        limited(spin, **LIMITS, wait_seconds=0.1)
