"""Which of several processes follows the feeds."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import pytest
from prometheus_client.registry import CollectorRegistry

from extproc.running.common_secret import common_secret
from extproc.running.feed_role import FeedRole, FeedRoleCollector, Role
from kvstate.feeds.feed import FeedState
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Overlap
from tests.kvstate.publishing import block, chain
from tests.kvstate.relay.relaying import SECRET, Publisher
from tests.waiting import until


@dataclass
class Member:
    """A process with a worker. is_wanted: whether it follows feeds."""

    fleet: FollowedWorkers
    feed_role: FeedRole
    is_wanted: bool = True

    @property
    def overlap(self) -> Overlap | None:
        return self.fleet.blocks.overlaps(chain(1)).get("w")

    async def end(self) -> None:
        await self.feed_role.close()
        await self.fleet.close()


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kvsteer-") as directory:
        yield directory


@pytest.fixture
async def member(directory: str) -> AsyncIterator[Callable[..., Member]]:
    made: list[Member] = []

    def make(secret: int = SECRET, alone_seconds: float = 60.0) -> Member:
        fleet = FollowedWorkers(secret, clock=lambda: 0.0)
        feed_role = FeedRole(directory, fleet, lambda: one.is_wanted, alone_seconds)
        one = Member(fleet, feed_role)
        made.append(one)
        return one

    yield make
    for each in made:
        await each.end()


async def begin(member: Member, publisher: Publisher) -> None:
    await member.feed_role.start()
    member.fleet.add_source("w", "m", 1, publisher.connect)


async def test_the_next_process_leads_when_the_first_ends(member: Callable[..., Member]) -> None:
    publisher, first, second = Publisher(), member(), member()
    await begin(first, publisher)
    await begin(second, publisher)
    publisher.publish(block(1))
    await until(lambda: second.overlap == first.overlap is not None)
    assert (first.feed_role.role, second.feed_role.role) == (Role.LEADING, Role.READING)
    assert len(publisher.transports) == 1
    await first.end()
    await until(lambda: second.feed_role.role is Role.LEADING)
    await until(lambda: second.fleet.feeds.state("w") is FeedState.LIVE)
    assert second.overlap


async def test_a_process_whose_events_are_off_lets_another_lead(
    member: Callable[..., Member],
) -> None:
    publisher, first, second = Publisher(), member(), member()
    await begin(first, publisher)
    await begin(second, publisher)
    first.is_wanted = False
    await until(lambda: second.feed_role.role is Role.LEADING)
    assert first.feed_role.role is Role.ALONE


async def test_a_process_with_other_keys_follows_alone(member: Callable[..., Member]) -> None:
    publisher, first, second = Publisher(), member(), member(SECRET + 1, alone_seconds=0.2)
    await begin(first, publisher)
    await begin(second, publisher)
    await until(lambda: second.feed_role.role is Role.ALONE)
    publisher.publish(block(1))
    await until(lambda: second.overlap)
    await first.end()
    await until(lambda: second.feed_role.role is Role.LEADING)


async def test_the_role_is_shown(member: Callable[..., Member]) -> None:
    one, registry = member(), CollectorRegistry()
    registry.register(FeedRoleCollector(one.feed_role))
    await begin(one, Publisher())
    for role in Role:
        shown = registry.get_sample_value("kvsteer_process_role", {"role": role.value})
        assert shown == float(role is Role.LEADING)


async def test_processes_have_one_secret(directory: str) -> None:
    found = await asyncio.gather(*(common_secret(directory, each, 100 + each) for each in range(4)))
    assert found == [100] * 4


async def test_a_secret_is_not_waited_for_long(directory: str) -> None:
    assert await common_secret(directory, 3, 103, first_seconds=0.05) == 103
    assert await common_secret(directory, 0, 100) == 103
