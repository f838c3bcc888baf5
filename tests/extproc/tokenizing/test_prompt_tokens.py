"""Which tokenizer is asked, where, and for how long; remote ones over real HTTP."""

import asyncio
import json
import threading
from array import array
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import generate_latest

from extproc.base.errors import RequestError
from extproc.config.reader import parse
from extproc.config.schema import Model
from extproc.fleet.workers import Workers
from extproc.observing.decisions import Timeline
from extproc.observing.metrics import Metrics
from extproc.requests.costly_json import INLINE_BYTES
from extproc.requests.prompt import (
    CONVERSATION,
    GIVEN,
    InferenceRequest,
    Prompt,
    Text,
    TokenIds,
)
from extproc.requests.request import CHAT_PATH, COMPLETIONS_PATH, Head, Models, RoutingRequest
from extproc.requests.request import parse as parse_request
from extproc.running.app import remote_tokenizers
from extproc.serving.queries import Queries
from extproc.serving.router import Router
from extproc.templates.chat_template import BUDGET_SECONDS
from extproc.tokenizing.prompt_tokens import (
    INLINE_SECONDS,
    MAX_WAITING,
    MAX_WAITING_BYTES,
    TOKENIZER_THREADS,
    KeyedPrompts,
    PromptTokens,
    ThreadUse,
)
from extproc.tokenizing.tokens import StartedPrompt, Tokenizer
from kvstate.fleet import FollowedWorkers
from kvtools.simulator.server import running
from kvtools.simulator.settings import TINY_MODEL, Settings
from tests.extproc.settled import at_once
from tests.extproc.tokenizing.test_remote_tokenizer import Answer, hanging, saying, server
from tests.waiting import until

CHAT = Head("POST", CHAT_PATH, None)


def chat(text: str = "hello") -> bytes:
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": text}]}).encode()


def configuration(endpoint: str, router_deadline_ms: int = 100, **options: Any) -> Any:
    tokenizer = json.dumps({"remote": True, **options})
    models = f"{{name: tiny, tokenizer: {tokenizer}}}, {{name: bare, tokenizer: {{remote: false}}}}"
    workers = f"{{endpoint: '{endpoint}', model: tiny}}"
    limits = f"extproc: {{deadline_ms: {router_deadline_ms}}}\nenvoy: {{message_timeout_ms: 5001}}"
    text = f"{limits}\nmodels: [{models}]\nworkers: [{workers}]"
    return parse(text, "c")


class Routed:
    """A router whose model is tokenized by its one worker."""

    def __init__(self, endpoint: str, **options: Any) -> None:
        config = configuration(endpoint, **options)
        workers = Workers(config, FollowedWorkers(12345678, lambda: 0.0), lambda _: [])
        self.metrics = Metrics(workers.states)
        self.remote = remote_tokenizers(config, workers, self.metrics)
        self.router = Router(config, workers, self.remote, self.metrics, Random(0))

    async def close(self) -> None:
        self.router.close()
        await asyncio.gather(*(one.close() for one in self.remote.values()))


async def test_worker_that_tokenizes_has_its_prompts_keyed() -> None:
    async with running(Settings()) as worker, aiohttp.ClientSession() as client:
        one = Routed(worker.endpoint, router_deadline_ms=5_000, deadline_ms=5_000)
        decision, _ = await one.router.route(RoutingRequest(CHAT, chat()))
        async with client.post(f"{worker.url}{CHAT_PATH}", data=chat()) as response:
            usage = (await response.json())["usage"]
        assert (decision.basis.prompt_tokens, decision.model) == (usage["prompt_tokens"], "tiny")
        assert set(one.remote) == {"tiny"}
        sample = b'kvsteer_remote_tokenizer_total{model="tiny",outcome="answered"} 1.0'
        assert sample in generate_latest(one.metrics)
        await one.close()


@pytest.mark.parametrize(
    ("answer", "deadline_ms", "reason"),
    [
        (hanging, 20, "tokenizer_timeout"),
        (hanging, 60_000, "deadline"),
        (saying(b"nonsense"), 60_000, "tokenizer_failed"),
        (saying(b"", 400), 60_000, "tokenizer_refused"),
    ],
)
async def test_missing_tokens_leave_the_pick_to_load(
    answer: Answer, deadline_ms: int, reason: str
) -> None:
    async with server(answer) as endpoint:
        one = Routed(endpoint, deadline_ms=deadline_ms)
        decision, ticket = await one.router.route(RoutingRequest(CHAT, chat()))
        assert decision.pick == (endpoint,)
        assert ticket is not None
        assert decision.basis.prompt_tokens == 0
        assert decision.reason == reason
        await one.close()


async def test_token_ids_need_no_worker() -> None:
    one = Routed("127.0.0.1:1")
    body = json.dumps({"model": "tiny", "prompt": [1, 2, 3]}).encode()
    decision, _ = await one.router.route(RoutingRequest(Head("POST", COMPLETIONS_PATH, None), body))
    assert decision.basis.prompt_tokens == 3
    await one.close()


