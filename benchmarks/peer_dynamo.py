"""Dynamo's index and selection service as references; they are optional.

Both run in this process, without etcd, NATS or any other part of Dynamo: the radix tree is fed by
calls, the selection service over ZMQ, as by engines.
"""

import asyncio
import importlib
import importlib.metadata
import json
import os
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from measure import CannotRunError, Cost, timed
from workload import BLOCK_SIZE, MODEL, Piece

PACKAGE = "ai-dynamo-runtime"


def version() -> str:
    """Returns the installed version, or that it is not installed."""
    try:
        return f"{PACKAGE} {importlib.metadata.version(PACKAGE)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed"


def _core() -> Any:
    os.environ.setdefault("DYN_LOG", "error")
    try:
        return importlib.import_module("dynamo._core")
    except ImportError:
        raise CannotRunError(f"did not run: pip install {PACKAGE}") from None


class Radix:
    """RadixTree: engine events in, overlaps out, in blocks."""

    def __init__(self) -> None:
        core = _core()
        self._tree = core.RadixTree()
        self._hashes: Callable[[Sequence[int], int], list[int]] = core.compute_block_hash_for_seq
        self._events = 0

    def store(self, worker: int, piece: Piece) -> None:
        """Stores a piece. The tree needs hashes of each block's tokens instead of the tokens."""
        hashes = self._hashes(piece.tokens.tolist(), BLOCK_SIZE)
        blocks = [
            {"block_hash": block, "tokens_hash": tokens}
            for block, tokens in zip(piece.hashes, hashes, strict=True)
        ]
        parent = piece.parent.hashes[-1] if piece.parent else None
        event = {
            "event_id": self._events,
            "data": {"stored": {"parent_hash": parent, "blocks": blocks}},
            "dp_rank": 0,
        }
        self._tree.apply_event(worker, json.dumps(event).encode())
        self._events += 1

    def overlaps(self, tokens: Sequence[int]) -> Mapping[int, int]:
        """Blocks that each worker holds of a prompt."""
        scores = self._tree.find_matches(self._hashes(tokens, BLOCK_SIZE)).scores
        return {worker: blocks for (worker, _), blocks in scores.items() if blocks}

    def look_up(self, prompts: Sequence[Sequence[int]]) -> None:
        """Looks prompts up, as lists, its fastest input."""
        find, hashes = self._tree.find_matches, self._hashes
        for tokens in prompts:
            _ = find(hashes(tokens, BLOCK_SIZE)).scores


Select = Callable[[Sequence[int]], Awaitable[dict[str, Any]]]


class Selection:
    """SelectionService with one ZMQ feed per worker."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        core = _core()
        if not hasattr(core, "SelectionService"):
            raise CannotRunError(f"did not run: this {PACKAGE} has no SelectionService")
        self._loop = asyncio.new_event_loop()
        self._hashes: Callable[[Sequence[int], int], list[int]] = core.compute_block_hash_for_seq
        self._workers = len(endpoints)
        self._service: Any = None
        self._loop.run_until_complete(self._start(core, endpoints))
        self.forms: Mapping[str, Select] = {"tokens": self._by_tokens, "hashes": self._by_hashes}

    async def _start(self, core: Any, endpoints: Sequence[str]) -> None:
        self._service = core.SelectionService()
        for number, endpoint in enumerate(endpoints):
            worker = {
                "worker_id": number,
                "model_name": MODEL,
                "block_size": BLOCK_SIZE,
                "endpoint": f"http://10.0.0.{number}:8000",
                "kv_events_endpoints": {0: endpoint},
            }
            await self._service.upsert_worker(worker)

    async def _by_tokens(self, tokens: Sequence[int]) -> dict[str, Any]:
        answer: dict[str, Any] = await self._service.select(
            {"model_name": MODEL, "token_ids": tokens}
        )
        return answer

    async def _by_hashes(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Selects with the cheaper input for the service: hashes, as signed integers.

        Sequence hashes, which only reservations need, are left out, which favours the service.
        """
        hashes = self._hashes(tokens, BLOCK_SIZE)
        count = len(hashes)
        signed = struct.unpack(f"{count}q", struct.pack(f"{count}Q", *hashes))
        request = {
            "model_name": MODEL,
            "block_hashes": signed,
            "sequence_hashes": signed,
            "isl_tokens": len(tokens),
        }
        answer: dict[str, Any] = await self._service.select(request)
        return answer

    def picked_blocks(self, tokens: Sequence[int], form: str) -> int:
        """Returns how many blocks of a prompt the picked worker holds."""
        answer = self._loop.run_until_complete(self._selected(form, tokens))
        return int(answer["overlap"]["gpu"]) // BLOCK_SIZE

    async def _selected(self, form: str, tokens: Sequence[int]) -> dict[str, Any]:
        return await self.forms[form](tokens)

    def select(self, prompts: Sequence[Sequence[int]], form: str) -> Cost:
        """Picks for prompts one after the other; returns the total cost."""
        return self._loop.run_until_complete(self._select(prompts, self.forms[form]))

    async def _select(self, prompts: Sequence[Sequence[int]], select: Select) -> Cost:
        with timed() as cost:
            for tokens in prompts:
                await select(tokens)
        return cost

    def overlaps(self, tokens: Sequence[int]) -> Mapping[int, int]:
        """Blocks that each worker holds of a prompt."""
        return self._loop.run_until_complete(self._overlaps(tokens))

    async def _overlaps(self, tokens: Sequence[int]) -> Mapping[int, int]:
        answer = await self._service.overlap_scores({"model_name": MODEL, "token_ids": tokens})
        held = {int(worker["worker_id"]): worker["device_blocks"] for worker in answer["workers"]}
        return {worker: blocks for worker, blocks in held.items() if blocks}

    def wait_for(self, piece: Piece, first: float, timeout: float = 60.0) -> None:
        """Waits until all workers are shown to hold a piece.

        first: seconds to wait before the first check, since checking takes time too.

        Raises:
            CannotRunError: not all do within `timeout` seconds.
        """
        self._loop.run_until_complete(self._wait_for(piece.whole.tolist(), first, timeout))

    async def _wait_for(self, tokens: list[int], first: float, timeout: float) -> None:  # noqa: ASYNC109 - counted from a moment before
        await asyncio.sleep(first)
        try:
            async with asyncio.timeout(timeout):
                while len(await self._overlaps(tokens)) < self._workers:
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise CannotRunError("did not run: its events never became visible") from None

    def close(self) -> None:
        """Stops the service."""
        self._service.shutdown()
        self._loop.close()
