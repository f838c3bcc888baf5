"""Feeds that are connected and tell nothing of what their workers compute, on real sockets."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from extproc.proof.lookups import SILENCE_SECONDS
from extproc.proof.recurring import EXPLAINED
from extproc.proof.state import SILENT_PROMPTS
from extproc.requests.request import Head, RoutingRequest
from extproc.routing.health.evidence import Judge
from kvstate.feeds.feed import FeedState
from kvstate.feeds.feed_times import FeedTimes
from tests.extproc.proof.test_trust import PATH, Checked, Run, chat, run, text
from tests.waiting import until

__all__ = ["run"]

OK, BUSY = 200, 503


def mute(one: Checked, *, muted: bool = True) -> None:
    """Has all batches get lost on their way, and no replay answered; or ends that."""
    one.worker.faults.drop(1_000 if muted else 0)
    one.worker.faults.hide_replay("silent" if muted else None)


@asynccontextmanager
async def muted(run: Run, **settings: Any) -> AsyncIterator[Checked]:
    """Runs a worker whose batches are lost on their way, and whose replay is silent."""
    async with run(**settings) as one:
        mute(one)
        yield one


async def serve(one: Checked, prompt: str, *, status: int | None = OK) -> None:
    """Has a worker answer a conversation; the router sees the status, if any."""
    ticket = await one.send(prompt)
    if status is not None:
        one.router.note_answer(ticket, status, one.worker.endpoint)
    one.router.release(ticket)
    one.now += SILENCE_SECONDS


async def serve_many(one: Checked, count: int, *, status: int | None = OK, words: int = 60) -> None:
    for seed in range(count):
        await serve(one, text(seed, words), status=status)
    one.status()


def has_caught_up(one: Checked) -> bool:
    is_live = one.fleet.feeds.state(one.worker.endpoint) is FeedState.LIVE
    return is_live and one.has_applied_all and one.fleet.feeds.live_batches(one.worker.endpoint) > 0


def shown(one: Checked) -> dict[str, Any]:
    one.status()
    (status,) = one.workers.states.statuses()
    return status


def codes(one: Checked) -> list[str]:
    return [fault.code for fault in one.workers.proofs.faults()]


async def test_feed_that_tells_nothing_of_answered_prompts_is_silent(run: Run) -> None:
    async with muted(run) as one:
        await serve_many(one, SILENT_PROMPTS - 1)
        assert (shown(one)["state"], codes(one)) == ("live", [])
        await serve(one, text(99))
        status = shown(one)
        assert (status["state"], codes(one)) == ("silent", ["feed-silent"])
        assert status["feeds"][0]["reason"].startswith(
            "the feed is connected and told nothing of 6 of"
        )
        assert one.sample("kvsteer_feed_silent") == 1


async def test_what_was_sent_to_a_silent_worker_counts(run: Run) -> None:
    async with muted(run) as one:
        await serve_many(one, SILENT_PROMPTS)
        await serve(one, text(99, 100))
        found = await one.explain(text(99, 100))
        assert (found["state"], found["overlap_tokens"]) == ("silent", 0)
        decision, _ = await one.router.route(
            RoutingRequest(Head("POST", PATH, None), json.dumps(chat(text(99, 100))).encode())
        )
        assert decision.reason == "approximate_overlap"


async def test_certain_credit_of_a_silent_worker_ends(run: Run) -> None:
    async with run() as one:
        await one.run(text(999))
        assert (await one.explain(text(999)))["overlap_tokens"] > 0
        mute(one)
        await serve_many(one, SILENT_PROMPTS)
        found = await one.explain(text(999))
        assert found["overlap_tokens"] == 0 < found["uncertain_tokens"]


async def test_silence_ends_with_a_prompt_that_the_feed_tells_of(run: Run) -> None:
    async with muted(run) as one:
        await serve_many(one, SILENT_PROMPTS)
        assert shown(one)["state"] == "silent"
        mute(one, muted=False)
        ticket = await one.send(text(500))
        await until(lambda: has_caught_up(one))
        one.router.release(ticket)
        one.now += SILENCE_SECONDS
        assert shown(one)["state"] != "silent"
        assert (codes(one), one.sample("kvsteer_feed_silent")) == ([], 0)


@pytest.mark.parametrize(
    ("status", "words"), [(None, 60), (BUSY, 60), (OK, 2)], ids=["unanswered", "refused", "short"]
)
async def test_requests_that_need_not_be_told_of_are_no_evidence(
    run: Run, status: int | None, words: int
) -> None:
    async with muted(run) as one:
        await serve_many(one, 2 * SILENT_PROMPTS, status=status, words=words)
        assert (shown(one)["state"], codes(one)) == ("live", [])


async def test_cached_prompts_are_no_evidence(run: Run) -> None:
    async with run() as one:
        await one.run(text(1))
        for _ in range(2 * SILENT_PROMPTS):
            await serve(one, text(1))
        assert shown(one)["state"] == "live"


async def test_worker_that_caches_no_prefixes_need_not_tell(run: Run) -> None:
    async with muted(run, prefix_caching=False) as one:
        worker = one.workers.records[one.worker.endpoint]
        await until(lambda: worker.engine_answer.caches is False)
        await serve_many(one, 2 * SILENT_PROMPTS)
        assert (shown(one)["state"], codes(one)) == ("live", [])
        (fault,) = one.workers.engines.identifying.faults()
        assert fault.code == "prefix-caching-off"


async def test_worker_that_is_down_need_not_tell(run: Run) -> None:
    async with muted(run) as one:
        upstream = one.workers.records[one.worker.endpoint].upstream
        assert upstream is not None
        tickets = [await one.send(text(seed)) for seed in range(SILENT_PROMPTS)]
        one.workers.upstreams.eject(upstream, Judge.PROBE, "it does not answer", one.now)
        for ticket in tickets:
            one.router.note_answer(ticket, OK, one.worker.endpoint)
            one.router.release(ticket)
        for _ in tickets:
            one.now += SILENCE_SECONDS
            assert shown(one)["state"] == "live"


async def test_answers_are_asked_for_while_a_feed_is_suspected(run: Run) -> None:
    async with muted(run) as one:
        wanted = [one.workers.proofs.wants_answers]
        await serve_many(one, 1, status=None)
        wanted.append(one.workers.proofs.wants_answers)
        mute(one, muted=False)
        ticket = await one.send(text(500))
        await until(lambda: has_caught_up(one))
        one.router.release(ticket)
        one.now += SILENCE_SECONDS
        one.status()
        assert [*wanted, one.workers.proofs.wants_answers] == [False, True, False]


async def test_feed_with_a_hole_is_silent_only_if_it_never_told_anything(run: Run) -> None:
    async with muted(run) as one:
        one.fleet.feeds.has_holes = True
        await serve_many(one, SILENT_PROMPTS)
        assert codes(one) == ["feed-silent"]
    async with run() as one:
        await one.run(text(999))
        one.fleet.feeds.has_holes = True
        mute(one)
        await serve_many(one, SILENT_PROMPTS)
        assert codes(one) == []


async def test_prompts_that_only_replays_bring_are_not_told_of(run: Run) -> None:
    times = FeedTimes(0.25, 0.25)  # a check ends the one before, so it needs time for an answer
    async with run(times=times) as one:
        one.worker.faults.drop(1_000)
        for seed in range(SILENT_PROMPTS):
            ticket = await one.send(text(seed))
            one.router.note_answer(ticket, OK, one.worker.endpoint)
            await until(lambda: one.has_applied_all)
            one.router.release(ticket)
            one.now += SILENCE_SECONDS
        one.status()
        (status,) = one.workers.states.statuses()
        assert (status["state"], status["tokens"]["matched"]) == ("silent", SILENT_PROMPTS)


async def test_wrong_predictions_of_a_silent_worker_are_no_second_fault(run: Run) -> None:
    async with muted(run) as one:
        for _ in range(EXPLAINED):
            one.workers.proofs.predicted(one.worker.endpoint, "unknown")
        assert codes(one) == ["predictions-wrong"]
        await serve_many(one, SILENT_PROMPTS)
        assert codes(one) == ["feed-silent"]
