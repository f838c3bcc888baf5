"""One address takes all it can get of what all share: the others' calls are answered."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.attacks.peer import GREETING, Peer, data, headers
from tests.system.attacks.victim import Victim, running_victim

MIB = 2**20
FILES = 200
ATTACKER = "127.0.0.2"


async def flooded(victim: Victim, connections: int, streams: int, sent: bytes = b"") -> list[Peer]:
    """Opens calls that do not go on, from another address. sent: of each one's message."""
    numbers = range(1, 2 * streams, 2)
    calls = b"".join(headers(n) for n in numbers)
    parts = [data(n, sent[at : at + 16_384]) for at in range(0, len(sent), 16_384) for n in numbers]
    peers: list[Peer] = []
    for _ in range(connections):
        peers.append(await victim.connect(ATTACKER))
        peers[-1].send(GREETING + calls + b"".join(parts))
    await asyncio.gather(*(peer.seen() for peer in peers))
    return peers


async def assert_others_are_answered(victim: Victim) -> None:
    """Checks that calls from our own address are answered, one after the other."""
    async with victim.channel() as channel:
        for _ in range(20):
            await victim.answers(channel)


async def test_calls_without_a_message_fail_no_call_of_another_address(victim: Victim) -> None:
    async with victim.unharmed(may_grow_bytes=200 * MIB):
        await flooded(victim, 5, 16_000)
        await assert_others_are_answered(victim)


@pytest.mark.slow
async def test_unfinished_messages_fail_no_call_of_another_address(fresh: Victim) -> None:
    async with fresh.unharmed(may_grow_bytes=300 * MIB):
        # a message of 30 MiB, of which 1,000,000 bytes come: not all are kept
        peers = await flooded(fresh, 5, 80, b"\0\x01\xe0\0\0" + bytes(1_000_000))
        await flooded(fresh, 1, 10_000)  # what is left
        await assert_others_are_answered(fresh)
        assert any(peer.trailers for peer in peers)


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[Victim]:
    """A router that may open only a few files."""
    with running_victim(tmp_path, files=FILES) as victim:
        yield victim
        victim.leave()


async def test_busy_connections_of_one_address_lock_out_no_other(narrow: Victim) -> None:
    async with narrow.unharmed():
        await flooded(narrow, FILES, 1)
        await assert_others_are_answered(narrow)
