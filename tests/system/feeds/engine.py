"""A publisher whose cache is known exactly, and that loses, restarts and lies on command.

It speaks as vLLM 0.32 does, over real sockets bound to 127.0.0.1. Its blocks have `BLOCK_SIZE`
tokens that all are the block's number, so that a prompt is a list of numbers.
"""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from kvstate.overlap import Prompt, Tokens
from tests.waiting import blocked_until

BLOCK_SIZE = 4
MODEL = "m"
END_OF_REPLAY = [b"", b"", b"\xff" * 8, b""]

Chain = tuple[int, ...]
_lives = itertools.count(1)


def prompt(chain: Sequence[int]) -> Prompt:
    """A prompt of these blocks, and one more token."""
    tokens = [number for number in chain for _ in range(BLOCK_SIZE)]
    return Prompt(MODEL, Tokens("I", [*tokens, 7]))


class Moment(NamedTuple):
    """The engine's cache after a batch."""

    life: int
    sequence: int


class Cache:
    """The truth: how many copies of which chain's last block are held."""

    def __init__(self, copies: Counter[Chain] | None = None) -> None:
        self.copies: Counter[Chain] = Counter(copies or {})

    def copy(self) -> "Cache":
        """A copy of the present state."""
        return Cache(self.copies)

    def overlap(self, chain: Sequence[int]) -> int:
        """Leading blocks of a chain that are held."""
        ends = range(1, len(chain) + 1)
        held = itertools.takewhile(lambda end: self.copies[tuple(chain[:end])] > 0, ends)
        return len(list(held))


class Engine:
    """One rank.

    seed: goes into the hashes; two incarnations with one seed have the same hashes.
    """

    def __init__(
        self, *, replays: bool = True, buffer: int = 10_000, seed: int = 0, hwm: int = 100_000
    ) -> None:
        self.cache = Cache()
        self.truth: dict[Moment, Cache] = {}
        self.seed = seed
        self.life = next(_lives)
        self.clock = 1_000_000.0 * self.life
        self.sequence = 0
        self.answers_replays = True
        self._buffer = buffer
        self._hwm = hwm
        self._kept: dict[int, bytes] = {}
        self._context = zmq.asyncio.Context()
        self._serving: asyncio.Task[None] | None = None
        self.events, self.replay = "tcp://127.0.0.1:0", "tcp://127.0.0.1:0" if replays else None
        self.open()

    def open(self) -> None:
        """Binds the sockets, again on the same ports if they were bound before."""
        # like a PUB it drops messages instead of waiting, but it reports who subscribes
        self._pub = zmq.Context(self._context).socket(zmq.XPUB)
        self._is_subscribed = False
        self._pub.sndhwm = self._hwm
        self.events = _bound(self._pub, self.events)
        if self.replay is not None:
            self._router = self._context.socket(zmq.ROUTER)
            self.replay = _bound(self._router, self.replay)
            self._serving = asyncio.create_task(self._serve())

    @property
    def is_subscribed(self) -> bool:
        """Whether anybody is subscribed."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._is_subscribed = self._pub.recv(zmq.NOBLOCK)[:1] == b"\x01"
        return self._is_subscribed

    async def close(self) -> None:
        """Closes the sockets like a process that ends."""
        self._pub.close(linger=0)
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
            self._router.close(linger=0)

    async def end(self) -> None:
        """Closes everything."""
        await self.close()
        self._context.term()

    async def restart(self, seed: int | None = None, batches: int = 0) -> None:
        """Restarts with an empty cache, and publishes batches before anybody is subscribed."""
        await self.close()
        self.cache = Cache()
        self.life = next(_lives)
        self.clock = 1_000_000.0 * self.life
        self.sequence = 0
        self._kept.clear()
        self.seed = self.seed if seed is None else seed
        for number in range(batches):
            self.lose(self.store([5000 + number]))
        self.open()

    def store(self, chain: Sequence[int], known: int = 0) -> dict[str, Any]:
        """Holds one more copy of all blocks of a chain but the first `known`; returns the event."""
        new = range(known + 1, len(chain) + 1)
        for end in new:
            self.cache.copies[tuple(chain[:end])] += 1
        return {
            "type": "BlockStored",
            "block_hashes": [self._hash(chain[:end]) for end in new],
            "parent_block_hash": self._hash(chain[:known]) if known else None,
            "token_ids": [number for number in chain[known:] for _ in range(BLOCK_SIZE)],
            "block_size": BLOCK_SIZE,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }

    def remove(self, chain: Sequence[int]) -> dict[str, Any]:
        """Drops one copy of a chain's last block; returns the event."""
        self.cache.copies[tuple(chain)] -= 1
        return {"type": "BlockRemoved", "block_hashes": [self._hash(chain)], "medium": "GPU"}

    def clear(self) -> dict[str, Any]:
        """Drops everything; returns the event."""
        self.cache.copies.clear()
        return {"type": "AllBlocksCleared"}

    def publish(self, *events: Any) -> None:
        """Sends one batch, and keeps it for replays."""
        self.publish_payload(self.batch(*events))

    def publish_payload(self, payload: bytes) -> None:
        """Sends any bytes as one batch, and keeps them for replays."""
        self._send(self._number(payload), payload)

    def lose(self, *events: Any, keep: bool = True) -> None:
        """Numbers one batch and does not send it; without `keep` no replay has it either."""
        self._number(self.batch(*events), keep=keep)

    def repeat(self) -> None:
        """Sends the last batch again."""
        self._send(self.sequence - 1, self._kept[self.sequence - 1])

    def batch(self, *events: Any) -> bytes:
        """The payload of these events."""
        self.clock += 1.0
        return msgspec.msgpack.encode([self.clock, list(events), 0])

    def _number(self, payload: bytes, *, keep: bool = True) -> int:
        if keep:
            self._kept[self.sequence] = payload
        self._kept.pop(self.sequence - self._buffer, None)
        self.truth[Moment(self.life, self.sequence)] = self.cache.copy()
        self.sequence += 1
        return self.sequence - 1

    def _send(self, sequence: int, payload: bytes) -> None:
        self._pub.send_multipart([b"kv", sequence.to_bytes(8, "big"), payload])

    def _hash(self, chain: Sequence[int]) -> int:
        return hash((self.seed, *chain)) & 0xFFFF_FFFF_FFFF_FFFF

    async def _serve(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            if not self.answers_replays:
                continue
            for sequence, payload in list(self._kept.items()):
                if sequence >= int.from_bytes(start, "big"):
                    frames = [client, b"", b"kv", sequence.to_bytes(8, "big"), payload]
                    await self._router.send_multipart(frames)
            await self._router.send_multipart([client, *END_OF_REPLAY])


def _bound(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, address: str) -> str:
    """Binds; libzmq closes in the background, so a port may still be in use for a moment."""

    def is_bound() -> bool:
        with contextlib.suppress(zmq.ZMQError):
            socket.bind(address)
            return True
        return False

    blocked_until(is_bound, f"{address} is free", seconds=5, pause=0.001)
    return socket.get_string(zmq.LAST_ENDPOINT)
