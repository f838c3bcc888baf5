"""Times what it costs to say of each turn why its tokens are computed (`misses`).

python benchmarks/misses_cost.py [--quick | --smoke]

A router decides on the turns of agents' conversations, which grow by a thousand tokens a turn, and
releases each: the request's way from its body to its end, without a server around it. One router
judges the turns and one does not, in turns; the CPU of the whole process counts, so that of the
thread as well. Eight workers are live. `goes on`: every turn goes on from the one before. `a
clock`: each turn has another time at the head of its system, so each is examined.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from extproc_counts import Bench
from measure import Figure, Goal, Row
from prose import Prose
from rows import Run, arguments, run

from extproc.features.hooks import tell
from extproc.requests.request import CHAT_PATH, Head, RoutingRequest
from extproc.serving.router import Router

TURNS = 24
TURN_BYTES = 4_000
SYSTEM_BYTES = 16_000
GOAL = Goal(1.05, "<= 1.05 of without")
ON: dict[str, Any] = {"misses": {"enabled": True}}


def turns(seed: int, *, has_clock: bool) -> Iterator[str]:
    """Yields the bodies of one conversation, turn by turn."""
    prose = Prose(seed)
    head = prose.text(SYSTEM_BYTES)
    messages = [{"role": "user", "content": prose.text(TURN_BYTES)}]
    for turn in range(TURNS):
        clock = f"It is 12:{turn:02}:07 now. " if has_clock else ""
        system = {"role": "system", "content": f"You are agent {seed}. {clock}{head}"}
        body = {"model": "tiny", "max_tokens": 1, "messages": [system, *messages]}
        yield msgspec.json.encode(body).decode()
        messages.append({"role": "assistant", "content": prose.text(TURN_BYTES // 2)})
        messages.append({"role": "user", "content": prose.text(TURN_BYTES // 2)})


async def _spent(router: Router, bodies: Sequence[str]) -> float:
    """Returns the microseconds of CPU for one decision and its end."""
    requests = [
        RoutingRequest(Head("POST", CHAT_PATH, len(text)), text.encode()) for text in bodies
    ]
    gc.collect()
    idle, before = asyncio.all_tasks(), time.process_time()
    for request in requests:
        decision, ticket = await router.route(request)
        assert ticket is not None
        router.release(ticket)
        tell(router.hooks.note_end, decision, None, is_booked=True, is_sent=True)
        if examining := asyncio.all_tasks() - idle:
            await asyncio.wait(examining)
    return (time.process_time() - before) * 1e6 / len(bodies)


async def _rows(one: Run) -> None:
    for has_clock in (False, True):
        on, off = Bench(8, more=ON), Bench(8)
        for bench in (on, off):
            await bench.start()
        spent: dict[Bench, list[float]] = {on: [], off: []}
        for seed in range(one.amount(2, 6, 24)):
            bodies = list(turns(seed, has_clock=has_clock))
            for bench in (on, off) if seed % 2 else (off, on):
                spent[bench].append(await _spent(bench.router, bodies))
        what = "a clock" if has_clock else "goes on"
        goal = None if has_clock else GOAL
        ours, reference = Figure(spent[on]), Figure(spent[off])
        one.add([Row(f"CPU of a turn (us), {what}", ours, reference, goal)])
        for bench in (on, off):
            await bench.close()


def main() -> None:
    """Times, and prints the rows."""
    logging.disable(logging.CRITICAL)
    with run(arguments(__doc__, "fewer conversations")) as one:
        asyncio.run(_rows(one))


if __name__ == "__main__":
    main()
