"""Times what it costs to say of each turn why its tokens are computed (`misses`).

python benchmarks/misses_cost.py [--quick | --smoke]

A router decides on the turns of agents' conversations, which grow by a thousand tokens a turn, and
releases each: the request's way from its body to its end, without a server around it. One router
judges the turns and one does not, in turns; the CPU of the whole process counts, so that of the
thread as well. Eight workers are live, and the one that gets a turn stores it. `goes on`: every
turn goes on from the one before; only the first of each conversation is examined in the thread. `a
clock`: each turn has another time at the head of its system, so each is examined.

The microseconds are those of this machine, with all that runs beside it. Valgrind counts the
instructions of turns that go on: those are nearly the same in every run.
"""

import argparse
import asyncio
import gc
import logging
import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec
from copies_counted import instructions_of_copies, wait_for
from extproc_counts import BLOCK, Bench, turn_off_what_depends_on_time
from measure import Figure, Goal, Result, Row, or_reason
from prose import Prose
from rows import Run, arguments, run

from extproc.features.hooks import tell
from extproc.requests.request import CHAT_PATH, Head, RoutingRequest, parse
from kvstate.events import Batch, BlocksStored, EventBatch
from kvstate.overlap import Prompt

TURNS = 24
COUNTED = range(8, TURNS, 2)  # turns whose instructions are counted
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


class Turn(NamedTuple):
    """One turn. prompt: as it is stored by the worker that gets it."""

    request: RoutingRequest
    prompt: Prompt


def _turn(bench: Bench, text: str) -> Turn:
    body = text.encode()
    prompt = Prompt("tiny", bench.tokenizer.encode(parse(CHAT_PATH, body).prompts[0]))
    return Turn(RoutingRequest(Head("POST", CHAT_PATH, len(body)), body), prompt)


async def _decided(bench: Bench, turn: Turn) -> str:
    """Decides on a turn and ends it; returns its worker."""
    router, idle = bench.router, asyncio.all_tasks()
    decision, ticket = await router.route(turn.request)
    assert ticket is not None
    router.release(ticket)
    tell(router.hooks.note_end, decision, None, is_booked=True, is_sent=True)
    if examining := asyncio.all_tasks() - idle:
        await asyncio.wait(examining)
    return decision.worker


async def _spent(bench: Bench, text: str) -> float:
    """Returns the seconds of CPU for one decision and its end."""
    turn = _turn(bench, text)
    before = time.process_time()
    worker = await _decided(bench, turn)
    spent = time.process_time() - before
    await _stored(bench, worker, turn.prompt)
    return spent


async def _count(*, has_verdicts: bool) -> None:
    """Plays one conversation; at some turns makes two copies, of which one decides on the turn."""
    bench = Bench(8, more=ON if has_verdicts else {})
    await bench.start()
    made = [_turn(bench, text) for text in turns(0, has_clock=False)]
    gc.collect()
    gc.freeze()
    gc.disable()
    for at, turn in enumerate(made):
        if at in COUNTED:
            await _copy(bench, None)
            await _copy(bench, turn)
        await _stored(bench, await _decided(bench, turn), turn.prompt)
    os._exit(0)


async def _copy(bench: Bench, turn: Turn | None) -> None:
    """Makes a copy of this process that decides on a turn, if any, and waits for its end."""
    loop, child = asyncio.get_running_loop(), os.fork()
    if child:
        wait_for(child)
        return
    asyncio._set_running_loop(loop)  # noqa: SLF001 - it is known as that of the parent
    if turn is not None:
        await _decided(bench, turn)
    os._exit(0)


def instructions(*, has_verdicts: bool) -> Figure:
    """Returns the instructions of decisions and their ends.

    Raises:
        CannotRunError: valgrind is missing.
    """
    found = instructions_of_copies([__file__, "--count", str(int(has_verdicts))])
    pairs = zip(found[::2], found[1::2], strict=True)
    return Figure([decided - idle for idle, decided in pairs])


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
        ours, reference = map(Figure, spent.values())
        one.add([Row(f"CPU of a turn (us), {what}", ours, reference)])
        for bench in benches:
            await bench.close()


def _counted_row() -> Row:
    def counted(*, has_verdicts: bool) -> Result:
        return or_reason(partial(instructions, has_verdicts=has_verdicts))

    ours, reference = counted(has_verdicts=True), counted(has_verdicts=False)
    return Row("instructions of a turn, goes on", ours, reference, GOAL)


def main() -> None:
    """Times, and prints the rows."""
    logging.disable(logging.CRITICAL)
    turn_off_what_depends_on_time()
    parser = arguments(__doc__, "fewer conversations")
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count is not None:
        asyncio.run(_count(has_verdicts=bool(options.count)))
        return
    with run(parser) as one:
        asyncio.run(_rows(one))
        if not one.options.smoke:  # valgrind takes a minute
            one.add([_counted_row()])


if __name__ == "__main__":
    main()
