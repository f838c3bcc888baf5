"""The state of tokens end to end: router, feeds and simulated workers on real sockets, no Envoy."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from extproc.config.reader import parse
from extproc.config.schema import Model
from extproc.fleet.asking.surroundings import Surroundings
from extproc.fleet.workers import Workers
from extproc.observing.metrics import Metrics
from extproc.observing.outcomes import Account
from extproc.proof.lookups import (
    GRACE_SECONDS,
    MAX_SECONDS,
    MAX_WAITING,
    PAUSE_SECONDS,
    PAUSE_WHILE_PROVED_SECONDS,
)
from extproc.proof.state import (
    MATCHED,
    NOT_STORED,
    PROMPTS_NOT_STORED,
    PROMPTS_STORED,
    Comparison,
    GoldenVerdict,
    Mismatch,
)
from extproc.proof.tally import LAST_FINDINGS
from extproc.requests import request
from extproc.requests.prompt import BILLING, CONVERSATION, FORM_NAMES, INLINE_SYSTEM
from extproc.requests.request import Head, RoutingRequest
from extproc.routing.load.endpoint_load import Ticket
from extproc.serving.router import Router
from extproc.tokenizing.tokens import Tokenizer
from kvstate.events import Loss
from kvstate.feeds.feed import FeedState
from kvstate.feeds.feed_sources import FeedSource
from kvstate.feeds.feed_times import USUAL, FeedTimes
from kvstate.feeds.transport import FeedTransport
from kvstate.feeds.zmq_transport import ZmqTransport
from kvstate.fleet import FollowedWorkers
from kvstate.following.worker_feeds import WorkerFeeds
from kvtools.simulator.server import SimulatedWorker, running
from kvtools.simulator.settings import TINY_MODEL, Settings
from tests.waiting import until

PATH = "/v1/chat/completions"
COMPLETION = Head("POST", "/v1/completions", None)
CONFIG = """
accounting: {{responses: usage}}
models: [{{name: tiny, lora: [ad], tokenizer: "{TINY_MODEL}", verify: {verify}}}]
workers:
- endpoint: {worker.endpoint}
  events: {{zmq: "{worker.events_endpoint}", replay: "{worker.replay_endpoint}"}}
