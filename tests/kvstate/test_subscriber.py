import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from kvstate import subscriber as subscriber_module
from kvstate.feed import State
from kvstate.index import BYTES_PER_BLOCK, Index, Limits
from kvstate.overlap import Overlap
from kvstate.subscriber import Subscriber
from kvstate.transport import Connected, Disconnected, MemoryTransport, Message, Signal
from tests.kvstate.publishing import block, chain, frames, until

CLEAR = ["AllBlocksCleared"]


class Following:
    """A subscriber that runs, and the index that it fills."""

    def __init__(
        self, transport: MemoryTransport, clock: Callable[[], float], limits: Limits | None
    ) -> None:
        self.index = Index(12345678, limits)
        self.transport = transport
        self.subscriber = Subscriber(
            self.index, self.index.add("w", 0, "m"), transport, asyncio.Semaphore(1), clock
        )
        self.feed = self.subscriber.feed
        self.task = asyncio.create_task(self.subscriber.run())

    def publish(self, number: int, *events: object, life: int = 0) -> None:
        message = frames(number, *events, life=life)
        if self.transport.history is not None:
            self.transport.history[number] = message
        self.transport.put(Message(message))

    async def state(self, state: State) -> None:
        await until(lambda: self.feed.state is state)

    def overlap(self, length: int = 9) -> Overlap:
        return self.index.overlaps(chain(length)).get("w", Overlap(1))


@asynccontextmanager
async def following(
    transport: MemoryTransport | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    limits: Limits | None = None,
) -> AsyncIterator[Following]:
    followed = Following(transport or MemoryTransport(), clock, limits)
    yield followed
    followed.task.cancel()
    await asyncio.gather(followed.task, return_exceptions=True)
    await followed.subscriber.close()
    followed.index.check()


async def connected(followed: Following) -> None:
    followed.transport.put(Connected())
    await until(lambda: followed.feed.state in (State.LIVE, State.DEGRADED))


async def test_replays_then_follows() -> None:
    history: dict[int, Sequence[bytes]] = {0: frames(0, block(1))}
    async with following(MemoryTransport(history)) as followed:
        await connected(followed)
        assert followed.overlap() == Overlap(1, (1, 0, 0, 0))
        followed.publish(1, block(2, 1))
        await until(lambda: followed.overlap() == Overlap(1, (2, 0, 0, 0)))
        assert followed.subscriber.counts["batches"] == 2


async def test_nothing_is_certain_while_disconnected() -> None:
    async with following(MemoryTransport({0: frames(0, block(1))})) as followed:
        await connected(followed)
        followed.transport.put(Disconnected())
        await followed.state(State.STALE)
        assert followed.overlap() == Overlap(1, uncertain=1)


async def test_reconnection_to_a_restarted_publisher_forgets_its_blocks() -> None:
    transport = MemoryTransport({0: frames(0, block(1)), 1: frames(1, block(2, 1))})
    async with following(transport) as followed:
        await connected(followed)
        transport.history = {
            number: frames(number, block(number + 7), life=1) for number in range(5)
        }
        transport.put(Disconnected())
        await followed.state(State.STALE)
        await connected(followed)
        assert (followed.overlap(), followed.subscriber.owner.blocks) == (Overlap(1), 5)
        assert (transport.replays, followed.feed.reason) == ([0, 1, 0], "")


async def test_gap_is_replayed() -> None:
    async with following(MemoryTransport({0: frames(0, block(1))})) as followed:
        await connected(followed)
        assert followed.transport.history is not None
        followed.transport.history[1] = frames(1, block(2, 1))
        followed.publish(2, block(3, 2))
        await until(lambda: followed.overlap() == Overlap(1, (3, 0, 0, 0)))
        assert followed.transport.replays == [0, 0]


