"""Streams of requests with classes: the engine's queue gets the priority of the class."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from extproc.base.engine import Engine, Release
from extproc.features.classes.classes import is_told_by_header, written_priority
from extproc.features.feature import NOTHING_WRITTEN
from extproc.observing.class_report import class_figures
from extproc.pb.kvsteer_ext_proc_pb2 import HeaderValue, ProcessingMode, ProcessingResponse
from extproc.routing.priorities import CLASS_RANGE
from extproc.serving.exchange import Exchange, Service
from extproc.serving.preparation import INLINE_BYTES
from tests.extproc.messages import answers_of, body, head
from tests.extproc.serving.routers import counted, of

RULES = """
policy:
  classes:
    header: x-class
    default: people
    of: [{name: people}, {name: batch, priority: 10, max_in_flight: 1}]
"""
PATH = "/v1/completions"


def serving(engine: str) -> Service:
    worker = f"{{endpoint: '10.0.0.1:1', engine: {engine}}}" if engine else "'10.0.0.1:1'"
    worker = worker if engine else "{endpoint: '10.0.0.1:1'}"
    return of(f"models: [{{name: m}}]\nworkers: [{worker}]\n{RULES}")


VLLM, OLDER = "{name: vllm, version: '0.32.0'}", "{name: vllm, version: '0.20.0'}"
SGLANG = "{name: sglang, version: '0.5.23'}"


@pytest.fixture
def closing() -> Iterator[list[Service]]:
    opened: list[Service] = []
    yield opened
    for one in opened:
        one.router.close()


async def opened(
    one: Service, name: str, mode: int = ProcessingMode.BUFFERED, **fields: Any
) -> tuple[Exchange, ProcessingResponse]:
    exchange = one.open()
    first = head(PATH, mode=mode, headers={"x-vllm-priority": "-9"})
    first.request_headers.headers.headers.append(HeaderValue(key="x-class", value=name))
    read = one.decoder.decode
    await exchange.receive(read(first.SerializeToString()))
    content = json.dumps({"model": "m", "prompt": [1, 2], "priority": -9, **fields}).encode()
    answers = await exchange.receive(read(body(content).SerializeToString()))
    return exchange, answers_of(answers)[0]


def changes(answer: ProcessingResponse) -> tuple[dict[str, str], list[str]]:
    """The headers that an answer sets, and those that it removes."""
    part = answer.request_body if answer.HasField("request_body") else answer.request_headers
    mutation = part.response.header_mutation
    headers = {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}
    return headers, list(mutation.remove_headers)


@pytest.mark.parametrize(
    ("engine", "name", "header", "field"),
    [
        (VLLM, "batch", "10", None),
        (VLLM, "people", "0", None),
        (VLLM, "unknown", "0", None),
        (OLDER, "batch", None, 10),
        (SGLANG, "batch", None, -10),
        ("", "batch", None, None),
    ],
)
@pytest.mark.parametrize("padding", [0, INLINE_BYTES])
async def test_class_replaces_the_priority_of_the_client(
    engine: str,
    name: str,
    header: str | None,
    field: int | None,
    padding: int,
    closing: list[Service],
) -> None:
    one = serving(engine)
    closing.append(one)
    exchange, answer = await opened(one, name, more="x" * padding)
    headers, removed = changes(answer)
    sent = json.loads(answer.request_body.response.body_mutation.body)
    assert (headers.get("x-vllm-priority"), sent.get("priority")) == (header, field)
    assert ("x-vllm-priority" in removed) is (header is None)
    exchange.close()


async def test_streamed_body_stays_and_the_header_is_set(closing: list[Service]) -> None:
    one = serving(VLLM)
    closing.append(one)
    exchange, answer = await opened(one, "batch", ProcessingMode.FULL_DUPLEX_STREAMED)
    assert changes(answer)[0]["x-vllm-priority"] == "10"
    exchange.close()


@pytest.mark.parametrize(("other", "priority"), [(OLDER, 10), (SGLANG, None)])
async def test_unsteered_request_gets_a_priority_only_among_engines_of_one_kind(
    other: str, priority: int | None, closing: list[Service]
) -> None:
    workers = (
        f"{{endpoint: '10.0.0.1:1', engine: {OLDER}}}, {{endpoint: '10.0.0.2:1', engine: {other}}}"
    )
    one = of(f"models: [{{name: m}}]\nworkers: [{workers}]\nsteering: {{percent: 0}}\n{RULES}")
    closing.append(one)
    exchange, answer = await opened(one, "batch")
    sent = json.loads(answer.request_body.response.body_mutation.body)
    assert sent.get("priority") == priority
    exchange.close()


BARE = b'{"priority": -1000, "model": "m", "prompt": [1]}'
MANY = b'{%b"model": "m"}' % (b'"priority": -1000,' * 65)


async def settled(one: Service, path: str, content: bytes, length: int = 0) -> ProcessingResponse:
    """The answer that settles a request of class batch, to its headers or to its body."""
    exchange = one.open()
    first = head(path, headers={"content-length": str(length or len(content))})
    first.request_headers.headers.headers.append(HeaderValue(key="x-class", value="batch"))
    read = one.decoder.decode
    (answer,) = answers_of(await exchange.receive(read(first.SerializeToString())))
    part = answer.request_headers.response
    if not (answer.HasField("immediate_response") or part.HasField("header_mutation")):
        message = read(body(content).SerializeToString())
        (answer,) = answers_of(await exchange.receive(message))
    exchange.close()
    return answer


@pytest.mark.parametrize("path", [PATH, "/v1/messages", "/v1/score", "/v1/of/a/newer/engine"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32-le"])
@pytest.mark.parametrize("engine", [VLLM, OLDER, SGLANG, ""])
async def test_no_engine_reads_a_clients_own_priority(
    engine: str, encoding: str, path: str, closing: list[Service]
) -> None:
    one = serving(engine)
    closing.append(one)
    answer = await settled(one, path, BARE.decode().encode(encoding))
    sent = json.loads(answer.request_body.response.body_mutation.body)
    assert sent.get("priority") in (None, 10, -10)


@pytest.mark.parametrize(
    ("content", "length", "status"), [(MANY, 0, 400), (b"", 40 * 1024 * 1024, 413)]
)
@pytest.mark.parametrize(
    ("engine", "path", "is_refused"),
    [
        (OLDER, PATH, True),
        (SGLANG, PATH, True),
        ("", PATH, True),
        (VLLM, PATH, False),
        (VLLM, "/v1/embeddings", True),
        (VLLM, "/v1/of/a/newer/engine", True),
        (VLLM, "/v1/responses//", True),
        (SGLANG, "/v1/audio/transcriptions", False),
        (SGLANG, "/tokenize", False),
    ],
)
async def test_body_that_may_hide_a_priority_is_refused_where_an_engine_may_read_it(
    engine: str,
    path: str,
    is_refused: bool,
    content: bytes,
    length: int,
    status: int,
    closing: list[Service],
) -> None:
    one = serving(engine)
    closing.append(one)
    answer = await settled(one, path, content, length)
    assert answer.immediate_response.status.code == (status if is_refused else 0)
    reason = "unread" if length else "too_many_members"
    line = f'kvsteer_bodies_refused_total{{reason="{reason}"}}'
    assert counted(one, line) == is_refused


@pytest.mark.parametrize("content", [b"[1]", b"--b\r\n", b"", b'{"priority":1'])
async def test_body_in_which_no_engine_reads_a_priority_passes(
    content: bytes, closing: list[Service]
) -> None:
    one = serving(OLDER)
    closing.append(one)
    answer = await settled(one, PATH, content)
    assert not answer.HasField("immediate_response")


def test_priority_is_told_by_header_only_if_every_engine_reads_it_there() -> None:
    new, old = Engine("vllm", Release(0, 32)), Engine("vllm", Release(0, 20))
    told = {(new,): True, (new, new): True, (new, old): False, (new, None): False, (): False}
    assert {one: is_told_by_header(one, PATH) for one in told} == told
    assert not is_told_by_header((new,), "/v1/embeddings")


async def test_class_over_its_limit_is_refused_and_counted(closing: list[Service]) -> None:
    one = serving(VLLM)
    closing.append(one)
    running, _ = await opened(one, "batch")
    refused, answer = await opened(one, "batch")
    assert answer.immediate_response.status.code == 429
    assert counted(one, 'kvsteer_class_in_flight{class="batch"}') == 1
    for exchange in (running, refused):
        exchange.close()
    assert counted(one, 'kvsteer_class_in_flight{class="batch"}') == 0
    for verdict in ("steer", "shed"):
        line = f'kvsteer_class_requests_total{{class="batch",verdict="{verdict}"}}'
        assert counted(one, line) == 1
    now = time.time()
    (batch,) = class_figures(one.metrics.report.window(120, now).periods, ["batch"])
    assert batch["shed"] == 1


async def test_request_that_calls_no_model_has_no_class(closing: list[Service]) -> None:
    one = serving(VLLM)
    closing.append(one)
    exchange = one.open()
    message = head("/v1/models", method="GET", end_of_stream=True)
    answers = await exchange.receive(one.decoder.decode(message.SerializeToString()))
    (answer,) = answers_of(answers)
    assert changes(answer)[1].count("x-vllm-priority") == 1
    assert not counted(one, 'kvsteer_class_requests_total{class="people",verdict="steer"}')
    exchange.close()


@pytest.mark.parametrize(
    ("engine", "path"), [(None, PATH), (Engine("vllm", Release(0, 32)), "/score")]
)
def test_priority_is_named_only_where_it_is_read(engine: Engine | None, path: str) -> None:
    assert written_priority(10, engine, path, b"{}") == NOTHING_WRITTEN


async def test_hits_go_first_within_their_class(closing: list[Service]) -> None:
    one = of(
        f"models: [{{name: m}}]\nworkers: [{{endpoint: '10.0.0.1:1', engine: {VLLM}}}]\n"
        f"{RULES}    hits_first: true\n"
    )
    closing.append(one)
    priorities = []
    for prompt in ([1] * 3_000, [1, 2]):
        exchange, answer = await opened(one, "batch", prompt=prompt)
        priorities.append(int(changes(answer)[0]["x-vllm-priority"]))
        exchange.close()
    assert 11 * CLASS_RANGE > priorities[0] > priorities[1] >= 10 * CLASS_RANGE


def test_priority_is_not_written_into_a_body_that_must_not_change() -> None:
    engine = Engine("sglang", Release(0, 5, 23))
    assert written_priority(10, engine, PATH, None) == NOTHING_WRITTEN
