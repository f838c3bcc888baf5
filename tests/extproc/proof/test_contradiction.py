"""Feeds that the engines' answers contradict; router, feeds and simulated workers on sockets."""

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import aiohttp
import pytest

from extproc.config.reader import parse
from extproc.config.schema import Model
from extproc.fleet.workers import Workers
from extproc.observing.metrics import Metrics
from extproc.observing.outcomes import Account
from extproc.proof.recurring import EXPLAINED, RIGHT
from extproc.requests.request import Head, RoutingRequest
from extproc.routing.decision import Decision
from extproc.serving.router import Router
from extproc.tokenizing.tokens import Tokenizer
from kvstate.feeds.feed_sources import FeedSource
from kvstate.feeds.transport import FeedTransport
from kvstate.feeds.zmq_transport import ZmqTransport
from kvstate.fleet import FollowedWorkers
from kvtools.simulator.server import running
from kvtools.simulator.settings import TINY_MODEL, Settings
from tests.extproc.proof.test_trust import PATH, WITH_SYSTEM_LINE, Run, chat, run, text
from tests.faults import found as found_by
from tests.waiting import until

__all__ = ["run"]

SWAPPED = "feed_of_another"
CONFIG = """
accounting: {{responses: usage}}
models: [{{name: tiny, tokenizer: "{model}", verify: off}}]
workers:
- endpoint: {first.endpoint}
  events: {{zmq: "{second.events_endpoint}", replay: "{second.replay_endpoint}"}}
- endpoint: {second.endpoint}
  events: {{zmq: "{first.events_endpoint}", replay: "{first.replay_endpoint}"}}
"""


async def test_credit_is_uncertain_while_a_cause_recurs(run: Run) -> None:
    async with run(usage=True) as one:
        await one.run(text(1))
        proofs, name = one.workers.proofs, one.worker.endpoint
        held = (await one.explain(text(1)))["overlap_tokens"]
        for _ in range(EXPLAINED):
            proofs.predicted(name, SWAPPED)
        found = await one.explain(text(1))
        assert (found["state"], found["overlap_tokens"]) == ("contradicted", 0)
        assert found["uncertain_tokens"] == held > 0
        (status,) = one.workers.states.statuses()
        assert status["state"] == "contradicted"
        assert SWAPPED in status["feeds"][0]["reason"]
        assert [fault.code for fault in found_by(one.workers)] == ["predictions-wrong"]
        for _ in range(RIGHT):
            await one.run(text(1))  # its cached tokens are what was held, though uncertain
        assert (await one.explain(text(1)))["overlap_tokens"] == held
        assert not found_by(one.workers)


@pytest.mark.parametrize("cause", ["unknown", "evicted"])
async def test_credit_stays_where_the_cause_is_unknown_or_a_race(run: Run, cause: str) -> None:
    async with run() as one:
        await one.run(text(1))
        held = (await one.explain(text(1)))["overlap_tokens"]
        for _ in range(EXPLAINED):
            one.workers.proofs.predicted(one.worker.endpoint, cause)
        found = await one.explain(text(1))
        assert (found["state"], found["overlap_tokens"]) == ("live", held)
        assert len(found_by(one.workers)) == (cause == "unknown")


async def test_refuted_tokens_are_no_second_fault(run: Run) -> None:
    async with run(WITH_SYSTEM_LINE, usage=True) as one:
        for seed in range(2 * EXPLAINED):
            await one.run(text(seed))
            await one.run(text(seed))
        (status,) = one.workers.states.statuses()
        assert status["tokens"]["state"] == "refuted"
        assert "token_mismatch" in status["predictions"]["causes"]
        assert "predictions-wrong" not in {fault.code for fault in found_by(one.workers)}


async def test_restart_of_a_worker_ends_what_its_answers_contradicted(run: Run) -> None:
    async with run() as one:
        record = one.workers.records[one.worker.endpoint]
        for _ in range(EXPLAINED):
            one.workers.proofs.predicted(one.worker.endpoint, SWAPPED)
        one.workers.proofs.restarted(record)
        assert not found_by(one.workers)


def opened(source: FeedSource) -> Sequence[FeedTransport]:
    assert isinstance(source, tuple)
    return [ZmqTransport(one, lambda: 0.5) for one in source]


async def test_swapped_feeds_are_found_by_what_the_engines_report() -> None:
    tokenizer = Tokenizer.load(Model("tiny", tokenizer=str(TINY_MODEL)))
    assert tokenizer is not None
    known = {"tiny": tokenizer}
    async with (
        running(Settings()) as first,
        running(Settings()) as second,
        aiohttp.ClientSession() as client,
    ):
        both = {first.endpoint: first, second.endpoint: second}
        config = parse(CONFIG.format(model=TINY_MODEL, first=first, second=second), "c")
        fleet = FollowedWorkers(1, lambda: 0.0)
        workers = Workers(config, fleet, opened, encoders=known)
        metrics = Metrics(workers.states)
        router = Router(config, workers, known, metrics, Random(0))
        await workers.start()
        await until(lambda: all(workers.candidates.state(name) == "live" for name in both))

        async def serve(body: dict[str, Any]) -> Decision:
            request = RoutingRequest(Head("POST", PATH, None), json.dumps(body).encode())
            decision, ticket = await router.route(request)
            assert ticket is not None
            account = Account(decision, ticket.compared, 0.0)
            server, before = both[decision.worker], sum(map(fleet.feeds.batches, both))
            async with client.post(f"{server.url}{PATH}", json=body) as answer:
                account.respond(200, decision.worker, 1.0)
                account.read(await answer.read(), 2.0, is_last=True)
            await until(lambda: sum(map(fleet.feeds.batches, both)) > before)
            router.release(ticket)
            metrics.observe_outcome(account.outcome())
            return decision

        for seed in range(20):
            for turns in (1, 2, 3):
                await serve(chat(*[text(10 * seed + turn) for turn in range(turns)]))
        found = {fault.code for fault in found_by(workers)}
        assert found == {"predictions-wrong"}
        assert {one["state"] for one in workers.states.statuses()} == {"contradicted"}
        decision = await serve(chat(text(999)))
        for turn in range(3):
            later = await serve(chat(text(999), *[text(1000 + n) for n in range(turn + 1)]))
            assert (later.worker, later.basis.certain_tokens) == (decision.worker, 0)
        router.close()
        await workers.close()
