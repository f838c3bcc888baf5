"""Golden requests end to end: workers over real sockets are asked for tokens, and judged."""

import asyncio
import contextlib
import itertools
import json
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Self

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from extproc.base.engine import SGLANG, VLLM, Engine, Release
from extproc.config.reader import parse
from extproc.config.schema import Model
from extproc.fleet.asking.asking_times import AskingTimes
from extproc.fleet.asking.surroundings import Surroundings
from extproc.fleet.proof.verifying import VerifiedCollector
from extproc.fleet.workers import Workers
from extproc.observing.metrics import Metrics
from extproc.proof.golden import GOLDEN, MAX_ANSWER_BYTES
from extproc.proof.state import TokenProof
from extproc.requests import responses_request
from extproc.requests.dialect import Dialect, dialect_of, rivals_of
from extproc.requests.prompt import (
    CONVERSATION,
    CONVERTED,
    GIVEN,
    INLINE_SYSTEM,
    NO_TOOLS,
    PRINTED,
    ROLES,
    TOOLS,
)
from extproc.requests.request import CHAT_PATH, Head
from extproc.requests.request import parse as parse_request
from extproc.serving.router import Router
from extproc.tokenizing.tokens import Tokenizer
from kvstate.events import Loss
from kvstate.feeds.feed import FeedState
from kvstate.fleet import FollowedWorkers
from kvstate.following.worker_feeds import WorkerFeeds
from kvtools.simulator.server import running as simulated
from kvtools.simulator.settings import TINY_MODEL, Settings
from tests.extproc.template_shapes import QWEN_TOOLS
from tests.faults import said
from tests.ports import free_port
from tests.waiting import until

OWN = (TINY_MODEL / "chat_template.jinja").read_text()
CONFIG = """
models: [{{name: tiny, tokenizer: "{tokenizer}", verify: {verify}}}]
workers: [{workers}]
"""
PLAIN: dict[str, Any] = {"messages": [{"role": "user", "content": "hi " * 40}]}

# Those of every model, and two with the added tokens of this one.
OF_MODEL = len(GOLDEN) + 2


# The waits between questions are short: tests would have to wait for them.
SOON = AskingTimes(
    tokens_least_seconds=0.05,
    tokens_different_seconds=0.05,
    tokens_different_spread_seconds=0.05,
    tokens_retry_seconds=(0.05, 0.1),
)


class ShownFeeds(WorkerFeeds):
    """No feeds, which may be shown as if there were some."""

    is_live = False

    def state(self, worker: str) -> FeedState:
        return FeedState.LIVE if self.is_live else super().state(worker)


class ShownWorkers(FollowedWorkers):
    """Workers with such feeds."""

    def __init__(self) -> None:
        super().__init__(1, lambda: 0.0)
        self.feeds: ShownFeeds = ShownFeeds(self._ranks, lambda: 0.0)


