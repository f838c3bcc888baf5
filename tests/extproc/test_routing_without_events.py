"""Workers that publish no events: a conversation stays where it began, with a tokenizer or not."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from random import Random
from typing import Any

import pytest

from extproc.checking.evidence import Difference
from extproc.config.reader import parse
from extproc.observing.metrics import Metrics
from extproc.picking.decision import Decision
from extproc.requests.request import Ask, Head
from extproc.router import Router
from extproc.tokenizing.tokens import Tokenizer
from extproc.workers.workers import Workers
from kvstate.events import Batch
from kvstate.feeds.feed_sources import FeedSource
from kvstate.feeds.transport import (
    Connected,
    Disconnected,
    Malformed,
    MemoryTransport,
    Refused,
    Signal,
    Transport,
)
from kvstate.fleet import Fleet
from simulator.settings import TINY_MODEL
from tests.kvstate.publishing import block, payload, until

CHAT = Head("POST", "/v1/chat/completions", None)
WORKERS = ", ".join(
    f'{{endpoint: "127.0.0.1:{n}", model: {m}}}'
    for m in ("tiny", "bare")
    for n in (range(1, 9) if m == "tiny" else range(11, 19))
)
CONFIG = f"""
models: [{{name: tiny, tokenizer: "{TINY_MODEL}"}}, {{name: bare}}]
workers: [{WORKERS}]
"""

FEEDS = ", ".join(
    f'{{endpoint: "127.0.0.1:{n}", events: {{zmq: "tcp://127.0.0.1:{n + 100}"}}}}'
    for n in range(1, 9)
)
WITH_EVENTS = f"""
models: [{{name: tiny, tokenizer: "{TINY_MODEL}"}}]
workers: [{FEEDS}]
"""


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    config = parse(CONFIG, "c")
    tokenizer = Tokenizer.load(config.models[0])
    assert tokenizer is not None
    workers = Workers(config, Fleet(12345678, lambda: 0.0), lambda _: [])
    await workers.start()
    one = Router(config, workers, {"tiny": tokenizer}, Metrics(workers), Random(0))
    yield one
    one.close()
    await workers.close()


async def turn(router: Router, model: str, *texts: str) -> Decision:
    """One turn of a conversation that is over before the next one."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    body = json.dumps({"model": model, "messages": messages}).encode()
    decision, booking = await router.route(Ask(CHAT, body))
    assert booking is not None
    router.release(booking)
    return decision


@pytest.mark.parametrize(
    ("model", "reason"), [("tiny", "approximate_overlap"), ("bare", "no_tokenizer")]
)
async def test_a_conversation_stays_where_it_began(router: Router, model: str, reason: str) -> None:
    for number in range(10):
        question, answer = f"{number} question " * 200, f"{number} answer " * 20
        first = await turn(router, model, question)
        second = await turn(router, model, question, answer, "and now?")
        assert (second.worker, second.reason) == (first.worker, reason)
        assert second.certain_tokens == 0
        assert second.claims[second.worker].approximate > 256


async def test_conversations_of_their_own_are_spread(router: Router) -> None:
    picked = {(await turn(router, "bare", f"{n} {n} question " * 200)).worker for n in range(40)}
    assert len(picked) == 8


def away(_: FeedSource) -> Sequence[Transport]:
    return [MemoryTransport()]


def followed(*signals: Signal, **settings: Any) -> Callable[[FeedSource], Sequence[Transport]]:
    """Publishers that send these signals."""

    def open_transports(_: FeedSource) -> Sequence[Transport]:
        transport = MemoryTransport(**settings)
        for signal in signals:
            transport.put(signal)
        return [transport]

    return open_transports


class Replaying(MemoryTransport):
    async def replay(self, start: int) -> AsyncGenerator[Batch | Malformed]:  # noqa: ARG002
        await asyncio.Event().wait()
        yield Malformed()


def replaying(_: FeedSource) -> Sequence[Transport]:
    transport = Replaying()
    transport.put(Connected())
    return [transport]


EMPTY, STORED = payload(0), payload(2, block(1))
LIVE = followed(Connected(), history={0: EMPTY})
STATES = {
    "connecting": away,
    "replaying": replaying,
    "degraded": followed(Connected(), Batch(0, EMPTY), Batch(2, STORED), history=None),
    "stale": followed(Connected(), Disconnected("lost"), history={0: EMPTY}),
    "unsupported": followed(Refused("no events")),
    "differs": LIVE,
    "no tokens": LIVE,
    "switched off": LIVE,
}


@pytest.mark.parametrize("trust", STATES)
async def test_no_state_of_trust_is_routed_worse_than_without_events(trust: str) -> None:
    """Whatever the feeds say, a conversation stays where it began: what was sent there counts."""
    config = parse(WITH_EVENTS, "c")
    fleet = Fleet(12345678, lambda: 0.0)
    workers = Workers(config, fleet, STATES[trust])
    tokenizer = Tokenizer.load(config.models[0])
    assert tokenizer is not None
    tokenizers = {} if trust == "no tokens" else {"tiny": tokenizer}
    router = Router(config, workers, tokenizers, Metrics(workers), Random(0))
    await workers.start()
    if trust == "switched off":
        await workers.enable_events(enabled=False)
    elif trust == "differs":
        for name in workers.names():
            distrusted = workers.records[name].check
            distrusted.result.is_distrusted = True
            distrusted.result.difference = Difference(0, 1, 2)
            workers.checks.status(name)
    state = {"differs": "live", "no tokens": "live", "switched off": "unsupported"}.get(
        trust, trust
    )
    await until(lambda: {workers.state(name) for name in workers.names()} == {state})
    for number in range(10):
        question, answer = f"{number} question " * 200, f"{number} answer " * 20
        first = await turn(router, "tiny", question)
        second = await turn(router, "tiny", question, answer, "and now?")
        assert second.worker == first.worker
        assert second.claims[second.worker].approximate > 256
    router.close()
    await workers.close()


LEARNED = payload(0, ["BlockStored", [1], None, list(range(2048)), 2048])


@pytest.mark.parametrize(
    ("policy", "worker", "learned", "expects"),
    [
        (16, None, False, True),
        (2048, None, False, False),  # longer than the prompt: none of its blocks is kept
        (2048, 16, False, True),
        (16, 2048, False, False),
        (16, 16, True, False),
    ],
)
async def test_what_is_expected_is_in_blocks_as_learned_else_configured(
    *, policy: int, worker: int | None, learned: bool, expects: bool
) -> None:
    size = "null" if worker is None else worker
    config = parse(
        f"""
models: [{{name: tiny, tokenizer: "{TINY_MODEL}"}}]
workers: [{{endpoint: "127.0.0.1:1", block_size: {size}, events: {{zmq: "tcp://127.0.0.1:2"}}}}]
policy: {{block_size: {policy}}}
""",
        "c",
    )
    batch = Batch(1, LEARNED) if learned else Batch(1, EMPTY)  # the first batch is missing
    publisher = followed(Connected(), batch, history=None)
    workers = Workers(config, Fleet(12345678, lambda: 0.0), publisher)
    tokenizer = Tokenizer.load(config.models[0])
    assert tokenizer is not None
    router = Router(config, workers, {"tiny": tokenizer}, Metrics(workers), Random(0))
    await workers.start()
    await until(lambda: workers.state("127.0.0.1:1") == "degraded")
    await turn(router, "tiny", "a question " * 200)
    second = await turn(router, "tiny", "a question " * 200, "an answer", "and now?")
    assert bool(second.claims) is expects
    router.close()
    await workers.close()
