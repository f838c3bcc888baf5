"""A wait that gives up says what it saw last."""

import re
from itertools import count

import pytest

from tests.waiting import blocked_until, until


async def test_until_repeats_its_condition_until_it_holds() -> None:
    numbers = count()
    await until(lambda: next(numbers) == 3)
    assert next(numbers) == 4


async def test_until_names_the_last_value_and_the_variables_of_its_condition() -> None:
    seen = [7, 8]

    async def nine() -> list[int]:
        return [one for one in seen if one == 9]

    told = r"not within 0 s: the nine; its last value was \[\]\n  seen = \[7, 8\]"
    with pytest.raises(AssertionError, match=told):
        await until(nine, "the nine", seconds=0)


async def test_until_names_a_condition_without_words_by_its_source() -> None:
    seen = [7, 8]
    with pytest.raises(AssertionError, match=re.escape("len(seen) == 3, seconds=0")):
        await until(lambda: len(seen) == 3, seconds=0)


def test_blocked_until_names_the_last_value() -> None:
    with pytest.raises(AssertionError, match="its last value was 0"):
        blocked_until(lambda: 0, seconds=0)
