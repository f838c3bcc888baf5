"""A process that follows feeds as a router does, and says what CPU time their batches took.

python benchmarks/feeds_follower.py BATCHES; reads the publishers' endpoints as JSON from standard
input, prints "ready" once all feeds are live, and at the end the CPU seconds from then until each
feed had so many batches more.
"""

import asyncio
import json
import random
import sys
import time

import uvloop

from kvstate.feeds.feed import FeedState
from kvstate.feeds.feed_sources import ZmqSource
from kvstate.feeds.zmq_transport import ZmqTransport
from kvstate.fleet import FollowedWorkers


async def main() -> None:
    wanted, endpoints = int(sys.argv[1]), json.loads(sys.stdin.readline())
    fleet = FollowedWorkers(1, time.time, random.random)
    names = [f"w{number}" for number in range(len(endpoints))]
    for name, each in zip(names, endpoints, strict=True):
        fleet.add(name, "m", [ZmqTransport(ZmqSource(each[0], each[1], ""))])
    while any(fleet.state(name) is not FeedState.LIVE for name in names):
        await asyncio.sleep(0.05)
    before = sum(map(fleet.batches, names))
    print("ready", flush=True)
    began = time.process_time()
    while sum(map(fleet.batches, names)) < before + wanted * len(names):
        await asyncio.sleep(0.05)
    print(time.process_time() - began, flush=True)
    await fleet.close()


if __name__ == "__main__":
    uvloop.run(main())
