"""Whoever reaches a port can have few lines written, whatever he sends and however often."""

import asyncio
import re
from collections import Counter

import pytest

from extproc.base.logs import MAX_LINES
from tests.system.attacks.peer import GREETING, data, headers, message, raw, window_update
from tests.system.attacks.victim import Victim
from tests.waiting import WAIT_SECONDS

TIMES = 100
# What ends a connection or a call with a line in the log.
SENT = {
    "a broken rule": GREETING + window_update(0, 0),
    "no preface": b"GET / HTTP/1.1\r\n\r\n" + bytes(20),
    "an unknown table size": GREETING + raw(1, 4, 1, b"\x3f\xff\xff\xff\x0f"),
    "a malformed message": GREETING + headers(1) + data(1, message(b"\xff"), last=True),
    "a message without a request": GREETING + headers(1) + data(1, message(b""), last=True),
}


@pytest.mark.parametrize("sent", SENT.values(), ids=SENT)
async def test_connections_that_end_in_faults_write_few_lines(victim: Victim, sent: bytes) -> None:
    async with victim.unharmed():
        before = len(victim.log_text())
        peers = [await victim.connect() for _ in range(TIMES)]
        for peer in peers:
            peer.send(sent)
            peer.half_close()
        async with asyncio.timeout(WAIT_SECONDS):
            await asyncio.gather(*(peer.ended() for peer in peers))
        lines = victim.log_text()[before:].splitlines()
    kinds = Counter(re.sub(r"^\S+ \S+ ", "", line) for line in lines)
    assert all(count <= MAX_LINES for count in kinds.values()), kinds.most_common(3)


async def test_invalid_http_requests_write_few_lines(victim: Victim) -> None:
    before = len(victim.log_text())
    for _ in range(TIMES):
        for port in victim.http_ports:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"\x00\xff / HTTP/9\r\n\r\n")
            await reader.read()
            writer.close()
    assert len(victim.log_text()[before:].splitlines()) <= 2 * MAX_LINES
