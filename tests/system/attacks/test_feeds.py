"""What a worker's publisher may send: nobody else waits for it, and its own feed says so."""

import asyncio
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvstate.feeds.feed_news import BEHIND
from kvtools.simulator.settings import TINY_MODEL
from tests.ports import free_port
from tests.system.attacks.publisher import Publisher, batch, command, message
from tests.system.attacks.victim import (
    MAX_HELD_SECONDS,
    MIB,
    Harm,
    Victim,
    assert_undelayed,
    running_victim,
)
from tests.waiting import until

MAX_LATENCY_SECONDS = 10.0  # on a machine that does other work, too
MAX_GROWN_BYTES = 256 * MIB
# Decisions during a flood: some seconds of it.
FLOODED = 100
# For how long a flood may go on before its feed says so.
MARK_SECONDS = 30.0


def stores(first: int, count: int, size: int = 1) -> list[Any]:
    """The event that stores a chain of `count` blocks."""
    hashes = list(range(first, first + count))
    return ["BlockStored", hashes, None, [7] * (count * size), size, None, "GPU"]


def numbered(start: int, make: Callable[[int], bytes]) -> Iterator[bytes]:
    """Messages from this number on, without end."""
    return map(make, itertools.count(start))


def empty_events() -> Iterator[bytes]:
    payload = b"\x93\xcb" + bytes(8) + b"\xdd" + (MIB).to_bytes(4, "big") + b"\x90" * MIB + b"\0"
    return numbered(1, lambda number: message(number, payload))


def removals() -> Iterator[bytes]:
    payload = [["BlockRemoved", [n % 100 + 10**6 for n in range(200_000)]]]
    return numbered(1, lambda number: batch(number, payload))


def two_full_segments() -> Iterator[bytes]:
    chains = (batch(n + 1, [stores(n * 20_000 + 1, 20_000)]) for n in range(15))
    others = (batch(n + 20, [stores((n + 50) * 20_000, 20_000)]) for n in range(15))
    holes = (batch(n * 2 + 40, [stores(10**7 + n, 1)]) for n in itertools.count())
    return itertools.chain(chains, others, holes)


def clears() -> Iterator[bytes]:
    chains = (batch(n + 1, [stores(n * 20_000 + 1, 20_000)]) for n in range(30))
    return itertools.chain(chains, [batch(32, [["AllBlocksCleared"]])] * 2)


def orphans(what: str) -> Iterator[bytes]:
    def make(number: int) -> bytes:
        name = number.to_bytes(8, "big")
        long = name.ljust(500_000, b"x")
        block = ["BlockStored", [name], b"unknown", [7], 1, None, "GPU", None, None]
        if what == "hash":
            block[1] = [long]
        elif what == "parent":
            block[2] = long
        else:
            block[8] = [[long.decode("latin-1")]]
        return batch(number, [block])

    return numbered(1, make)


def valid_events() -> Iterator[bytes]:
    removed = ["BlockRemoved", list(range(1, 1_001)), "GPU"]
    return numbered(1, lambda number: batch(number, [stores(1, 1_000), removed]))


def one_block() -> list[bytes]:
    return [batch(0, [stores(1, 1)])]


@dataclass(frozen=True)
class Attack:
    """first: sent before, so that the feed is live. flood: sent then, as fast as possible.

    is_marked: whether its feed then reports that it does not know everything; else it is only slow.
    """

    name: str
    flood: Callable[[], Iterable[bytes]] = field(repr=False)
    first: Callable[[], Iterable[bytes]] = field(
        repr=False, default=lambda: [batch(0, [stores(1, 1)])]
    )
    is_marked: bool = True

    def __str__(self) -> str:
        return self.name


ATTACKS = [
    Attack("1 MiB of empty events", empty_events),
    Attack("messages of 32 MiB", lambda: numbered(1, lambda n: message(n, b"\x90" * (32 * MIB)))),
    Attack(
        "removals over many pools",
        removals,
        lambda: [batch(0, [stores(n * 100, 5, n) for n in range(1, 65)])],
        is_marked=False,
    ),
    Attack("holes with two full segments", two_full_segments),
    Attack("clearing a full rank", clears),
    Attack("orphans of large hashes", lambda: orphans("hash")),
    Attack("orphans of large parents", lambda: orphans("parent")),
    Attack("orphans of large extra keys", lambda: orphans("extra")),
    Attack("empty commands", lambda: itertools.repeat(b"\x04\x02\x01?" * 20_000)),
    Attack("valid events without end", valid_events),
    Attack("PINGs", lambda: itertools.repeat(command(b"PING", b"\0\0") * 5_000)),
]

