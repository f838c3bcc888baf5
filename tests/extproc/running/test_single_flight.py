import asyncio

from hypothesis import given
from hypothesis import strategies as st

from extproc.running.single_flight import SingleFlight
from tests.waiting import until

# how many rounds of the loop each read takes, and how many pass until the next wish
TIMES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12)


@given(TIMES, st.booleans())
def test_single_flight_ends_with_a_run_that_sees_the_last_request(
    times: list[tuple[int, int]],
    fails: bool,
) -> None:
    async def scene() -> None:
        file, applied, running, left = 0, 0, 0, [rounds for rounds, _ in times]

        async def apply() -> None:
            nonlocal applied, running
            running += 1
            assert running == 1
            read = file
            for _ in range(left.pop() if left else 0):
                await asyncio.sleep(0)
            running -= 1
            if fails and left:
                raise RuntimeError("this file cannot be read")
            assert read >= applied
            applied = read

        flight = SingleFlight(apply, "not applied")
        for _, pause in times:
            file += 1
            flight.want()
            for _ in range(pause):
                await asyncio.sleep(0)
        await until(lambda: applied == file or (fails and left))

    asyncio.run(scene())
