"""Benchmark of the feeds: the cost of a batch, and the delay of picks while a fleet replays.

python benchmarks/feeds.py [--quick | --smoke] [--json FILE]
"""

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from feeds_publisher import BLOCKS_A_BATCH, payload
from measure import NO_REFERENCE, Figure, Goal, Row
from rows import Run, arguments, run
from warm_publisher import BLOCKS_A_BATCH as WARM_BLOCKS_A_BATCH

from kvstate.feeds.feed import FeedState
from kvstate.feeds.feed_sources import GrpcSource, ZmqSource
from kvstate.feeds.grpc_transport import grpc_transports
from kvstate.feeds.transport import FeedTransport
from kvstate.feeds.zmq_transport import ZmqTransport
from kvstate.fleet import FollowedWorkers
from kvstate.index.index import Index
from kvstate.overlap import Prompt
from kvstate.steps import finished

HERE = Path(__file__).parent
PICK_INTERVAL_SECONDS = 0.002
PICKS = 2_000
PROCESSES = 4
# vLLM's defaults: the batches of its replay buffer, and the messages that its replay socket queues.
BUFFER_BATCHES, SEND_LIMIT = 10_000, 1_000

METHOD = """\
How: publishers, and the bridge, in processes of their own; our CPU time alone, from the first batch
on the socket to the last one applied, for each batch of 16 blocks of 16 tokens; medians
(least-most) of rounds. Picks: a lookup of a prompt of 257 tokens that all workers hold, due every
2 ms, from when it was due to when it was done, so that whatever held the loop counts; the worst p99
of ten parts of the time. The reference is the same with one worker that has nothing to say.
Several processes: one follows all feeds and passes them on, as with `serve --processes`; a batch of
each worker every 20 ms or more, of 16 blocks; the CPU time of all of them, against that of one.
A start: from the first connection until all of a full buffer (10,000 batches of 64 blocks, 3.6 kB
each) is certain, beside a publisher that drops of a replay what vLLM drops; the reference drops
nothing. The slowest of the starts; our CPU time is their median.
"""


