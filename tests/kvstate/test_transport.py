import pytest

from kvstate.errors import ReplayError
from kvstate.transport import Connected, MemoryTransport, Message


async def test_signals_come_out_in_their_order() -> None:
    transport = MemoryTransport()
    transport.put(Connected())
    transport.put(Message([b"x"]))
    assert await transport.receive() == [Connected(), Message([b"x"])]
    await transport.close()


async def test_replay_answers_from_a_number_on() -> None:
    transport = MemoryTransport({2: [b"two"], 1: [b"one"], 0: [b"zero"]})
    assert [each.frames async for each in transport.replay(1)] == [[b"one"], [b"two"]]
    assert (transport.can_replay, transport.replays) == (True, [1])


async def test_without_history_there_is_no_replay() -> None:
    transport = MemoryTransport(history=None)
    assert not transport.can_replay
    assert [each async for each in transport.replay(0)] == []


async def test_replay_may_be_made_to_fail() -> None:
    transport = MemoryTransport(replay_error="silent")
    with pytest.raises(ReplayError, match="silent"):
        await anext(transport.replay(0))
