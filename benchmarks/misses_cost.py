"""Times what it costs to say of each turn why its tokens are computed (`misses`).

python benchmarks/misses_cost.py [--quick | --smoke]

A router decides on the turns of agents' conversations, which grow by a thousand tokens a turn, and
releases each: the request's way from its body to its end, without a server around it. One router
judges the turns and one does not, in turns; the CPU of the whole process counts, so that of the
thread as well. Eight workers are live, and the one that gets a turn stores it. `goes on`: every
turn goes on from the one before; only the first of each conversation is examined in the thread. `a
clock`: each turn has another time at the head of its system, so each is examined.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from extproc_counts import BLOCK, Bench
from measure import Figure, Goal, Row
from prose import Prose
from rows import Run, arguments, run

from extproc.features.hooks import tell
from extproc.requests.request import CHAT_PATH, Head, RoutingRequest, parse
from kvstate.events import Batch, BlocksStored, EventBatch
from kvstate.overlap import Prompt

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


async def _stored(bench: Bench, worker: str, prompt: Prompt) -> None:
    """Has a worker announce that it has stored a prompt, and waits until that is known."""
    at = int(worker.rpartition(":")[2]) - 1
    count, number = len(prompt.tokens) // BLOCK, bench.numbers[at]
    bench.numbers[at] += 1
    hashes: list[int | bytes] = [*range(number << 32, (number << 32) + count)]
    event = BlocksStored(hashes, None, prompt.tokens[: count * BLOCK], BLOCK)
    bench.transports[at].put(Batch(number, EventBatch(float(number), [event])))
    while _held(bench, worker, prompt) < (len(prompt.tokens) - 1) // BLOCK * BLOCK:
        await asyncio.sleep(0)


def _held(bench: Bench, worker: str, prompt: Prompt) -> int:
    found = bench.candidates.overlaps(prompt).get(worker)
    return 0 if found is None else found.certain_tokens


async def _spent(bench: Bench, text: str) -> float:
    """Returns the seconds of CPU for one decision and its end."""
    router, body = bench.router, text.encode()
    prompt = Prompt("tiny", bench.tokenizer.encode(parse(CHAT_PATH, body).prompts[0]))
    request = RoutingRequest(Head("POST", CHAT_PATH, len(body)), body)
    idle, before = asyncio.all_tasks(), time.process_time()
    decision, ticket = await router.route(request)
    assert ticket is not None
    router.release(ticket)
    tell(router.hooks.note_end, decision, None, is_booked=True, is_sent=True)
    if examining := asyncio.all_tasks() - idle:
        await asyncio.wait(examining)
    spent = time.process_time() - before
    await _stored(bench, decision.worker, prompt)
    return spent


async def _rows(one: Run) -> None:
    for has_clock in (False, True):
        benches = Bench(8, more=ON), Bench(8)
        for bench in benches:
            await bench.start()
        spent: dict[Bench, list[float]] = {bench: [] for bench in benches}
        for seed in range(one.amount(2, 6, 48)):
            sums = dict.fromkeys(benches, 0.0)
            gc.collect()
            for at, text in enumerate(turns(seed, has_clock=has_clock)):
                for bench in benches if at % 2 else benches[::-1]:
                    sums[bench] += await _spent(bench, text)
            for bench in benches:
                spent[bench].append(sums[bench] * 1e6 / TURNS)
        what = "a clock" if has_clock else "goes on"
        goal = None if has_clock else GOAL
        ours, reference = map(Figure, spent.values())
        one.add([Row(f"CPU of a turn (us), {what}", ours, reference, goal)])
        for bench in benches:
            await bench.close()


def main() -> None:
    """Times, and prints the rows."""
    logging.disable(logging.CRITICAL)
    with run(arguments(__doc__, "fewer conversations")) as one:
        asyncio.run(_rows(one))


if __name__ == "__main__":
    main()
