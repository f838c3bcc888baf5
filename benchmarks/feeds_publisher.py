"""Publishers in their own process, whose batches can be replayed; the first publishes live.

python benchmarks/feeds_publisher.py WORKERS BATCHES; prints their endpoints as JSON. For each
number in standard input, the first publisher sends that many more batches at full speed; for a
negative one, each of them sends so many, a batch of each in turn. The process ends with its input.
"""

import itertools
import json
import sys
import threading
import time

import msgspec
import zmq

BLOCK_SIZE = 16
BLOCKS_A_BATCH = 16
# Between two batches of each publisher, where all of them publish.
PAUSE_SECONDS = 0.02
TOKENS_A_BATCH = BLOCKS_A_BATCH * BLOCK_SIZE
END = [b"", b"", b"\xff" * 8, b""]


def payload(worker: int, number: int) -> bytes:
    """Returns a batch of one chain of 16 blocks, with the same tokens for every worker."""
    first = number * BLOCKS_A_BATCH
    event = {
        "type": "BlockStored",
        "block_hashes": [(worker << 40) + first + block + 1 for block in range(BLOCKS_A_BATCH)],
        "parent_block_hash": None,
        "token_ids": [
            (first * 7 + token) % 100_000 for token in range(BLOCKS_A_BATCH * BLOCK_SIZE)
        ],
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return msgspec.msgpack.encode([time.time(), [event], 0])


class Publisher:
    """A PUB and a ROUTER socket, like those of vLLM 0.32."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", worker: int, batches: int
    ) -> None:
        self.worker = worker
        self.numbers = itertools.count(batches)
        self.kept = [payload(worker, number) for number in range(batches)]
        self.events, self.replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self.events.sndhwm = 100_000  # vLLM's default hwm
        self.replay.sndhwm = batches + 10
        for socket in (self.events, self.replay):
            socket.bind("tcp://127.0.0.1:0")

    @property
    def endpoints(self) -> list[str]:
        return [
            socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
            for socket in (self.events, self.replay)
        ]

    def answer(self) -> None:
        client, _, start = self.replay.recv_multipart()
        for number in range(int.from_bytes(start, "big"), len(self.kept)):
            frames = [client, b"", b"", number.to_bytes(8, "big"), self.kept[number]]
            self.replay.send_multipart(frames)
        self.replay.send_multipart([client, *END])

    def publish(self, batches: int) -> None:
        for number in itertools.islice(self.numbers, batches):
            body = payload(self.worker, number)
            self.kept.append(body)
            self.events.send_multipart([b"", number.to_bytes(8, "big"), body])


def main() -> None:
    workers, batches = int(sys.argv[1]), int(sys.argv[2])
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4096)
    made = [Publisher(context, worker, batches) for worker in range(workers)]
    orders: list[int] = []
    ended = threading.Event()

    def read_lines() -> None:
        while line := sys.stdin.readline():
            orders.append(int(line))
        ended.set()

    print(json.dumps([publisher.endpoints for publisher in made]), flush=True)
    threading.Thread(target=read_lines, daemon=True).start()
    poller = zmq.Poller()
    by_socket = {publisher.replay: publisher for publisher in made}
    for socket in by_socket:
        poller.register(socket, zmq.POLLIN)
    while not ended.is_set():
        for socket, _ in poller.poll(20):
            by_socket[socket].answer()
        while orders:
            count = orders.pop(0)
            for _ in range(-count):
                time.sleep(PAUSE_SECONDS)
                for publisher in made:
                    publisher.publish(1)
            made[0].publish(max(0, count))


if __name__ == "__main__":
    main()
