"""A process that follows feeds as a router does, and says what CPU time their batches took.

python benchmarks/feeds_follower.py BATCHES [lead | read SOCKET]; reads the publishers' endpoints as
JSON from standard input, prints "ready" once all feeds are live, and at the end the CPU seconds
from then until each feed had so many batches more. One that leads passes on what it learns at a
socket, and ends with its input; one that reads has no feeds of its own.
"""

import asyncio
import json
import random
import sys
import time
from pathlib import Path

import uvloop

from kvstate.feeds.feed import FeedState
from kvstate.feeds.feed_sources import ZmqSource
from kvstate.feeds.transport import FeedTransport
from kvstate.feeds.zmq_transport import ZmqTransport
from kvstate.fleet import FollowedWorkers
from kvstate.relay.passing import COUNTS_SECONDS, Passing
from kvstate.relay.reading import Reading
from kvstate.relay.records import VERSION, Hello
from kvstate.relay.taps import Taps

# Asking 300 workers for their counts takes as long as some batches do.
POLL_SECONDS = 0.5

HELLO = Hello(VERSION, "benchmark", "")


async def keep_reading(reading: Reading, socket: Path) -> None:
    """Reads until it is cancelled."""
    while True:
        await reading.follow(socket)


async def main() -> None:
    wanted, endpoints = int(sys.argv[1]), json.loads(sys.stdin.readline())
    role, socket = sys.argv[2:] or ("", "")
    fleet = FollowedWorkers(1, time.time, random.random)
    reading = fleet.relayed.read(HELLO) if role == "read" else None
    passing = None
    if role == "lead":
        fleet.subscriptions.taps = Taps(fleet.index.core)
        passing = Passing(
            fleet.subscriptions.taps, fleet.rows.copy_ranks, fleet.rows.copy_stores, HELLO
        )
        await passing.start(Path(socket))
    names = [f"w{number}" for number in range(len(endpoints))]
    for name, each in zip(names, endpoints, strict=True):
        source = ZmqSource(each[0], each[1], "")

        def connect(source: ZmqSource = source) -> list[FeedTransport]:
            return [ZmqTransport(source)]

        fleet.add_source(name, "m", 1, connect)
    task = None if reading is None else asyncio.create_task(keep_reading(reading, Path(socket)))
    while any(fleet.feeds.state(name) is not FeedState.LIVE for name in names):
        await asyncio.sleep(0.05)
    await asyncio.sleep(COUNTS_SECONDS + 1.0)  # until counts are passed on
    before = sum(map(fleet.feeds.batches, names))
    print("ready", flush=True)
    began = time.process_time()
    while sum(map(fleet.feeds.batches, names)) < before + wanted * len(names):
        await asyncio.sleep(POLL_SECONDS)
    print(time.process_time() - began, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    if task is not None:
        task.cancel()
    if passing is not None:
        await passing.close()
    await fleet.close()


if __name__ == "__main__":
    uvloop.run(main())
