"""The instruments of the other tests here measure what they should."""

import asyncio
import io
import time

from tests.hostile.held_router import LOOK_SECONDS, Watch
from tests.hostile.victim import Victim


async def test_a_router_that_nobody_harms_answers_and_its_loop_is_free(either: Victim) -> None:
    async with either.probed() as harm:
        pass
    assert len(harm.latencies) >= 10
    assert harm.worst_held < 0.05, harm


async def test_a_loop_that_is_held_up_is_seen() -> None:
    file = io.StringIO()
    Watch(asyncio.get_running_loop(), file)
    await asyncio.sleep(0)  # the watch's first run
    ends = time.thread_time() + 0.1
    while time.thread_time() < ends:
        pass
    while not file.getvalue():  # noqa: ASYNC110 - a timer writes it
        await asyncio.sleep(LOOK_SECONDS)
    assert 0.1 <= float(file.getvalue().splitlines()[-1]) < 1