async def test_ids_in_place_of_a_conversation_need_no_tokenizer() -> None:
    tokens = PromptTokens({}, 60.0)
    request = InferenceRequest("m", [TokenIds(array("I", [1, 2]))])
    expected = KeyedPrompts([array("I", [1, 2])], GIVEN)
    assert await tokens.tokenize(request, "tiny", 1) == expected
    assert tokens.tokenize_inline(request, "tiny", ThreadUse()) == expected
    tokens.close()


async def test_ids_of_a_response_count_where_the_model_is_known_not_to_be_rendered_in_code() -> (
    None
):
    class CodeRendering:
        renders_in_code = True

    templated: Any = Tokenizer.load(Model("tiny", tokenizer=str(TINY_MODEL)))
    known: dict[str, Any] = {"tiny": templated, "code": CodeRendering()}
    tokens = PromptTokens(known, 60.0)
    given = TokenIds(array("I", [1, 2]), is_response=True)
    request = InferenceRequest("m", [given])
    assert (await tokens.tokenize(request, "tiny", 1)).tokens == [given.ids]
    assert templated.encode(given) is given.ids
    for model in ("code", "other"):
        with pytest.raises(RequestError, match="unsupported_kv_transfer"):
            await tokens.tokenize(request, model, 1)
    tokens.close()


async def test_prompts_of_a_request_are_all_tokenized_and_truncated() -> None:
    async def length(asked: web.Request) -> web.Response:
        return web.json_response({"tokens": [7] * len((await asked.json())["prompt"])})

    async with server(length) as endpoint:
        one = Routed(endpoint, deadline_ms=5_000)
        tokens = PromptTokens(one.remote, 5.0)
        body = {"prompt": ["abc", "a"], "truncate_prompt_tokens": 2, "add_special_tokens": False}
        request = parse_request(COMPLETIONS_PATH, json.dumps(body).encode())
        found = (await tokens.tokenize(request, "tiny", 1)).tokens
        assert [each.tolist() for each in found] == [[7, 7], [7]]
        tokens.close()
        await one.close()


@pytest.mark.parametrize("text", ["hello", "word " * 3_000, "x" * INLINE_BYTES])
async def test_local_tokens_are_equal_inline_and_in_a_thread(text: str) -> None:
    config = parse(
        f"models: [{{name: tiny, tokenizer: '{TINY_MODEL}'}}]\nworkers: [{{endpoint: 'a:1'}}]", "c"
    )
    tokenizer = Tokenizer.load(config.models[0])
    assert tokenizer is not None
    tokens = PromptTokens({"tiny": tokenizer}, 60.0)
    request = parse_request(CHAT_PATH, chat(text))
    expected = [tokenizer.encode(request.prompts[0])]
    assert await tokens.tokenize(request, "tiny", len(chat(text))) == KeyedPrompts(
        expected, CONVERSATION
    )
    texts = parse_request(COMPLETIONS_PATH, json.dumps({"prompt": [text, text]}).encode())
    both = (await tokens.tokenize(texts, "tiny", 2 * len(text))).tokens
    assert both == [tokenizer.encode(prompt) for prompt in texts.prompts]
    tokens.close()


def turns(count: int) -> Any:
    messages = [{"role": "user", "content": "hello"}] * count
    return parse_request(CHAT_PATH, json.dumps({"messages": messages}).encode())


SLOW = "{% for m in messages if m.content %}{% for i in range(90000) %}{% endfor %}{% endfor %}a"


@pytest.mark.parametrize(
    ("template", "request_", "is_at_once"),
    [(None, turns(64), True), (None, turns(65), False), (SLOW, turns(1), False)],
)
async def test_slow_template_is_rendered_beside_the_loop(
    tmp_path: Path,
    template: str | None,
    request_: Any,
    is_at_once: bool,
) -> None:
    model = {"name": "tiny", "tokenizer": str(TINY_MODEL)}
    if template is not None:
        (tmp_path / "slow.jinja").write_text(template)
        model["chat_template"] = str(tmp_path / "slow.jinja")
    config = parse(json.dumps({"models": [model], "workers": [{"endpoint": "a:1"}]}), "c")
    tokenizer = Tokenizer.load(config.models[0])
    assert tokenizer is not None
    inline_seconds = 60.0 if template is None else INLINE_SECONDS  # nor on a busy machine
    tokens = PromptTokens({"tiny": tokenizer}, 60.0, inline_seconds=inline_seconds)
    expected = [tokenizer.encode(request_.prompts[0])]
    if is_at_once:
        assert at_once(tokens.tokenize(request_, "tiny", 1_000)).tokens == expected
    else:
        with pytest.raises(AssertionError, match="it waits"):
            at_once(tokens.tokenize(request_, "tiny", 1_000))
        assert (await tokens.tokenize(request_, "tiny", 1_000)).tokens == expected
    tokens.close()


