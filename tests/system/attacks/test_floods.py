"""Floods over real sockets: they end, leave nothing behind, and others are answered meanwhile."""

import asyncio

import pytest

from tests.system.attacks.floods import CALL, FLOODS, Flood
from tests.system.attacks.peer import GREETING, data, headers, settings, window_update
from tests.system.attacks.victim import Victim


@pytest.mark.slow
@pytest.mark.parametrize("flood", FLOODS, ids=str)
async def test_flood_from_several_peers_ends_with_goaway_or_is_served(
    victim: Victim, flood: Flood
) -> None:
    sent = GREETING + flood.make()
    async with victim.unharmed(may_grow_bytes=192 * 2**20):
        peers = [await victim.connect() for _ in range(4)]
        await asyncio.gather(*(peer.flood(sent) for peer in peers))
        ends = [peer.until(lambda one: one.goaway == flood.goaway) for peer in peers]
        await asyncio.gather(*ends)
        assert [peer.goaway for peer in peers] == [flood.goaway] * len(peers)


@pytest.mark.slow
async def test_call_sent_byte_by_byte_is_answered(victim: Victim) -> None:
    async with victim.unharmed():
        peer = await victim.connect()
        for byte in GREETING + headers(1) + data(1, CALL, last=True):
            peer.send(bytes((byte,)))
            await asyncio.sleep(0)
        await peer.until(lambda peer: 1 in peer.trailers)
        assert peer.resets == []


@pytest.mark.parametrize("cut", [1, 10, 24, 30, 33, 60, 150, 200])
@pytest.mark.slow
async def test_partial_call_is_released_with_its_connection(victim: Victim, cut: int) -> None:
    whole = GREETING + headers(1) + data(1, CALL, last=True)
    async with victim.unharmed():
        peer = await victim.connect()
        peer.send(whole[:cut])
        peer.half_close()
        await peer.ended()


@pytest.mark.slow
async def test_peer_that_never_reads_is_throttled(victim: Victim) -> None:
    async with victim.unharmed():
        peer = await victim.connect()
        peer.send(GREETING, window_update(0, 2**30))
        assert await peer.is_choked(
            lambda n: headers(n) + data(n, CALL, last=True), limit=64 * 2**20
        )


@pytest.mark.slow
async def test_peer_without_a_window_gets_its_answers_once_it_opens_one(victim: Victim) -> None:
    async with victim.unharmed():
        peer = await victim.connect()
        calls = b"".join(headers(n) + data(n, CALL, last=True) for n in range(1, 999, 2))
        await peer.flood(GREETING + settings(INITIAL_WINDOW_SIZE=0) + calls)
        assert not peer.trailers
        peer.send(settings(INITIAL_WINDOW_SIZE=65_535), window_update(0, 2**24))
        await peer.until(lambda peer: len(peer.trailers) == 499)
