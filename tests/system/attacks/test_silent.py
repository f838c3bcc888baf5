"""Connections that say nothing: they lock nobody out."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.system.attacks.peer import GREETING
from tests.system.attacks.victim import MIB, Victim, running_victim
from tests.waiting import until

FILES = 256


@pytest.fixture
async def narrow(tmp_path: Path) -> AsyncIterator[Victim]:
    """A router that may open only a few files."""
    with running_victim(tmp_path, files=FILES) as victim:
        yield victim
        victim.leave()


@pytest.mark.parametrize("said", [b"", GREETING])
async def test_silent_connections_do_not_lock_out_other_peers(narrow: Victim, said: bytes) -> None:
    async with narrow.probed() as harm:
        for _ in range(FILES + 100):
            peer = await narrow.connect()
            peer.send(said)
        decided = len(harm.latencies)
        await until(lambda: len(harm.latencies) >= decided + 10, "ten more decisions")
        assert await narrow.feeds() is not None
        assert await narrow.metric("kvsteer_open_streams") >= 0
        async with narrow.channel() as channel:
            await narrow.answers(channel)
        assert narrow.log_text().count("connections are open, which is the limit") == 1
    assert harm.grown_bytes < 256 * MIB, harm


async def test_silent_http_connections_do_not_lock_out_other_peers(narrow: Victim) -> None:
    writers = []
    for port in narrow.http_ports * (FILES // 2 + 50):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
    async with narrow.probed():
        assert await narrow.feeds() is not None
        assert await narrow.metric("kvsteer_open_streams") >= 0
        async with narrow.channel() as channel:
            await narrow.answers(channel)
    for writer in writers:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
