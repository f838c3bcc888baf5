import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
from msgspec.structs import replace

from kvstate.events import Batch, Loss
from kvstate.feeds.feed import FeedState
from kvstate.feeds.transport import Connected, Disconnected, Malformed
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Overlap
from tests.kvstate.publishing import block, chain, payload
from tests.memory_transport import MemoryTransport
from tests.waiting import until


@pytest.fixture
async def fleet() -> AsyncIterator[FollowedWorkers]:
    fleet = FollowedWorkers(12345678, clock=lambda: 0.0)
    yield fleet
    await fleet.close()


def transport(*blocks: int) -> MemoryTransport:
    """A publisher that is connected and whose first batch stored these blocks."""
    transport = MemoryTransport({0: payload(0, *(block(number) for number in blocks))})
    transport.put(Connected())
    return transport


async def test_worker_is_followed_on_all_ranks(fleet: FollowedWorkers) -> None:
    fleet.add("w", "m", [transport(1), transport(7, 8)])
    await until(lambda: fleet.feeds.state("w") is FeedState.LIVE)
    assert fleet.blocks.overlaps(chain(3)) == {"w": Overlap(1, uncertain=1)}
    fleet.blocks.names_ranks = True
    assert fleet.blocks.overlaps(chain(3)) == {"w": Overlap(1, (1, 0, 0, 0))}
    assert fleet.blocks.by_tier("w") == (3, 0, 0, 0)
    assert fleet.blocks.block_size("w") == 1
    first, second = fleet.feeds.statuses("w")
    assert (first.rank, first.state, first.last_sequence, first.blocks) == (0, FeedState.LIVE, 0, 1)
    assert (second.rank, second.blocks, second.counts["batches"]) == (1, 2, 1)


def offloading() -> MemoryTransport:
    """A publisher whose device lost what it offloaded to a tier that announces no removals."""
    publisher = transport(1)
    offloaded = [[*block(1), None, "cpu"], [*block(2, 1), None, "cpu"]]
    publisher.put(Batch(1, payload(1, *offloaded)))
    publisher.put(Batch(2, payload(2, ["BlockRemoved", [1], "GPU"])))
    return publisher


async def test_doubted_blocks_are_not_certain(fleet: FollowedWorkers) -> None:
    fleet.add("w", "m", [offloading()])
    await until(lambda: fleet.blocks.overlaps(chain(3)) == {"w": Overlap(1, uncertain=2)})
    (feed,) = fleet.feeds.statuses("w")
    assert (feed.state, feed.blocks, feed.uncertain_blocks) == (FeedState.LIVE, 2, 2)


async def test_doubted_blocks_expire() -> None:
    fleet = FollowedWorkers(12345678, clock=lambda: 0.0, doubted_seconds=0.01)
    fleet.add("w", "m", [offloading()])
    await until(
        lambda: (
            fleet.feeds.state("w") is FeedState.LIVE and fleet.feeds.statuses("w")[0].blocks == 0
        )
    )
    assert fleet.blocks.overlaps(chain(3)) == {}
    await fleet.close()


async def test_unknown_worker_has_no_feeds(fleet: FollowedWorkers) -> None:
    assert fleet.feeds.state("w") is FeedState.UNSUPPORTED
    assert (fleet.feeds.statuses("w"), fleet.blocks.block_size("w")) == ([], None)
    await fleet.remove("w")


async def test_worker_is_in_the_state_of_its_worst_rank(fleet: FollowedWorkers) -> None:
    fleet.add("w", "m", [transport(1), MemoryTransport()])
    await until(lambda: fleet.feeds.statuses("w")[0].state is FeedState.LIVE)
    assert fleet.feeds.state("w") is FeedState.CONNECTING


async def test_emptied_worker_is_reported() -> None:
    told: list[tuple[str, Loss]] = []

    def note(worker: str, why: Loss) -> None:
        told.append((worker, why))

    fleet = FollowedWorkers(12345678, clock=lambda: 0.0, emptied=note)
    first, second = transport(1), transport(7)
    fleet.add("w", "m", [first, second])
    await until(lambda: fleet.feeds.state("w") is FeedState.LIVE)
    assert (fleet.feeds.ranks("w"), fleet.feeds.ranks("x")) == (2, 0)
    second.put(Batch(1, payload(1, ["AllBlocksCleared"])))
    await until(lambda: told == [("w", Loss.CLEARED)])
    first.history = {0: payload(0, block(5), life=1)}
    first.put(Batch(0, payload(0, block(5), life=1)))
    await until(lambda: told[1:] == [("w", Loss.RESTARTED)])
    assert fleet.feeds.statuses("w")[0].restarts == 1
    await fleet.close()


async def test_disconnected_worker_is_reported_once() -> None:
    told: list[str] = []
    fleet = FollowedWorkers(12345678, clock=lambda: 0.0, cut=told.append)
    publisher = transport(1)
    fleet.add("w", "m", [publisher])
    await until(lambda: fleet.feeds.state("w") is FeedState.LIVE)
    assert told == []
    for reason in ("closed", "refused"):
        publisher.put(Disconnected(reason))
        await until(lambda reason=reason: reason in fleet.feeds.statuses("w")[0].reason)  # type: ignore[misc]
    assert told == ["w"]
    await fleet.close()


async def test_removed_worker_leaves_nothing(fleet: FollowedWorkers) -> None:
    fleet.add("w", "m", [transport(1)])
    await until(lambda: fleet.feeds.state("w") is FeedState.LIVE)
    await fleet.remove("w")
    assert fleet.blocks.overlaps(chain(1)) == {}
    assert fleet.feeds.state("w") is FeedState.UNSUPPORTED


