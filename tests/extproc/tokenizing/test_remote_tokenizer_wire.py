import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.engine import RUST, SGLANG, VLLM, Engine, Release
from extproc.base.errors import RequestError
from extproc.requests.dialect import NEWEST, dialect_of
from extproc.requests.prompt import (
    ASKED,
    DEVELOPER,
    INLINE_SYSTEM,
    PARTS,
    REASONING,
    Chat,
    Text,
)
from extproc.requests.request import CHAT_PATH, parse
from extproc.tokenizing.remote_tokenizer_wire import (
    answered,
    forms_asked,
    longest_answer_bytes,
    question,
)

TOOL = {"type": "function", "function": {"name": "f", "description": None, "parameters": {}}}


def asked(body: dict[str, Any]) -> Any:
    """The question that is sent for the prompt of a chat completion."""
    request = parse(CHAT_PATH, json.dumps(body).encode())
    (prompt,) = request.prompts
    assert isinstance(prompt, Chat)
    return json.loads(question(prompt, request.model))


def test_question_for_a_text_is_that_of_completions() -> None:
    expected = {"model": "m", "prompt": "hé", "add_special_tokens": False}
    assert json.loads(question(Text("hé", add_special_tokens=False), "m")) == expected
    assert json.loads(question(Text("a"), None)) == {"prompt": "a", "add_special_tokens": True}


def test_question_for_a_conversation_holds_all_that_its_template_reads() -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "m", "messages": messages, "tools": [TOOL], "continue_final_message": True}
    body |= {"add_generation_prompt": False, "chat_template_kwargs": {"enable_thinking": False}}
    assert asked(body) == {
        "model": "m",
        "messages": messages,
        "add_special_tokens": False,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "tools": [TOOL],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert "chat_template_kwargs" not in asked({"messages": messages})


def test_question_holds_messages_as_clients_write_them() -> None:
    function = {"name": "f", "arguments": '{"b":1,"a":2.5}'}
    turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]}
    result = {"role": "tool", "content": "x", "tool_call_id": "c"}
    sent = asked({"messages": [turn, result]})["messages"]
    assert sent == [turn, result]
    developer = {"role": "developer", "content": "be brief"}
    assert asked({"messages": [developer]})["messages"] == [developer]


def test_question_holds_reasoning_under_the_key_that_tokenize_reads() -> None:
    turn = {"role": "assistant", "content": "a", "reasoning_content": "why"}
    told = json.loads(question(Chat([turn], {}, dialect=NEWEST), None))["messages"]
    assert told == [{"role": "assistant", "content": "a", "reasoning": "why"}]


def test_question_for_a_rust_front_end_holds_messages_as_sent() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{ "a":1}'}}
    messages = [{"role": "assistant", "content": "It is.", "tool_calls": [call]}]
    dialect = dialect_of(Engine(VLLM, Release(0, 33), RUST))
    (chat,) = parse(
        CHAT_PATH, json.dumps({"messages": messages}).encode(), lambda _: dialect
    ).prompts
    assert isinstance(chat, Chat)
    assert json.loads(question(chat, None))["messages"] == messages


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (Text("a", special_tokens_vary=True), "unsupported_special_tokens"),
        (Text("\ud800"), "not_unicode"),
        (Chat([], {}, has_media=True), "unsupported_media"),
        (Chat([], {}, effort="low"), "unsupported_reasoning_effort"),
        (Chat([], {"documents": []}), "unsupported_documents"),
        (Chat([], {}, forms=INLINE_SYSTEM), "unsupported_inline_system"),
        (Chat([{"role": "assistant", "reasoning": "r"}], {}), "unsupported_reasoning"),
    ],
)
def test_question_refuses_prompts_that_a_worker_would_tokenize_differently(
    prompt: Chat | Text, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        question(prompt, None)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_answered_returns_the_ids(ids: list[int]) -> None:
    answer = {"count": len(ids), "max_model_len": 9, "tokens": ids, "token_strs": None}
    assert answered(json.dumps(answer).encode()).tolist() == ids


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{}", b"[]", b"null", b'{"tokens": []}', b'{"tokens": null}', b'{"tokens": "1"}',
        b'{"tokens": [-1]}', b'{"tokens": [4294967296]}', b'{"tokens": [1.5]}',
        b'{"tokens": [true]}', b'{"tokens": [[1]], "count": [1]}', b'{"tokens": [1], "count": 2}',
        b'{"tokens": [1], "\xff": 1', b"[" * 100_000,
    ],
)  # fmt: skip
def test_answered_refuses_malformed_bodies(content: bytes) -> None:
    with pytest.raises(RequestError, match="tokenizer_failed"):
        answered(content)


@given(st.binary(max_size=2_000))
def test_answered_returns_ids_or_refuses_for_any_bytes(content: bytes) -> None:
    with contextlib.suppress(RequestError):
        assert len(answered(content)) > 0


def test_longest_answer_bytes_grow_with_the_question() -> None:
    text = Text("a" * 100_000)
    longest = json.dumps({"count": 100_000, "tokens": [2**32 - 1] * 100_000})
    assert len(longest) < longest_answer_bytes(question(text, None))
    assert longest_answer_bytes(b"x" * 4_000_000) == 16 * 1024 * 1024


@pytest.mark.parametrize(
    ("message", "forms"),
    [
        ({"role": "user", "content": "a"}, ASKED),
        ({"role": "assistant", "content": "a", "reasoning_content": "b"}, ASKED | REASONING),
        ({"role": "developer", "content": "a"}, ASKED | DEVELOPER),
        ({"role": "user", "content": [{"type": "text", "text": "a"}]}, ASKED | PARTS),
    ],
)
def test_conversation_that_a_worker_tokenizes_needs_a_proof(
    message: dict[str, Any], forms: int
) -> None:
    assert forms_asked(Chat([message], {})) == forms
    assert forms_asked(Text("a")) == 0


def test_conversation_that_sglang_converts_is_not_asked() -> None:
    sglang = dialect_of(Engine(SGLANG, Release(0, 5, 23)))
    plain = {"messages": [{"role": "user", "content": "a"}]}
    for fields, is_asked in (({}, True), ({"tools": [TOOL]}, False)):
        body = json.dumps({**plain, **fields}).encode()
        (prompt,) = parse(CHAT_PATH, body, lambda _: sglang).prompts
        assert isinstance(prompt, Chat)
        with contextlib.nullcontext() if is_asked else pytest.raises(RequestError):
            assert question(prompt, None)
