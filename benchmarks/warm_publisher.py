"""A publisher with a full replay buffer, like vLLM 0.32's, in its own process.

python benchmarks/warm_publisher.py BATCHES LIMIT; prints its endpoints (events, replay) as JSON and
ends with its input. One thread answers replays and publishes. LIMIT: messages that the replay
socket queues, beyond which a ROUTER drops them; vLLM uses libzmq's default, 1,000; 0 is no limit.
"""

import json
import queue
import sys
import threading
import time

import msgspec
import zmq

BLOCK_SIZE = 16
BLOCKS_A_BATCH = 64
TOKENS_A_BATCH = BLOCKS_A_BATCH * BLOCK_SIZE
END = b"\xff" * 8


def payload(number: int) -> bytes:
    """Returns a batch of one chain of 64 blocks, some 3.6 kB."""
    first = number * BLOCKS_A_BATCH
    event = {
        "type": "BlockStored",
        "block_hashes": [first + block + 1 for block in range(BLOCKS_A_BATCH)],
        "parent_block_hash": None,
        "token_ids": [(number * 7 + token) % 150_000 for token in range(TOKENS_A_BATCH)],
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return msgspec.msgpack.encode([time.time(), [event], 0])


def serve(events: "zmq.Socket[bytes]", replay: "zmq.Socket[bytes]", kept: list[bytes]) -> None:
    """Works in turns like vLLM's thread: one replay, then a batch, for which it waits 0.1 s."""
    waiting: queue.Queue[bytes] = queue.Queue()
    while True:
        if replay.poll(0):
            client, _, start = replay.recv_multipart()
            for number in range(int.from_bytes(start, "big"), len(kept)):
                replay.send_multipart((client, b"", number.to_bytes(8, "big"), kept[number]))
            replay.send_multipart((client, b"", END, b""))
        try:
            body = waiting.get(timeout=0.1)
        except queue.Empty:
            continue
        events.send_multipart((b"", len(kept).to_bytes(8, "big"), body))
        kept.append(body)


def main() -> None:
    kept = [payload(number) for number in range(int(sys.argv[1]))]
    context = zmq.Context()
    events, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    events.sndhwm, replay.sndhwm = 100_000, int(sys.argv[2])
    for socket in (events, replay):
        socket.bind("tcp://127.0.0.1:0")
    endpoints = [each.get_string(zmq.LAST_ENDPOINT).rstrip("\0") for each in (events, replay)]
    print(json.dumps(endpoints), flush=True)
    threading.Thread(target=serve, args=(events, replay, kept), daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
