import asyncio
import itertools

from kvstate.feeds.turns import MAX_TURNS_AT_ONCE, Turns
from kvstate.steps import Pace, Steps
from tests.waiting import until


async def test_slice_is_over_after_its_time() -> None:
    turns = Turns(60.0)
    assert turns.is_over()
    await turns.next()
    assert not turns.is_over()


async def test_turns_are_given_in_the_order_of_asking() -> None:
    turns, order = Turns(), list[int]()

    async def take(number: int) -> None:
        await turns.next()
        order.append(number)

    await asyncio.gather(*(take(number) for number in range(3 * MAX_TURNS_AT_ONCE)))
    assert order == list(range(3 * MAX_TURNS_AT_ONCE))


async def test_turns_alternate_between_workers() -> None:
    turns, order = Turns(), list[str]()

    async def take(worker: str) -> None:
        await turns.next(worker)
        order.append(worker)

    await asyncio.gather(*(take(worker) for worker in [*["many"] * 100, "few", "few"]))
    assert order[:5] == ["many", "few", "many", "few", "many"]


async def test_turns_per_loop_iteration_are_bounded() -> None:
    turns, done = Turns(), list[int]()

    async def take(number: int) -> None:
        await turns.next()
        done.append(number)

    tasks = [asyncio.create_task(take(number)) for number in range(10 * MAX_TURNS_AT_ONCE)]
    seen = []
    while len(done) < len(tasks):
        await asyncio.sleep(0)
        seen.append(len(done))
    steps = [after - before for before, after in itertools.pairwise(seen)]
    assert max(steps) <= MAX_TURNS_AT_ONCE


async def test_turns_pass_over_a_cancelled_waiter() -> None:
    turns = Turns()
    gone, waiting = asyncio.create_task(turns.next()), asyncio.create_task(turns.next())
    await asyncio.sleep(0)
    gone.cancel()
    async with asyncio.timeout(60):
        await waiting


async def test_a_slice_begins_at_once_unless_somebody_waits_for_one() -> None:
    turns = Turns(60.0)
    assert turns.begin()
    assert not turns.is_over()
    waiting = asyncio.create_task(turns.next())
    await asyncio.sleep(0)
    assert not turns.begin()
    await waiting


async def test_steps_of_a_cancelled_run_are_closed_at_once() -> None:
    turns, done = Turns(0.0), list[str]()

    def steps() -> Steps[None]:
        try:
            while True:
                done.append("step")
                yield
        finally:
            done.append("closed")

    under_way = steps()
    running = asyncio.create_task(turns.run(under_way))
    await until(lambda: done)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert done[-1] == "closed"


async def test_work_that_waits_for_other_work_leaves_its_slice_to_it() -> None:
    turns, done = Turns(60.0), list[str]()

    def waiting() -> Steps[int]:
        for looks in range(1_000):
            if done:
                return looks
            yield Pace.WAITS
        raise AssertionError("it kept its slice")

    async def work() -> None:
        await turns.next()
        done.append("other work")

    looks, _ = await asyncio.gather(turns.run(waiting()), work())
    assert looks <= 2
