import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import RequestError
from extproc.requests.prompt import Chat, Text
from extproc.requests.request import CHAT_PATH, parse
from extproc.tokenizing.remote_tokenizer_wire import answered, longest_answer_bytes, question

TOOL = {"type": "function", "function": {"name": "f", "description": None, "parameters": {}}}


def asked(body: dict[str, Any]) -> Any:
    """The question that is sent for the prompt of a chat completion."""
    request = parse(CHAT_PATH, json.dumps(body).encode())
    (prompt,) = request.prompts
    assert isinstance(prompt, Chat)
    return json.loads(question(prompt, request.model))


def test_a_text_is_asked_for_as_completions_have_it() -> None:
    expected = {"model": "m", "prompt": "hé", "add_special_tokens": False}
    assert json.loads(question(Text("hé", add_special_tokens=False), "m")) == expected
    assert json.loads(question(Text("a"), None)) == {"prompt": "a", "add_special_tokens": True}


def test_a_conversation_is_asked_for_with_all_that_its_template_sees() -> None:
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


def test_messages_are_sent_as_clients_write_them() -> None:
    function = {"name": "f", "arguments": '{"b":1,"a":2.5}'}
    turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]}
    result = {"role": "tool", "content": "x", "tool_call_id": "c"}
    sent = asked({"messages": [turn, result]})["messages"]
    assert sent == [turn, result]
    developer = {"role": "developer", "content": "be brief"}
    assert asked({"messages": [developer]})["messages"] == [developer]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (Text("a", special_tokens_vary=True), "unsupported_special_tokens"),
        (Text("\ud800"), "not_unicode"),
        (Chat([], {}, has_media=True), "unsupported_media"),
        (Chat([], {}, has_reasoning_effort=True), "unsupported_reasoning_effort"),
        (Chat([], {"documents": []}), "unsupported_documents"),
    ],
)
def test_what_the_worker_would_tell_otherwise_than_its_engine_is_not_asked(
    prompt: Chat | Text, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        question(prompt, None)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_an_answer_gives_its_ids(ids: list[int]) -> None:
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
def test_nonsense_is_no_answer(content: bytes) -> None:
    with pytest.raises(RequestError, match="tokenizer_failed"):
        answered(content)


@given(st.binary(max_size=2_000))
def test_any_bytes_are_an_answer_or_none(content: bytes) -> None:
    with contextlib.suppress(RequestError):
        assert len(answered(content)) > 0


def test_an_answer_may_be_as_long_as_its_question_makes_it() -> None:
    text = Text("a" * 100_000)
    longest = json.dumps({"count": 100_000, "tokens": [2**32 - 1] * 100_000})
    assert len(longest) < longest_answer_bytes(question(text, None))
    assert longest_answer_bytes(b"x" * 4_000_000) == 16 * 1024 * 1024
