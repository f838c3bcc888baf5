"""An answer is awaited for as long as the router itself can hear it."""

import asyncio
import time

import pytest

from extproc.fleet.asking.time_limits import answered_within

SECONDS = 0.1


async def answer() -> str:
    for _ in range(3):  # as many turns of the loop as it takes to read an answer
        await asyncio.sleep(0)
    return "it lives"


async def test_answer_that_lay_there_while_the_router_was_held_up_is_heard() -> None:
    asyncio.get_running_loop().call_soon(time.sleep, 3 * SECONDS)
    assert await answered_within(answer(), SECONDS) == "it lives"


async def test_silence_ends_the_wait_and_the_question() -> None:
    was_ended = asyncio.Event()

    async def silent() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            was_ended.set()

    with pytest.raises(TimeoutError):
        await answered_within(silent(), SECONDS)
    assert was_ended.is_set()


async def test_fault_of_a_question_is_raised() -> None:
    async def refused() -> None:
        raise ConnectionRefusedError

    with pytest.raises(ConnectionRefusedError):
        await answered_within(refused(), SECONDS)
