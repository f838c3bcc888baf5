"""A process with many engines, or one that sends garbage; prints where they publish, then serves.

python crowd.py WORKERS BATCHES    engines that have published this much before anybody listens
python crowd.py garbage            one that sends random bytes at full speed, under rising numbers
"""

import asyncio
import json
import os
import sys

import zmq

from tests.system.feeds.engine import Engine

BLOCKS_A_BATCH = 16


async def engines(workers: int, batches: int) -> None:
    """Serves replays until standard input ends."""
    made = [Engine() for _ in range(workers)]
    for number, engine in enumerate(made):
        for batch in range(batches):
            first = 1000 * batch
            engine.lose(engine.store([number, *range(first, first + BLOCKS_A_BATCH - 1)]))
    print(json.dumps([(engine.events, engine.replay) for engine in made]), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def garbage() -> None:
    """Sends until it is killed."""
    publisher = zmq.Context().socket(zmq.PUB)
    publisher.bind("tcp://127.0.0.1:0")
    print(json.dumps([(publisher.get_string(zmq.LAST_ENDPOINT), None)]), flush=True)
    number = 0
    payload = os.urandom(8192)
    while True:
        publisher.send_multipart([b"", number.to_bytes(8, "big"), payload[number % 4096 :]])
        number += 1


if __name__ == "__main__":
    if sys.argv[1] == "garbage":
        garbage()
    else:
        asyncio.run(engines(int(sys.argv[1]), int(sys.argv[2])))
