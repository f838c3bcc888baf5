"""Bodies, calls' arguments and a client's ids against vLLM's own front end, without an engine."""

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import pytest
import pytest_asyncio

from extproc.config.schema import Model
from extproc.observing.decisions import Timeline
from extproc.requests.dialect import NEWEST, ModelDialects
from extproc.requests.request import CHAT_PATH, Head, Models, RoutingRequest
from extproc.serving.queries import Queries
from extproc.tokenizing.prompt_tokens import PromptTokens
from extproc.tokenizing.tokens import Tokenizer
from kvtools.simulator.settings import TINY_MODEL
from tests.clients.rendering import PythonFrontEnd, RefusedError, rendering
from tests.engines import vllm_engine
from tests.extproc.template_shapes import QWEN_TOOLS

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1_800),
    pytest.mark.asyncio(loop_scope="module"),
]

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32")
USER = {"role": "user", "content": "Look it up."}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "an animal"}
NAN, HALF = float("nan"), "\ud83d"
PIECES = ("NaN", "1e400", "{", "[", "]", "}", '"a"', ":", ",", "1", " ", "null", '"\\ud83d"')
IDS = [*range(11, 43)]

Case = tuple[str, bytes]


class Both:
    """vLLM's renderer and KVSteer's reading of the same model."""

    def __init__(self, renderer: PythonFrontEnd, directory: Path) -> None:
        tokenizer = Tokenizer.load(Model("m", tokenizer=str(directory)))
        assert tokenizer is not None
        self._renderer = renderer
        tokens = PromptTokens({"m": tokenizer}, 60.0)
        self._queries = Queries(Models([Model("m")]), tokens, lambda _: ModelDialects(NEWEST))

    async def engines(self, path: str, body: bytes) -> list[int] | None:
        """The engine's ids, None if it refuses the body."""
        try:
            return await self._renderer.ids_of(path, body)
        except RefusedError:
            return None

    async def ours(self, path: str, body: bytes) -> list[int] | str:
        """KVSteer's ids, or why there are none."""
        request = RoutingRequest(Head("POST", path, None), body)
        query = await self._queries.make_query(request, Timeline.begin(monotonic))
        return list(query.prompts[0].tokens) if query.prompts else query.reason


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Both]:
    """Both, for the tiny model with a template that prints tools."""
    why = vllm_engine.missing()
    if why:
        pytest.skip(why)
    directory = tmp_path_factory.mktemp("model") / "m"
    shutil.copytree(TINY_MODEL, directory)
    (directory / "chat_template.jinja").write_text(QWEN_TOOLS)
    async with AsyncExitStack() as stack:
        renderer = await stack.enter_async_context(rendering(vllm_engine.PYTHON, directory))
        yield Both(renderer, directory)


def tools(maximum: float) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"n": {"type": "number", "maximum": maximum}}}
    return [{"type": "function", "function": {"name": "look_up", "parameters": parameters}}]


def chat(*turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [*turns], **fields}


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "look_up", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


def odd_bodies() -> list[Case]:
    """Bodies that no strict decoder reads, in every encoding."""
    bodies = [
        chat(USER),
        chat(USER, tools=tools(NAN)),
        chat(USER, tools=tools(float("-inf")), temperature=NAN),
        chat(USER, metadata={"a": HALF}),
        chat({"role": "user", "content": HALF}),
        chat({"role": "user", "content": [{"type": "text", "text": "a", "x": NAN}]}),
        chat(USER, chat_template_kwargs={"x": NAN}),
        chat(call('{"a": NaN}'), RESULT),
    ]
    written = [json.dumps(one).encode(encoding) for one in bodies for encoding in ENCODINGS]
    plain = json.dumps(chat(USER)).encode()
    written += [
        b'{"model": 5, "messages": 5, "top_p": 1e400, ' + plain[1:],
        b'{"user": "\xed\xa0\xbd", ' + plain[1:],
        b'{"user": "\xff", ' + plain[1:],
        b'{"user": "\x01", ' + plain[1:],
        b'{"seed": %b, ' % (b"1" * 5000) + plain[1:],
        plain + b"x",
        plain[:-1],
    ]
    return [(CHAT_PATH, one) for one in written]


def called() -> list[Case]:
    """Calls with arguments of all kinds, a part of them made at random."""
    rng = Random(51)
    texts = ['{"word": "fo', "[]", "5", "null", "", " ", "{}", "\ufeff{}", '{"a":1,"a":2}', "NaN"]
    texts += ['{"a": 1} x', '"{}"', '{"a": 123456789012345678901234567890}', '{"a": "\\ud83d"}']
    texts += ["".join(rng.choices(PIECES, k=rng.randrange(1, 8))) for _ in range(100)]
    items = [
        {"type": "message", "role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "an animal"},
    ]
    cases = [(CHAT_PATH, chat(USER, call(text), RESULT, tools=tools(1))) for text in texts]
    for text in texts[:14]:
        given = [items[0], {**items[1], "arguments": text}, items[2]]
        cases.append((RESPONSES, {"model": "m", "input": given}))
    return [(path, json.dumps(body).encode()) for path, body in cases]


def given_ids() -> list[Case]:
    """Conversations with the ids of another text, in each API."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    bodies: list[tuple[str, dict[str, Any]]] = []
    tried: list[Any] = [IDS, [], None, [1.0], [True], [-1], ["a"], "x", 5, {}, [2**40]]
    for ids in tried:
        given = {"kv_transfer_params": {"prompt_token_ids": ids}}
        bodies += [
            (CHAT_PATH, chat(USER, **given)),
            (MESSAGES, chat(USER, max_tokens=5, **given)),
            (RESPONSES, {"model": "m", "input": "hi", **given}),
        ]
    given = {"kv_transfer_params": {"prompt_token_ids": IDS}}
    for fields in (
        {"echo": True},
        {"truncate_prompt_tokens": 3},
        {"tools": tools(1)},
        {"add_special_tokens": True},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, image]}]},
        {"messages": [{"role": "user", "content": [{"text": "a"}]}]},
        {"messages": [USER, call("{"), RESULT]},
    ):
        bodies.append((CHAT_PATH, {**chat(USER), **given, **fields}))
    return [(path, json.dumps(body).encode()) for path, body in bodies]


@pytest.mark.parametrize("cases", [odd_bodies, called, given_ids])
async def test_what_the_engine_accepts_is_keyed_as_it_reads_it(both: Both, cases: Any) -> None:
    accepted = 0
    for path, body in cases():
        theirs, ours = await both.engines(path, body), await both.ours(path, body)
        assert theirs is None or theirs == ours, (path, body[:400])
        accepted += theirs is not None
    assert accepted > len(cases()) // 4