class Before:
    """A router in front of these workers, without feeds."""

    def __init__(
        self,
        *endpoints: str,
        verify: str = "start",
        engine: str = "",
        times: AskingTimes = SOON,
        model: Path = TINY_MODEL,
        kind: type[Tokenizer] = Tokenizer,
    ) -> None:
        of_engine = f", engine: {engine}" if engine else ""
        listed = ", ".join(f'{{endpoint: "{one}"{of_engine}}}' for one in endpoints)
        config = parse(CONFIG.format(tokenizer=model, workers=listed, verify=verify), "c")
        tokenizer = kind.load(config.models[0])
        assert tokenizer is not None
        tokenizers = {"tiny": tokenizer}
        self.fleet = ShownWorkers()
        self.workers = Workers(
            config,
            self.fleet,
            lambda _: [],
            encoders=tokenizers,
            surroundings=Surroundings(times=times),
        )
        self.router = Router(
            config, self.workers, tokenizers, Metrics(self.workers.states), Random(0)
        )

    async def __aenter__(self) -> Self:
        await self.workers.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.router.close()
        await self.workers.close()

    @property
    def told(self) -> dict[str, Any]:
        """What GET /models shows about the model."""
        (shown,) = self.workers.engines.verifying.models_as_json()
        return shown

    async def until(self, result: str) -> dict[str, Any]:
        await until(lambda: self.told["state"] == result)
        return self.told

    def differs(self) -> list[bool]:
        """Whether GET /workers shows that the tokens differ, for each worker."""
        return [one["tokens"]["state"] == "refuted" for one in self.workers.states.statuses()]

    async def picked(self, body: dict[str, Any]) -> str:
        """Where a request goes; it goes somewhere, whatever is wrong with tokens."""
        explained = await self.router.explain(
            Head("POST", CHAT_PATH, None), json.dumps(body).encode()
        )
        (pick,) = explained["pick"][:1]
        return str(pick)

    def metric(self, result: str) -> float | None:
        registry = CollectorRegistry()
        registry.register(VerifiedCollector(self.workers.engines.verifying.of_models))
        return registry.get_sample_value(
            "kvsteer_model_verified", {"model": "tiny", "result": result}
        )


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def engine(answer: Answer) -> AsyncIterator[str]:
    """Runs an engine whose POST /tokenize answers like this; yields its host:port."""
    application = web.Application()
    application.router.add_post("/tokenize", answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def template(folder: Path, source: str) -> Path:
    file = folder / "template.jinja"
    file.write_text(source)
    return file


async def test_right_template_is_verified_at_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvsteer.tokens")
    async with (
        simulated(Settings()) as one,
        simulated(Settings()) as two,
        Before(one.endpoint, two.endpoint) as before,
    ):
        # what a worker stores may prove its forms before all golden requests are compared
        await until(lambda: before.told["workers"]["proved"] == 2 and not before.told["why"])
        assert before.told["state"] == "proved"
        assert before.told["compared"] == OF_MODEL
        assert before.metric("proved") == 1
        assert before.metric("refuted") == 0
        assert said(before.workers.engines.verifying) == ""
    assert caplog.text.count("its tokens match those of worker") == 1


WRONG = {
    "system line": ("<|im_start|>system\nYou help.<|im_end|>\n" + OWN, "chat template", 1),
    "one byte": (OWN.replace("'<|im_end|>' + '\n'", "'<|im_end|>'"), "white space differs", 22),
    "no prompt": (OWN.replace("{% if add_generation_prompt %}", "{% if false %}"), "end diff", 23),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_wrong_template_is_named_and_trusted_again_once_mended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    caplog.set_level(logging.INFO, "kvsteer.tokens")
    source, cause, position = WRONG[wrong]
    listen = f"127.0.0.1:{free_port()}"
    async with Before(listen) as before:
        async with simulated(Settings(listen=listen, chat_template=template(tmp_path, source))):
            told = await before.until("refuted")
            assert (told["request"], told["position"]) == ("a conversation", position)
            assert cause in told["cause"]
            assert told["forms"]["conversations"]["state"] == "refuted"
            assert before.differs() == [True]
            assert before.metric("refuted") == 1
            assert "found to differ" in said(before.workers.engines.verifying)
            assert await before.picked(PLAIN) == listen
        async with simulated(Settings(listen=listen)):
            await before.until("proved")
            assert before.differs() == [False]
    assert caplog.text.count("its tokens differ from those of worker") == 1
    assert caplog.text.count("its tokens match those of worker") == 1


async def test_difference_in_one_form_of_request_affects_only_that_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = OWN + "{% if tools %}tools{% endif %}"
    wrong = Settings(chat_template=template(tmp_path, source))
    async with simulated(wrong) as worker, Before(worker.endpoint) as before:
        told = await before.until("refuted")
        assert told["request"] == "a conversation with tools"
        assert "tools are rendered differently" in told["cause"]
        assert [name for name, one in told["forms"].items() if one["state"] == "refuted"] == [
            "conversations with tools"
        ]
        proofs = before.workers.proofs
        (name,) = before.workers.records
        before.fleet.feeds.is_live = True
        assert proofs.trust_for(CONVERSATION).state(name) == "live"
        assert proofs.trust_for(CONVERSATION | TOOLS).state(name) == "differs"


async def test_difference_of_one_worker_is_named_among_others(tmp_path: Path) -> None:
    wrong = Settings(chat_template=template(tmp_path, "x" + OWN))
    async with (
        simulated(Settings()) as right,
        simulated(wrong) as other,
        Before(right.endpoint, other.endpoint) as before,
    ):
        told = await before.until("refuted")
        await until(lambda: before.told["workers"]["proved"] == 1)
        assert told["worker"] == other.endpoint
        assert before.differs() == [False, True]


@pytest.mark.parametrize("dialect", ["trtllm", "sglang-0.5.22"])
async def test_engine_without_tokenize_is_not_verified_and_still_serves(
    dialect: str,
) -> None:
    async with simulated(Settings(dialect=dialect)) as worker, Before(worker.endpoint) as before:
        await until(lambda: "status 40" in before.told["why"])
        assert before.told["state"] == "unproved"
        assert before.differs() == [False]
        assert "not proved by worker" in said(before.workers.engines.verifying)
        assert await before.picked(PLAIN) == worker.endpoint


async def test_late_worker_is_verified_when_it_comes() -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with Before(listen) as before:
        await until(lambda: "Error" in before.told["why"])
        assert before.told["state"] == "unproved"
        assert await before.picked(PLAIN) == listen
        async with simulated(Settings(listen=listen)):
            await before.until("proved")


async def test_verify_off_asks_no_worker() -> None:
    async def refuse(_: web.Request) -> web.Response:
        raise AssertionError

    async with engine(refuse) as endpoint, Before(endpoint, verify="off") as before:
        assert "tokens" not in before.workers.records[endpoint].polls
        assert before.told["state"] == "off"
        assert said(before.workers.engines.verifying) == ""


async def test_hanging_worker_delays_no_other_verification() -> None:
    async def hang(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with (
        engine(hang) as endpoint,
        simulated(Settings()) as well,
        Before(endpoint, well.endpoint, times=replace(SOON, tokens_answer_seconds=0.3)) as before,
    ):
        assert await before.picked(PLAIN)
        await before.until("proved")
        hanging = before.workers.records[endpoint].proof
        await until(lambda: "within 0.3 s" in hanging.summary.reason)
        assert before.differs() == [False, False]


async def test_endless_answer_is_read_up_to_its_limit_and_blocks_nothing() -> None:
    sent_bytes: list[int] = []

    async def flood(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        sent_bytes.append(0)
        number = len(sent_bytes) - 1
        with contextlib.suppress(OSError):
            for piece in itertools.chain([b'{"tokens": ['], itertools.repeat(b"1," * 32_768)):
                await response.write(piece)
                sent_bytes[number] += len(piece)
        return response

    async with (
        engine(flood) as endpoint,
        simulated(Settings()) as well,
        Before(endpoint, well.endpoint) as before,
    ):
        assert await before.picked(PLAIN)
        await before.until("proved")
        flooding = before.workers.records[endpoint].proof
        await until(lambda: "an answer of more than" in flooding.summary.reason)
        assert before.differs() == [False, False]
        assert max(sent_bytes) < 32 * 2**20  # what the system keeps of a connection


HOSTILE: dict[str, Any] = {
    "huge": b'{"tokens": [' + b"1," * MAX_ANSWER_BYTES + b"1]}",
    "wrong types": b'{"tokens": ["a", null, {}], "count": 3}',
    "too large an id": b'{"tokens": [4294967296]}',
    "negative": b'{"tokens": [-1]}',
    "no list": b'{"tokens": 7}',
    "empty": b'{"tokens": []}',
    "deep": b'{"tokens": ' + b"[" * 20_000,
    "no JSON": b"\xff\xfe<html>",
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_answer_is_no_evidence(name: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=HOSTILE[name], content_type="application/json")

    async with engine(answer) as endpoint, Before(endpoint) as before:
        await until(lambda: "an answer" in before.told["why"])
        assert before.told["state"] == "unproved"
        assert before.differs() == [False]
        assert await before.picked(PLAIN) == endpoint


async def test_difference_with_unknown_token_ids_is_shown_without_text() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"tokens": [4_294_967_295] * 4_000, "count": 4_000})

    async with engine(answer) as endpoint, Before(endpoint) as before:
        told = await before.until("refuted")
        assert (told["position"], told["engine"]) == (0, 4_294_967_295)
        assert len(told["why"]) < 400


async def test_difference_persists_while_its_worker_fails(tmp_path: Path) -> None:
    """A difference must not be forgotten because the engine is being restarted."""
    listen = f"127.0.0.1:{free_port()}"
    wrong = Settings(listen=listen, chat_template=template(tmp_path, "x" + OWN))
    async with Before(listen) as before:
        async with simulated(wrong):
            await before.until("refuted")
        record = before.workers.records[listen]
        asked_at = record.golden_questions.at
        await until(lambda: record.golden_questions.at > asked_at + 0.2)
        assert before.told["state"] == "refuted"


async def test_worker_whose_cache_is_emptied_is_verified_at_once(tmp_path: Path) -> None:
    """It may have been restarted with another template."""
    listen = f"127.0.0.1:{free_port()}"
    async with Before(listen) as before:
        async with simulated(Settings(listen=listen)):
            await before.until("proved")
        wrong = Settings(listen=listen, chat_template=template(tmp_path, "x" + OWN))
        async with simulated(wrong):
            before.workers.note_emptied(listen, Loss.RESTARTED)
            await before.until("refuted")


class Dated(Tokenizer):
    """Before midnight it renders another date."""

    calls: ClassVar[list[object]] = []

    def encode(self, prompt: Any, *rest: Any) -> Any:
        self.calls.append(prompt)
        tokens = super().encode(prompt, *rest)
        return tokens if len(self.calls) > OF_MODEL else tokens[1:]


async def test_date_change_during_verification_is_no_difference() -> None:
    """What the router rendered before midnight is rendered again before it counts."""
    Dated.calls.clear()
    async with simulated(Settings()) as worker, Before(worker.endpoint, kind=Dated) as before:
        await before.until("proved")
        assert len(Dated.calls) == 2 * OF_MODEL


class ChatPath:
    """An engine that renders chat completions, or answers them with their ids, in its dialect.

    status: of its render path. wrong: its ids of prompts with calls are other ones. dialect: the
    one that it speaks, None for the engine's. model: the folder of its model.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        status: int = 200,
        wrong: bool = False,
        dialect: Dialect | None = None,
        model: Path = TINY_MODEL,
    ) -> None:
        self._dialect = dialect or dialect_of(engine)
        self._model = str(model)
        self._status, self._wrong = status, wrong
        self.asked: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path.removesuffix("/render")
        self.asked.append(request.path)
        is_rendered = path != request.path
        if is_rendered and (self._status != 200 or path != CHAT_PATH):
            return web.Response(status=self._status if path == CHAT_PATH else 404)
        body = await request.read()
        (prompt,) = parse_request(path, body, lambda _: self._dialect).prompts
        tokenizer = Tokenizer.load(Model("tiny", tokenizer=self._model))
        assert tokenizer is not None
        ids = list(tokenizer.encode(prompt))
        if path == responses_request.PATH:
            return web.json_response({"input_messages": [{"message": "", "tokens": ids}]})
        if self._wrong and b"tool_calls" in body:
            ids[-1] = 0
        return web.json_response({"token_ids" if is_rendered else "prompt_token_ids": ids})


@asynccontextmanager
async def chat_engine(path: ChatPath) -> AsyncIterator[str]:
    """Runs an engine that answers on its chat path only; yields its host:port."""
    application = web.Application()
    application.router.add_post("/v1/{name:.*}", path.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def proof(before: Before) -> TokenProof:
    (record,) = before.workers.records.values()
    return record.proof


@pytest.mark.parametrize("status", [200, 403])
async def test_form_of_releases_is_proved_by_the_chat_path_of_its_engine(status: int) -> None:
    path = ChatPath(Engine(SGLANG, Release(0, 5, 23)), status=status)
    async with (
        chat_engine(path) as endpoint,
        Before(endpoint, engine="{name: sglang, version: 0.5.23}") as before,
    ):
        await until(lambda: proof(before).is_proved(CONVERTED))
        assert bool(path.asked.count(CHAT_PATH)) is (status != 200)
        assert proof(before).refuted == 0


async def test_form_that_no_path_shows_stays_unproved() -> None:
    path = ChatPath(Engine(VLLM, Release(0, 32)))
    async with (
        chat_engine(path) as endpoint,
        Before(endpoint, engine="{name: vllm, version: 0.32.0}") as before,
    ):
        await until(lambda: proof(before).is_proved(NO_TOOLS))
        assert not proof(before).is_proved(INLINE_SYSTEM)


VLLM_0_24 = Engine(VLLM, Release(0, 24))
OF_VLLM_0_24 = "{name: vllm, version: 0.24.0}"


async def test_worker_shows_how_it_prints_tools(tmp_path: Path) -> None:
    shutil.copytree(TINY_MODEL, tmp_path / "m")
    (tmp_path / "m/chat_template.jinja").write_text(QWEN_TOOLS)
    spoken = rivals_of(dialect_of(VLLM_0_24))[1]
    path = ChatPath(VLLM_0_24, status=403, dialect=spoken, model=tmp_path / "m")
    async with (
        chat_engine(path) as endpoint,
        Before(endpoint, engine=OF_VLLM_0_24, model=tmp_path / "m") as before,
    ):
        await until(lambda: proof(before).is_proved(PRINTED))
        record = before.workers.records[endpoint]
        assert before.workers.candidates.dialect_of(record) == spoken
        assert proof(before).refuted == 0


async def test_next_way_of_printing_is_tried_where_live_requests_differ() -> None:
    async with Before("127.0.0.1:9", engine=OF_VLLM_0_24, verify="off") as before:
        candidates, proofs = before.workers.candidates, before.workers.proofs
        (record,) = before.workers.records.values()
        for spoken in rivals_of(dialect_of(VLLM_0_24)):
            while candidates.dialect_of(record) != spoken:
                proofs.counted(record.name, PRINTED, 10, 12)
            assert record.proof.refuted == 0


async def test_form_that_the_chat_path_renders_otherwise_is_refuted() -> None:
    path = ChatPath(Engine(SGLANG, Release(0, 5, 23)), wrong=True)
    async with (
        chat_engine(path) as endpoint,
        Before(endpoint, engine="{name: sglang, version: 0.5.23}") as before,
    ):
        await until(lambda: proof(before).refuted & ~GIVEN == CONVERTED | ROLES)
