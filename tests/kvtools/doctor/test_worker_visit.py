import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.engine import Engine, PromptArguments, Release
from extproc.config.schema import Config, Model, WorkerEngine, WorkerSettings
from extproc.fleet.records.engine_identity import EngineAnswer
from kvtools.doctor.findings import Finding, Severity, Subject
from kvtools.doctor.worker_visit import (
    API_PATHS,
    Answer,
    ListedModels,
    WebClient,
    judge_block_size,
    judge_clock,
    judge_draft,
    judge_engine,
    judge_models,
    judge_prefix_caching,
    judge_ranks,
    judge_template_arguments,
    model_served,
    models_of,
    sources_in,
)

ABOUT = Subject("worker")
VLLM, SGLANG = Engine("vllm", Release(0, 32)), Engine("sglang", Release(0, 5, 9))
ONE = Config(models=(Model("a", aliases=("org/a",), lora=("x",)),))
TWO = Config(models=(Model("a"), Model("b")))
NONSENSE = [b"", b"[]", b"1", b'{"data": 1}', b"[" * 5000, b"\xff"]


def of(*models: str, adapters: tuple[str, ...] = ()) -> ListedModels:
    return ListedModels(models, frozenset(adapters))


def judged(config: Config, models: ListedModels, **worker: Any) -> list[Finding]:
    return list(judge_models(ABOUT, config, WorkerSettings("h:1", **worker), models))


def size_of(size: int, block_size: int | None = None) -> Finding:
    return judge_block_size(
        ABOUT, ONE, WorkerSettings("h:1", block_size=block_size), size, "its events"
    )


def test_models_of_separates_models_and_adapters() -> None:
    cards = [{"id": "a", "parent": None}, {"id": "x", "parent": "a"}]
    assert models_of(json.dumps({"data": cards}).encode()) == of("a", adapters=("x",))


@pytest.mark.parametrize("answer", NONSENSE)
def test_models_of_ignores_malformed_answers(answer: bytes) -> None:
    assert models_of(answer) is None
    assert sources_in("/kv_event_sources", answer, "h") is None


def test_model_served_is_the_configured_the_only_or_the_listed_one() -> None:
    assert model_served(TWO, WorkerSettings("h:1", model="b"), of("a")) == TWO.models[1]
    assert model_served(ONE, WorkerSettings("h:1"), of("z")) == ONE.models[0]
    assert model_served(TWO, WorkerSettings("h:1", learn=True), of("b")) == TWO.models[1]
    assert model_served(TWO, WorkerSettings("h:1", learn=True), of("z")) is None


def test_model_is_served_under_its_name_or_an_alias() -> None:
    assert {one.code for one in judged(ONE, of("org/a", adapters=("x",)))} == {""}
    assert [one.code for one in judged(ONE, of("z"))] == ["model-not-served"]
    (one,) = judged(TWO, of(*"cdefghijkl"))
    assert one.says.startswith("it serves c, d, e, f, g, h, i, j and 2 more; requests")
    assert judged(TWO, of())[0].says.startswith("it serves nothing")


def test_judge_models_finds_unlisted_adapters_where_any_are_listed() -> None:
    assert judged(ONE, of("a"))[-1].verdict is Severity.NOTE
    assert judged(ONE, of("a", adapters=("y",)))[-1].code == "adapter-not-served"
    assert judged(ONE, of("a"), lora=("y",))[-1].code == "adapter-not-served"
    found = judged(ONE, of("a", "org/a", adapters=("y",)), learn=True)
    assert [one.code for one in found] == ["", "adapter-not-configured"]


def test_judge_models_finds_no_missing_adapter_without_adapters() -> None:
    assert [one.verdict for one in judged(ONE, of("a", "org/a"), lora=())] == [Severity.RIGHT]


@pytest.mark.parametrize(("listed", "missing"), [("a", "org/a"), ("org/a", "a")])
def test_judge_models_notes_a_name_that_the_worker_does_not_list(listed: str, missing: str) -> None:
    right, note = judged(ONE, of(listed), lora=())
    assert (right.verdict, note.verdict) == (Severity.RIGHT, Severity.NOTE)
    assert note.says.startswith(f"it does not list {missing}: ")


def test_judge_clock_allows_some_seconds() -> None:
    assert judge_clock(ABOUT, -4.0, "the Date").code == ""
    assert "60 s ahead of the local clock" in judge_clock(ABOUT, 60.0, "the Date").says
    assert "60 s behind the local clock" in judge_clock(ABOUT, -60.0, "the Date").says


@pytest.mark.parametrize(
    ("version", "answer", "verdict", "says"),
    [
        (None, EngineAnswer(VLLM, ""), Severity.RIGHT, "vllm 0.32.0, as it says itself"),
        ("0.32.0", EngineAnswer(VLLM, ""), Severity.RIGHT, "vllm 0.32.0, as configured"),
        ("0.32.0", EngineAnswer(reason="why"), Severity.RIGHT, "vllm 0.32.0, as configured"),
        (None, EngineAnswer(reason="why"), Severity.NOTE, "unknown: why; "),
        ("0.24.0", EngineAnswer(VLLM, ""), Severity.WRONG, "vllm 0.24.0 is configured; the worker"),
        (None, EngineAnswer(SGLANG, "why"), Severity.NOTE, "sglang 0.5.9, as it says itself; why"),
    ],
)
def test_judge_engine_compares_the_worker_with_the_configuration(
    version: str | None, answer: EngineAnswer, verdict: Severity, says: str
) -> None:
    given = None if version is None else WorkerEngine("vllm", version)
    finding = judge_engine(ABOUT, WorkerSettings("h:1", engine=given), answer)
    assert finding.verdict is verdict
    assert finding.says.startswith(says)


