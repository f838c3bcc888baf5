import asyncio
import itertools
import random
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import zmq
import zmq.asyncio

from kvstate.errors import ReplayError
from kvstate.events import Batch
from kvstate.feeds.transport import Malformed
from kvstate.feeds.zmq_limits import USUAL, ZmqLimits
from kvstate.feeds.zmq_transport import replay_from
from kvtools.simulator.dialects import DEFAULT, DIALECTS
from kvtools.simulator.interference import Interference
from kvtools.simulator.publisher import ReplaySocket
from tests.kvstate.publishing import frames, payload
from tests.kvstate.zmq_publisher import Publisher
from tests.ports import free_port

END = [b"", b"", b"\xff" * 8, b""]


@pytest.fixture
async def engine() -> AsyncIterator[Publisher]:
    engine = Publisher()
    yield engine
    engine.close()


async def answer(router: zmq.asyncio.Socket, *messages: list[bytes]) -> list[bytes]:
    """Answers one replay; returns the request without its sender."""
    sender, *request = await router.recv_multipart()
    for message in messages:
        await router.send_multipart([sender, *message])
    return request


async def replayed(
    endpoint: str | None, start: int = 0, limits: ZmqLimits = USUAL
) -> list[Batch | Malformed]:
    return [batch async for batch in replay_from(endpoint, start, limits)]


def batches(*numbers: int) -> list[list[bytes]]:
    """Batches in the form that an answer has."""
    return [[b"", *frames(number)] for number in numbers]


def asked(number: int) -> list[bytes]:
    """The request for the batches from a number on."""
    return [b"", number.to_bytes(8, "big")]


def told(*numbers: int) -> list[Batch]:
    """The expected result of a replay."""
    return [Batch(number, payload(number)) for number in numbers]


# Publishers have room for three messages of an answer; what follows may be dropped.
EARLY = ZmqLimits(never_dropped=3, silence_seconds=0.3)


@pytest.mark.parametrize("end", [END, END[1:]])
async def test_replay_requests_its_start_and_yields_the_batches_after_it(
    engine: Publisher, end: list[bytes]
) -> None:
    router, address = engine.bind(zmq.ROUTER)
    messages = [[b"", *frames(number)] for number in (5, 6)]
    batches = [Batch(number, payload(number)) for number in (5, 6)]
    replay = asyncio.create_task(replayed(address, 5))
    assert await answer(router, *messages, end) == [b"", (5).to_bytes(8, "big")]
    assert await replay == batches


async def test_replay_without_an_answer_fails(engine: Publisher) -> None:
    _, address = engine.bind(zmq.ROUTER)
    with pytest.raises(ReplayError, match=r"no answer within 0\.02 s"):
        await replayed(address, limits=ZmqLimits(replay_seconds=0.02))


