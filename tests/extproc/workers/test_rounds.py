import asyncio

import aiohttp

from extproc.workers.asking import Place, Rounds


async def test_a_question_that_fails_ends_nothing() -> None:
    asked: list[str] = []
    again = asyncio.Event()

    async def ask(_: aiohttp.ClientSession, place: Place) -> None:
        asked.append(place[0])
        if asked.count("a") > 1 and asked.count("b") > 1:
            again.set()
        raise RuntimeError("nobody thought of this")

    kept: list[set[str]] = []
    places = [("a", "10.0.0.1:1"), ("b", "10.0.0.2:1")]
    rounds = Rounds(0.01, lambda: places, kept.append, ask, lambda: 0.5)
    await rounds.start()
    await asyncio.wait_for(again.wait(), 60)
    await rounds.close()
    assert kept[0] == {"10.0.0.1:1", "10.0.0.2:1"}


async def test_without_an_interval_nobody_is_asked() -> None:
    async def ask(*_: object) -> None:
        raise AssertionError

    rounds = Rounds(0, lambda: [("a", "10.0.0.1:1")], lambda _: None, ask, lambda: 0.5)
    await rounds.start()
    await rounds.close()
