"""The self-check end to end: router, feeds and simulated workers over real sockets, no Envoy."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from extproc.checking import watch as self_check_watch
from extproc.checking.self_check import (
    DIFFERENT,
    EFFORT_BURST_SECONDS,
    EFFORT_SHARE,
    GRACE_SECONDS,
    LAST_CHECKED,
    MAX_WATCH_SECONDS,
    VERIFIED,
    WATCHED_PER_SECOND_WHILE_WELL,
    Verification,
    WorkerCheck,
)
from extproc.checking.watch import EVENTS_AT_ONCE, SelfCheck
from extproc.config.reader import parse
from extproc.config.schema import Model
from extproc.observing.metrics import Metrics
from extproc.picking.load import Booking
from extproc.requests import request
from extproc.requests.prompt import CONVERSATION
from extproc.requests.request import Ask, Head
from extproc.router import Router
from extproc.tokenizing.tokens import Tokenizer
from extproc.workers.workers import Workers
from kvstate.events import Body, Taken
from kvstate.feeds.feed import State
from kvstate.feeds.feed_sources import FeedSource
from kvstate.feeds.subscriber import FeedNews
from kvstate.feeds.transport import Connected, MemoryTransport, Transport
from kvstate.feeds.zmq_transport import ZmqTransport
from kvstate.fleet import Fleet
from kvstate.overlap import Prompt, Tokens
from kvstate.owner import Owner
from kvstate.wire.zmq_wire import decode_batch
from simulator.server import Worker, running
from simulator.settings import TINY_MODEL, Settings
from tests.kvstate.publishing import until

PATH = "/v1/chat/completions"
COMPLETION = Head("POST", "/v1/completions", None)
CONFIG = """
models: [{{name: tiny, lora: [ad]}}]
workers:
- endpoint: {worker.endpoint}
  events: {{zmq: "{worker.events_endpoint}", replay: "{worker.replay_endpoint}"}}
