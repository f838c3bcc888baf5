import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.observing.usage import MAX_DOCUMENT_BYTES, Usage, UsageScanner


def scanned(*pieces: bytes) -> Usage:
    one = UsageScanner()
    for piece in pieces:
        one.read(piece)
    return one.usage


def events(*datas: Any) -> bytes:
    lines = [f"data: {json.dumps(data)}\n\n" for data in datas]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


CHAT = {"prompt_tokens": 90, "total_tokens": 95, "prompt_tokens_details": {"cached_tokens": 64}}
ANTHROPIC = {"input_tokens": 26, "cache_read_input_tokens": 64, "output_tokens": 1}
RESPONSES = {"input_tokens": 90, "input_tokens_details": {"cached_tokens": 64}}
GENERATE = {"id": "x", "prompt_tokens": 90, "cached_tokens": 64, "completion_tokens": 5}

BODIES = {
    "chat": json.dumps({"choices": [{"message": {"content": "hi"}}], "usage": CHAT}).encode(),
    "chat, compact": json.dumps({"usage": CHAT}, separators=(",", ":")).encode(),
    "chat, indented": json.dumps({"usage": CHAT}, indent=2).encode(),
    "chat, streamed": events({"usage": None}, {"choices": [], "usage": CHAT}),
    "responses": json.dumps({"output": [], "usage": RESPONSES}).encode(),
    "responses, streamed": events({"type": "response.completed", "response": {"usage": RESPONSES}}),
    "messages": json.dumps({"content": [], "usage": ANTHROPIC}).encode(),
    "messages, streamed": events(
        {"type": "message_start", "message": {"usage": ANTHROPIC}},
        {"type": "message_delta", "usage": {"output_tokens": 5}},
    ),
    "messages, streamed by vLLM": events(
        {"type": "message_start", "message": {"usage": {"input_tokens": 90, "output_tokens": 0}}},
        {"type": "message_delta", "usage": ANTHROPIC},
    ),
    "messages, created": json.dumps(
        {"usage": {**ANTHROPIC, "input_tokens": 10, "cache_creation_input_tokens": 16}}
    ).encode(),
    "generate": json.dumps({"text": "hi", "meta_info": GENERATE}).encode(),
    "generate, streamed": events(
        {"text": "h", "meta_info": {**GENERATE, "cached_tokens": 0}},
        {"text": "hi", "meta_info": GENERATE},
    ),
}


def form_of(name: str) -> str:
    return name if (name := name.partition(",")[0]) in ("messages", "responses") else "prompt"


@pytest.mark.parametrize("name", BODIES)
def test_scanner_reads_usage_of_every_api(name: str) -> None:
    assert scanned(BODIES[name])[:3] == (90, 64, form_of(name))


@pytest.mark.parametrize(
    ("name", "tokens"), [("chat", None), ("messages, streamed", 5), ("generate", 5)]
)
def test_scanner_reads_the_length_of_an_answer(name: str, tokens: int | None) -> None:
    assert scanned(BODIES[name]).output_tokens == tokens


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_scanner_reads_the_same_bytewise(body: bytes) -> None:
    assert scanned(*(body[at : at + 1] for at in range(len(body)))) == scanned(body)


