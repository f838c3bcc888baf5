"""How workers are asked which engine they run, over real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from extproc.base.engine import Engine, Release
from extproc.config.reader import parse
from extproc.config.schema import WorkerEngine, WorkerSettings
from extproc.fleet.asking.asking_times import AskingTimes
from extproc.fleet.asking.surroundings import Surroundings
from extproc.fleet.discovery.view import Sighting, merged
from extproc.fleet.records.worker import Worker as Record
from extproc.fleet.workers import Workers
from extproc.routing.health.evidence import Judge
from kvstate.events import Loss
from kvstate.fleet import FollowedWorkers
from kvtools.simulator.server import running
from kvtools.simulator.settings import Settings
from tests.extproc.fleet.answering import Raw, worker
from tests.waiting import until

NEVER = 3600.0


# Retries come soon, and regular questions never.
HASTY = AskingTimes(
    engine_retry_seconds=(0.02, 0.02), engine_least_seconds=0.01, engine_again_seconds=NEVER
)


@contextlib.asynccontextmanager
async def followed(
    endpoint: str, more: str = "", times: AskingTimes = HASTY
) -> AsyncIterator[tuple[Workers, Record]]:
    """A fleet of one worker."""
    text = f"models: [{{name: tiny}}]\nworkers: [{{endpoint: '{endpoint}'{more}}}]"
    one = Workers(
        parse(text, "c"),
        FollowedWorkers(1, lambda: 0.0),
        lambda _: [],
        surroundings=Surroundings(times=times),
    )
    await one.start()
    try:
        yield one, one.records[endpoint]
    finally:
        await one.close()


async def until_runs(record: Record, name: str, *release: int) -> None:
    await until(lambda: record.engine == Engine(name, Release(*release)), "its engine is known")


def models(owner: str) -> dict[str, Any]:
    return {"data": [{"id": "tiny", "owned_by": owner}]}


@pytest.mark.parametrize(
    ("dialect", "name", "release"),
    [
        ("vllm-0.10", "vllm", (0, 10, 2)),
        ("vllm-0.32", "vllm", (0, 32, 0)),
        ("sglang-0.5.9", "sglang", (0, 5, 9)),
        ("sglang-0.5.22", "sglang", (0, 5, 23)),
        ("trtllm", "trtllm", (1, 4, 0)),
    ],
)
async def test_worker_tells_its_engine_and_release(
    dialect: str, name: str, release: tuple[int, ...]
) -> None:
    async with running(Settings(dialect=dialect)) as engine, followed(engine.endpoint) as (_, one):
        await until_runs(one, name, *release)
        assert one.identity.source == "learned"
        assert (one.identity.arguments is not None) == (name == "sglang")


async def test_engine_that_counts_drafts_is_uncertain_from_the_start() -> None:
    counted = "\nvllm:spec_decode_num_drafts_total{engine='0'} 0.0\n"
    answers = {"v1/models": models("vllm"), "version": {"version": "0.32.0"}}
    async with (
        worker(**answers, metrics=Raw(counted)) as endpoint,
        followed(endpoint) as (workers, one),
    ):
        await until(lambda: one.identity.drafts, "it counts drafts")
        (status,) = workers.states.statuses()
        assert status["reuse"]["uncertain_because"] == "draft_drop"


@pytest.mark.parametrize(("events", "is_blind"), [("", True), (", events: auto", False)])
async def test_cache_size_bounds_the_record_of_workers_without_events(
    events: str, is_blind: bool
) -> None:
    cache = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
    answers = {"v1/models": models("vllm"), "version": {"version": "0.32.0"}}
    async with (
        worker(**answers, metrics=Raw(cache)) as endpoint,
        followed(endpoint, events) as (_, one),
    ):
        await until_runs(one, "vllm", 0, 32, 0)
        assert one.engine_answer.cache_tokens == 1600
        assert one.holdings.capacity_tokens == 1600
        assert one.holdings.is_blind == is_blind


async def test_worker_that_hides_its_models_is_known_by_its_metrics() -> None:
    metrics = Raw("vllm:num_requests_running{engine='0'} 0.0\n")
    async with (
        worker(version={"version": "0.32.0"}, metrics=metrics) as endpoint,
        followed(endpoint) as (_, one),
    ):
        await until_runs(one, "vllm", 0, 32)


async def test_older_path_of_sglang_is_asked_too() -> None:
    info = {"version": "0.4.6", "chat_template": "chatml"}
    answers = {"v1/models": models("sglang"), "get_server_info": info}
    async with worker(**answers) as endpoint, followed(endpoint) as (fleet, one):
        await until_runs(one, "sglang", 0, 4, 6)
        assert one.identity.arguments is not None
        assert one.identity.arguments.chat_template == "chatml"
        assert fleet.candidates.dialects_of("tiny").first.has_own_template


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({}, "neither /v1/models nor /metrics names an engine that is known here"),
        ({"v1/models": models("vllm")}, "it is vllm, but /version: status 404"),
        (
            {"v1/models": models("vllm"), "version": {"version": 7}},
            "it is vllm, but /version: its answer names no version",
        ),
        (
            {"v1/models": models("vllm"), "version": {"version": "x" * 2_000_000}},
            "it is vllm, but /version: more than 1048576 bytes",
        ),
        (
            {"v1/models": models("sglang"), "server_info": {"version": "dev"}},
            "it is sglang, but /server_info: 'dev' is no release; /get_server_info: status 404",
        ),
    ],
)
async def test_unknown_engine_has_a_reason(answers: dict[str, Any], reason: str) -> None:
    async with worker(**answers) as endpoint, followed(endpoint) as (workers, one):
        await until(lambda: one.identity.reason == reason, "its answers are refused")
        (status,) = workers.states.statuses()
        assert (status["engine"], status["engine_reason"]) == (None, reason)


async def test_sglang_with_unreadable_arguments_is_known_without_them() -> None:
    info = {"version": "0.5.23", "chat_template": 7}
    answers = {"v1/models": models("sglang"), "server_info": info, "openapi.json": {}}
    async with worker(**answers) as endpoint, followed(endpoint) as (_, one):
        await until_runs(one, "sglang", 0, 5, 23)
        assert one.identity.arguments is None
        assert one.identity.reason == "/server_info: its arguments cannot be read"


async def test_configured_engine_is_known_without_an_answer() -> None:
    given = ", engine: {name: vllm, version: '0.24.0'}"
    async with running(Settings()) as engine, followed(engine.endpoint, given) as (workers, one):
        assert one.engine == Engine("vllm", Release(0, 24))
        await until(
            lambda: one.engine_answer.engine is not None, "the worker is asked all the same"
        )
        (status,) = workers.states.statuses()
        named = {"name": "vllm", "version": "0.24.0", "frontend": "python"}
        assert status["engine"] == {**named, "source": "configured"}
        assert status["engine_reason"] == "the worker says that it is vllm 0.32.0"


async def test_worker_that_starts_later_is_asked_again() -> None:
    async with running(Settings()) as first:
        endpoint = first.endpoint
    async with followed(endpoint) as (_, one):
        await until(lambda: one.identity.reason.startswith("it does not answer"))
        async with running(Settings(listen=endpoint)):
            await until_runs(one, "vllm", 0, 32)


@contextlib.asynccontextmanager
async def upgraded(times: AskingTimes = HASTY) -> AsyncIterator[tuple[Workers, Record]]:
    """A worker that was known as 0.30.0, and then restarted as 0.32.0 without being asked."""
    async with contextlib.AsyncExitStack() as stack:
        async with running(Settings(engine_version="0.30.0")) as engine:
            endpoint = engine.endpoint
            one, record = await stack.enter_async_context(followed(endpoint, times=times))
            await until_runs(record, "vllm", 0, 30)
        await stack.enter_async_context(running(Settings(listen=endpoint)))
        assert record.engine == Engine("vllm", Release(0, 30))
        yield one, record


async def test_worker_that_lost_its_cache_is_asked_again() -> None:
    async with upgraded() as (workers, one):
        workers.note_emptied(one.name, Loss.RESTARTED)
        await until_runs(one, "vllm", 0, 32)


async def test_worker_that_is_healthy_again_is_asked_again() -> None:
    async with upgraded() as (workers, one):
        assert one.upstream is not None
        workers.upstreams.eject(one.upstream, Judge.PROBE, "it is down", 0.0)
        await until(lambda: one.engine_questions.was_down, "its ejection is seen")
        workers.upstreams.restore(one.upstream, Judge.PROBE)
        await until_runs(one, "vllm", 0, 32)


async def test_worker_is_asked_regularly() -> None:
    async with upgraded(replace(HASTY, engine_again_seconds=0.02)) as (_, one):
        await until_runs(one, "vllm", 0, 32)


async def test_silent_worker_keeps_what_it_said() -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with running(Settings()) as engine:
            workers, one = await stack.enter_async_context(followed(engine.endpoint))
            await until_runs(one, "vllm", 0, 32)
        asked_at = one.engine_questions.at
        workers.note_emptied(one.name, Loss.RESTARTED)
        await until(lambda: one.engine_questions.at > asked_at + 0.05, "it is asked again")
        assert one.engine == Engine("vllm", Release(0, 32))


async def test_overloaded_worker_is_silent_for_now() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with followed(endpoint) as (_, one):
            await until(lambda: "status 503" in one.identity.reason, "it is asked")
            assert one.identity.reason == "it does not answer: /v1/models: status 503"


async def test_moved_worker_is_unknown_until_it_answers() -> None:
    async with running(Settings()) as engine, followed(engine.endpoint) as (workers, one):
        await until_runs(one, "vllm", 0, 32)
        workers.note_moved(one, "127.0.0.1:1")
        assert one.engine is None


async def test_changed_engine_is_told_to_those_who_watch() -> None:
    told: list[tuple[str, Engine | None]] = []
    async with running(Settings()) as engine, followed(engine.endpoint) as (workers, one):
        workers.engines.identifying.watch(
            lambda name: told.append((name, workers.records[name].engine))
        )
        await until_runs(one, "vllm", 0, 32)
        named = WorkerSettings(one.name, engine=WorkerEngine("sglang", "0.5.9"))
        await workers.replace(merged({"file": (Sighting(named),)}))
        await workers.replace(merged({"file": (Sighting(named),)}))
    engines = [Engine("vllm", Release(0, 32)), Engine("sglang", Release(0, 5, 9))]
    assert told == [(one.name, each) for each in engines]
