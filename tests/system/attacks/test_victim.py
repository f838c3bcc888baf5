"""The instruments of the other tests here measure what they should."""

import asyncio
import io
import time

from tests.system.attacks.held_router import LOOK_SECONDS, Watch
from tests.system.attacks.victim import Victim
from tests.waiting import until


async def test_probe_of_an_unharmed_router_sees_answers_and_a_free_loop(victim: Victim) -> None:
    async with victim.probed() as harm:
        pass
    assert len(harm.latencies) >= 10
    assert harm.worst_held < 0.05, harm


async def test_watch_reports_a_blocked_loop() -> None:
    file = io.StringIO()
    Watch(asyncio.get_running_loop(), file)
    await asyncio.sleep(0)  # the watch's first run
    ends = time.thread_time() + 0.1
    while time.thread_time() < ends:
        pass
    await until(file.getvalue, "it is reported", pause=LOOK_SECONDS)
    assert 0.1 <= float(file.getvalue().splitlines()[-1]) < 1
