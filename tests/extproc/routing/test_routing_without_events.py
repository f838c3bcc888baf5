"""Workers that publish no events: a conversation stays where it began, with a tokenizer or not."""

import asyncio
import json
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest

from extproc.config.reader import parse
from extproc.fleet.asking.surroundings import Surroundings
from extproc.fleet.workers import Workers
from extproc.observing.metrics import Metrics
from extproc.proof.state import PROMPTS_NOT_STORED, Comparison, GoldenVerdict
from extproc.requests.prompt import CONVERSATION, FORM_NAMES
from extproc.requests.request import Head, RoutingRequest
from extproc.routing.decision import Decision
from extproc.routing.load.endpoint_load import Ticket
from extproc.serving.router import Router
from extproc.tokenizing.tokens import Tokenizer
from kvstate.events import Batch
from kvstate.feeds.feed_sources import FeedSource
from kvstate.feeds.transport import (
    Connected,
    Disconnected,
    FeedTransport,
    Malformed,
    Refused,
    Signal,
)
from kvstate.fleet import FollowedWorkers
from kvtools.simulator.settings import TINY_MODEL
from tests.agents import claude_code, codex
from tests.kvstate.publishing import block, payload
from tests.memory_transport import MemoryTransport
from tests.waiting import until

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


class SteadyClock:
    """A clock that goes on by as much for each look at it, however busy the machine is."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 0.0001
        return self._now


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    config = parse(CONFIG, "c")
    tokenizer = Tokenizer.load(config.models[0])
    assert tokenizer is not None
    workers = Workers(
        config,
        FollowedWorkers(12345678, lambda: 0.0),
        lambda _: [],
        surroundings=Surroundings(monotonic=SteadyClock()),
    )
    await workers.start()
    one = Router(config, workers, {"tiny": tokenizer}, Metrics(workers.states), Random(0))
    yield one
    one.close()
    await workers.close()


async def turn(router: Router, model: str, *texts: str) -> Decision:
    """One turn of a conversation that is over before the next one."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    body = json.dumps({"model": model, "messages": messages}).encode()
    decision, ticket = await router.route(RoutingRequest(CHAT, body))
    assert ticket is not None
    router.release(ticket)
    return decision


@pytest.mark.parametrize(
    ("model", "reason"), [("tiny", "approximate_overlap"), ("bare", "no_tokenizer")]
)
async def test_conversation_stays_on_its_first_worker(
    router: Router, model: str, reason: str
) -> None:
    for number in range(10):
        question, answer = f"{number} question " * 200, f"{number} answer " * 20
        first = await turn(router, model, question)
        second = await turn(router, model, question, answer, "and now?")
        assert (second.worker, second.reason) == (first.worker, reason)
        assert second.basis.certain_tokens == 0
        assert second.basis.claims[second.worker].approximate > 256


async def test_conversation_does_not_count_where_its_cache_has_no_room_left(router: Router) -> None:
    first = await turn(router, "tiny", "0 question " * 200)
    held = first.basis.prompt_tokens
    for record in router._workers.records.values():
        record.holdings.capacity_tokens = 3 * held
        record.holdings.is_blind = True
    for number in range(8):  # each of its own, and spread
        await turn(router, "tiny", f"{number} question " * 200)
    again = await turn(router, "tiny", "3 question " * 200)
    assert again.reason == "approximate_overlap"
    for number in range(8, 60):
        await turn(router, "tiny", f"{number} question " * 200)
    late = await turn(router, "tiny", "4 question " * 200)
    assert late.reason == "nothing_cached"


async def test_new_conversations_are_spread(router: Router) -> None:
    picked = {(await turn(router, "bare", f"{n} {n} question " * 200)).worker for n in range(40)}
    assert len(picked) == 8


def away(_: FeedSource) -> Sequence[FeedTransport]:
    return [MemoryTransport()]


def followed(*signals: Signal, **settings: Any) -> Callable[[FeedSource], Sequence[FeedTransport]]:
    """Publishers that send these signals."""

    def open_transports(_: FeedSource) -> Sequence[FeedTransport]:
        transport = MemoryTransport(**settings)
        for signal in signals:
            transport.put(signal)
        return [transport]

    return open_transports


class Replaying(MemoryTransport):
    async def replay(self, start: int) -> AsyncGenerator[Batch | Malformed]:
        await asyncio.Event().wait()
        yield Malformed()


def replaying(_: FeedSource) -> Sequence[FeedTransport]:
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
    "doubted": LIVE,
    "no tokens": LIVE,
    "switched off": LIVE,
}


