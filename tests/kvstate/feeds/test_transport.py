import pytest

from kvstate.errors import ReplayError
from kvstate.events import Batch
from kvstate.feeds.feed_sources import Recovery
from kvstate.feeds.transport import Connected, Disconnected, Refused
from tests.memory_transport import MemoryTransport


async def test_signals_are_received_in_their_order() -> None:
    transport = MemoryTransport()
    transport.put(Connected())
    transport.put(Batch(0, b"x"))
    assert await transport.receive() == [Connected(), Batch(0, b"x")]
    await transport.close()


async def test_replay_yields_batches_from_its_start() -> None:
    transport = MemoryTransport({2: b"two", 1: b"one", 0: b"zero"})
    assert [each async for each in transport.replay(1)] == [Batch(1, b"one"), Batch(2, b"two")]
    assert (transport.recovery, transport.replays) == (Recovery.REPLAY, [1])


async def test_transport_without_history_has_no_replay() -> None:
    transport = MemoryTransport(history=None)
    assert transport.recovery is Recovery.NONE
    assert [each async for each in transport.replay(0)] == []


async def test_replay_raises_the_error_it_is_given() -> None:
    transport = MemoryTransport(replay_error="silent")
    with pytest.raises(ReplayError, match="silent"):
        await anext(transport.replay(0))


def test_reason_from_a_peer_is_shown_printable() -> None:
    forged = "busy\n2026-11-22 ERROR kvsteer: all is lost\x1b[2J"
    shown = "busy 2026-11-22 ERROR kvsteer: all is lost?[2J"
    assert Disconnected(forged).reason == Refused(forged).reason == shown
