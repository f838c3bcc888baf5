"""The socket where published batches can be asked for again."""

import asyncio
from collections import deque

import zmq
import zmq.asyncio

from simulator import frames
from simulator.dialects import Dialect
from simulator.interference import Interference
from simulator.sockets import bind

Kept = deque[tuple[int, bytes]]
"""Sequence numbers and payloads, oldest first."""

_MAX_REQUEST_BYTES = 1024  # a replay request has 8


class ReplaySocket:
    """Answers from `kept` until closed."""

    def __init__(
        self,
        endpoint: str,
        kept: Kept,
        *,
        topic: bytes,
        send_limit_messages: int,
        dialect: Dialect,
        interference: Interference,
    ) -> None:
        self._kept = kept
        self._topic = topic
        self._with_topic = dialect.replay_topic
        self._interference = interference
        # Of its own, so that closing it can wait until the port is really free.
        self._context = zmq.asyncio.Context()
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self._router.sndhwm = send_limit_messages  # beyond it a ROUTER drops
            self._router.maxmsgsize = _MAX_REQUEST_BYTES
            self.endpoint = bind(self._router, endpoint)
        except BaseException:
            self._close_socket()
            raise
        self._task = asyncio.create_task(self._serve())

    def close(self) -> None:
        """Stop at once, in the middle of an answer too."""
        self._task.cancel()
        self._close_socket()

    def _close_socket(self) -> None:
        self._router.close(linger=0)
        self._context.term()

    async def _serve(self) -> None:
        while True:
            client, *request = await self._router.recv_multipart()
            start = frames.replay_start(request)
            if start is not None and self._interference.replay != "silent":
                await self._answer(client, start)
            await asyncio.sleep(0)

    async def _answer(self, client: bytes, start: int) -> None:
        wanted = [entry for entry in self._kept if entry[0] >= start]
        truncated = self._interference.replay == "truncated"
        for sequence, payload in wanted[: len(wanted) // 2] if truncated else wanted:
            batch = frames.replayed(self._topic, sequence, payload, with_topic=self._with_topic)
            await self._router.send_multipart((client, *batch))
        if not truncated:
            end = frames.end_of_replay(with_topic=self._with_topic)
            await self._router.send_multipart((client, *end))
