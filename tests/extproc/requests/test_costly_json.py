"""What a body may contain is bounded before decoding, and never below what honest ones contain."""

import json
import time
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.base.errors import RequestError
from extproc.requests.costly_json import INLINE_BYTES, MAX_PARTS, is_light
from extproc.requests.request import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    MAX_BYTES,
    MAX_MESSAGES,
    Chat,
    parse,
)
from tests.system.attacks.bodies import BODIES, Body

GENERATE = "/generate"


def outcome(path: str, body: bytes) -> str:
    """Returns why a body is not keyed; "" if it is."""
    try:
        parse(path, body)
    except RequestError as error:
        return error.reason
    return ""


def messages_in(body: bytes) -> Any:
    (chat,) = parse(CHAT_PATH, body).prompts
    assert isinstance(chat, Chat)
    return chat.messages


def conversation(*messages: Any, **fields: Any) -> bytes:
    return json.dumps({"messages": messages, **fields}).encode()


@pytest.mark.parametrize("body", BODIES, ids=str)
def test_decoded_body_costs_a_few_times_a_text_of_its_length(body: Body) -> None:
    def seconds() -> float:
        began = time.process_time()
        assert outcome(body.path, body.content) == body.reason
        return time.process_time() - began

    assert len(body.content) > 0.9 * MAX_BYTES
    assert min(seconds() for _ in range(3)) < 0.3  # a tenth of that on an idle machine


@pytest.mark.parametrize("content", ["a", [{"type": "text", "text": 'say "{[,"\\'}]])
def test_longest_conversation_is_keyed(content: object) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    turn = {"role": "assistant", "content": content, "tool_calls": calls}
    answer = {"role": "tool", "content": content, "tool_call_id": "1"}
    body = conversation(*[turn, answer] * (MAX_MESSAGES // 2))
    assert len(messages_in(body)) == MAX_MESSAGES


def test_hundreds_of_tools_are_keyed() -> None:
    fields = {f"field_{n}": {"type": "string", "enum": ["a", "b"]} for n in range(20)}
    parameters = {"type": "object", "properties": fields, "required": [*fields]}
    function = {"name": "f", "description": 'a "quoted" {one}', "parameters": parameters}
    tools = [{"type": "function", "function": function}] * 500
    (chat,) = parse(CHAT_PATH, conversation({"role": "user", "content": "a"}, tools=tools)).prompts
    assert isinstance(chat, Chat)
    assert chat.variables["tools"] == tools


@pytest.mark.parametrize("path", [COMPLETIONS_PATH, GENERATE])
def test_prompts_of_half_a_million_token_ids_are_keyed(path: str) -> None:
    ids = [100_000 + n % 7 for n in range(500_000)]
    key = "prompt" if path == COMPLETIONS_PATH else "input_ids"
    (prompt,) = parse(path, json.dumps({key: ids}, separators=(",", ":")).encode()).prompts
    assert isinstance(prompt, array)
    assert prompt.tolist() == ids


@pytest.mark.parametrize("piece", ["{[", '"', "\\", '\\"{', "1,2,", '"a": "b", '])
def test_brackets_within_a_text_are_not_counted(piece: str) -> None:
    text = piece * (MAX_BYTES // 4 // len(piece))
    assert messages_in(conversation({"role": "user", "content": text}))[0]["content"] == text


TEXTS = st.lists(st.sampled_from(['"', "\\", "{", "[", ",", "a", "\n", "é", "x" * 70_000]))


@settings(max_examples=settings().max_examples // 4)  # of a megabyte each
@given(TEXTS, st.booleans(), st.booleans())
def test_is_light_counts_parts_behind_texts(
    texts: list[str],
    is_ascii: bool,
    is_costly: bool,
) -> None:
    parts: list[object] = [[]] * (MAX_PARTS + 1 if is_costly else MAX_PARTS - 5)
    text = "".join(texts) + "{[" * 20_000
    message = {"role": "user", "content": text, "other": parts}
    body = json.dumps({"messages": [message]}, ensure_ascii=is_ascii).encode()
    if len(body) > MAX_BYTES:
        return
    if is_costly:
        assert outcome(CHAT_PATH, body) == "too_many_parts"
    else:
        assert messages_in(body)[0]["content"] == text


def test_is_light_is_decided_by_length_and_brackets() -> None:
    assert is_light(b"[" * 8_192)
    assert not is_light(b"[" * 8_193)
    assert is_light(b"a" * INLINE_BYTES)
    assert not is_light(b"a" * (INLINE_BYTES + 1))
    assert not is_light(b"{" * 1_025 + b"a" * 9_000)