"""

RIGHT = (TINY_MODEL / "chat_template.jinja").read_text()
WITH_SYSTEM_LINE = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + RIGHT
WITH_NEWLINE = RIGHT.replace("+ message['content']", "+ '\n' + message['content']")
WITHOUT_NEWLINE = RIGHT.replace("<|im_end|>' + '\n'", "<|im_end|>'")

# None of these words is in a log line.
WORDS = [
    *("river", "stone", "winter", "garden", "yellow", "pebble", "forest", "silver", "mountain"),
    *("paper", "window", "market", "summer", "bottle", "kitchen", "thunder", "letter", "morning"),
    *("island", "copper", "planet", "harbor", "velvet", "candle", "meadow"),
]


@dataclass
class Checked:
    """A router in front of one worker, and a separate clock for the self-check."""

    worker: Worker
    fleet: Fleet
    workers: Workers
    router: Router
    client: aiohttp.ClientSession
    now: float = 0.0
    applied: int = 0

    async def send(self, *texts: str, deliver: bool = True, **fields: Any) -> Booking:
        """Routes a conversation and has the worker answer it."""
        roles = ("user", "assistant") * len(texts)
        messages = [
            {"role": role, "content": text} for role, text in zip(roles, texts, strict=False)
        ]
        body = {"model": "tiny", "messages": messages, "max_tokens": 2, **fields}
        decision, booking = await self.router.route(
            Ask(Head("POST", PATH, None), json.dumps(body).encode())
        )
        assert decision.pick == (self.worker.endpoint,)
        assert booking is not None
        if deliver:
            await self.ask(body)
        return booking

    async def explain(self, *texts: str) -> dict[str, Any]:
        return await self.explain_body(PATH, chat(*texts))

    async def explain_body(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What is known of the worker for a request."""
        content = json.dumps(body).encode()
        explained = await self.router.explain(Head("POST", path, None), content)
        (candidate,) = explained["candidates"]
        assert isinstance(candidate, dict)
        return candidate

    def sample(self, name: str, **labels: str) -> float | None:
        metrics = Metrics(self.workers)
        registry = CollectorRegistry()
        registry.register(metrics)
        return registry.get_sample_value(name, labels)

    def is_listened_to(self) -> bool:
        return self.fleet._followed[self.worker.endpoint][0].subscriber.news.listener is not None

    def count_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Counts the applied batches, to know when all of them are applied."""
        applying = Owner.applying

        def counting(owner: Owner, body: Body) -> Generator[None, None, Taken]:
            taken = yield from applying(owner, body)
            self.applied += 1
            return taken

        monkeypatch.setattr(Owner, "applying", counting)

    async def ask(self, body: dict[str, Any]) -> None:
        """Sends a request to the worker directly, as a client."""
        async with self.client.post(f"{self.worker.url}{PATH}", json=body) as response:
            assert response.status == 200, await response.text()

    async def settle(self, *bookings: Booking) -> dict[str, Any]:
        """Ends requests, waits for all events and the grace; returns what /workers then shows."""
        for booking in bookings:
            self.router.release(booking)
        await until(lambda: self.applied == self.worker.next_sequence())
        self.now += GRACE_SECONDS
        return self.status()

    async def run(self, *texts: str, **fields: Any) -> dict[str, Any]:
        return await self.settle(await self.send(*texts, **fields))

    def status(self) -> dict[str, Any]:
        (status,) = self.workers.status()
        tokens: dict[str, Any] = status["tokens"]
        return tokens


Run = Callable[..., AbstractAsyncContextManager[Checked]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a worker with the tiny model's own template, behind a router with the given one."""
    file = tmp_path / "template.jinja"

    @asynccontextmanager
    async def checked(template: str = RIGHT, **settings: Any) -> AsyncIterator[Checked]:
        file.write_text(template)
        model = Model("tiny", tokenizer=str(TINY_MODEL), chat_template=str(file))
        tokenizer = Tokenizer.load(model)
        assert tokenizer is not None

        def open_transports(source: FeedSource) -> Sequence[Transport]:
            assert isinstance(source, tuple)
            return [ZmqTransport(one, lambda: 0.5) for one in source]

        async with running(Settings(**settings)) as worker, aiohttp.ClientSession() as client:
            config = parse(CONFIG.format(worker=worker), "c")
            fleet = Fleet(12345678, lambda: 0.0)
            workers = Workers(config, fleet, open_transports)
            router = Router(config, workers, {"tiny": tokenizer}, Metrics(workers), Random(0))
            one = Checked(worker, fleet, workers, router, client)
            workers.checks = SelfCheck(fleet, workers.records, lambda: one.now)
            one.count_batches(monkeypatch)
            await workers.start()
            await until(lambda: workers.state(worker.endpoint) == "live")
            try:
                yield one
            finally:
                router.close()
                await workers.close()

    return checked


def chat(*texts: str) -> dict[str, Any]:
    """A conversation of these turns."""
    roles = ("user", "assistant") * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return {"model": "tiny", "messages": messages, "max_tokens": 2}


def tokens_of(body: dict[str, Any], template: Path | None = None) -> list[int]:
    """The tokens of a conversation, rendered with the worker's template or another one."""
    override = str(template) if template else None
    tokenizer = Tokenizer.load(Model("t", tokenizer=str(TINY_MODEL), chat_template=override))
    assert tokenizer is not None
    (prompt,) = request.parse(PATH, json.dumps(body).encode()).prompts
    return tokenizer.encode(prompt).tolist()


def text(seed: int, words: int = 60) -> str:
    return " ".join(Random(seed).choices(WORDS, k=words))


@pytest.mark.parametrize(
    "template", [WITH_SYSTEM_LINE, WITH_NEWLINE, WITHOUT_NEWLINE], ids=["system", "more", "less"]
)
@pytest.mark.parametrize("dialect", ["vllm-0.32", "vllm-0.9", "sglang-0.5.22", "trtllm"])
@pytest.mark.slow
async def test_a_wrong_template_is_raised_within_eight_requests(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str, dialect: str
) -> None:
    async with run(template, dialect=dialect) as one:
        turns = [(text(seed), text(-seed), text(9 * seed)) for seed in range(8)]
        status = await one.settle(*[await one.send(*texts) for texts in turns])
        where = status["position"]
        ours = tokens_of(chat(*turns[7]), tmp_path / "template.jinja")
        engines = tokens_of(chat(*turns[7]))
        assert status["differs"]
        assert ours[:where] == engines[:where]
        assert (status["ours"], status["engine"]) == (ours[where], engines[where])
        assert status["ours"] != status["engine"]
        assert f"at position {where}" in caplog.text
        assert not any(word in caplog.text for word in WORDS)