async def test_replay_from_a_port_that_refuses_says_so() -> None:
    limits = ZmqLimits(replay_seconds=0.02)
    with pytest.raises(ReplayError, match=r"connection refused for 0\.02 s"):
        await replayed(f"tcp://127.0.0.1:{free_port()}", limits=limits)
    with pytest.raises(ReplayError, match=r"no connection for 0\.02 s"):
        await replayed("ipc:///nowhere/replay", limits=limits)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([[b"", *frames(5)], [b"", *frames(5)]], "its numbers do not ascend"),
        ([[b"", b"junk"]], "message of 2 frames has no sequence number"),
    ],
)
async def test_replay_with_an_invalid_answer_fails(
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
async def test_replay_without_a_usable_endpoint_fails(address: str | None, reason: str) -> None:
    with pytest.raises(ReplayError, match=reason):
        await replayed(address)


async def test_replay_requests_batches_dropped_from_an_answer(engine: Publisher) -> None:
    router, address = engine.bind(zmq.ROUTER)
    replay = asyncio.create_task(replayed(address, limits=EARLY))
    assert await answer(router, *batches(0, 1, 2, 3, 7, 8), END) == asked(0)
    assert await answer(router, *batches(3, 4, 5, 6, 7, 8), END) == asked(3)
    assert await answer(router, *batches(8), END) == asked(8)
    assert await replay == told(*range(9))


async def test_replay_does_not_request_missing_batches_of_a_short_answer(engine: Publisher) -> None:
    router, address = engine.bind(zmq.ROUTER)
    replay = asyncio.create_task(replayed(address, 3, limits=EARLY))
    await answer(router, *batches(5, 9), END)
    assert await replay == told(5, 9)


async def test_replay_requests_batches_dropped_just_before_the_end(engine: Publisher) -> None:
    router, address = engine.bind(zmq.ROUTER)
    replay = asyncio.create_task(replayed(address, limits=EARLY))
    await answer(router, *batches(0, 1, 2), END)
    assert await answer(router, *batches(2, 3), END) == asked(2)
    assert await replay == told(0, 1, 2, 3)


async def test_replay_requests_a_dropped_end(engine: Publisher) -> None:
    router, address = engine.bind(zmq.ROUTER)
    replay = asyncio.create_task(replayed(address, limits=EARLY))
    await answer(router, *batches(0, 1))
    assert await answer(router, *batches(1, 2)) == asked(1)
    assert await answer(router, *batches(2), END) == asked(2)
    assert await replay == told(0, 1, 2)


async def test_replay_yields_other_content_of_a_publisher_restarted_between_answers(
    engine: Publisher,
) -> None:
    router, address = engine.bind(zmq.ROUTER)
    replay = asyncio.create_task(replayed(address, limits=EARLY))
    await answer(router, *batches(0, 1))
    await answer(router, [b"", *frames(1, life=1)], END)
    assert await replay == [*told(0, 1), Batch(1, payload(1, life=1))]


@pytest.mark.parametrize("again", [[END], [*batches(2, 3), END]])
async def test_replay_fails_if_the_next_answer_lacks_the_last_batch(
    engine: Publisher, again: list[list[bytes]]
) -> None:
    router, address = engine.bind(zmq.ROUTER)
    replay = asyncio.create_task(replayed(address, limits=EARLY))
    await answer(router, *batches(0, 1))
    await answer(router, *again)
    with pytest.raises(ReplayError, match="batch 1 is gone: maybe another publisher"):
        await replay


async def test_replay_fails_if_the_publisher_falls_silent(engine: Publisher) -> None:
    router, address = engine.bind(zmq.ROUTER)
    requests: list[list[bytes]] = []

    async def answer_all() -> None:
        while True:
            requests.append(await answer(router, *(batches(1) if requests else batches(0, 1))))

    answering = asyncio.create_task(answer_all())
    while requests != [asked(0), asked(1)]:  # on a busy machine the first answer may be late too
        requests.clear()
        with pytest.raises(ReplayError, match=r"no answer within 0\.1 s"):
            await replayed(address, limits=replace(EARLY, replay_seconds=0.1))
    answering.cancel()


@pytest.mark.parametrize("seed", range(8))
async def test_replay_is_complete_whatever_is_dropped(engine: Publisher, seed: int) -> None:
    router, address = engine.bind(zmq.ROUTER)
    chance = random.Random(seed)
    replay = asyncio.create_task(replayed(address, 10, limits=replace(EARLY, silence_seconds=0.02)))
    while not replay.done():
        if not await router.poll(20):
            continue
        sender, _, start = await router.recv_multipart()
        messages = [*batches(*range(max(20, int.from_bytes(start, "big")), 60)), END]
        fates = itertools.chain([True] * 3, iter(lambda: chance.random() < 0.6, None))
        for message in itertools.compress(messages, fates):
            await router.send_multipart([sender, *message])
    assert await replay == told(*range(20, 60))


async def test_replay_of_a_buffer_beyond_the_send_limit_is_complete() -> None:
    limits = ZmqLimits(never_dropped=8, max_read_bytes=1 << 20)
    kept = deque((number, number.to_bytes(4, "big") * 25_000) for number in range(200))
    socket = ReplaySocket(
        "tcp://127.0.0.1:0",
        kept,
        topic=b"",
        send_limit_messages=16,
        dialect=DIALECTS[DEFAULT],
        interference=Interference(),
    )
    assert await replayed(socket.endpoint, limits=limits) == [Batch(*each) for each in kept]
    socket.close()