@pytest.mark.parametrize("size", [1, MAX_WAITING_BYTES // 16])
async def test_waiting_prompts_are_bounded_in_number_and_bytes(size: int) -> None:
    tokens, may_end = PromptTokens({}, 60.0), threading.Event()
    most = min(MAX_WAITING, MAX_WAITING_BYTES // size)
    waiting = [asyncio.create_task(tokens.run_in_thread(may_end.wait, size)) for _ in range(most)]
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="too_many_waiting"):
        await tokens.run_in_thread(may_end.wait, size)
    may_end.set()
    assert await asyncio.gather(*waiting) == [True] * most
    assert await tokens.run_in_thread(may_end.wait, size)
    tokens.close()


@pytest.mark.parametrize("size", [1, MAX_WAITING_BYTES // 16])
async def test_prompts_of_one_client_leave_room_for_those_of_others(size: int) -> None:
    tokens, may_end = PromptTokens({}, 60.0), threading.Event()

    def wait(whose: bytes) -> asyncio.Task[bool]:
        return asyncio.create_task(tokens.run_in_thread(may_end.wait, size, None, whose))

    greedy = [wait(b"greedy") for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    others = [wait(b"%d" % n) for n in range(3)]
    await asyncio.sleep(0)
    may_end.set()
    assert await asyncio.gather(*others) == [True] * 3
    refused = [
        one for one in await asyncio.gather(*greedy, return_exceptions=True) if one is not True
    ]
    assert len(greedy) - len(refused) == 3 * min(MAX_WAITING, MAX_WAITING_BYTES // size) // 4
    assert tokens.waiting == 0
    tokens.close()


async def test_waiting_prompt_is_dropped_at_its_deadline() -> None:
    tokens, may_end, begun = PromptTokens({}, 0.05), threading.Event(), []

    def work() -> None:
        begun.append(True)
        may_end.wait()

    late = await asyncio.gather(
        *[tokens.run_in_thread(work, 1) for _ in range(9)], return_exceptions=True
    )
    assert {type(one) for one in late} == {TimeoutError}
    may_end.set()
    tokens.deadline_seconds = 60.0
    await tokens.run_in_thread(may_end.wait, 1)
    assert len(begun) == TOKENIZER_THREADS
    tokens.close()


class Endless(Tokenizer):
    """A tokenizer that does not come back until it is told to."""

    may_end = threading.Event()

    def start(self, prompt: Prompt, render_seconds: float = BUDGET_SECONDS) -> StartedPrompt:
        del prompt
        if render_seconds < BUDGET_SECONDS:
            raise RequestError("template_too_slow")  # so that a thread renders it
        self.may_end.wait()
        return StartedPrompt(0, is_cheap=True, finish=lambda: array("I"))


async def test_hanging_model_loses_its_tokens_and_spares_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    honest = Tokenizer.load(Model("tiny", tokenizer=str(TINY_MODEL)))
    endless = Endless.load(Model("endless", tokenizer=str(TINY_MODEL)))
    assert honest is not None
    assert isinstance(endless, Endless)
    hung = {f"endless {n}": endless for n in range(TOKENIZER_THREADS + 1)}
    tokens = PromptTokens({"tiny": honest, **hung}, 0.02, hung_seconds=0.05)
    asked = InferenceRequest("any", [Text("a prompt")])
    for model in hung:
        with pytest.raises(TimeoutError):
            await tokens.tokenize(asked, model, 1)
        await until(lambda said=f"model {model}: its template": said in caplog.text)  # type: ignore[misc]
        with pytest.raises(RequestError, match="tokenizer_hung"):
            await tokens.tokenize(asked, model, 1)
    tokens.deadline_seconds = 60.0  # a busy machine may start no thread within 20 ms
    assert await tokens.run_in_thread(lambda: "done", 1, ThreadUse("tiny")) == "done"
    assert await tokens.tokenize(asked, "tiny", 1)
    endless.may_end.set()
    tokens.close()


async def test_model_that_hangs_on_a_large_body_is_noticed_and_takes_no_further_thread() -> None:
    begun = []

    class Counted(Endless):
        may_end = threading.Event()

        def start(self, prompt: Prompt, render_seconds: float = BUDGET_SECONDS) -> StartedPrompt:
            begun.append(prompt)
            return super().start(prompt, render_seconds)

    endless = Counted.load(Model("endless", tokenizer=str(TINY_MODEL)))
    assert isinstance(endless, Counted)
    tokens = PromptTokens({"endless": endless}, 0.02, hung_seconds=0.05)
    queries = Queries(Models([Model("endless")]), tokens)
    body = json.dumps({"model": "endless", "prompt": "a" * 4 * INLINE_BYTES}).encode()
    ask = RoutingRequest(Head("POST", COMPLETIONS_PATH, None), body)
    assert (await queries.make_query(ask, Timeline.begin(monotonic))).reason == "deadline"
    await until(lambda: tokens.is_hung("endless"))
    tokens.deadline_seconds = 60.0  # a busy machine needs more than 20 ms to read the body
    assert (await queries.make_query(ask, Timeline.begin(monotonic))).reason == "tokenizer_hung"
    assert len(begun) == 1
    endless.may_end.set()
    tokens.close()
