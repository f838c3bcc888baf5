"""Bodies that engines read and strict decoders refuse are keyed as the engine reads them."""

import gzip
import json
from time import monotonic
from typing import Any

import pytest

from extproc.base.engine import RUST, SGLANG, VLLM, Engine, Release
from extproc.config.schema import Model
from extproc.observing.decisions import Timeline
from extproc.requests.dialect import NEWEST, Dialect, ModelDialects, dialect_of
from extproc.requests.outline import beginning_of
from extproc.requests.request import CHAT_PATH, Head, Models, RoutingRequest
from extproc.routing.inputs.query import Query
from extproc.serving.queries import Queries
from extproc.tokenizing.prompt_tokens import PromptTokens
from extproc.tokenizing.tokens import Tokenizer
from kvtools.simulator.settings import TINY_MODEL

NEW = ModelDialects(NEWEST)
STRICT = dialect_of(Engine(SGLANG, Release(0, 5, 23)))
RUSTS = dialect_of(Engine(VLLM, Release(0, 33), RUST))
OLDER = dialect_of(Engine(SGLANG, Release(0, 5, 16)))
LONG = "Tell me more about it. " * 4000
NAN, HALF = float("nan"), "half of a pair: \ud83d"


def chat(content: str = "hello", **fields: Any) -> dict[str, Any]:
    system = {"role": "system", "content": "Be brief."}
    return {"model": "tiny", "messages": [system, {"role": "user", "content": content}], **fields}


def tools(maximum: float) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"n": {"type": "number", "maximum": maximum}}}
    return [{"type": "function", "function": {"name": "count", "parameters": parameters}}]


async def query(body: bytes, spoken: ModelDialects = NEW, **head: Any) -> Query:
    tokenizer = Tokenizer.load(Model("tiny", tokenizer=str(TINY_MODEL)))
    assert tokenizer is not None
    tokens = PromptTokens({"tiny": tokenizer}, 60.0)
    queries = Queries(Models([Model("tiny"), Model("other")]), tokens, lambda _: spoken)
    request = RoutingRequest(Head("POST", CHAT_PATH, None, **head), body)
    found = await queries.make_query(request, Timeline.begin(monotonic))
    tokens.close()
    return found


def keys(found: Query) -> list[tuple[str, list[int]]]:
    return [(one.model, list(one.tokens)) for one in found.prompts]


@pytest.mark.parametrize("content", ["hello", LONG])
@pytest.mark.parametrize(
    "write",
    [
        lambda body: json.dumps(body).encode("utf-8-sig"),
        lambda body: json.dumps(body).encode("utf-16"),
        lambda body: json.dumps(body).encode("utf-32-be"),
        lambda body: json.dumps({**body, "temperature": NAN}).encode(),
        lambda body: json.dumps({**body, "metadata": {"a": [HALF, NAN, -NAN]}}).encode(),
        lambda body: (
            b'{"temperature": -1e400, "stop": "\xed\xa0\xbd", ' + json.dumps(body).encode()[1:]
        ),
        lambda body: b'{"model": 1, "n": {}, "n": 1, ' + json.dumps(body).encode()[1:],
    ],
)
async def test_odd_body_is_keyed_as_the_same_body_in_strict_json(write: Any, content: str) -> None:
    found = await query(write(chat(content)))
    assert found.prompts
    assert keys(found) == keys(await query(json.dumps(chat(content)).encode()))


async def test_number_that_json_lacks_is_rendered_as_the_engine_renders_it() -> None:
    found = await query(json.dumps(chat(tools=tools(NAN))).encode())
    (written,) = keys(await query(json.dumps(chat(tools=tools(0.5))).encode()))
    (model, ids) = written
    tokenizer = Tokenizer.load(Model("tiny", tokenizer=str(TINY_MODEL)))
    assert tokenizer is not None
    text = tokenizer.text_of(ids).replace("0.5", "NaN")
    assert [(model, tokenizer.text_of(one.tokens)) for one in found.prompts] == [(model, text)]


@pytest.mark.parametrize("content", [HALF, HALF + LONG])
async def test_conversation_with_half_of_a_pair_is_followed_by_its_texts(content: str) -> None:
    body = chat(content)
    found = await query(json.dumps(body).encode())
    assert (found.reason, found.model, found.prompts) == ("odd_json", "tiny", ())
    body["messages"] += [{"role": "assistant", "content": "I see."}, *body["messages"][1:]]
    later = await query(json.dumps(body).encode())
    assert found.outline is not None
    assert later.outline is not None
    shared = len(found.outline.digests)
    assert found.outline.digests == later.outline.digests[:shared]
    assert shared < len(later.outline.digests)


async def test_body_that_is_nested_too_deeply_is_followed_by_its_beginning() -> None:
    body = json.dumps(chat()).encode()[:-1] + b', "a": %b}' % (b"[" * 3000 + b"]" * 3000)
    found = await query(body)
    assert (found.reason, found.outline) == ("odd_json", beginning_of(body))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "bad_json"),
        (b"", "bad_json"),
        (b'{"messages": [{"content": "\xff"}]}', "bad_json"),
        (b"[NaN]", "bad_request"),
    ],
)
async def test_body_that_engines_refuse_is_placed_by_load(body: bytes, reason: str) -> None:
    found = await query(body)
    assert (found.reason, found.outline) == (reason, None)


@pytest.mark.parametrize("strict", [STRICT, RUSTS])
async def test_body_that_its_engine_refuses_is_placed_by_load(strict: Dialect) -> None:
    body = json.dumps(chat(temperature=NAN)).encode()
    found = await query(body, ModelDialects(strict))
    assert (found.reason, found.model, found.outline) == ("bad_json", "tiny", None)
    for either in (ModelDialects(OLDER), ModelDialects(STRICT, ((NEWEST, frozenset("w")),))):
        assert (await query(body, either)).prompts


async def test_name_that_occurs_twice_is_read_for_strict_engines_too() -> None:
    body = b'{"n": "x", ' + json.dumps(chat(n=1)).encode()[1:]
    body = body.replace(b'"model": "tiny"', b'"model": 1, "model": "tiny"')
    assert (await query(body, ModelDialects(STRICT))).prompts


async def test_compressed_body_has_a_reason_of_its_own() -> None:
    packed = gzip.compress(json.dumps(chat()).encode())
    for body, encoding in ((packed, ""), (packed, "gzip"), (b"\x0b\x02\x80{}", "br")):
        found = await query(body, encoding=encoding)
        assert (found.reason, found.outline) == ("unsupported_compression", None)
    assert (await query(json.dumps(chat()).encode(), encoding="gzip")).prompts