@pytest.mark.parametrize("words", [15, 20, 30])
async def test_single_short_turns_raise_it_too(run: Run, words: int) -> None:
    async with run(WITH_SYSTEM_LINE) as one:
        for seed in range(8):
            status = await one.run(text(seed, words))
        assert status["differs"]


async def test_it_is_raised_behind_a_prefix_that_was_cached_before_anybody_listened(
    run: Run,
) -> None:
    async with run(WITH_SYSTEM_LINE) as one:
        shared = text(99, 100)
        await one.ask(chat(shared + " " + text(100)))
        await one.settle()
        for seed in range(8):
            status = await one.run(shared + " " + text(seed))
        assert status["differs"]
        assert status["position"] == 0  # start of the first missing block: the shift was not seen
        assert status["engine"] is None


async def test_what_differs_counts_as_uncertain_and_heals(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvsteer.tokens")
    async with run(WITHOUT_NEWLINE) as one:
        turns = [(text(seed), text(-seed), text(9 * seed)) for seed in range(8)]
        for texts in turns:
            await one.run(*texts)
        assert one.status()["differs"]
        explained = await one.explain(*turns[0])
        assert explained["overlap_tokens"] == 0
        assert explained["uncertain_tokens"] >= 64  # the first turn has no difference in it
        assert explained["approximate_tokens"] > 128  # as without events
        ids = {"model": "tiny", "prompt": tokens_of(chat(*turns[0])), "max_tokens": 2}
        assert (await one.explain_body("/v1/completions", ids))["overlap_tokens"] >= 64
        assert one.sample("kvsteer_tokens_differ", worker=one.worker.endpoint) == 1
        for seed in range(20, 28):
            await one.run(text(seed, 12) + "." * 9)  # single turns agree up to their last block
        assert not one.status()["differs"]
        assert (await one.explain(*turns[0]))["overlap_tokens"] >= 64
        assert one.sample("kvsteer_tokens_differ", worker=one.worker.endpoint) == 0
    assert caplog.messages[-1].endswith("its tokens match the router's again")


async def test_the_right_template_matches(run: Run) -> None:
    async with run() as one:
        for seed in range(8):
            status = await one.run(text(seed), text(-seed), text(9 * seed))
        assert (status["matched"], status["mismatched"]) == (8, 0)
        assert (status["position"], status["differs"]) == (None, False)


async def nothing(one: Checked, seed: int) -> Booking:
    """Retried elsewhere, or given up before the worker took it."""
    return await one.send(text(seed), deliver=False)


async def aborted(one: Checked, seed: int) -> Booking:
    """Given up in the middle of the answer."""
    booking = await one.send(text(seed, 100), deliver=False)
    counters = one.worker.engine.counters
    asking = asyncio.create_task(one.ask({**chat(text(seed, 100)), "max_tokens": 500}))
    await until(lambda: counters.running > 0)
    asking.cancel()
    await until(lambda: counters.in_flight == 0)
    return booking


async def short(one: Checked, seed: int) -> Booking:
    return await one.send(f"hi {seed}")


async def cached(one: Checked, seed: int) -> Booking:  # noqa: ARG001 - the same every time
    return await one.send(text(1))


async def similar_at_once(one: Checked, seed: int) -> Booking:
    shared, user = text(99, 100), str(seed)
    first, _ = await asyncio.gather(
        one.send(shared, user, text(5)), one.send(shared, user, text(6))
    )
    return first


async def similar_from_elsewhere(one: Checked, seed: int) -> Booking:
    """Another client asks the worker directly, and our request never arrives: the worst case."""
    body = text(99, 100)
    booking = await one.send(f"You serve Bob {seed}. {body} {text(seed, 20)}", deliver=False)
    await one.ask(chat(f"You serve Alice {seed}. {body} {text(500 + seed, 20)}"))
    return booking


async def same_beginning_from_elsewhere(one: Checked, seed: int) -> Booking:
    booking = await one.send(text(99, 100) + text(seed), deliver=False)
    await one.ask(chat(text(99, 100) + text(500 + seed)))
    return booking


async def continued_from_elsewhere(one: Checked, seed: int) -> Booking:
    """Somebody types: each request is abandoned for a longer one."""
    booking = await one.send(text(seed) + " and", deliver=False)
    await one.ask(chat(text(seed) + " and " + text(7 * seed, 3)))
    return booking


async def edited_from_elsewhere(one: Checked, seed: int) -> Booking:
    turns = text(seed), text(-seed)
    booking = await one.send(*turns, text(9 * seed), deliver=False)
    await one.ask(chat(*turns, text(9 * seed + 1)))
    return booking


async def salted(one: Checked, seed: int) -> Booking:
    return await one.send(text(seed), cache_salt=f"tenant {seed % 2}")


async def adapted(one: Checked, seed: int) -> Booking:
    return await one.send(text(seed), model="ad" if seed % 2 else "tiny")


@pytest.mark.parametrize("dialect", ["vllm-0.32", "sglang-0.5.22"])
@pytest.mark.parametrize(
    "behave",
    [
        nothing, aborted, short, cached, similar_at_once, similar_from_elsewhere,
        same_beginning_from_elsewhere, continued_from_elsewhere, edited_from_elsewhere,
        salted, adapted,
    ],
)  # fmt: skip
@pytest.mark.slow
async def test_with_the_right_template_nothing_is_raised(
    run: Run, behave: Callable[[Checked, int], Awaitable[Booking]], dialect: str
) -> None:
    async with run(dialect=dialect, loras=("ad",), decode_tokens_per_second=200.0) as one:
        for seed in range(10):
            booking = await behave(one, seed)
            await one.ask(chat(text(700 + seed)))
            status = await one.settle(booking)
        assert (status["mismatched"], status["differs"]) == (0, False)


async def test_a_worker_without_prefix_caching_is_no_evidence(run: Run) -> None:
    async with run(WITH_SYSTEM_LINE) as one:
        for seed in range(8):
            status = await one.settle(await one.send(text(seed), deliver=False))
        assert (status["checked"], status["without_evidence"]) == (0, 8)


async def test_token_ids_of_the_client_tell_nothing(run: Run) -> None:
    async with run() as one:
        body = {"model": "tiny", "prompt": tokens_of(chat(text(1)))}
        _, booking = await one.router.route(Ask(COMPLETION, json.dumps(body).encode()))
        assert booking is not None
        status = await one.settle(booking)
        assert (status["checked"], status["without_evidence"]) == (0, 0)


async def twins(one: Checked, seed: int, status: int) -> dict[str, Any]:
    """Sends a request that the worker never computes, and its ids with one of them changed."""
    texts = text(99, 100), text(seed), text(-seed)
    ids = tokens_of(chat(*texts))
    body = {"model": "tiny", "prompt": [*ids[:349], ids[349] ^ 1, *ids[350:]], "max_tokens": 2}
    forged = await one.send(*texts, deliver=False)
    if status:
        one.router.answered(forged, status, "")
    ask = Ask(Head("POST", "/v1/completions", None), json.dumps(body).encode())
    _, booking = await one.router.route(ask)
    assert booking is not None
    url = f"{one.worker.url}/v1/completions"
    async with one.client.post(url, json=body) as response:
        assert response.status == 200
    return await one.settle(forged, booking)


@pytest.mark.parametrize("status", [0, 400])
async def test_a_client_cannot_forge_that_tokens_differ(run: Run, status: int) -> None:
    async with run() as one:
        for seed in range(8):
            told = await twins(one, seed, status)
        assert (told["mismatched"], told["differs"]) == (0, False)
        assert told["without_evidence"] > 2


async def test_a_feed_with_a_hole_tells_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run(WITH_SYSTEM_LINE) as one:
        await one.run(text(1))
        bookings = [await one.send(text(2), deliver=False)]
        monkeypatch.setattr(Fleet, "state", lambda *_: State.DEGRADED)
        await one.ask(chat(text(2)))
        bookings.append(await one.send(text(3)))  # not watched at all
        status = await one.settle(*bookings)
        assert (status["checked"], status["without_evidence"]) == (0, 2)


async def test_nobody_is_listened_to_without_need(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run() as one:
        booking = await one.send(text(1), deliver=False)
        assert one.is_listened_to()
        await one.settle(booking)
        assert not one.is_listened_to()
        monkeypatch.setattr(self_check_watch, "MAX_LISTENED", 0)
        await one.run(text(2))
        monkeypatch.setattr(self_check_watch, "MAX_PROMPT_TOKENS", 10)
        status = await one.run(text(3))
        assert (status["checked"], status["without_evidence"]) == (0, 1)


async def test_a_worker_that_is_well_is_checked_without_listening(run: Run) -> None:
    async with run() as one:
        for seed in range(LAST_CHECKED):
            await one.run(text(seed))
        one.now += 1 / WATCHED_PER_SECOND_WHILE_WELL
        booking = await one.send(text(100))
        assert not one.is_listened_to()
        assert (await one.settle(booking))["matched"] == LAST_CHECKED + 1
        one.now += 1 / WATCHED_PER_SECOND_WHILE_WELL
        await one.settle(await one.send(text(101), deliver=False))  # the worker does not hold it
        await one.send(text(102), deliver=False)
        assert one.is_listened_to()


async def test_a_worker_that_was_well_and_changes_its_template_is_found_out(
    run: Run,
) -> None:
    async with run(WITH_SYSTEM_LINE) as one:
        for seed in range(LAST_CHECKED):
            await one.settle(await one.send(text(seed), deliver=False))
        assert one.status()["without_evidence"] == LAST_CHECKED
        for seed in range(100, 109):
            one.now += 1 / WATCHED_PER_SECOND_WHILE_WELL
            status = await one.run(text(seed))
        assert status["differs"]


def stores(count: int) -> bytes:
    """A batch of blocks that nobody asked for."""
    events = [["BlockStored", [n], None, [n] * 16, 16, None, "GPU"] for n in range(count)]
    return msgspec.msgpack.encode([1.0, events, 0])


@dataclass
class Busy:
    """Clocks that stand still, except that each reading of the CPU time adds `look_seconds`."""

    look_seconds: float
    now: float = 0.0
    cpu: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def cpu_seconds(self) -> float:
        self.cpu += self.look_seconds
        return self.cpu


async def listening(busy: Busy) -> tuple[Fleet, SelfCheck, FeedNews]:
    fleet = Fleet(12345678, lambda: 0.0)
    transport = MemoryTransport({})
    transport.put(Connected())
    fleet.add("w", "m", [transport])
    await until(lambda: fleet.state("w") is State.LIVE)
    news = fleet._followed["w"][0].subscriber.news
    records = {"w": Record("w")}
    return fleet, SelfCheck(fleet, records, busy.monotonic, busy.cpu_seconds), news


@pytest.mark.parametrize("body", [stores(1), decode_batch(stores(1))], ids=["bytes", "decoded"])
async def test_to_listen_takes_no_more_than_its_share_of_the_cpu(body: Body) -> None:
    busy = Busy(look_seconds=0.001)
    fleet, checks, news = await listening(busy)
    heard = 0
    for seed in range(1_000):  # one second each, in which a thousand batches come
        busy.now += 1
        checks.watch("w", Prompt("m", Tokens("I", range(seed, seed + 100))), None)
        for _ in range(1_000):
            if news.listener is not None:
                news.listener(body)
                heard += 1
    assert heard > 100
    allowed = EFFORT_BURST_SECONDS + 1_000 * EFFORT_SHARE
    assert busy.cpu <= 2 * allowed  # the clock also advances between two measured intervals
    assert checks.status("w")["without_evidence"] > LAST_CHECKED
    await fleet.close()


@pytest.mark.parametrize("count", [4 * EVENTS_AT_ONCE, 400 * EVENTS_AT_ONCE])
@pytest.mark.parametrize("is_decoded", [False, True])
async def test_a_batch_that_takes_too_long_is_left_and_tells_nothing(
    *, count: int, is_decoded: bool
) -> None:
    busy = Busy(look_seconds=self_check_watch.MAX_LOOK_SECONDS / 3)
    fleet, checks, news = await listening(busy)
    checks.watch("w", Prompt("m", Tokens("I", range(100))), None)
    show = news.listener
    assert show is not None
    show(decode_batch(stores(count)) if is_decoded else stores(count))
    assert busy.cpu <= 3 * self_check_watch.MAX_LOOK_SECONDS
    assert news.listener is None
    assert checks.status("w")["without_evidence"] == 1
    await fleet.close()


async def test_what_is_only_asked_of_the_index_needs_a_feed_that_tells_all(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run() as one:
        for seed in range(LAST_CHECKED):
            await one.run(text(seed))
        one.now += 1 / WATCHED_PER_SECOND_WHILE_WELL
        booking = await one.send(text(100), deliver=False)
        with monkeypatch.context() as patch:
            patch.setattr(Fleet, "state", lambda *_: State.DEGRADED)
            assert (await one.settle(booking))["without_evidence"] == 1
        one.now += 1 / WATCHED_PER_SECOND_WHILE_WELL
        await one.send(text(101))
        assert not one.is_listened_to()  # a hole is no reason to listen


async def test_workers_that_fell_silent_make_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(self_check_watch, "MAX_LISTENED", 1)
    monkeypatch.setattr(self_check_watch, "MAX_REMEMBERED", 1)
    fleet, now = Fleet(12345678, lambda: 0.0), 0.0
    records = {name: Record(name) for name in ("a", "b", "c")}
    checks = SelfCheck(fleet, records, lambda: now)
    prompt = Prompt("m", Tokens("I", range(100)))
    for worker in ("a", "b", "c"):
        transport = MemoryTransport({})
        transport.put(Connected())
        fleet.add(worker, "m", [transport])
    await until(lambda: all(fleet.state(worker) is State.LIVE for worker in "abc"))
    assert checks.watch("a", prompt, None) is not None
    assert checks.watch("b", prompt, None) is None
    now += MAX_WATCH_SECONDS
    assert checks.watch("b", prompt, None) is not None
    now += MAX_WATCH_SECONDS
    assert checks.watch("c", prompt, None) is not None
    assert [checks.status(worker)["without_evidence"] for worker in "abc"] == [1, 1, 0]
    await fleet.close()


class Record:
    """A worker's record, as far as the self-check reads it."""

    def __init__(self, worker: str) -> None:
        self.check = WorkerCheck(worker)


async def test_a_worker_that_is_gone_is_forgotten_and_listened_to_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(self_check_watch, "MAX_LISTENED", 1)
    fleet = Fleet(12345678, lambda: 0.0)
    records = {name: Record(name) for name in ("a", "b")}
    checks = SelfCheck(fleet, records, lambda: 0.0)
    prompt = Prompt("m", Tokens("I", range(100)))
    for worker in ("a", "b"):
        transport = MemoryTransport({})
        transport.put(Connected())
        fleet.add(worker, "m", [transport])
    await until(lambda: fleet.state("a") is fleet.state("b") is State.LIVE)
    watched = checks.watch("a", prompt, None)
    assert watched is not None
    del records["a"]
    await fleet.remove("a")
    checks.ended(watched)
    assert checks.status("a")["without_evidence"] == 0
    assert checks.watch("b", prompt, None) is not None
    await fleet.close()


async def test_a_check_that_fails_is_no_fault_of_the_request(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError(text(1))

    async with run() as one:
        monkeypatch.setattr(SelfCheck, "watch", broken)
        await one.run(text(1))
        assert "self-check failed with RuntimeError" in caplog.text
        assert not any(word in caplog.text for word in WORDS)


async def test_what_golden_requests_find_counts_as_uncertain_for_that_form_alone(run: Run) -> None:
    async with run() as one:
        await one.settle(await one.send(text(1)))
        completion = {"model": "tiny", "prompt": text(2), "max_tokens": 2}
        async with one.client.post(f"{one.worker.url}/v1/completions", json=completion) as answer:
            assert answer.status == 200
        await one.settle()
        held = (await one.explain(text(1)))["overlap_tokens"]
        assert held
        (record,) = one.workers.records.values()
        differs = Verification(DIFFERENT, "another template", forms=CONVERSATION)
        one.workers.checks.judge(record.check, differs)
        explained = await one.explain(text(1))
        assert (explained["overlap_tokens"], explained["uncertain_tokens"]) == (0, held)
        explained = await one.explain_body("/v1/completions", completion)
        assert explained["overlap_tokens"]
        assert one.status()["differs"]
        assert one.sample("kvsteer_tokens_differ", worker=one.worker.endpoint) == 1
        one.workers.checks.judge(record.check, Verification(VERIFIED))
        assert (await one.explain(text(1)))["overlap_tokens"] == held
