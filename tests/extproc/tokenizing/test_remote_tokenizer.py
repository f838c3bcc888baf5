"""The workers' tokenizer over real HTTP: the simulator's, and servers that misbehave."""

import asyncio
import contextlib
import json
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from extproc.base.errors import RequestError
from extproc.config import schema
from extproc.config.reader import parse
from extproc.fleet.discovery.view import listed, merged
from extproc.fleet.workers import Workers
from extproc.observing.metrics import Metrics
from extproc.requests.prompt import Chat, Text, TokenIds
from extproc.running.app import remote_tokenizers
from extproc.tokenizing import remote_tokenizer
from extproc.tokenizing.remote_tokenizer import PROBE_SECONDS, Failures, RemoteTokenizer
from extproc.tokenizing.tokens import Tokenizer
from kvstate.fleet import FollowedWorkers
from kvtools.simulator.server import running
from kvtools.simulator.settings import TINY_MODEL, Settings
from tests.waiting import until

CHAT = Chat([{"role": "user", "content": "hello there"}], {"add_generation_prompt": True})
MODEL = schema.Model("tiny")

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[str]:
    """Runs a worker with this /tokenize; yields its ip:port."""
    application = web.Application(client_max_size=8 * 1024 * 1024)
    application.add_routes([web.post("/tokenize", answer)])
    runner = web.AppRunner(application, shutdown_timeout=0.01, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    yield f"{host}:{port}"
    await runner.cleanup()


class Asked:
    """A tokenizer of one model, its workers with their failures, and what it counted."""

    def __init__(
        self,
        *workers: str,
        deadline_ms: int = 5_000,
        cache_bytes: int = 0,
        probe_seconds: tuple[float, float] = PROBE_SECONDS,
        max_flights: int = 9,
    ) -> None:
        self.counts: Counter[str] = Counter()
        options = schema.RemoteTokenizerSettings(deadline_ms=deadline_ms, cache_bytes=cache_bytes)
        self.workers = {worker: Failures(probe_seconds=probe_seconds) for worker in workers}
        self.tokenizer = RemoteTokenizer(
            MODEL, options, lambda: self.workers, self._count, max_flights
        )

    def _count(self, outcome: str) -> None:
        self.counts[outcome] += 1

    async def reason(self, text: str = "hello") -> str:
        """Returns why a text is not tokenized; "" if it is."""
        try:
            await self.tokenizer.encode(Text(text), None)
        except RequestError as error:
            return error.reason
        return ""


@asynccontextmanager
async def asking(*answers: Answer, **options: Any) -> AsyncIterator[Asked]:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(server(answer)) for answer in answers]
        asked = Asked(*workers, **options)
        stack.push_async_callback(asked.tokenizer.close)
        yield asked


async def well(request: web.Request) -> web.Response:
    return web.json_response({"count": 1, "tokens": [len((await request.json())["prompt"])]})