@given(st.sampled_from(list(BODIES.values())), st.lists(st.integers(0, 400), max_size=6))
def test_scanner_reads_the_same_from_any_split(body: bytes, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    pieces = [body[start:end] for start, end in itertools.pairwise(bounds)]
    assert scanned(*pieces) == scanned(body)


def test_scanner_counts_all_input_where_no_cached_tokens_are_named() -> None:
    assert scanned(b'{"usage": {"input_tokens": 90}}') == Usage(90, None, "messages")


FRAGMENTS = st.lists(
    st.sampled_from(
        [b'"cached_tokens"', b'"prompt_tokens"', b"_tokens", b":", b" ", b"\n", b"12", b"7", b",",
         b"}", b'"', b"\\", b"x"]
    )
)  # fmt: skip


@given(FRAGMENTS, st.integers(0, 60), st.integers(0, 60))
def test_scanner_reads_any_split_of_any_bytes_alike(parts: list[bytes], one: int, two: int) -> None:
    body = b"".join(parts)
    first, second = sorted((one, two))
    assert scanned(body[:first], body[first:second], body[second:]) == scanned(body)


def test_scanner_ignores_usage_written_by_a_model() -> None:
    text = '{"usage": {"prompt_tokens": 1, "cached_tokens": 2}}'
    assert scanned(json.dumps({"choices": [{"text": text}]}).encode()) == Usage()
    assert scanned(events({"choices": [{"delta": {"content": text}}]})) == Usage()


@pytest.mark.parametrize(
    "value", [b"-5", b"1.5", b"1e9", b'"64"', b"null", b"{}", b"9" * 10, b"9" * 5000]
)
def test_scanner_ignores_figures_that_are_no_number_of_tokens(value: bytes) -> None:
    assert scanned(b'{"cached_tokens": ' + value + b"}") == Usage()


@given(st.lists(st.binary()))
def test_scanner_finds_no_usage_in_garbage(pieces: list[bytes]) -> None:
    assert scanned(*pieces) == Usage()


@pytest.mark.parametrize("begin", [b'{"text": "', b"data: "])
def test_scanner_drops_a_response_that_is_too_long(begin: bytes) -> None:
    one = UsageScanner()
    one.read(begin)
    for _ in range(100):
        one.read(b"a" * 100_000)
        assert one.buffered_bytes <= MAX_DOCUMENT_BYTES
    one.read(b'", "usage": {"prompt_tokens": 90}}\n')
    assert one.usage == Usage()
    one.read(events({"usage": CHAT}))
    assert one.usage == (Usage() if begin.startswith(b"{") else Usage(90, 64, "prompt"))


# What a client may have sent, and an engine repeats: it looks like any of the reports above.
REPORTS: list[dict[str, Any]] = [CHAT, ANTHROPIC, RESPONSES, GENERATE]
FORGED = st.recursive(
    st.sampled_from(REPORTS).map(
        lambda told: {name: 1 for name in told if name.endswith("tokens")} | {"cached_tokens": 1}
    ),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["usage", "response", "message", "meta_info", "x"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
# The fields of an answer that may repeat something, and their places before and behind its usage.
REPEATED = ["tools", "text", "metadata", "input_messages", "instructions", "choices", "content"]


def hiding(answer: dict[str, Any], forged: list[Any], before: int) -> dict[str, Any]:
    """An answer that repeats what was forged, some of it before its own fields."""
    named = dict(zip(REPEATED, forged, strict=False))
    first = dict(list(named.items())[:before])
    return first | answer | named


Hide = Callable[[dict[str, Any]], dict[str, Any]]
ANSWERS: dict[str, Callable[[Hide], bytes]] = {
    "chat": lambda hide: json.dumps(hide({"usage": CHAT})).encode(),
    "completions": lambda hide: events(hide({"text": ""}), hide({"choices": [], "usage": CHAT})),
    "responses": lambda hide: json.dumps(hide({"output": [], "usage": RESPONSES})).encode(),
    "responses, streamed": lambda hide: events(
        {"type": "response.created", "response": hide({"usage": None})},
        {"type": "response.completed", "response": hide({"usage": RESPONSES})},
    ),
    "messages": lambda hide: json.dumps(hide({"usage": ANTHROPIC})).encode(),
    "messages, streamed": lambda hide: events(
        {"type": "message_start", "message": hide({"usage": ANTHROPIC})},
        hide({"type": "message_delta", "usage": {"output_tokens": 5}}),
    ),
    "generate": lambda hide: json.dumps(hide({"meta_info": GENERATE})).encode(),
}


@pytest.mark.parametrize("name", ANSWERS)
@given(st.lists(FORGED, max_size=7), st.integers(0, 7), st.lists(st.integers(0, 900), max_size=4))
def test_scanner_never_reads_usage_repeated_from_a_client(
    name: str, forged: list[Any], before: int, cuts: list[int]
) -> None:
    honest = ANSWERS[name](lambda answer: answer)
    body = ANSWERS[name](lambda answer: hiding(answer, forged, before))
    bounds = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    assert scanned(*(body[a:b] for a, b in itertools.pairwise(bounds))) == scanned(honest)


def test_scanner_ignores_more_cached_tokens_than_the_prompt_has() -> None:
    told = {"usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 6}}}
    assert scanned(json.dumps(told).encode()) == Usage(5, None, "prompt")


CREATED = (
    b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_1",'
    b'"object":"response","tools":[{"id":"resp_9","object":"response"}],"usage":null}}\n\n'
)
DELTA = b'event: response.output_text.delta\ndata: {"type":"x","item":{"id":"resp_8"}}\n\n'


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (CREATED, "resp_1"),
        (DELTA + CREATED + CREATED.replace(b"resp_1", b"resp_2"), "resp_1"),
        (b'{"object": "response", "id": "resp_3", "max_output_tokens": null}', "resp_3"),
        (b'{"object": "chat.completion", "id": "c", "usage": {"prompt_tokens": 3}}', ""),
        (CREATED.replace(b'"resp_1"', b"7"), ""),
        (CREATED.replace(b"resp_1", b"x" * 513), ""),
        (CREATED.replace(b'"object":"response",', b""), ""),
        (b'{"response": "response.created", "max_tokens": 1}', ""),
    ],
)
def test_scanner_finds_the_id_of_a_response(answer: bytes, found: str) -> None:
    for split in range(1, len(answer)):
        scanner = UsageScanner()
        scanner.read(answer[:split])
        scanner.read(answer[split:])
        assert scanner.usage.cached_tokens is None
        assert scanner.response_id == found


@pytest.mark.parametrize(
    ("kinds", "tokens"),
    [({"image": 256, "audio": 4}, 260), ({}, None), ({"image": "x"}, None), (7, None)],
)
def test_usage_has_the_tokens_of_media(kinds: object, tokens: int | None) -> None:
    details = {"cached_tokens": 64, "multimodal_tokens": kinds}
    usage = {"prompt_tokens": 290, "prompt_tokens_details": details}
    assert scanned(json.dumps({"usage": usage}).encode()).media_tokens == tokens


@pytest.mark.parametrize(
    ("details", "tokens"),
    [
        ({"image_tokens": 256, "video_tokens": 4}, 260),
        ({"audio_tokens": 0}, None),
        ({"image_tokens": "x"}, None),
        ({"image_tokens": 9, "multimodal_tokens": {"image": 5}}, 5),
    ],
)
def test_usage_of_sglang_has_the_tokens_of_media(
    details: dict[str, object], tokens: int | None
) -> None:
    usage = {"prompt_tokens": 290, "prompt_tokens_details": {"cached_tokens": 64, **details}}
    assert scanned(json.dumps({"usage": usage}).encode()).media_tokens == tokens
