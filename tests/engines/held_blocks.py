"""An engine's cache, computed from its events independently of the router's code."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

Hash = int | bytes


class Held:
    """One engine's cache, from its events; blocks are counted, since each copy is announced."""

    def __init__(self, port: int) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        self._socket.set_hwm(0)
        self._socket.subscribe(b"")
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._reading = asyncio.create_task(self._read())
        self.batches = self.removals = 0
        self._forget()

    async def close(self) -> None:
        """Stops listening."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._socket.close(linger=0)

    def tokens(self, prompt: Sequence[int], block: int) -> int:
        """Returns how many leading tokens of a prompt it holds that could be reused."""
        parent: Hash | None = None
        for at in range((len(prompt) - 1) // block):
            child = self._children.get((parent, tuple(prompt[at * block : (at + 1) * block])))
            if child is None or not self._copies[child]:
                return at * block
            parent = child
        return (len(prompt) - 1) // block * block

    def _forget(self) -> None:
        self.last = -1
        self._copies: Counter[Hash] = Counter()
        self._children: dict[tuple[Hash | None, tuple[int, ...]], Hash] = {}

    async def _read(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                frames: list[bytes] = await self._socket.recv_multipart()
                number = int.from_bytes(frames[-2], "big")
                if number <= self.last:
                    self._forget()
                assert self.last < 0 or number == self.last + 1, "the recorder lost a batch"
                self.last = number
                self.batches += 1
                for event in msgspec.msgpack.decode(frames[-1])[1]:
                    self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self._copies.clear()
        elif event["type"] == "BlockRemoved":
            self._copies.subtract(event["block_hashes"])
            self.removals += len(event["block_hashes"])
        elif event["type"] == "BlockStored":
            parent, size = event["parent_block_hash"], event["block_size"]
            blocks = _cut(event["token_ids"], size)
            for name, tokens in zip(event["block_hashes"], blocks, strict=True):
                self._children[parent, tokens] = name
                self._copies[name] += 1
                parent = name


def _cut(ids: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(ids[at : at + size]) for at in range(0, len(ids), size)]
