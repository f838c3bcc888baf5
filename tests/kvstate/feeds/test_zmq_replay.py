import asyncio
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio

from kvstate.errors import ReplayError
from kvstate.feeds import zmq_replay
from kvstate.feeds.transport import Batch, Malformed
from kvstate.feeds.zmq_replay import replay_from
from tests.kvstate.publishing import frames, payload
from tests.kvstate.zmq_publisher import Publisher

END = [b"", b"", b"\xff" * 8, b""]


@pytest.fixture
async def engine() -> AsyncIterator[Publisher]:
    engine = Publisher()
    yield engine
    engine.close()


async def answer(router: zmq.asyncio.Socket, *messages: list[bytes]) -> list[bytes]:
    """Answers one replay; the request less its sender."""
    sender, *request = await router.recv_multipart()
    for message in messages:
        await router.send_multipart([sender, *message])
    return request


async def replayed(endpoint: str | None, start: int = 0) -> list[Batch | Malformed]:
    return [batch async for batch in replay_from(endpoint, start)]


@pytest.mark.parametrize("end", [END, END[1:]])
async def test_replay_is_asked_from_a_number_and_ends(engine: Publisher, end: list[bytes]) -> None:
    router, address = engine.bind(zmq.ROUTER)
    messages = [[b"", *frames(number)] for number in (5, 6)]
    batches = [Batch(number, payload(number)) for number in (5, 6)]
    replay = asyncio.create_task(replayed(address, 5))
    assert await answer(router, *messages, end) == [b"", (5).to_bytes(8, "big")]
    assert await replay == batches


async def test_replay_that_nobody_answers_fails(
    engine: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_replay, "REPLAY_TIMEOUT_SECONDS", 0.02)
    _, address = engine.bind(zmq.ROUTER)
    with pytest.raises(ReplayError, match=r"no answer within 0\.02 s"):
        await replayed(address)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([[b"", *frames(5)], [b"", *frames(5)]], "its numbers do not ascend"),
        ([[b"", b"junk"]], "message of 2 frames has no sequence number"),
    ],
)
async def test_answer_that_is_no_replay_fails(
    engine: Publisher, messages: list[list[bytes]], reason: str
) -> None:
    router, address = engine.bind(zmq.ROUTER)
    replay = asyncio.create_task(replayed(address))
    await answer(router, *messages)
    with pytest.raises(ReplayError, match=reason):
        await replay


@pytest.mark.parametrize(
    ("address", "reason"),
    [(None, "no replay endpoint"), ("tcp://nowhere", "neither tcp://host:port nor")],
)
async def test_replay_that_cannot_be_asked_for_fails(address: str | None, reason: str) -> None:
    with pytest.raises(ReplayError, match=reason):
        await replayed(address)