async def test_failed_replay_leaves_what_was_before_uncertain() -> None:
    async with following(MemoryTransport({0: frames(0, block(1))})) as followed:
        await connected(followed)
        followed.transport.replay_error = "silent"
        followed.publish(2, block(3, 1))
        await followed.state(State.DEGRADED)
        assert followed.feed.reason == "batches 1 to 1 are lost: silent"
        assert followed.overlap() == Overlap(1, uncertain=1)


async def test_clearing_heals_a_degraded_feed() -> None:
    async with following(MemoryTransport(history=None)) as followed:
        await connected(followed)
        followed.publish(5, block(1))
        followed.publish(6, CLEAR, block(1))
        await followed.state(State.LIVE)
        assert followed.overlap() == Overlap(1, (1, 0, 0, 0))


async def test_turnover_heals_a_degraded_feed() -> None:
    async with following(MemoryTransport(history=None)) as followed:
        await connected(followed)
        followed.publish(0, block(1))
        followed.publish(2, block(2))
        await followed.state(State.DEGRADED)
        followed.publish(3, ["BlockRemoved", [1]])
        await followed.state(State.LIVE)


async def test_hole_after_a_clearing_in_one_go_is_not_healed() -> None:
    async with following(MemoryTransport({0: frames(0, block(1))})) as followed:
        await connected(followed)
        followed.transport.replay_error = "silent"
        for number in (2, 4):
            followed.transport.put(Message(frames(number, CLEAR if number == 2 else block(1))))
        await followed.state(State.DEGRADED)
        await until(lambda: followed.feed.last_sequence == 4)
        assert followed.feed.reason == "batches 3 to 3 are lost: silent"


async def test_lost_removal_leaves_what_was_before_uncertain() -> None:
    async with following() as followed:
        await connected(followed)
        followed.publish(0, block(1), ["BlockRemoved", "not a hash"])
        followed.publish(1, block(2))
        await until(lambda: followed.feed.last_sequence == 1)
        assert followed.overlap() == Overlap(1, uncertain=1)
        assert followed.subscriber.counts["bad_hash"] == 1


async def test_undecodable_batch_is_a_hole(caplog: pytest.LogCaptureFixture) -> None:
    async with following() as followed:
        await connected(followed)
        followed.publish(0, block(1))
        followed.transport.put(Message([b"", (1).to_bytes(8, "big"), b"\xc1"]))
        await followed.state(State.DEGRADED)
        assert followed.overlap() == Overlap(1, uncertain=1)
        assert followed.subscriber.counts["undecodable_batch"] == 1
        assert "w rank 0: payload is not msgpack" in caplog.text


async def test_message_without_a_number_is_counted() -> None:
    history: dict[int, Sequence[bytes]] = {0: frames(0, block(1)), 1: [b"no number"]}
    async with following(MemoryTransport(history)) as followed:
        await connected(followed)
        followed.transport.put(Message([b"x"]))
        await until(lambda: followed.subscriber.counts["malformed_message"] == 2)


async def test_lag_is_the_age_of_the_last_batch() -> None:
    async with following(clock=lambda: 1002.5) as followed:
        await connected(followed)
        followed.publish(0, life=1)
        await until(lambda: followed.feed.last_sequence == 0)
        assert followed.subscriber.lag_seconds == 2.5


async def test_changes_of_state_and_block_size_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvsteer.feed")
    async with following(MemoryTransport(history=None)) as followed:
        await connected(followed)
        followed.publish(0, block(1))
        await followed.state(State.LIVE)
    assert "feed of w rank 0: live" in caplog.messages
    assert "w: block size learned: 1" in caplog.messages


async def test_silence_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber_module, "QUIET_SECONDS", 0.02)
    async with following() as followed:
        await connected(followed)
        followed.publish(0, block(1))
        await until(lambda: followed.feed.last_sequence == 0)
        assert followed.transport.history is not None
        followed.transport.history[1] = frames(1, block(2, 1))  # it was lost on its way
        await until(lambda: followed.overlap() == Overlap(1, (2, 0, 0, 0)))
        await asyncio.sleep(0.1)  # that nothing more is asked can only be waited for
        assert followed.transport.replays == [0, 0]


