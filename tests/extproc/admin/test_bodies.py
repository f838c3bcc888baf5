import asyncio
import contextlib
import itertools
import json

from extproc.admin.routes import AT_ONCE, listed


async def test_a_long_list_is_made_in_turns_and_whole() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    working = asyncio.create_task(others())
    made = await listed({"at": number, "turn": turns} for number in range(10 * AT_ONCE + 1))
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working
    told = json.loads(bytes(made))
    assert [one["at"] for one in told] == list(range(10 * AT_ONCE + 1))
    in_one_go = [len(list(each)) for _, each in itertools.groupby(told, lambda one: one["turn"])]
    assert max(in_one_go) == AT_ONCE


async def test_a_list_of_nothing_is_an_empty_one() -> None:
    assert bytes(await listed([])) == b"[]"
