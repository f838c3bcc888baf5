"""The memory of open streams: there is one for each request under way."""

import asyncio
from pathlib import Path

import pytest

from tests.extproc.router_process import router
from tests.extproc.serving.running import listen_at

pytestmark = pytest.mark.slow

STREAMS = 3_000
AT_ONCE = 100
MOST_BYTES = 32 * 1024


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


async def test_open_streams_by_thousands_need_little_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with router(tmp_path, listen_at("tcp", tmp_path)) as one:
        first = [await one.placed() for _ in range(AT_ONCE)]
        before = resident_bytes(one.process.pid)
        calls = list(first)
        while len(calls) < STREAMS + AT_ONCE:
            calls += await asyncio.gather(*(one.placed() for _ in range(AT_ONCE)))
        after = resident_bytes(one.process.pid)
        a_stream = (after - before) / STREAMS
        with capsys.disabled():
            print(f"\n{a_stream:,.0f} bytes for each of {STREAMS} open streams")
        assert a_stream < MOST_BYTES
        for call in calls:
            call.cancel()
        again = [await one.placed() for _ in range(AT_ONCE)]
        assert len(again) == AT_ONCE
