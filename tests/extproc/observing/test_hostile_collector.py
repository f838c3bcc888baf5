"""A collector that does not end its answer: no decision waits, and neither does the end."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import chain, repeat

import pytest
import requests

from extproc.observing.metrics import Metrics
from extproc.observing.otlp_http import MAX_ANSWER_BYTES, bounded_session
from extproc.observing.telemetry import telemetry
from tests.extproc.nobody import Nobody
from tests.extproc.observing.test_telemetry import decision, timeline
from tests.waiting import until

HEAD = b"HTTP/1.1 200 OK\r\n"
PIECE = bytes(64 * 1024)
GZIPPED = HEAD + b"Content-Encoding: gzip\r\n\r\n"

# What the system keeps of a connection that is not read.
MAX_UNREAD_BYTES = 32 * 2**20

# What is sent, and the seconds between two pieces.
ATTACKS: dict[str, tuple[Callable[[], Iterator[bytes]], float]] = {
    "hangs": (lambda: iter(()), 0.0),
    "garbage": (lambda: repeat(b"garbage " * 100), 0.0),
    "endless body": (lambda: chain([HEAD + b"\r\n"], repeat(PIECE)), 0.0),
    "zeros as gzip": (lambda: chain([GZIPPED], repeat(PIECE)), 0.0),
    "slow body": (lambda: chain([HEAD + b"Content-Length: 99999\r\n\r\n"], repeat(b"x")), 0.05),
    "slow heads": (lambda: chain([HEAD], repeat(b"x")), 0.05),
}


class Collector:
    """Answers every connection with an attack. sent_bytes: to all."""

    def __init__(self, attack: Callable[[], Iterator[bytes]], pause: float) -> None:
        self._attack, self._pause = attack, pause
        self.asked = self.sent_bytes = 0
        self.serving: set[asyncio.Task[None] | None] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving.add(asyncio.current_task())
        with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            self.asked += 1
            for piece in self._attack():
                writer.write(piece)
                self.sent_bytes += len(piece)
                await asyncio.sleep(self._pause)
                await writer.drain()
            await asyncio.Event().wait()
        writer.transport.abort()
        self.serving.discard(asyncio.current_task())


@contextlib.asynccontextmanager
async def running(collector: Collector) -> AsyncIterator[str]:
    """Listens until the block ends; yields the URL."""
    server = await asyncio.start_server(collector.serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(collector.serving):
            if task is not None:
                task.cancel()
        await until(lambda: not collector.serving, "all connections are closed")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ATTACKS)
async def test_endless_collector_answer_delays_neither_decisions_nor_the_stop(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector(*ATTACKS[kind])
    async with asyncio.timeout(60), running(collector) as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
        async with telemetry(os.environ, Metrics(Nobody())) as traces:
            assert traces is not None
            for _ in range(3_000):  # more than are queued
                assert traces.record(decision(), timeline()).is_sampled
            await until(lambda: collector.asked > 1, "spans and metrics are sent")
    assert collector.sent_bytes <= collector.asked * MAX_UNREAD_BYTES


async def test_session_reads_an_answer_up_to_its_limit() -> None:
    collector = Collector(*ATTACKS["endless body"])
    async with running(collector) as url:
        session = bounded_session()["session"]
        answer = await asyncio.to_thread(session.post, url, data=b"", timeout=60)
        assert (answer.status_code, len(answer.content)) == (200, MAX_ANSWER_BYTES)


async def test_session_sends_nothing_before_an_answer_has_ended() -> None:
    collector = Collector(*ATTACKS["slow heads"])
    async with running(collector) as url:
        session = bounded_session()["session"]
        for _ in range(3):
            with pytest.raises(requests.Timeout):
                await asyncio.to_thread(session.post, url, data=b"", timeout=0.5)
        assert collector.asked == 1


async def test_environment_with_credentials_keeps_its_own_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER", "own")
    assert bounded_session() == {}
