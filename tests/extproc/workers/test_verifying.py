"""Golden requests end to end: workers over real sockets are asked for tokens, and judged."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, Self

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from extproc.checking.golden import GOLDEN
from extproc.config.reader import parse
from extproc.observing.metrics import Metrics
from extproc.requests.prompt import CONVERSATION, TOOLS
from extproc.requests.request import CHAT_PATH, Head
from extproc.router import Router
from extproc.tokenizing.tokens import Tokenizer
from extproc.workers import verifying
from extproc.workers.verifying import MAX_ANSWER_BYTES, VerifiedCollector
from extproc.workers.workers import Workers
from kvstate.feeds.feed import State
from kvstate.fleet import Fleet
from simulator.server import running as simulated
from simulator.settings import TINY_MODEL, Settings
from tests.extproc.workers.asked import until
from tests.ports import free_port

OWN = (TINY_MODEL / "chat_template.jinja").read_text()
CONFIG = """
models: [{{name: tiny, tokenizer: "{tokenizer}", verify: {verify}}}]
workers: [{workers}]
"""
PLAIN: dict[str, Any] = {"messages": [{"role": "user", "content": "hi " * 40}]}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the waits between questions, for which tests would have to wait."""
    waits = ("LEAST_SECONDS", "AGAIN_WHILE_DIFFERENT_SECONDS")
    for name in (*waits, "AGAIN_WHILE_DIFFERENT_SECONDS_A_WORKER"):
        monkeypatch.setattr(verifying, name, 0.05)
    monkeypatch.setattr(verifying, "RETRY_SECONDS", (0.05, 0.1))


class Before:
    """A router in front of these workers, without feeds."""

    def __init__(self, *endpoints: str, verify: str = "start") -> None:
        listed = ", ".join(f'{{endpoint: "{one}"}}' for one in endpoints)
        config = parse(CONFIG.format(tokenizer=TINY_MODEL, workers=listed, verify=verify), "c")
        tokenizer = Tokenizer.load(config.models[0])
        assert tokenizer is not None
        tokenizers = {"tiny": tokenizer}
        self.workers = Workers(config, Fleet(1, lambda: 0.0), lambda _: [], tokenizers=tokenizers)
        self.router = Router(config, self.workers, tokenizers, Metrics(self.workers), Random(0))

    async def __aenter__(self) -> Self:
        await self.workers.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.router.close()
        await self.workers.close()

    @property
    def told(self) -> dict[str, Any]:
        """What GET /models shows about the model."""
        (shown,) = self.workers.verifying.shown()
        return shown

    async def until(self, result: str) -> dict[str, Any]:
        await until(lambda: self.told["result"] == result)
        return self.told

    def differs(self) -> list[bool]:
        """Whether GET /workers shows that the tokens differ, for each worker."""
        return [one["tokens"]["differs"] for one in self.workers.status()]

    async def picked(self, body: dict[str, Any]) -> str:
        """Where a request goes; it goes somewhere, whatever is wrong with tokens."""
        explained = await self.router.explain(
            Head("POST", CHAT_PATH, None), json.dumps(body).encode()
        )
        (pick,) = explained["pick"][:1]
        return str(pick)

    def metric(self, result: str) -> float | None:
        registry = CollectorRegistry()
        registry.register(VerifiedCollector(self.workers.verifying.of_models))
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


async def test_the_right_template_is_verified_at_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvsteer.tokens")
    async with (
        simulated(Settings()) as one,
        simulated(Settings()) as two,
        Before(one.endpoint, two.endpoint) as before,
    ):
        await until(lambda: before.told["workers"]["verified"] == 2)
        assert (before.told["result"], before.told["why"]) == ("verified", "")
        assert before.told["compared"] == len(GOLDEN)
        assert before.metric("verified") == 1
        assert before.metric("differs") == 0
        assert before.workers.verifying.note() == ""
    assert caplog.text.count("its tokens match those of worker") == 1