def test_judge_block_size_needs_the_block_size_of_the_worker() -> None:
    assert size_of(16).verdict is Severity.RIGHT
    assert size_of(32, block_size=16).code == "block-size"
    assert size_of(32).verdict is Severity.NOTE
    assert size_of(1).verdict is Severity.NOTE


def test_sources_in_distinguishes_disabled_from_unknown_feeds() -> None:
    listed = {"0": {"endpoint": "tcp://*:5557", "replay_endpoint": None}}
    models = sources_in("/kv_event_sources", json.dumps(listed).encode(), "10.0.0.1")
    assert models is not None
    assert models.sources[0].events == "tcp://10.0.0.1:5557"
    off = sources_in("/server_info", b'{"kv_events": null}', "h")
    assert off is not None
    assert off.sources == ()
    assert sources_in("/server_info", b'{"page_size": 1}', "h") is None


@pytest.mark.parametrize(
    ("metrics", "info", "codes"),
    [
        (b"", b"", []),
        (b'vllm:cache_config_info{a="b",enable_prefix_caching="True"} 1.0', b"", []),
        (
            b'# x\nvllm:cache_config_info{a="b",enable_prefix_caching="False",c="d"} 1.0',
            b"",
            ["prefix-caching-off"],
        ),
        (b'other{enable_prefix_caching="False"} 1.0', b'{"disable_radix_cache": false}', []),
        (b"\xff", b'{"disable_radix_cache": true}', ["prefix-caching-off"]),
        (b"", b"[" * 100_000, []),
        (b"", b'{"disable_radix_cache": 7}', []),
    ],
)
def test_judge_prefix_caching_finds_a_disabled_cache(
    metrics: bytes, info: bytes, codes: list[str]
) -> None:
    found = judge_prefix_caching(Subject("worker"), metrics, info)
    assert [one.code for one in found] == codes


PIECES = (
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.1 999 \r\n",
    b"HTTP/9.9 200\r\n",
    b"\r\n",
    b"\0\xff",
    b"Content-Length: 5\r\n",
    b"Content-Length: -1\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"5\r\nhello\r\n",
    b"zz\r\n",
    b"ffffffffffffffffffff\r\n",
    b"0\r\n\r\n",
    b"hello",
    b"Content-Encoding: br\r\n",
    b"Date: Mon, 99 Jan 99999 00:00:00 +9999\r\n",
    b"Location: ////[::\r\n",
    b"Set-Cookie: \xff=;\r\n",
    b"A" * 70_000,
)


async def answer_to(said: bytes) -> Answer:
    """What becomes of a question to a server that says this, whatever it is asked."""

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        writer.close()

    async with await asyncio.start_server(say, "127.0.0.1", 0) as server, WebClient(20.0) as web:
        port = server.sockets[0].getsockname()[1]
        return await web.get(f"http://127.0.0.1:{port}/")


@given(st.lists(st.sampled_from(PIECES) | st.binary(max_size=9), max_size=6), st.booleans())
def test_get_returns_an_answer_for_any_bytes(
    pieces: list[bytes],
    is_http: bool,
) -> None:
    said = b"HTTP/1.1 200 OK\r\n" * is_http + b"".join(pieces)
    answer = asyncio.run(answer_to(said))
    assert answer.is_ok or answer.reason or answer.status


@pytest.mark.parametrize("host", ["", "[::1", "a" * 300, "..", "\ud800", "x:99999"])
async def test_get_returns_an_answer_for_any_host(host: str) -> None:
    async with WebClient(20.0) as web:
        answer = await web.get(f"http://{host}/")
    assert (answer.status, answer.is_ok) == (0, False)
    assert answer.reason


@pytest.mark.parametrize(
    ("engine", "ranks", "unread"),
    [
        (Engine("vllm", Release(0, 32)), 2, ["/v1/responses"]),
        (Engine("vllm", Release(0, 32)), 1, []),
        (Engine("sglang", Release(0, 5, 20)), 2, []),
        (None, 2, []),
    ],
)
def test_judge_ranks_names_the_apis_that_read_no_rank(
    engine: Engine | None, ranks: int, unread: list[str]
) -> None:
    found = list(judge_ranks(ABOUT, WorkerSettings("h:1"), EngineAnswer(engine), ranks))
    assert [path for path in API_PATHS for one in found if path in one.says] == unread


@pytest.mark.parametrize(
    ("metrics", "notes"),
    [
        (b"", 0),
        (b"vllm:num_requests_running 0\n", 0),
        (b'# HELP x\nvllm:spec_decode_num_drafts_total{engine="0"} 3.0\n', 1),
    ],
)
def test_judge_draft_notes_that_an_engine_drafts(metrics: bytes, notes: int) -> None:
    assert len(list(judge_draft(Subject("worker"), metrics))) == notes


@pytest.mark.parametrize(
    ("configured", "shown", "notes"),
    [
        (None, None, 0),
        ({"a": 1}, '{"a":1}', 0),
        ({"a": 1}, None, 1),
        (None, '{"a":1}', 1),
    ],
)
def test_default_arguments_of_templates_that_disagree_are_noted(
    configured: dict[str, int] | None, shown: str | None, notes: int
) -> None:
    arguments = PromptArguments(default_chat_template_kwargs=shown)
    model = Model("m", chat_template_kwargs=configured)
    answer = EngineAnswer(arguments=arguments)
    found = list(judge_template_arguments(Subject("worker"), model, answer))
    assert len(found) == notes
    assert all("--default-chat-template-kwargs" in one.says for one in found)
    assert not list(judge_template_arguments(Subject("worker"), None, answer))