@contextmanager
def publishers(
    workers: int, batches: int
) -> Iterator[tuple[subprocess.Popen[str], list[tuple[str, str]]]]:
    """Starts publishers; yields their endpoints (events, replay)."""
    command = [sys.executable, str(HERE / "feeds_publisher.py"), str(workers), str(batches)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


@contextmanager
def bridge(endpoints: tuple[str, str]) -> Iterator[str]:
    """Starts `kvsteer bridge` beside a publisher; yields its target."""
    events, replay = endpoints
    command = [sys.executable, "-m", "extproc", "bridge", "--zmq", events, "--replay", replay]
    process = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    try:
        words = process.stdout.readline().replace(",", " ").split()
        yield next(word for word in words if word.startswith("127.0.0.1:"))
    finally:
        process.kill()
        process.wait()


async def live_cost(
    transports: Sequence[FeedTransport], process: subprocess.Popen[str], batches: int
) -> float:
    """Returns the CPU microseconds for each of this many live batches."""
    fleet = FollowedWorkers(1, time.time, random.random)
    fleet.add("w", "m", transports)
    while fleet.feeds.state("w") not in (FeedState.LIVE, FeedState.DEGRADED):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    before = fleet.feeds.statuses("w")[0].blocks
    wanted = before + batches * BLOCKS_A_BATCH
    started = time.process_time()
    assert process.stdin
    process.stdin.write(f"{batches}\n")
    process.stdin.flush()
    deadline = time.monotonic() + 60
    while fleet.feeds.statuses("w")[0].blocks < wanted:
        if time.monotonic() > deadline:
            raise SystemExit(f"batches were lost: {fleet.feeds.statuses('w')[0]}")
        await asyncio.sleep(0.01)
    cost = (time.process_time() - started) / batches
    await fleet.close()
    return 1e6 * cost


async def costs(rounds: int, batches: int) -> list[Row]:
    """Returns the cost of a batch, over ZMQ and over gRPC."""
    over_zmq, over_grpc = [], []
    for _ in range(rounds):
        with publishers(1, 1) as (process, (endpoints,)):
            source = ZmqSource(*endpoints, "")
            over_zmq.append(await live_cost([ZmqTransport(source)], process, batches))
        with publishers(1, 1) as (process, (endpoints,)), bridge(endpoints) as target:
            transports = grpc_transports(GrpcSource(target, "vllm"), random.random)
            over_grpc.append(await live_cost(transports, process, batches))
    reference = Figure(over_zmq)
    return [
        Row("a batch of 16 blocks over ZMQ (us of CPU)", reference, NO_REFERENCE),
        Row(
            "a batch of 16 blocks over gRPC, from the bridge (us of CPU)",
            Figure(over_grpc),
            reference,
        ),
    ]


async def waits(workers: int, batches: int) -> tuple[Figure, Figure, float]:
    """Returns the p99s of picks, idle and during replays, and how long the replays took.

    The p99s are in ms, one for each tenth of the picks; the duration is in seconds.
    """
    with publishers(workers, batches) as (_, endpoints):
        fleet = FollowedWorkers(1, time.time, random.random)
        fleet.add("w0", "m", [ZmqTransport(ZmqSource(*endpoints[0], ""))])
        while fleet.feeds.state("w0") is not FeedState.LIVE:
            await asyncio.sleep(0.01)
        idle = await picks(fleet, None)
        started = time.monotonic()
        for number in range(1, workers):
            source = ZmqSource(*endpoints[number], "")
            fleet.add(f"w{number}", "m", [ZmqTransport(source)])
        names = [f"w{number}" for number in range(workers)]
        busy = await picks(
            fleet, lambda: all(fleet.feeds.state(name) is FeedState.LIVE for name in names)
        )
        took = time.monotonic() - started
        await fleet.close()
    return Figure(idle), Figure(busy), took


async def picks(fleet: FollowedWorkers, are_over: Callable[[], bool] | None) -> list[float]:
    """Returns the p99 of each tenth of the picks until the replays end, or of `PICKS` picks."""
    loop = asyncio.get_running_loop()
    prompt = Prompt("m", array("I", range(257)))
    took: list[float] = []
    due = loop.time()
    while not are_over() if are_over else len(took) < PICKS:
        due = max(due + PICK_INTERVAL_SECONDS, loop.time())
        await asyncio.sleep(max(0.0, due - loop.time()))
        fleet.blocks.overlaps(prompt)
        took.append(1e3 * (loop.time() - due))
    tenth = max(1, len(took) // 10)
    parts = [sorted(took[at : at + tenth]) for at in range(0, len(took) - tenth + 1, tenth)]
    return [part[int(0.99 * (len(part) - 1))] for part in parts]


async def starts(rounds: int) -> tuple[Figure, Figure, Figure]:
    """Returns the times of starts with vLLM's queue limit and without one, and the former's CPU.

    All are in seconds, one for each start.
    """
    took: dict[int, list[float]] = {SEND_LIMIT: [], 0: []}
    cpu = []
    with warm_publisher(SEND_LIMIT) as limited, warm_publisher(0) as unlimited:
        for _ in range(rounds):
            for limit, endpoints in ((SEND_LIMIT, limited), (0, unlimited)):
                began, cpu_began = time.monotonic(), time.process_time()
                await start(endpoints)
                took[limit].append(time.monotonic() - began)
                if limit:
                    cpu.append(time.process_time() - cpu_began)
    return Figure(took[SEND_LIMIT]), Figure(took[0]), Figure(cpu)


@contextmanager
def warm_publisher(limit: int) -> Iterator[tuple[str, str]]:
    """Starts a publisher with a full buffer; yields its endpoints (events, replay)."""
    script = str(HERE / "warm_publisher.py")
    process = subprocess.Popen(
        [sys.executable, script, str(BUFFER_BATCHES), str(limit)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


async def start(endpoints: tuple[str, str]) -> None:
    """Starts a router beside a publisher and waits until all its blocks are certain."""
    fleet = FollowedWorkers(1, time.time, random.random)
    fleet.add("w", "m", [ZmqTransport(ZmqSource(*endpoints, ""))])
    deadline = time.monotonic() + 60
    while (feed := fleet.feeds.statuses("w")[0]).state is not FeedState.LIVE or (
        feed.blocks - feed.uncertain_blocks < BUFFER_BATCHES * WARM_BLOCKS_A_BATCH
    ):
        if time.monotonic() > deadline:
            raise SystemExit(f"not all of it became certain: {feed}")
        await asyncio.sleep(0.005)
    await fleet.close()


def followed_by(roles: Sequence[Sequence[str]], workers: int, batches: int) -> float:
    """Returns the CPU microseconds of a batch in one process for each role, all together."""
    with publishers(workers, 1) as (publisher, endpoints):
        followers = []
        try:
            for role in roles:
                script = str(HERE / "feeds_follower.py")
                command = [sys.executable, script, str(batches), *role]
                each = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
                followers.append(each)
                assert each.stdin
                each.stdin.write(json.dumps(endpoints) + "\n")
                each.stdin.flush()
                if role[:1] == ["lead"]:
                    await_file(Path(role[1]))
            for each in followers:
                assert each.stdout
                each.stdout.readline()
            assert publisher.stdin
            publisher.stdin.write(f"{-batches}\n")
            publisher.stdin.flush()
            seconds = sum(float(each.stdout.readline()) for each in followers if each.stdout)
        finally:
            for each in followers:
                each.kill()
                each.wait()
    return 1e6 * seconds / (workers * batches)


def await_file(path: Path) -> None:
    """Waits until a file is there."""
    deadline = time.monotonic() + 60
    while not path.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"{path} was not made")
        time.sleep(0.01)


def applied(batches: int) -> float:
    """Returns the CPU microseconds of applying a batch to the index, without its feed."""
    index = Index(1)
    owner = index.add("w", 0, "m")
    payloads = [payload(0, number) for number in range(batches)]
    began = time.process_time()
    for one in payloads:
        finished(owner.applying(one))
    return 1e6 * (time.process_time() - began) / batches


def several(rounds: int, workers: int, batches: int) -> list[Row]:
    """Returns what the feeds cost in several processes of one host, and in one.

    A machine's speed drifts: each is compared with one process right before it and right after.
    """
    ones, four = [followed_by([[]], workers, batches)], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as directory:
            socket = f"{directory}/feeds"
            lead, read = ["lead", socket], ["read", socket]
            four.append(followed_by([lead, *[read] * (PROCESSES - 1)], workers, batches))
        ones.append(followed_by([[]], workers, batches))
    one = Figure([fmean(pair) for pair in pairwise(ones)])
    each = Figure([followed_by([[]] * PROCESSES, workers, batches)])
    what = f"a batch of one of {workers} workers in {PROCESSES} processes (us of CPU)"
    return [
        Row(what, Figure(four), one, Goal(1.3, "<= 1.3x of one")),
        Row("the same if each followed all feeds (us of CPU)", each, one),
        Row("applying it, in each (us of CPU)", Figure([applied(5_000)]), one),
    ]


async def measured(one: Run) -> None:
    """Measures all rows."""
    one.add(await costs(*one.amount((1, 500), (3, 5_000), (7, 10_000))))
    workers, batches = one.amount((5, 60), (50, 625), (200, 625))
    idle, busy, took = await waits(workers, batches)
    what = f"pick while {workers} workers replay {batches * BLOCKS_A_BATCH:,} blocks each, p99 (ms)"
    limit = Goal(10.0, "<= 10 ms", of_ratio=False)
    blocks = workers * batches * BLOCKS_A_BATCH
    one.add(
        [
            Row(what, Figure([max(busy.values)]), Figure([max(idle.values)]), limit),
            Row("blocks replayed a second (M)", Figure([blocks / took / 1e6]), NO_REFERENCE),
        ]
    )
    one.add(several(*one.amount((1, 5, 20), (1, 100, 100), (7, 300, 200))))
    limited, unlimited, cpu = await starts(one.amount(1, 5, 20))
    one.add(
        [
            Row(
                "start beside a full buffer of vLLM's, slowest (s)",
                Figure([max(limited.values)]),
                Figure([max(unlimited.values)]),
                Goal(2.0, "<= 2 s", of_ratio=False),
            ),
            Row("start beside a full buffer of vLLM's (s)", limited, unlimited),
            Row(
                "start beside a full buffer of vLLM's (s of our CPU)",
                Figure([cpu.median]),
                NO_REFERENCE,
            ),
        ]
    )


def main() -> None:
    """Measures all and prints the table."""
    parser = arguments("Benchmark of the feeds.", "less of all, within two minutes")
    with run(parser, METHOD) as one:
        asyncio.run(measured(one))


if __name__ == "__main__":
    main()
