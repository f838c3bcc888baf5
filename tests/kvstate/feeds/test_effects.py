import asyncio

import pytest

from kvstate.errors import WireError
from kvstate.events import Batch, BatchResult, Body
from kvstate.feeds.allowance import Allowance
from kvstate.feeds.effects import Effects
from kvstate.feeds.feed import Demote, Feed, FeedState, Forget, RequestReplay
from kvstate.feeds.feed_news import FeedNews
from kvstate.feeds.feed_sources import Recovery
from kvstate.feeds.transport import RankName
from kvstate.feeds.turns import Turns
from kvstate.steps import Pace, Steps


def batch(body: Body) -> Batch:
    return Batch(0, body)


class Written:
    """A sink that writes down what was done to it."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.taken = BatchResult()
        self.paces: list[Pace | None] = [None]

    def applying(self, body: Body) -> Steps[BatchResult]:
        yield from self.paces
        if body == b"broken":
            raise WireError("payload is not msgpack")
        self.done.append(body)
        return self.taken

    def forgetting(self) -> Steps[None]:
        yield
        self.done.append("forget")

    def demoting(self) -> Steps[None]:
        yield
        self.done.append("demote")

    def trust(self, *, trusted: bool) -> None:
        self.done.append(trusted)


class Requested:
    """A replay that writes down what is asked of it."""

    def __init__(self) -> None:
        self.done: list[int | str] = []

    def start(self, start: int, /) -> None:
        self.done.append(start)

    def stop(self) -> None:
        self.done.append("stop")


class Carrying:
    """Effects of a live feed, and where they go."""

    def __init__(self, turns: Turns, allowance: Allowance | None = None) -> None:
        self.feed = Feed(Recovery.REPLAY)
        self.feed.connect()
        self.feed.end_replay()
        self.sink = Written()
        self.replay = Requested()
        self.news = FeedNews(RankName("w", 0), self.feed, lambda _: None, lambda: None)
        self.effects = Effects(self.feed, self.sink, turns, self.news, self.replay, allowance)


@pytest.fixture
def carrying() -> Carrying:
    return Carrying(Turns())


async def test_effects_are_carried_out_in_order(carrying: Carrying) -> None:
    await carrying.effects.carry_out(
        [batch(b"1"), Demote(), Forget(), RequestReplay(3), batch(b"2")]
    )
    assert carrying.sink.done == [False, b"1", "demote", "forget", b"2", True]
    assert (carrying.replay.done, len(carrying.effects)) == (["stop", 3], 0)


async def test_credit_is_lowered_before_its_turn_comes(carrying: Carrying) -> None:
    waiting = asyncio.create_task(carrying.effects.carry_out([batch(b"1"), Demote()]))
    await asyncio.sleep(0)
    assert carrying.sink.done == [False]
    await waiting
    assert carrying.sink.done == [False, b"1", "demote", True]


async def test_replay_under_way_is_stopped_before_the_turn_of_another_comes(
    carrying: Carrying,
) -> None:
    waiting = asyncio.create_task(carrying.effects.carry_out([batch(b"1"), RequestReplay(3)]))
    await asyncio.sleep(0)
    assert (carrying.replay.done, len(carrying.effects)) == (["stop"], 2)
    await waiting
    assert carrying.replay.done == ["stop", 3]


async def test_credit_without_a_demotion_stays_trusted(carrying: Carrying) -> None:
    await carrying.effects.carry_out([batch(b"1")])
    assert carrying.sink.done == [b"1", True]


@pytest.fixture
def one_a_slice() -> Carrying:
    """Effects that are carried out in slices of one each."""
    return Carrying(Turns(0.0))


async def test_effects_keep_their_order_across_concurrent_callers(one_a_slice: Carrying) -> None:
    bodies = [str(number).encode() for number in range(6)]
    await asyncio.gather(
        one_a_slice.effects.carry_out([batch(body) for body in bodies[:3]]),
        one_a_slice.effects.carry_out([batch(body) for body in bodies[3:]]),
    )
    assert [each for each in one_a_slice.sink.done if isinstance(each, bytes)] == bodies


async def test_dropped_effects_are_not_carried_out(one_a_slice: Carrying) -> None:
    waiting = asyncio.create_task(one_a_slice.effects.carry_out([batch(b"1"), batch(b"2")]))
    await asyncio.sleep(0)
    assert len(one_a_slice.effects) == 2
    one_a_slice.effects.drop()
    await waiting
    assert b"1" not in one_a_slice.sink.done


class Asked(Allowance):
    """An allowance that is never used up, and counts how often it is asked."""

    asked = 0

    def wait_seconds(self, now: float) -> float:
        self.asked += 1
        return 0.0


async def test_work_that_others_wait_for_is_not_put_off_for_the_allowance() -> None:
    allowance = Asked(0.0)
    carrying = Carrying(Turns(0.0), allowance)
    carrying.sink.paces = [None, Pace.WAITS, Pace.HURRIES, Pace.HURRIES]
    await carrying.effects.carry_out([batch(b"1")])
    assert allowance.asked == 2  # before the work, and after the step that is like any other
    await carrying.effects.carry_out([batch(b"2")])
    assert allowance.asked == 4


async def test_effect_that_waits_for_other_work_leaves_its_slice_to_it() -> None:
    turns = Turns(60.0)
    carrying = Carrying(turns)
    carrying.sink.paces = [Pace.WAITS]
    await turns.next()
    waiting = asyncio.create_task(carrying.effects.carry_out([batch(b"1")]))
    await asyncio.sleep(0)
    assert carrying.sink.done == []
    await waiting
    assert carrying.sink.done == [b"1", True]


async def test_body_that_heals_heals_the_feed(carrying: Carrying) -> None:
    carrying.feed.miss("something")
    carrying.sink.taken = BatchResult(healed=True)
    await carrying.effects.carry_out([batch(b"1")])
    assert carrying.feed.state is FeedState.LIVE


@pytest.mark.parametrize("later", [Demote(), Forget(), batch(b"broken")])
async def test_loss_after_a_healing_leaves_the_feed_degraded(
    carrying: Carrying, later: Demote | Forget | Batch
) -> None:
    carrying.feed.miss("something")
    carrying.sink.taken = BatchResult(healed=True)
    await carrying.effects.carry_out([batch(b"1"), later])
    assert carrying.feed.state is FeedState.DEGRADED


async def test_body_with_losses_sets_the_reason_and_counts_its_faults(carrying: Carrying) -> None:
    carrying.sink.taken = BatchResult(missed="no room", faults=("bad_hash", "bad_hash"))
    await carrying.effects.carry_out([batch(b"1")])
    assert (carrying.feed.reason, carrying.news.counts["bad_hash"]) == ("no room", 2)


async def test_undecodable_body_is_a_hole(carrying: Carrying) -> None:
    await carrying.effects.carry_out([batch(b"broken")])
    assert carrying.sink.done == [False, "demote", True]
    assert carrying.feed.reason == "a batch could not be decoded: payload is not msgpack"
    assert carrying.news.counts["undecodable_batch"] == 1