"""

RIGHT = (TINY_MODEL / "chat_template.jinja").read_text()
WITH_SYSTEM_LINE = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + RIGHT
WITH_NEWLINE = RIGHT.replace("+ message['content']", "+ '\n' + message['content']")
WITHOUT_NEWLINE = RIGHT.replace("<|im_end|>' + '\n'", "<|im_end|>'")
WITH_SPACE = RIGHT.replace("<|im_end|>' + '\n'", "<|im_end|>' + ' '")

# None of these words is in a log line.
WORDS = [
    "river",
    "stone",
    "winter",
    "garden",
    "yellow",
    "pebble",
    "forest",
    "silver",
    "mountain",
    "paper",
    "window",
    "market",
    "summer",
    "bottle",
    "kitchen",
    "thunder",
    "letter",
    "morning",
    "island",
    "copper",
    "planet",
    "harbor",
    "velvet",
    "candle",
    "meadow",
]


# Raised where batches are counted, in the test's own task only: the page counts them too.
FAULT: ContextVar[str] = ContextVar("fault", default="")


class ShownFeeds(WorkerFeeds):
    """Feeds of workers that may have holes, and may fail to count their batches."""

    has_holes = False

    def batches(self, worker: str) -> int:
        if fault := FAULT.get():
            raise RuntimeError(fault)
        return super().batches(worker)

    def state(self, worker: str) -> FeedState:
        return FeedState.DEGRADED if self.has_holes else super().state(worker)


class ShownWorkers(FollowedWorkers):
    """Workers with such feeds."""

    def __init__(self, secret: int, clock: Callable[[], float], times: FeedTimes) -> None:
        super().__init__(secret, clock, times=times)
        self.feeds: ShownFeeds = ShownFeeds(self._ranks, clock)


@dataclass
class Checked:
    """A router in front of one worker, and a separate clock for the state of its tokens."""

    worker: SimulatedWorker
    fleet: ShownWorkers
    workers: Workers
    router: Router
    client: aiohttp.ClientSession
    metrics: Metrics
    reads_usage: bool = False
    now: float = 0.0

    async def send(self, *texts: str, deliver: bool = True, **fields: Any) -> Ticket:
        """Routes a conversation and has the worker answer it."""
        roles = ("user", "assistant") * len(texts)
        messages = [
            {"role": role, "content": text} for role, text in zip(roles, texts, strict=False)
        ]
        body = {"model": "tiny", "messages": messages, "max_tokens": 2, **fields}
        decision, ticket = await self.router.route(
            RoutingRequest(Head("POST", PATH, None), json.dumps(body).encode())
        )
        assert decision.pick == (self.worker.endpoint,)
        assert ticket is not None
        if deliver:
            answer = await self.request(body)
            if self.reads_usage:
                account = Account(decision, ticket.compared, 0.0)
                account.respond(200, self.worker.endpoint, 1.0)
                account.read(answer, 2.0, is_last=True)
                self.metrics.observe_outcome(account.outcome())
        return ticket

    async def explain(self, *texts: str) -> dict[str, Any]:
        return await self.explain_body(PATH, chat(*texts))

    async def explain_body(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What is known of the worker for a request."""
        content = json.dumps(body).encode()
        explained = await self.router.explain(Head("POST", path, None), content)
        (candidate,) = explained["candidates"]
        assert isinstance(candidate, dict)
        return candidate

    def sample(self, name: str) -> float | None:
        registry = CollectorRegistry()
        registry.register(self.metrics)
        return registry.get_sample_value(name, {"worker": self.worker.endpoint})

    @property
    def has_applied_all(self) -> bool:
        """Whether all that the worker has published is in the index."""
        (feed,) = self.fleet.feeds.statuses(self.worker.endpoint)
        last = -1 if feed.last_sequence is None else feed.last_sequence
        return last + 1 == self.worker.next_sequence() and not feed.unapplied

    async def request(self, body: dict[str, Any]) -> bytes:
        """Sends a request to the worker directly, as a client; returns the answer."""
        async with self.client.post(f"{self.worker.url}{PATH}", json=body) as response:
            assert response.status == 200, await response.text()
            return await response.read()

    async def settle(self, *tickets: Ticket) -> dict[str, Any]:
        """Ends requests, waits for all events and the grace; returns what /workers then shows."""
        for ticket in tickets:
            self.router.release(ticket)
        await until(lambda: self.has_applied_all)
        self.now += max(GRACE_SECONDS, PAUSE_WHILE_PROVED_SECONDS)
        return self.status()

    async def run(self, *texts: str, **fields: Any) -> dict[str, Any]:
        return await self.settle(await self.send(*texts, **fields))

    async def run_many(self, turns: int, seeds: Sequence[int]) -> dict[str, Any]:
        """Sends a different conversation of as many turns for each seed, one after the other."""
        for seed in seeds:
            status = await self.run(*[text(10 * seed + turn) for turn in range(turns)])
        return status

    def status(self) -> dict[str, Any]:
        (status,) = self.workers.states.statuses()
        tokens: dict[str, Any] = status["tokens"]
        return tokens