# Those of them that delay others most.
WORST = ("removals over many pools", "holes with two full segments", "orphans of large extra keys")


async def harm_of(victim: Victim, publisher: Publisher) -> Harm:
    """The effects of a publisher's flood on others."""
    async with asyncio.timeout(60):
        await publisher.subscribed.wait()
    async with victim.probed(at_least=FLOODED) as harm:
        publisher.flooding.set()
    return harm


def is_marked(feed: dict[str, Any]) -> bool:
    """Whether the feed is reported as one of which not everything is known, with a reason."""
    is_behind = feed["reason"].startswith(BEHIND)
    return is_behind or (feed["state"] != "live" and bool(feed["reason"]))


async def settled(victim: Victim, attack: Attack) -> dict[str, Any]:
    """Waits for the feed to be marked, if it has to be, during the flood; returns the feed."""
    found: list[dict[str, Any]] = []

    async def is_settled() -> bool:
        found[:] = await victim.feeds()
        return not attack.is_marked or is_marked(found[0])

    await until(is_settled, "the feed is marked", seconds=MARK_SECONDS, pause=0.2)
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=str)
async def test_hostile_publisher_does_not_block_the_loop_and_its_feed_is_marked(
    attack: Attack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    publisher = Publisher(attack.first(), attack.flood())
    async with publisher.running(port):
        with running_victim(tmp_path, f"events: {{zmq: 'tcp://127.0.0.1:{port}'}}") as victim:
            harm = await harm_of(victim, publisher)
            feed = await settled(victim, attack)
    with capsys.disabled():
        print(f"\n{attack}: {harm}; {feed['state']}: {feed['reason']}")
    assert harm.worst_held < MAX_HELD_SECONDS, harm
    assert harm.quantile(1.0) < MAX_LATENCY_SECONDS, harm
    assert harm.grown_bytes < MAX_GROWN_BYTES, harm
    assert is_marked(feed) or not attack.is_marked, feed


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("attack", [one for one in ATTACKS if one.name in WORST], ids=str)
async def test_hostile_publisher_delays_no_decision(attack: Attack, tmp_path: Path) -> None:
    port = free_port()
    publisher = Publisher(attack.first(), attack.flood())
    async with publisher.running(port):
        with running_victim(tmp_path, f"events: {{zmq: 'tcp://127.0.0.1:{port}'}}") as victim:
            async with asyncio.timeout(60):
                await publisher.subscribed.wait()
            publisher.flooding.set()
            await assert_undelayed(victim, at_least=2 * FLOODED)


def unrelated_stores() -> Iterator[bytes]:
    return numbered(1, lambda number: batch(number, [stores(number * 4, 4, 16)]))


@pytest.mark.slow
async def test_endless_stores_do_not_block_the_loop_while_prompts_are_looked_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    publisher = Publisher(one_block(), unrelated_stores())
    keys = f"events: {{zmq: 'tcp://127.0.0.1:{port}'}}"
    async with publisher.running(port):
        with running_victim(tmp_path, keys, f"tokenizer: '{TINY_MODEL}'") as victim:
            async with asyncio.timeout(60):
                await publisher.subscribed.wait()
            async with victim.probed(at_least=20) as harm, victim.channel() as channel:
                publisher.flooding.set()

                async def flooded() -> bool:
                    return publisher.sent_bytes > (seed + 1) * MIB

                async def looked_up() -> bool:
                    tokens = (await victim.worker())["tokens"]
                    return bool(tokens["without_evidence"] > 0)

                for seed in range(20):  # each is looked up, and none is ever stored
                    text = f"{seed} " + "the quick brown fox " * 20
                    prompt = json.dumps({"model": "m", "prompt": text}).encode()
                    await victim.places(channel, "/v1/completions", prompt)
                    await until(flooded, "1 MiB of stores was sent")
                # the router may be behind: a look ends with the stores that it has read
                await until(looked_up, "a look has ended", seconds=MARK_SECONDS, pause=0.2)
    with capsys.disabled():
        print(f"\n{publisher.sent_bytes / MIB:.0f} MiB of stores: {harm}")
    assert harm.worst_held < MAX_HELD_SECONDS, harm
    assert harm.grown_bytes < MAX_GROWN_BYTES, harm
