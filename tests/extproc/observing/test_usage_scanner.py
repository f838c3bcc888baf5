import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.observing.outcomes import Usage, UsageScanner


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
def test_every_api_is_read(name: str) -> None:
    assert scanned(BODIES[name])[:3] == (90, 64, form_of(name))


@pytest.mark.parametrize(
    ("name", "tokens"), [("chat", None), ("messages, streamed", 5), ("generate", 5)]
)
def test_the_length_of_an_answer_is_read_where_it_is_told(name: str, tokens: int | None) -> None:
    assert scanned(BODIES[name]).output_tokens == tokens


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_byte_at_a_time_tells_the_same(body: bytes) -> None:
    assert scanned(*(body[at : at + 1] for at in range(len(body)))) == scanned(body)


@given(st.sampled_from(list(BODIES.values())), st.lists(st.integers(0, 400), max_size=6))
def test_any_split_tells_the_same(body: bytes, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    pieces = [body[start:end] for start, end in itertools.pairwise(bounds)]
    assert scanned(*pieces) == scanned(body)


def test_a_message_that_names_no_cached_tokens_is_all_input() -> None:
    assert scanned(b'{"usage": {"input_tokens": 90}}') == Usage(90, None, "messages")


FRAGMENTS = st.lists(
    st.sampled_from(
        [b'"cached_tokens"', b'"prompt_tokens"', b"_tokens", b":", b" ", b"\n", b"12", b"7", b",",
         b"}", b'"', b"\\", b"x"]
    )
)  # fmt: skip


@given(FRAGMENTS, st.integers(0, 60), st.integers(0, 60))
def test_any_split_of_any_bytes_tells_the_same(parts: list[bytes], one: int, two: int) -> None:
    body = b"".join(parts)
    first, second = sorted((one, two))
    assert scanned(body[:first], body[first:second], body[second:]) == scanned(body)


def test_text_that_a_model_writes_is_no_usage() -> None:
    text = '{"usage": {"prompt_tokens": 1, "cached_tokens": 2}}'
    assert scanned(json.dumps({"choices": [{"text": text}]}).encode()) == Usage()
    assert scanned(events({"choices": [{"delta": {"content": text}}]})) == Usage()


@pytest.mark.parametrize(
    "value", [b"-5", b"1.5", b"1e9", b'"64"', b"null", b"{}", b"9" * 10, b"9" * 5000]
)
def test_a_figure_that_is_no_number_of_tokens_is_not_read(value: bytes) -> None:
    assert scanned(b'{"cached_tokens": ' + value + b"}") == Usage()


@given(st.lists(st.binary()))
def test_garbage_tells_nothing_and_takes_no_room(pieces: list[bytes]) -> None:
    one = UsageScanner()
    for piece in pieces:
        one.read(piece)
    assert len(one._tail) < 100


def test_a_long_response_is_not_kept() -> None:
    one = UsageScanner()
    for _ in range(100):
        one.read(b'"cached_tokens": 7' + b" " * 100_000)
    assert len(one._tail) < 100
    assert one.usage == Usage(None, 7)