Run = Callable[..., AbstractAsyncContextManager[Checked]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a worker with the tiny model's own template, behind a router with the given one."""
    file = tmp_path / "template.jinja"

    @asynccontextmanager
    async def checked(
        template: str = RIGHT,
        *,
        golden: bool = False,
        usage: bool = False,
        times: FeedTimes = USUAL,
        **settings: Any,
    ) -> AsyncIterator[Checked]:
        file.write_text(template)
        model = Model("tiny", tokenizer=str(TINY_MODEL), chat_template=str(file))
        tokenizer = Tokenizer.load(model)
        assert tokenizer is not None

        def open_transports(source: FeedSource) -> Sequence[FeedTransport]:
            assert isinstance(source, tuple)
            return [ZmqTransport(one, lambda: 0.5) for one in source]

        async with running(Settings(**settings)) as worker, aiohttp.ClientSession() as client:
            verify = "start" if golden else "off"
            config = parse(CONFIG.format(worker=worker, TINY_MODEL=TINY_MODEL, verify=verify), "c")
            fleet, known = ShownWorkers(12345678, lambda: 0.0, times=times), {"tiny": tokenizer}
            workers = Workers(
                config,
                fleet,
                open_transports,
                encoders=known,
                surroundings=Surroundings(monotonic=lambda: one.now),
            )
            metrics = Metrics(workers.states)
            router = Router(config, workers, known, metrics, Random(0))
            one = Checked(worker, fleet, workers, router, client, metrics, usage)
            await workers.start()
            await until(lambda: workers.candidates.state(worker.endpoint) == "live")
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


# Planted faults: the template of the router, and how many turns a conversation must have for its
# stored blocks to differ.
FAULTS = {
    "system line": (WITH_SYSTEM_LINE, 1),
    "newline more": (WITH_NEWLINE, 1),
    "newline less": (WITHOUT_NEWLINE, 3),
    "another token": (WITH_SPACE, 3),  # as many tokens as in the engine
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dialect", ["vllm-0.32", "sglang-0.5.22", "trtllm"])
@pytest.mark.slow
async def test_wrong_template_is_doubted_by_what_was_stored(
    run: Run, caplog: pytest.LogCaptureFixture, fault: str, dialect: str
) -> None:
    template, turns = FAULTS[fault]
    async with run(template, dialect=dialect) as one:
        status = await one.run_many(turns, range(PROMPTS_NOT_STORED))
        assert (status["state"], status["why"]) == ("unproved", NOT_STORED)
        assert status["doubted"]
        assert status["forms"]["conversations"]["state"] == "unproved"
        assert one.sample("kvsteer_tokens_doubted") == 1
        assert one.sample("kvsteer_tokens_differ") == 0
        assert "its tokens are not proved" in caplog.text
        assert not any(word in caplog.text for word in WORDS)


@pytest.mark.parametrize("fault", ["system line", "newline more", "newline less"])
@pytest.mark.parametrize("dialect", ["vllm-0.32", "trtllm"])
async def test_template_with_other_counts_is_refuted_by_usage(
    run: Run, fault: str, dialect: str
) -> None:
    template, turns = FAULTS[fault]
    async with run(template, dialect=dialect, usage=True) as one:
        status = await one.run_many(turns, range(3))
        assert (status["state"], status["mismatched"]) == ("refuted", 3)
        assert "counts other tokens" in status["why"]
        assert status["forms"]["texts"]["state"] == "unproved"
        assert one.sample("kvsteer_tokens_differ") == 1


@pytest.mark.parametrize("fault", FAULTS)
async def test_wrong_template_is_refuted_by_golden_requests_before_any_request(
    run: Run, fault: str
) -> None:
    async with run(FAULTS[fault][0], golden=True) as one:
        await until(lambda: one.status()["state"] == "refuted")
        assert one.status()["request"] == "a conversation"


async def test_inline_system_turns_are_proved_by_a_message_before_any_request(run: Run) -> None:
    """The worker renders no messages for us, but stores the one that it answers."""
    async with run(golden=True) as one:

        def is_proved() -> bool:
            one.now += GRACE_SECONDS
            return bool(one.status()["forms"][FORM_NAMES[INLINE_SYSTEM]]["state"] == "proved")

        await until(is_proved)
        assert one.status()["matched"] >= 1


async def test_right_template_is_proved_by_the_first_prompt_that_is_stored(run: Run) -> None:
    async with run(usage=True) as one:
        assert one.status()["state"] == "off"
        assert (await one.run(text(1)))["state"] == "proved"
        status = await one.run_many(3, range(8))
        assert (status["matched"], status["mismatched"], status["without_evidence"]) == (9, 0, 0)
        assert status["forms"]["texts"]["state"] == "unproved"


async def test_right_template_is_proved_by_an_answer_that_lasts_long(run: Run) -> None:
    async with run() as one:
        ticket = await one.send(text(1))
        one.now += 30 * MAX_SECONDS
        assert (await one.settle(ticket))["state"] == "proved"


async def test_prompts_are_looked_up_after_more_at_once_than_can_wait(run: Run) -> None:
    async with run() as one:
        tickets = []
        for seed in range(2 * MAX_WAITING):
            tickets.append(await one.send(text(seed)))
            one.now += PAUSE_SECONDS
        for ticket in tickets:
            one.router.release(ticket)
        await until(lambda: one.has_applied_all)
        (record,) = one.workers.records.values()
        assert record.proof.findings[MATCHED] == 0
        for seed in range(MAX_WAITING):
            one.now += PAUSE_WHILE_PROVED_SECONDS
            await one.send(text(100 + seed), deliver=False)
        assert record.proof.findings[MATCHED] == MAX_WAITING


async def test_template_that_drifts_at_a_restart_is_doubted(run: Run) -> None:
    """As an update of the model would: golden requests are off, and what was stored is gone."""
    async with run(WITH_SYSTEM_LINE) as one:
        (record,) = one.workers.records.values()
        one.workers.proofs.compared(
            record, Comparison(1, {CONVERSATION: GoldenVerdict(is_same=True)})
        )
        assert one.status()["state"] == "proved"
        one.workers.note_emptied(one.worker.endpoint, Loss.RESTARTED)
        assert one.status()["state"] == "off"
        assert (await one.run_many(1, range(PROMPTS_NOT_STORED)))["doubted"]


async def test_refuted_tokens_are_uncertain_and_doubted_ones_count_what_was_sent(run: Run) -> None:
    async with run(WITHOUT_NEWLINE) as one:
        turns = text(0), text(1), text(2)
        for seed in range(PROMPTS_NOT_STORED):
            status = await one.run(*turns[:2], text(100 + seed))
        assert status["doubted"]
        explained = await one.explain(*turns)
        assert explained["overlap_tokens"] >= 64  # the first turn has no difference in it
        assert explained["approximate_tokens"] > 64  # as without events
        (record,) = one.workers.records.values()
        refuting = Comparison(1, {CONVERSATION: GoldenVerdict(is_same=False, reason="a date")})
        one.workers.proofs.compared(record, refuting)
        explained = await one.explain(*turns)
        assert explained["overlap_tokens"] == 0
        assert explained["uncertain_tokens"] >= 64
        ids = {"model": "tiny", "prompt": tokens_of(chat(*turns)), "max_tokens": 2}
        assert (await one.explain_body("/v1/completions", ids))["overlap_tokens"] >= 64


async def test_doubt_ends_with_prompts_that_are_stored(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvsteer.tokens")
    async with run(WITHOUT_NEWLINE) as one:
        assert (await one.run_many(3, range(PROMPTS_NOT_STORED)))["doubted"]
        for seed in range(PROMPTS_STORED):  # single turns agree up to their last block
            await one.run(f"{seed} " + "." * 26)
        assert one.status()["state"] == "proved"
        assert one.sample("kvsteer_tokens_doubted") == 0
    assert caplog.messages[-1].endswith("its tokens are proved")


async def nothing(one: Checked, seed: int) -> Ticket:
    """Retried elsewhere, or given up before the worker took it."""
    return await one.send(text(seed), deliver=False)


async def aborted(one: Checked, seed: int) -> Ticket:
    """Given up in the middle of the answer."""
    ticket = await one.send(text(seed, 100), deliver=False)
    counters = one.worker.engine.counters
    asking = asyncio.create_task(one.request({**chat(text(seed, 100)), "max_tokens": 500}))
    await until(lambda: counters.running > 0)
    asking.cancel()
    await until(lambda: counters.in_flight == 0)
    return ticket


async def short(one: Checked, seed: int) -> Ticket:
    return await one.send(f"hi {seed}")


async def cached(one: Checked, seed: int) -> Ticket:
    return await one.send(text(1))


async def similar_at_once(one: Checked, seed: int) -> Ticket:
    shared, user = text(99, 100), str(seed)
    first, _ = await asyncio.gather(
        one.send(shared, user, text(5)), one.send(shared, user, text(6))
    )
    return first


async def similar_from_elsewhere(one: Checked, seed: int) -> Ticket:
    """Another client asks the worker directly, and our request never arrives: the worst case."""
    body = text(99, 100)
    ticket = await one.send(f"You serve Bob {seed}. {body} {text(seed, 20)}", deliver=False)
    await one.request(chat(f"You serve Alice {seed}. {body} {text(500 + seed, 20)}"))
    return ticket


async def same_beginning_from_elsewhere(one: Checked, seed: int) -> Ticket:
    ticket = await one.send(text(99, 100) + text(seed), deliver=False)
    await one.request(chat(text(99, 100) + text(500 + seed)))
    return ticket


async def continued_from_elsewhere(one: Checked, seed: int) -> Ticket:
    """Somebody types: each request is abandoned for a longer one."""
    ticket = await one.send(text(seed) + " and", deliver=False)
    await one.request(chat(text(seed) + " and " + text(7 * seed, 3)))
    return ticket


async def edited_from_elsewhere(one: Checked, seed: int) -> Ticket:
    turns = text(seed), text(-seed)
    ticket = await one.send(*turns, text(9 * seed), deliver=False)
    await one.request(chat(*turns, text(9 * seed + 1)))
    return ticket


async def salted(one: Checked, seed: int) -> Ticket:
    return await one.send(text(seed), cache_salt=f"tenant {seed % 2}")


async def adapted(one: Checked, seed: int) -> Ticket:
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
async def test_right_template_is_never_refuted_and_credit_stays(
    run: Run, behave: Callable[[Checked, int], Awaitable[Ticket]], dialect: str
) -> None:
    async with run(
        dialect=dialect, loras=("ad",), decode_tokens_per_second=200.0, usage=True
    ) as one:
        await one.run(text(999))
        held = (await one.explain(text(999)))["overlap_tokens"]
        for seed in range(10):
            ticket = await behave(one, seed)
            await one.request(chat(text(700 + seed)))
            status = await one.settle(ticket)
        assert (status["mismatched"], status["state"] == "refuted") == (0, False)
        assert (await one.explain(text(999)))["overlap_tokens"] == held > 0


async def test_worker_without_prefix_caching_says_nothing(run: Run) -> None:
    async with run(WITH_SYSTEM_LINE) as one:
        for seed in range(8):
            status = await one.settle(await one.send(text(seed), deliver=False))
        assert (status["state"], status["without_evidence"]) == ("off", 0)


async def test_token_ids_of_the_client_say_nothing(run: Run) -> None:
    async with run() as one:
        body = {"model": "tiny", "prompt": tokens_of(chat(text(1)))}
        _, ticket = await one.router.route(RoutingRequest(COMPLETION, json.dumps(body).encode()))
        assert ticket is not None
        assert (await one.settle(ticket))["state"] == "off"


async def twins(one: Checked, seed: int, status: int) -> dict[str, Any]:
    """Sends a request that the worker never computes, and its ids with one of them changed."""
    texts = text(99, 100), text(seed), text(-seed)
    ids = tokens_of(chat(*texts))
    body = {"model": "tiny", "prompt": [*ids[:349], ids[349] ^ 1, *ids[350:]], "max_tokens": 2}
    forged = await one.send(*texts, deliver=False)
    if status:
        one.router.note_answer(forged, status, "")
    request = RoutingRequest(Head("POST", "/v1/completions", None), json.dumps(body).encode())
    _, ticket = await one.router.route(request)
    assert ticket is not None
    url = f"{one.worker.url}/v1/completions"
    async with one.client.post(url, json=body) as response:
        assert response.status == 200
    return await one.settle(forged, ticket)


@pytest.mark.parametrize("status", [0, 400])
async def test_client_cannot_forge_that_tokens_differ(run: Run, status: int) -> None:
    async with run(usage=True) as one:
        for seed in range(LAST_FINDINGS):
            shown = await twins(one, seed, status)
        assert (shown["mismatched"], shown["state"] == "refuted") == (0, False)
        assert shown["doubted"] is (status == 0)  # not stored, as far as the router can see


async def test_feed_with_a_hole_says_nothing(run: Run) -> None:
    async with run(WITH_SYSTEM_LINE) as one:
        tickets = [await one.send(text(2))]
        one.fleet.feeds.has_holes = True
        one.now += PAUSE_WHILE_PROVED_SECONDS
        tickets.append(await one.send(text(3)))
        status = await one.settle(*tickets)
        assert (status["state"], status["without_evidence"]) == ("off", 0)


async def test_check_that_fails_is_no_fault_of_the_request(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async with run() as one:
        token = FAULT.set(text(1))
        ticket = await one.send(text(1))
        FAULT.reset(token)
        await one.settle(ticket)
        assert "watching a request failed with RuntimeError" in caplog.text
        assert not any(word in caplog.text for word in WORDS)


async def test_golden_requests_lower_the_credit_of_the_form_that_differs_alone(run: Run) -> None:
    async with run() as one:
        await one.settle(await one.send(text(1)))
        completion = {"model": "tiny", "prompt": text(2), "max_tokens": 2}
        async with one.client.post(f"{one.worker.url}/v1/completions", json=completion) as answer:
            assert answer.status == 200
        await one.settle()
        held = (await one.explain(text(1)))["overlap_tokens"]
        assert held
        (record,) = one.workers.records.values()
        found = Mismatch("a conversation", 3, 1, 2, "another template")
        differs = GoldenVerdict(is_same=False, reason="another template", mismatch=found)
        one.workers.proofs.compared(record, Comparison(1, {CONVERSATION: differs}))
        explained = await one.explain(text(1))
        assert (explained["overlap_tokens"], explained["uncertain_tokens"]) == (0, held)
        explained = await one.explain_body("/v1/completions", completion)
        assert explained["overlap_tokens"]
        assert (one.status()["state"], one.status()["position"]) == ("refuted", 3)
        assert one.sample("kvsteer_tokens_differ") == 1
        same = Comparison(1, {CONVERSATION: GoldenVerdict(is_same=True)})
        one.workers.proofs.compared(record, same)
        assert (await one.explain(text(1)))["overlap_tokens"] == held


BILLED = {"role": "system", "content": f"x-anthropic-billing-header: cch=1\n{text(7)}"}


def billed(*texts: str) -> dict[str, Any]:
    """A conversation behind a system turn that releases read differently."""
    body = chat(*texts)
    return {**body, "messages": [BILLED, *body["messages"]]}


async def known(one: Checked, release: str) -> None:
    (record,) = one.workers.records.values()
    await until(lambda: str(record.engine).endswith(release))


async def test_form_that_releases_read_differently_is_certain_once_it_is_proved(run: Run) -> None:
    async with run(engine_version="0.31.0") as one:
        await known(one, "0.31.0")
        (record,) = one.workers.records.values()
        body = billed(text(1))
        await one.settle(await one.send(messages=body["messages"]))
        assert record.proof.proved == CONVERSATION | BILLING
        before = await one.explain_body(PATH, body)
        assert (before["overlap_tokens"] >= 64, before["uncertain_tokens"]) == (True, 0)
        one.workers.proofs.note_engine(record)
        assert record.proof.proved == CONVERSATION
        after = await one.explain_body(PATH, body)
        assert (after["overlap_tokens"], after["state"]) == (0, "unproved")
        assert after["uncertain_tokens"] == before["overlap_tokens"]
        refuting = Comparison(1, {BILLING: GoldenVerdict(is_same=False, reason="a line")})
        one.workers.proofs.compared(record, refuting)
        assert (await one.explain_body(PATH, body))["state"] == "differs"
        assert (await one.explain(text(1)))["state"] == "live"


async def test_form_that_a_worker_reads_otherwise_is_doubted_and_no_other(run: Run) -> None:
    async with run(engine_version="0.32.0") as one:  # which would drop the header
        await known(one, "0.32.0")
        for seed in range(PROMPTS_NOT_STORED):
            await one.settle(await one.send(messages=billed(text(seed))["messages"]))
        (record,) = one.workers.records.values()
        assert record.proof.doubted == BILLING
        assert (await one.run(text(1)))["forms"]["conversations"]["state"] == "proved"