WRONG = {
    "system line": ("<|im_start|>system\nYou help.<|im_end|>\n" + OWN, "chat template", 1),
    "one byte": (OWN.replace("'<|im_end|>' + '\n'", "'<|im_end|>'"), "white space differs", 22),
    "no prompt": (OWN.replace("{% if add_generation_prompt %}", "{% if false %}"), "end diff", 23),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_planted_wrong_template_is_named_and_trusted_again_once_it_is_mended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    caplog.set_level(logging.INFO, "kvsteer.tokens")
    source, cause, position = WRONG[wrong]
    listen = f"127.0.0.1:{free_port()}"
    async with Before(listen) as before:
        async with simulated(Settings(listen=listen, chat_template=template(tmp_path, source))):
            told = await before.until("differs")
            assert (told["request"], told["position"]) == ("a conversation", position)
            assert cause in told["cause"]
            assert "conversations" in told["forms"]
            assert before.differs() == [True]
            assert before.metric("differs") == 1
            assert "found to differ" in before.workers.verifying.note()
            assert await before.picked(PLAIN) == listen
        async with simulated(Settings(listen=listen)):
            await before.until("verified")
            assert before.differs() == [False]
    assert caplog.text.count("its tokens differ from those of worker") == 1
    assert caplog.text.count("its tokens match those of worker") == 1


async def test_only_requests_of_the_form_that_differs_are_routed_approximately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = OWN + "{% if tools %}tools{% endif %}"
    wrong = Settings(chat_template=template(tmp_path, source))
    async with simulated(wrong) as worker, Before(worker.endpoint) as before:
        told = await before.until("differs")
        assert told["request"] == "a conversation with tools"
        assert "tools are rendered differently" in told["cause"]
        assert told["forms"] == ["conversations with tools"]
        checks = before.workers.checks
        (name,) = before.workers.records
        monkeypatch.setattr(before.workers._fleet, "state", lambda _: State.LIVE)
        assert checks.of(CONVERSATION).state(name) == "live"
        assert checks.of(CONVERSATION | TOOLS).state(name) == "differs"


async def test_one_worker_that_differs_is_named_among_others(tmp_path: Path) -> None:
    wrong = Settings(chat_template=template(tmp_path, "x" + OWN))
    async with (
        simulated(Settings()) as right,
        simulated(wrong) as other,
        Before(right.endpoint, other.endpoint) as before,
    ):
        told = await before.until("differs")
        await until(lambda: before.told["workers"]["verified"] == 1)
        assert told["worker"] == other.endpoint
        assert before.differs() == [False, True]


@pytest.mark.parametrize("dialect", ["trtllm", "sglang-0.5.22"])
async def test_an_engine_that_cannot_tell_is_not_verified_and_serves_all_the_same(
    dialect: str,
) -> None:
    async with simulated(Settings(dialect=dialect)) as worker, Before(worker.endpoint) as before:
        await until(lambda: "status 40" in before.told["why"])
        assert before.told["result"] == "not_verified"
        assert before.differs() == [False]
        assert "not verified by worker" in before.workers.verifying.note()
        assert await before.picked(PLAIN) == worker.endpoint


async def test_a_worker_that_comes_late_is_verified_then() -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with Before(listen) as before:
        await until(lambda: "Error" in before.told["why"])
        assert before.told["result"] == "not_verified"
        assert await before.picked(PLAIN) == listen
        async with simulated(Settings(listen=listen)):
            await before.until("verified")


async def test_off_asks_nobody() -> None:
    async def refuse(_: web.Request) -> web.Response:
        raise AssertionError

    async with engine(refuse) as endpoint, Before(endpoint, verify="off") as before:
        assert not before.workers.records[endpoint].polls
        assert before.told["result"] == "off"
        assert before.workers.verifying.note() == ""


async def test_a_worker_that_hangs_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "TIMEOUT_SECONDS", 0.3)

    async def hang(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with (
        engine(hang) as endpoint,
        simulated(Settings()) as well,
        Before(endpoint, well.endpoint) as before,
    ):
        assert await before.picked(PLAIN)
        await before.until("verified")
        hanging = before.workers.records[endpoint].check
        await until(lambda: "within 0.3 s" in hanging.verification.why)
        assert before.differs() == [False, False]


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
async def test_a_hostile_answer_is_no_evidence(name: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=HOSTILE[name], content_type="application/json")

    async with engine(answer) as endpoint, Before(endpoint) as before:
        await until(lambda: "an answer" in before.told["why"])
        assert before.told["result"] == "not_verified"
        assert before.differs() == [False]
        assert await before.picked(PLAIN) == endpoint


async def test_ids_of_no_token_are_a_difference_that_is_shown_without_them() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"tokens": [4_294_967_295] * 4_000, "count": 4_000})

    async with engine(answer) as endpoint, Before(endpoint) as before:
        told = await before.until("differs")
        assert (told["position"], told["engine"]) == (0, 4_294_967_295)
        assert len(told["why"]) < 400


async def test_what_a_worker_told_holds_while_it_fails(tmp_path: Path) -> None:
    """A difference must not be forgotten because the engine is being restarted."""
    listen = f"127.0.0.1:{free_port()}"
    wrong = Settings(listen=listen, chat_template=template(tmp_path, "x" + OWN))
    async with Before(listen) as before:
        async with simulated(wrong):
            await before.until("differs")
        record = before.workers.records[listen]
        asked_at = record.questioned.at
        await until(lambda: record.questioned.at > asked_at + 0.2)
        assert before.told["result"] == "differs"


async def test_a_worker_that_lost_what_it_held_is_asked_at_once(tmp_path: Path) -> None:
    """It may have been restarted with another template."""
    listen = f"127.0.0.1:{free_port()}"
    async with Before(listen) as before:
        async with simulated(Settings(listen=listen)):
            await before.until("verified")
        wrong = Settings(listen=listen, chat_template=template(tmp_path, "x" + OWN))
        async with simulated(wrong):
            before.workers.emptied(listen)
            await before.until("differs")


async def test_a_date_that_changed_between_two_looks_is_no_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the router rendered before midnight is rendered again before it counts."""
    async with simulated(Settings()) as worker:
        before = Before(worker.endpoint)
        (encoder,) = before.workers.verifying._encoders.values()
        encode, calls = encoder.encode, []

        def dated(prompt: Any) -> Any:
            calls.append(prompt)
            tokens = encode(prompt)
            return tokens if len(calls) > len(GOLDEN) else tokens[1:]

        monkeypatch.setattr(encoder, "encode", dated)
        async with before:
            await before.until("verified")
            assert len(calls) == 2 * len(GOLDEN)
