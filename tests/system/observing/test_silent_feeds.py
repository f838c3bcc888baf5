"""Feeds that tell nothing of what their workers compute, behind a real Envoy; no accounting."""

import itertools

import pytest

from tests.system.system import chat, long_text, running
from tests.waiting import until


@pytest.mark.slow  # it takes six seconds of silence after each of six answers, which may overlap
async def test_silent_feed_is_named_everywhere_and_turns_stay_on_their_worker() -> None:
    async with running(2, changes={"accounting": {"responses": "none"}}) as system:
        for worker in system.workers:
            worker.faults.drop(1_000_000)
            worker.faults.hide_replay("silent")
        seeds = itertools.count()

        async def are_silent() -> bool:
            assert (await system.send(chat(long_text(f"new {next(seeds)}"))))[0] == 200
            return {one["state"] for one in await system.status()} == {"silent"}

        await until(are_silent, pause=0.2)

        async def text_of(address: str) -> str:
            async with system.session.get(address) as response:
                return await response.text()

        async def are_listed() -> bool:
            ready = await text_of(f"{system.metrics}/readyz")
            assert ready.startswith("ready\n")
            return ready.count("the feed is connected and told nothing of 6 of") == 2

        await until(are_listed)

        def are_logged() -> bool:
            return system.log.read_text().count("feed-silent: worker") == 2

        await until(are_logged)
        assert (await text_of(f"{system.admin}/faults")).count('"feed-silent"') == 2
        assert await system.metric('kvsteer_faults{code="feed-silent"}') == 2.0
        answered = {(await system.send(chat(long_text("one of all"))))[1] for _ in range(8)}
        assert len(answered) == 1

        for worker in system.workers:
            worker.faults.drop(0)
            worker.faults.hide_replay(None)

        async def are_live() -> bool:
            assert (await system.send(chat(long_text(f"newer {next(seeds)}"))))[0] == 200
            return {one["state"] for one in await system.status()} == {"live"}

        await until(are_live, pause=0.2)

        async def is_over() -> bool:
            return await system.metric('kvsteer_faults{code="feed-silent"}') == 0.0

        await until(is_over)
