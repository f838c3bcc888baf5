"""Workers that begin with what an earlier router saved of them."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvstate.events import Batch
from kvstate.feeds.feed import FeedState, Restoration
from kvstate.feeds.feed_times import FeedTimes
from kvstate.feeds.transport import Connected
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Overlap
from kvstate.rows.format import SavedRows
from kvstate.stores.stores import StoreRules
from tests.kvstate.publishing import block, chain, payload
from tests.memory_transport import MemoryTransport
from tests.waiting import until

SECRET = 12345678


@pytest.fixture
async def fleet() -> AsyncIterator[FollowedWorkers]:
    fleet = FollowedWorkers(SECRET, clock=lambda: 0.0)
    yield fleet
    await fleet.close()


@pytest.fixture
async def again() -> AsyncIterator[FollowedWorkers]:
    """The workers of a router that is started later."""
    fleet = FollowedWorkers(SECRET, clock=lambda: 0.0)
    yield fleet
    await fleet.close()


def publisher(*numbers: int) -> MemoryTransport:
    """A publisher whose buffer still has these batches; batch n stores block n + 1."""
    parents = {number: number or None for number in numbers}
    history = {number: payload(number, block(number + 1, parents[number])) for number in numbers}
    made = MemoryTransport(dict(history))
    made.put(Connected())
    return made


async def saved_of(fleet: FollowedWorkers) -> list[SavedRows]:
    return [one async for one in fleet.rows.saved_ranks(lambda worker: f"engine of {worker}")]


async def saved_after(fleet: FollowedWorkers, last: int) -> list[SavedRows]:
    """What is saved of a worker that sent the batches 0 to last."""
    fleet.add("w", "m", [publisher(*range(last + 1))])
    await until(lambda: fleet.feeds.state("w") is FeedState.LIVE)
    return await saved_of(fleet)


def begin(fleet: FollowedWorkers, saved: list[SavedRows], *publishers: MemoryTransport) -> None:
    fleet.subscriptions.take_saved = lambda *_: {one.rank.rank: one for one in saved}
    fleet.add("w", "m", publishers)


async def test_repeated_batch_makes_all_that_was_saved_certain(
    fleet: FollowedWorkers, again: FollowedWorkers
) -> None:
    saved = await saved_after(fleet, 3)
    assert [(one.rank.worker, one.rank.identity) for one in saved] == [("w", "engine of w")]
    later = publisher(3, 4)
    begin(again, saved, later)
    await until(lambda: again.feeds.restoration("w") is Restoration.PROVEN)
    await until(lambda: again.feeds.state("w") is FeedState.LIVE)
    assert later.replays == [3]
    assert again.blocks.overlaps(chain(6)) == {"w": Overlap(1, (5, 0, 0, 0))}


async def test_replay_that_breaks_off_is_asked_for_again(fleet: FollowedWorkers) -> None:
    saved = await saved_after(fleet, 3)
    again = FollowedWorkers(
        SECRET, clock=lambda: 0.0, times=FeedTimes(0.01, retry_seconds=(0.0, 0.0))
    )
    later = publisher(3, 4)
    later.replay_error = "silence"
    begin(again, saved, later)
    await until(lambda: later.replays == [3, 3])
    later.replay_error = None
    await until(lambda: again.blocks.overlaps(chain(6)) == {"w": Overlap(1, (5, 0, 0, 0))})
    assert again.feeds.restoration("w") is Restoration.PROVEN
    await again.close()


async def test_saved_block_is_uncertain_until_it_is_proven(
    fleet: FollowedWorkers, again: FollowedWorkers
) -> None:
    silent = MemoryTransport({})
    begin(again, await saved_after(fleet, 3), silent)
    await until(lambda: again.blocks.overlaps(chain(6)) == {"w": Overlap(1, uncertain=4)})
    assert again.feeds.restoration("w") is Restoration.UNPROVEN


async def test_new_publisher_loses_all_that_was_saved(
    fleet: FollowedWorkers, again: FollowedWorkers
) -> None:
    begin(again, await saved_after(fleet, 3), publisher(0, 1))
    await until(lambda: again.feeds.restoration("w") is Restoration.LOST)
    await until(lambda: again.blocks.overlaps(chain(6)) == {"w": Overlap(1, (2, 0, 0, 0))})


async def test_worker_without_replays_begins_with_nothing(
    fleet: FollowedWorkers, again: FollowedWorkers
) -> None:
    saved = await saved_after(fleet, 3)
    without = MemoryTransport(None)
    without.put(Connected())
    begin(again, saved, without)
    await until(lambda: again.feeds.state("w") is FeedState.DEGRADED)
    assert again.feeds.restoration("w") is Restoration.NONE
    assert again.blocks.overlaps(chain(6)) == {}
    assert await saved_of(again) == []


async def test_rows_that_cannot_be_put_back_leave_the_worker_empty(
    fleet: FollowedWorkers, again: FollowedWorkers
) -> None:
    (saved,) = await saved_after(fleet, 3)
    begin(again, [SavedRows(saved.rank, [b"no rows"])], publisher(2, 3))
    await until(lambda: again.feeds.state("w") is FeedState.DEGRADED)
    assert again.feeds.restoration("w") is Restoration.NONE
    assert again.blocks.overlaps(chain(6)) == {}


async def test_batches_wait_while_their_rank_is_saved(fleet: FollowedWorkers) -> None:
    followed = publisher(*range(2_000))
    fleet.add("w", "m", [followed])
    await until(lambda: fleet.feeds.state("w") is FeedState.LIVE)
    saving = asyncio.create_task(saved_of(fleet))
    for number in range(2_000, 2_050):
        followed.put(Batch(number, payload(number, block(number + 1, number))))
        await asyncio.sleep(0)
    (saved,) = await saving
    again = FollowedWorkers(SECRET, clock=lambda: 0.0)
    begin(again, [saved], publisher(*range(saved.rank.feed.next - 1, 2_050)))
    await until(lambda: again.feeds.state("w") is FeedState.LIVE)
    assert again.blocks.overlaps(chain(3_000)) == {"w": Overlap(1, (2_050, 0, 0, 0))}
    await again.close()


async def test_nothing_else_waits_while_a_saved_store_is_written() -> None:
    fleet = FollowedWorkers(SECRET, clock=lambda: 0.0, stores=[StoreRules("s")])
    fleet.add("w", "m", [publisher()])
    saved = fleet.rows.saved_stores()
    assert (await anext(saved)).store.store == "s"
    async with asyncio.timeout(60):
        await fleet.rows.forget_lost_stores()
    assert [one async for one in saved] == []
    await fleet.close()


async def test_removed_worker_is_not_saved(fleet: FollowedWorkers) -> None:
    for name in ("v", "w"):
        fleet.add(name, "m", [publisher(*range(100))])
    await until(lambda: fleet.feeds.state("w") is FeedState.LIVE)
    saved = fleet.rows.saved_ranks(lambda _: "")
    assert (await anext(saved)).rank.worker == "v"
    await fleet.remove("w")
    assert [one async for one in saved] == []


async def test_worker_removed_between_two_of_its_ranks_is_saved_no_further(
    fleet: FollowedWorkers,
) -> None:
    fleet.add("w", "m", [publisher(0, 1), publisher(0, 1)])
    await until(lambda: fleet.feeds.state("w") is FeedState.LIVE)
    saved = fleet.rows.saved_ranks(lambda _: "")
    first = (await anext(saved)).rank
    assert (first.rank, first.ranks) == (0, 2)
    await fleet.remove("w")
    assert [one async for one in saved] == []


async def test_worker_added_again_between_two_of_its_ranks_is_saved_no_further(
    fleet: FollowedWorkers,
) -> None:
    fleet.add("w", "m", [publisher(0, 1), publisher(0, 1)])
    await until(lambda: fleet.feeds.state("w") is FeedState.LIVE)
    saved = fleet.rows.saved_ranks(lambda _: "")
    await anext(saved)
    await fleet.remove("w")
    fleet.add("w", "m", [publisher(0, 1), publisher(0, 1)])
    await until(lambda: fleet.feeds.state("w") is FeedState.LIVE)
    assert [one async for one in saved] == []