@pytest.mark.parametrize("trust", STATES)
async def test_conversation_stays_on_its_first_worker_for_any_state_of_trust(trust: str) -> None:
    """Whatever the feeds say, a conversation stays where it began: what was sent there counts."""
    config = parse(WITH_EVENTS, "c")
    fleet = FollowedWorkers(12345678, lambda: 0.0)
    workers = Workers(config, fleet, STATES[trust])
    tokenizer = Tokenizer.load(config.models[0])
    assert tokenizer is not None
    tokenizers = {} if trust == "no tokens" else {"tiny": tokenizer}
    router = Router(config, workers, tokenizers, Metrics(workers.states), Random(0))
    await workers.start()
    if trust == "switched off":
        await workers.enable_events(enabled=False)
    elif trust == "differs":
        for name in workers.records:
            refuting = Comparison(1, dict.fromkeys(FORM_NAMES, GoldenVerdict(is_same=False)))
            workers.proofs.compared(workers.records[name], refuting)
    elif trust == "doubted":
        for name in workers.records:
            record = workers.records[name]
            for _ in range(PROMPTS_NOT_STORED):
                record.proof.look_up(CONVERSATION, 0.0, is_stored=False)
            workers.proofs.uncompared(record, "no answer", for_now=True)
    state = "live" if STATES[trust] is LIVE else trust
    state = "unsupported" if trust == "switched off" else state
    await until(lambda: {workers.candidates.state(name) for name in workers.records} == {state})
    for number in range(10):
        question, answer = f"{number} question " * 200, f"{number} answer " * 20
        first = await turn(router, "tiny", question)
        second = await turn(router, "tiny", question, answer, "and now?")
        assert second.worker == first.worker
        assert second.basis.claims[second.worker].approximate > 256
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
async def test_expectations_count_blocks_of_the_learned_or_configured_size(
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
    workers = Workers(config, FollowedWorkers(12345678, lambda: 0.0), publisher)
    tokenizer = Tokenizer.load(config.models[0])
    assert tokenizer is not None
    router = Router(config, workers, {"tiny": tokenizer}, Metrics(workers.states), Random(0))
    await workers.start()
    await until(lambda: workers.candidates.state("127.0.0.1:1") == "degraded")
    applied = 2048 if learned else worker or policy
    await until(lambda: workers.candidates.block_size("127.0.0.1:1") == applied)
    await turn(router, "tiny", "a question " * 200)
    second = await turn(router, "tiny", "a question " * 200, "an answer", "and now?")
    assert bool(second.basis.claims) is expects
    router.close()
    await workers.close()


@pytest.mark.parametrize(("size", "is_measured"), [(16, True), (2048, False)])
async def test_route_measures_no_prompt_shorter_than_a_block(
    *, size: int, is_measured: bool
) -> None:
    config = parse(
        f"""
models: [{{name: tiny, tokenizer: "{TINY_MODEL}"}}]
workers: [{{endpoint: "127.0.0.1:1", block_size: {size}, events: {{zmq: "tcp://127.0.0.1:2"}}}}]
""",
        "c",
    )
    publisher = followed(Connected(), Batch(0, EMPTY), history=None)
    workers = Workers(config, FollowedWorkers(12345678, lambda: 0.0), publisher)
    tokenizer = Tokenizer.load(config.models[0])
    assert tokenizer is not None
    router = Router(config, workers, {"tiny": tokenizer}, Metrics(workers.states), Random(0))
    await workers.start()
    await until(lambda: workers.candidates.state("127.0.0.1:1") == "live")
    messages = [{"role": "user", "content": "a question " * 200}]
    body = json.dumps({"model": "tiny", "messages": messages}).encode()
    decision, ticket = await router.route(RoutingRequest(CHAT, body))
    assert ticket is not None
    assert 160 < decision.basis.prompt_tokens < 2048
    assert bool(ticket.load.speed.waiting) is is_measured
    router.close()
    await workers.close()


@pytest.mark.parametrize(
    ("path", "requests"), [("/v1/messages", claude_code), ("/v1/responses", codex)]
)
async def test_agents_conversations_stay_on_their_workers(
    router: Router, path: str, requests: Callable[[int, int], Iterator[dict[str, Any]]]
) -> None:
    under_way = deque[Ticket]()
    found: dict[int, set[str]] = {}
    asked = {number: requests(number, 4) for number in range(12)}
    for _ in range(4):
        for number, bodies in asked.items():
            body = json.dumps({**next(bodies), "model": "bare"}).encode()
            decision, ticket = await router.route(RoutingRequest(Head("POST", path, None), body))
            found.setdefault(number, set()).add(decision.worker)
            assert ticket is not None
            under_way.append(ticket)
            if len(under_way) > 3:
                router.release(under_way.popleft())
        while under_way:
            router.release(under_way.popleft())
    assert {len(workers) for workers in found.values()} == {1}
    on_each = sorted(Counter(next(iter(workers)) for workers in found.values()).values())
    assert len(on_each) == 8
    assert on_each[-1] <= 3