async def test_worker_added_while_it_is_removed_stays(fleet: FollowedWorkers) -> None:
    fleet.add("w", "m", [transport(1)])
    await until(lambda: fleet.feeds.state("w") is FeedState.LIVE)
    removal = asyncio.create_task(fleet.remove("w"))
    await asyncio.sleep(0)
    fleet.add("w", "m", [transport(1, 2)])
    await removal
    await until(lambda: fleet.feeds.state("w") is FeedState.LIVE)
    assert fleet.blocks.by_tier("w") == (2, 0, 0, 0)
    fleet.index.check()


async def test_removal_is_finished_although_its_waiter_is_cancelled(fleet: FollowedWorkers) -> None:
    fleet.add("w", "m", [transport(1)])
    await until(lambda: fleet.feeds.state("w") is FeedState.LIVE)
    removal = asyncio.create_task(fleet.remove("w"))
    await asyncio.sleep(0)
    removal.cancel()
    await asyncio.gather(removal, return_exceptions=True)
    await fleet.close()
    assert (removal.cancelled(), fleet.blocks.overlaps(chain(1))) == (True, {})


async def test_replays_are_capped_over_the_fleet() -> None:
    fleet = FollowedWorkers(12345678, clock=lambda: 0.0, replays_at_once=1)
    for number in range(3):
        fleet.add(f"w{number}", "m", [transport(1)])
    await until(
        lambda: all(fleet.feeds.state(f"w{number}") is FeedState.LIVE for number in range(3))
    )
    await fleet.close()
    assert fleet.blocks.overlaps(chain(1)) == {}


class Trickling(MemoryTransport):
    """A publisher whose replays bring one batch, and never end."""

    async def replay(self, start: int) -> AsyncGenerator[Batch | Malformed]:
        yield Batch(start, payload(start))
        await asyncio.Event().wait()


async def test_worker_with_trickling_replays_does_not_block_those_of_others(
    fleet: FollowedWorkers,
) -> None:
    ranks = [Trickling() for _ in range(16)]
    for rank in ranks:
        rank.put(Connected())
    fleet.add("slow", "m", ranks)
    await until(lambda: any(feed.last_sequence == 0 for feed in fleet.feeds.statuses("slow")))
    fleet.add("honest", "m", [transport(1)])
    await until(lambda: fleet.feeds.state("honest") is FeedState.LIVE)
    assert fleet.feeds.state("slow") is FeedState.REPLAYING


async def test_adapter_numbered_in_events_is_found_by_its_name(
    fleet: FollowedWorkers,
) -> None:
    stored = ["BlockStored", [1], None, [1], 1, 7]  # of adapter number 7
    one, other = (MemoryTransport({0: payload(0, stored)}) for _ in range(2))
    for each in (one, other):
        each.put(Connected())
    fleet.add("w", "m", [one], [(7, "x")])
    fleet.add("v", "m", [other])
    await until(lambda: fleet.feeds.state("w") is fleet.feeds.state("v") is FeedState.LIVE)
    prompt, certain, unsure = chain(3), Overlap(1, (1, 0, 0, 0)), Overlap(1, uncertain=1)
    assert fleet.blocks.overlaps(prompt) == {}
    assert fleet.blocks.overlaps(replace(prompt, lora="y")) == {"v": unsure}
    assert fleet.blocks.overlaps(replace(prompt, lora="x")) == {"w": certain, "v": unsure}
    await fleet.remove("w")
    assert fleet.blocks.overlaps(replace(prompt, lora="x")) == {"v": unsure}
    await fleet.remove("v")
    assert fleet.blocks.overlaps(replace(prompt, lora="x")) == {}


async def test_feed_that_fails_to_close_is_removed_with_the_others(
    fleet: FollowedWorkers,
) -> None:
    class Stuck(MemoryTransport):
        async def close(self) -> None:
            raise OSError("it is stuck")

    stuck = Stuck({0: payload(0, block(1))})
    stuck.put(Connected())
    fleet.add("w", "m", [stuck, transport(1)])
    await until(lambda: fleet.feeds.state("w") is FeedState.LIVE)
    await fleet.remove("w")
    assert fleet.blocks.overlaps(chain(3)) == {}
    fleet.add("w", "m", [transport(1)])
    await until(lambda: fleet.feeds.state("w") is FeedState.LIVE)
    assert fleet.blocks.overlaps(chain(3)) == {"w": Overlap(1, (1, 0, 0, 0))}


async def test_feed_that_is_slow_to_close_keeps_no_other_open(fleet: FollowedWorkers) -> None:
    closing: list[str] = []
    may_end = asyncio.Event()

    class Slow(MemoryTransport):
        async def close(self) -> None:
            closing.append("slow")
            await may_end.wait()

    class Other(MemoryTransport):
        async def close(self) -> None:
            closing.append("other")

    fleet.add("w", "m", [Slow({}), Other({})])
    removing = asyncio.create_task(fleet.remove("w"))
    await until(lambda: closing == ["slow", "other"])
    assert not removing.done()
    may_end.set()
    await removing


async def test_batches_dropped_by_their_number_are_counted(fleet: FollowedWorkers) -> None:
    transport = MemoryTransport({})
    transport.put(Connected())
    fleet.add("w", "m", [transport])
    await until(lambda: fleet.feeds.state("w") is FeedState.LIVE)
    assert "dropped_batch" not in fleet.feeds.statuses("w")[0].counts
    for _ in range(3):
        transport.put(Batch(0, payload(0, block(1))))
    await until(lambda: fleet.feeds.statuses("w")[0].counts.get("dropped_batch") == 2)