class Unending(MemoryTransport):
    """Its replays never come to an end."""

    ended = False

    async def replay(self, start: int) -> AsyncGenerator[Message]:
        self.replays.append(start)
        try:
            await asyncio.Event().wait()
            yield Message([])
        finally:
            self.ended = True


async def test_disconnection_stops_a_replay() -> None:
    transport = Unending()
    async with following(transport) as followed:
        transport.put(Connected())
        await until(lambda: transport.replays == [0])
        transport.put(Disconnected())
        await until(lambda: transport.ended)
        assert followed.feed.state is State.STALE


async def test_replay_is_over_when_the_subscriber_is() -> None:
    transport = Unending()
    async with following(transport) as followed:
        transport.put(Connected())
        await until(lambda: transport.replays == [0])
        followed.task.cancel()
        await asyncio.gather(followed.task, return_exceptions=True)
        await followed.subscriber.close()
        assert transport.ended


async def test_rank_that_holds_more_than_its_bound_is_degraded() -> None:
    async with following(limits=Limits(bytes=2 * BYTES_PER_BLOCK)) as followed:
        await connected(followed)
        followed.publish(0, block(1), block(2, 1), block(3, 2))
        await followed.state(State.DEGRADED)
        assert followed.feed.reason == "it holds more than the index keeps of one rank"
        assert followed.overlap() == Overlap(1, (2, 0, 0, 0))
        followed.publish(1, CLEAR)
        await followed.state(State.LIVE)


class Faulty(MemoryTransport):
    """Fails in ways that nobody foresaw."""

    async def receive(self) -> list[Signal]:
        signals = await super().receive()
        if any(isinstance(signal, Message) and not signal.frames for signal in signals):
            raise RuntimeError("no frames")
        return signals

    async def replay(self, start: int) -> AsyncGenerator[Message]:
        async for message in super().replay(start):
            yield message
        if start or len(self.replays) > 1:
            raise RuntimeError("cannot replay")


async def test_unforeseen_error_leaves_nothing_certain(caplog: pytest.LogCaptureFixture) -> None:
    async with following(Faulty({0: frames(0, block(1))})) as followed:
        await connected(followed)
        followed.transport.put(Message([]))
        await followed.task
        assert followed.overlap() == Overlap(1, uncertain=1)
        assert followed.feed.state is State.STALE
        assert "feed of w rank 0 ends" in caplog.messages


async def test_unforeseen_error_in_a_replay_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    async with following(Faulty({0: frames(0, block(1))})) as followed:
        await connected(followed)
        followed.publish(5, block(2))
        await followed.state(State.STALE)
        assert followed.overlap() == Overlap(1, uncertain=1)
        assert "replay of w rank 0 failed" in caplog.messages


async def test_error_while_applying_ends_the_belief(monkeypatch: pytest.MonkeyPatch) -> None:
    async with following() as followed:
        await connected(followed)
        followed.publish(0, block(1))
        await until(lambda: followed.subscriber.owner.blocks == 1)
        monkeypatch.setattr(followed.index, "apply_message", None)
        followed.publish(1, block(2, 1))
        await followed.task
        assert followed.overlap() == Overlap(1, uncertain=1)


async def test_picks_have_their_turn_during_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber_module, "SLICE_SECONDS", 0.0)
    history: dict[int, Sequence[bytes]] = {
        number: frames(number, block(number + 1)) for number in range(50)
    }
    seen: set[int] = set()
    async with following(MemoryTransport(history)) as followed:
        followed.transport.put(Connected())
        while followed.feed.state is not State.LIVE:
            seen.add(followed.subscriber.owner.blocks)
            await asyncio.sleep(0)
    assert len(seen) > 25