async def hanging(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def closing(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


def saying(body: bytes, status: int = 200) -> Answer:
    async def say(_: web.Request) -> web.Response:
        headers = {"Location": "/tokenize"}
        return web.Response(body=body, status=status, headers=headers)

    return say


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" " * 65_536)


async def test_remote_tokens_equal_those_of_the_model_files() -> None:
    local = Tokenizer.load(schema.Model("tiny", tokenizer=str(TINY_MODEL)))
    assert local is not None
    async with running(Settings(model="tiny", loras=("ad",))) as worker:
        asked = Asked(worker.endpoint)
        for prompt in (CHAT, Text("hello there"), Text("a" * 100_000)):
            for model in (None, "tiny", "ad"):
                assert await asked.tokenizer.encode(prompt, model) == local.encode(prompt)
        await asked.tokenizer.close()


async def test_token_ids_need_no_question() -> None:
    async with asking(saying(b"", 500)) as asked:
        ids = array("I", [1, 2])
        assert await asked.tokenizer.encode(ids, None) is ids
        assert await asked.tokenizer.encode(TokenIds(ids), None) is ids
        assert not asked.counts


async def test_repeated_prompt_is_found_in_the_cache() -> None:
    async with server(well) as worker:
        asked = Asked(worker, cache_bytes=10_000)
        assert await asked.tokenizer.encode(Text("abc"), None) == array("I", [3])
        asked.workers.clear()
        assert await asked.tokenizer.encode(Text("abc"), None) == array("I", [3])
        assert asked.counts == {"answered": 1, "cached": 1}
        await asked.tokenizer.close()


async def test_equal_prompts_in_parallel_ask_once() -> None:
    release = asyncio.Event()
    questions = 0

    async def late(request: web.Request) -> web.Response:
        nonlocal questions
        questions += 1
        await release.wait()
        return await well(request)

    async with asking(late) as asked:
        first, *others = [asyncio.create_task(asked.reason()) for _ in range(5)]
        await until(lambda: questions > 0)
        first.cancel()  # a waiter that leaves takes nothing from the others
        release.set()
        assert await asyncio.gather(*others) == [""] * 4
        assert (questions, asked.counts) == (1, {"answered": 1, "joined": 4})


async def test_connections_are_reused() -> None:
    ports: set[object] = set()

    async def noting(request: web.Request) -> web.Response:
        assert request.transport is not None
        ports.add(request.transport.get_extra_info("peername"))
        return await well(request)

    async with asking(noting) as asked:
        assert [await asked.reason(str(n)) for n in range(20)] == [""] * 20
        assert len(ports) == 1


@pytest.mark.parametrize(
    "bad",
    [
        saying(b"", 500), saying(b"", 404), saying(b"", 307), saying(b"<html>"),
        saying(b'{"tokens": [-1]}'), saying(b'{"tokens": [1, 2], "count": 3}'), closing, endless,
    ],
)  # fmt: skip
async def test_failing_worker_is_replaced_by_another_and_then_avoided(bad: Answer) -> None:
    async with asking(bad) as asked:
        reasons = [await asked.reason() for _ in range(4)]
        assert reasons == ["tokenizer_failed"] * 3 + ["tokenizer_unavailable"]
    async with asking(bad, well) as asked:
        assert [await asked.reason(str(n)) for n in range(8)] == [""] * 8


async def test_absent_worker_is_replaced_by_another() -> None:
    async with server(well) as gone:
        pass
    async with asking(well) as asked:
        asked.workers[gone] = Failures()
        assert [await asked.reason(str(n)) for n in range(8)] == [""] * 8


async def test_hanging_worker_costs_the_deadline_only_a_few_times() -> None:
    async with asking(hanging, deadline_ms=20) as asked:
        reasons = [await asked.reason() for _ in range(4)]
        assert reasons == ["tokenizer_timeout"] * 3 + ["tokenizer_unavailable"]


async def test_late_answers_to_long_questions_keep_a_worker_in_use() -> None:
    async with asking(hanging, deadline_ms=20) as asked:
        long = "a" * remote_tokenizer.FAIR_QUESTION_BYTES
        assert [await asked.reason(long) for _ in range(5)] == ["tokenizer_timeout"] * 5


async def test_refusal_does_not_count_as_a_failure_of_the_worker() -> None:
    async with asking(saying(b"{}", 422)) as asked:
        assert [await asked.reason(str(n)) for n in range(5)] == ["tokenizer_refused"] * 5


async def test_recovered_worker_is_found_by_a_probe() -> None:
    is_well = False
    prompts: list[str] = []

    async def sometimes(request: web.Request) -> web.Response:
        if not is_well:
            return web.Response(status=503)
        prompts.append(json.loads(await request.read())["prompt"])
        return await well(request)

    async with asking(sometimes, probe_seconds=(0.001, 0.001)) as asked:
        while await asked.reason("mine") != "tokenizer_unavailable":
            pass
        is_well = True
        async with asyncio.timeout(60):
            while await asked.reason("mine"):
                pass
        assert prompts[0] == "probe"


async def test_parallel_questions_are_bounded() -> None:
    async with asking(hanging, max_flights=1) as asked:
        first = asyncio.create_task(asked.reason("a"))
        await until(lambda: bool(asked.tokenizer.flights))
        assert await asked.reason("b") == "tokenizer_unavailable"
        first.cancel()


async def test_missing_workers_are_reported_at_once() -> None:
    asked = Asked()
    assert await asked.reason() == "tokenizer_unavailable"
    await asked.tokenizer.close()


async def test_failures_of_removed_workers_are_forgotten() -> None:
    parsed = parse(
        "models: [{name: tiny, tokenizer: {remote: true}}]\ndiscovery: {file: w.yaml}",
        "kvsteer.yaml",
    )
    workers = Workers(parsed, FollowedWorkers(1, lambda: 0.0), lambda _: [])
    tokenizer = remote_tokenizers(parsed, workers, Metrics(workers.states))["tiny"]
    failing = []
    for network in range(3):
        fleet = [schema.WorkerSettings(f"127.0.{network + 1}.{host}:9") for host in range(1, 21)]
        await workers.replace(merged({"file": listed(fleet)}))
        for prompt in range(200):
            with contextlib.suppress(RequestError):
                await tokenizer.encode(Text(str(prompt)), None)
        failing.append(
            len([one for one in workers.candidates.tokenizers("tiny").values() if one.count])
        )
    await workers.replace({})
    assert (failing, workers.candidates.tokenizers("tiny")) == ([20, 20, 20], {})
    await tokenizer.close()
    await workers.close()


async def test_failure_of_a_worker_removed_during_its_question_is_forgotten() -> None:
    async with asking(hanging, deadline_ms=200) as asked:
        question = asyncio.create_task(asked.reason())
        await until(lambda: bool(asked.tokenizer.flights))
        before = dict(asked.workers)
        asked.workers = {worker: Failures() for worker in before}  # another worker at its address
        assert await question == "tokenizer_timeout"
        assert [one.count for one in before.values()] == [1]
        assert [one.count for one in asked.workers.values()] == [0]
