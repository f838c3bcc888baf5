"""Many connections, many streams: within bounds, and others are answered."""

import asyncio
import resource

import pytest

from extproc.serving.server_bounds import USUAL
from tests.system.attacks.floods import CALL
from tests.system.attacks.peer import GREETING, Peer, data, headers, window_update
from tests.system.attacks.victim import Victim
from tests.waiting import until

MIB = 2**20
MAX_CONNECTIONS = USUAL.max_connections


def connections_here(most: int) -> int:
    """This many, or fewer where that exceeds a third of this process's limit of open files."""
    return min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3)


async def greeted(victim: Victim, count: int) -> list[Peer]:
    """Opens this many connections, a hundred at a time."""
    peers: list[Peer] = []
    while len(peers) < count:
        some = [await victim.connect() for _ in range(min(100, count - len(peers)))]
        for peer in some:
            peer.send(GREETING)
        await asyncio.gather(*(peer.seen() for peer in some))
        peers += some
    return peers


@pytest.mark.slow
async def test_server_answers_thousands_of_connections_within_bounded_memory(
    fresh: Victim, capsys: pytest.CaptureFixture[str]
) -> None:
    count = connections_here(4000)
    async with fresh.unharmed(may_grow_bytes=400 * MIB):
        before = fresh.resident_bytes
        peers = await greeted(fresh, count)
        each = (fresh.resident_bytes - before) / count
        with capsys.disabled():
            print(f"\n{each:,.0f} bytes for each of {count} connections")
        assert all(peer.is_answered() for peer in peers)


@pytest.mark.slow
async def test_connections_over_the_limit_do_not_lock_out_a_new_peer(victim: Victim) -> None:
    count = connections_here(MAX_CONNECTIONS + 200)
    async with victim.unharmed(may_grow_bytes=400 * MIB):
        await greeted(victim, count)
        late = await victim.connect()
        late.send(GREETING, headers(1), data(1, CALL, last=True))
        assert 1 in (await late.until(lambda peer: 1 in peer.trailers)).trailers


async def opened(victim: Victim, connections: int, streams: int) -> list[Peer]:
    """Opens calls that are answered and stay open, like those of slow responses."""
    calls = b"".join(headers(n) + data(n, CALL) for n in range(1, 2 * streams, 2))
    peers = [await victim.connect() for _ in range(connections)]
    sent = GREETING + window_update(0, 2**24) + calls
    await asyncio.gather(*(peer.flood(sent) for peer in peers))
    return peers


@pytest.mark.slow
async def test_streams_by_the_thousand_do_not_grow_memory_when_repeated(
    fresh: Victim, capsys: pytest.CaptureFixture[str]
) -> None:
    async with fresh.unharmed(may_grow_bytes=400 * MIB):
        levels = [fresh.resident_bytes]
        for _ in range(3):
            await opened(fresh, 4, 2500)
            await until(lambda: fresh.has_at_least(10_000), "all streams are open")
            levels.append(fresh.resident_bytes)
            fresh.leave()
            await until(lambda: fresh.has_at_most(10), "all streams are closed")
        with capsys.disabled():
            each = (levels[1] - levels[0]) / 10_000
            print(f"\n{each:,.0f} bytes for each of 10,000 streams")
        assert levels[1] - levels[0] < 10_000 * 40_000
        assert levels[3] - levels[1] < 16 * MIB


async def test_server_answers_1500_concurrent_streams(victim: Victim) -> None:
    async with victim.unharmed(may_grow_bytes=100 * MIB):
        peer = await victim.connect()
        numbers = range(1, 3000, 2)
        calls = [headers(n) + data(n, CALL, last=True) for n in numbers]
        peer.send(GREETING, window_update(0, 2**24), *calls)
        await peer.until(lambda peer: len(peer.trailers) == len(numbers))
        assert {code for _, code in peer.resets} <= {0}
