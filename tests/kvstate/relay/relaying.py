"""A host with several processes, one of which passes on to the others what it learns."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from kvstate.events import Batch
from kvstate.feeds.feed import FeedState
from kvstate.feeds.feed_times import USUAL, FeedTimes
from kvstate.feeds.transport import Connected, FeedTransport
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Overlap, Prompt
from kvstate.relay.passing import Passing
from kvstate.relay.reading import Reading
from kvstate.relay.records import VERSION, Hello
from kvstate.relay.taps import Taps
from kvstate.stores.stores import StoreRules
from tests.kvstate.publishing import chain, payload
from tests.memory_transport import MemoryTransport
from tests.waiting import until

SECRET = 12345678
HELLO = Hello(VERSION, "layout", "proof")


class Publisher:
    """A worker's publisher, which any number of processes follow."""

    def __init__(self) -> None:
        self.history: dict[int, bytes] = {}
        self.life = self.number = 0
        self.transports: list[MemoryTransport] = []

    def connect(self) -> list[FeedTransport]:
        transport = MemoryTransport(self.history)  # type: ignore[arg-type]
        transport.put(Connected())
        self.transports.append(transport)
        return [transport]

    def publish(self, *events: object, is_heard: bool = True) -> None:
        body = self.history[self.number] = payload(self.number, *events, life=self.life)
        for transport in self.transports if is_heard else ():
            transport.put(Batch(self.number, body))
        self.number += 1

    def forget(self) -> None:
        """Empties its buffer: what was not heard is lost."""
        self.history.clear()

    def restart(self) -> None:
        self.history.clear()
        self.life, self.number = self.life + 1, 0


class Process:
    """One process: it leads, reads at a socket, or follows by itself."""

    def __init__(
        self,
        publisher: Publisher,
        hello: Hello = HELLO,
        *,
        stores: Sequence[StoreRules] = (),
        times: FeedTimes = USUAL,
    ) -> None:
        self.news: list[str] = []
        self.fleet = FollowedWorkers(
            SECRET,
            clock=lambda: 0.0,
            emptied=lambda _, __: self.news.append("emptied"),
            cut=lambda _: self.news.append("cut"),
            stores=stores,
            times=times,
        )
        self.fleet.subscriptions.taps = Taps(self.fleet.index.core)
        self.publisher = publisher
        self.hello = hello
        hand_over, hand_over_stores = self.fleet.rows.copy_ranks, self.fleet.rows.copy_stores
        self.passing = Passing(self.fleet.subscriptions.taps, hand_over, hand_over_stores, HELLO)
        self.reading: Reading | None = None
        self.task: asyncio.Task[bool] | None = None

    def follow(self) -> None:
        self.fleet.add_source("w", "m", 1, self.publisher.connect)

    async def lead(self, socket: Path) -> None:
        await self.passing.start(socket)
        self.follow()

    def read(self, socket: Path) -> None:
        self.reading = self.fleet.relayed.read(self.hello)
        self.follow()
        self.task = asyncio.create_task(self.reading.follow(socket))

    async def take_over(self, socket: Path) -> None:
        """Leads from now on, once the other process is gone."""
        assert self.task is not None
        await self.task
        await self.fleet.relayed.take_over()
        await self.passing.start(socket)

    async def end(self) -> None:
        await self.passing.close()
        if self.reading is not None:
            self.reading.close()
        if self.task is not None:
            await asyncio.gather(self.task, return_exceptions=True)
        await self.fleet.close()

    def held(self, prompts: list[Prompt]) -> list[Overlap | None]:
        """What the index says of each prompt."""
        return [self.fleet.blocks.overlaps(prompt).get("w") for prompt in prompts]

    async def position(self) -> list[int]:
        """After which batch its rows can be saved."""
        return [one.rank.feed.next async for one in self.fleet.rows.saved_ranks(lambda _: "engine")]

    @property
    def sequence(self) -> int | None:
        return self.fleet.feeds.statuses("w")[0].last_sequence

    @property
    def certain_tokens(self) -> int:
        """How many tokens of a chain are certain."""
        found = self.fleet.blocks.overlaps(chain(4)).get("w")
        return 0 if found is None else found.certain_tokens

    @property
    def is_heard(self) -> bool:
        """Whether the tokens of what the worker stores are passed on."""
        assert self.fleet.subscriptions.taps is not None
        return all(tap.is_heard for tap in self.fleet.subscriptions.taps.of("w") or ())

    @property
    def state(self) -> FeedState:
        return self.fleet.feeds.state("w")


async def until_alike(one: Process, other: Process, prompts: list[Prompt]) -> None:
    """Waits until two processes that follow by themselves hold the same, or one doubts its feed.

    Each asks the publisher at moments of its own, so that restarts one after the other may look to
    one of them as if replays contradicted what is published.
    """

    def is_alike() -> bool:
        if FeedState.DEGRADED in (one.state, other.state):
            return True
        return one.held(prompts) == other.held(prompts)

    await until(is_alike)


async def until_same(one: Process, other: Process, prompts: list[Prompt]) -> None:
    """Waits until two processes know the same, and could save the same."""

    async def is_same() -> bool:
        if one.state != other.state or one.held(prompts) != other.held(prompts):
            return False
        return await one.position() == await other.position()

    await until(is_same)
