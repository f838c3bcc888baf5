"""Chat completions as vLLM's Rust front end reads them (recorded prompts: tests/extproc/rust)."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.engine import RUST, SGLANG, VLLM, Engine, Release
from extproc.base.errors import RequestError
from extproc.requests import rust_chat
from extproc.requests.dialect import dialect_of
from extproc.requests.prompt import FRONT_END, NO_TOOLS, Chat, forms_of
from extproc.requests.request import CHAT_PATH, parse
from tests.extproc.rust.corpus import ANSWER, ASKED, CALL, FUNCTION, RESULT, TOOL, USER, planted

MINUS_ZERO = {**CALL, "function": {"name": "f", "arguments": '{"a": -0}'}}
DIALECT = dialect_of(Engine(VLLM, Release(0, 33), RUST))


def read(body: dict[str, Any], path: str = CHAT_PATH) -> Chat:
    (chat,) = parse(path, json.dumps(body).encode(), lambda _: DIALECT).prompts
    assert isinstance(chat, Chat)
    return chat


def reason(body: dict[str, Any] | bytes, path: str = CHAT_PATH) -> str:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(RequestError) as error:
        parse(path, content, lambda _: DIALECT)
    return error.value.reason


def test_conversation_is_of_a_form_of_its_own_and_never_plain() -> None:
    chat = read({"messages": [USER]})
    assert forms_of(chat) & FRONT_END
    assert not chat.is_usual
    assert chat.roles is None


def test_turn_of_the_model_has_one_text_and_its_reasoning_twice() -> None:
    parts = [{"type": "text", "text": one} for one in ("It is ", "green.")]
    chat = read({"messages": [{**ANSWER, "content": parts, "thinking": "Hm."}]})
    assert chat.messages == [{**ANSWER, "reasoning": "Hm.", "reasoning_content": "Hm."}]


def test_tools_are_the_request_s_and_then_those_of_developers() -> None:
    other = {"type": "function", "function": {**FUNCTION, "name": "other"}}
    developer = {"role": "developer", "content": "", "tools": [other]}
    chat = read({"messages": [developer, USER], "tools": [TOOL], "tool_choice": "none"})
    assert [one["function"]["name"] for one in chat.variables["tools"]] == ["colour_of", "other"]
    assert chat.forms & NO_TOOLS
    alone = read({"messages": [developer, USER], "tool_choice": "required"})
    assert [one["function"]["name"] for one in alone.variables["tools"]] == ["other"]
    assert alone.tool_choice == "required"
    assert not read({"messages": [USER], "tool_choice": "none"}).forms & NO_TOOLS


@pytest.mark.parametrize("body", [*planted()])
def test_field_that_nobody_names_changes_nothing_or_is_refused(body: dict[str, Any]) -> None:
    chat = read(body)
    parsed = json.dumps([chat.messages, chat.variables])
    assert "new_field" not in parsed
    assert "cache_control" not in parsed


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"messages": []}, "empty_prompt"),
        ({"messages": [USER] * 8_193}, "too_many_messages"),
        ({"messages": [USER], "truncate_prompt_tokens": 5}, "unsupported_truncation"),
        ({"messages": [USER], "chat_template": "x"}, "unsupported_client_template"),
        (
            {"messages": [USER], "chat_template_kwargs": {"tools": 1}},
            "unsupported_template_kwargs",
        ),
        (
            {"messages": [USER], "chat_template_kwargs": {"a": [0.1234567890123456]}},
            "unsupported_content",
        ),
        ({"messages": [USER], "documents": [{"a": 2**64}]}, "unsupported_content"),
        (
            b'{"messages": [{"role": "user", "content": "a"}], "documents": [{"a": -0}]}',
            "unsupported_content",
        ),
        (
            {"messages": [USER, {**ASKED, "tool_calls": [MINUS_ZERO]}, RESULT]},
            "unsupported_tool_arguments",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            "unsupported_media",
        ),
        (b'{"messages": 7}', "bad_request"),
        (b"{", "bad_json"),
    ],
)
def test_request_that_is_not_known_has_a_reason(body: dict[str, Any] | bytes, why: str) -> None:
    assert reason(body) == why


def test_minus_zero_in_a_text_changes_nothing() -> None:
    assert read({"messages": [{"role": "user", "content": "[1, -0]"}]}).messages


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_other_apis_have_no_prompt(path: str) -> None:
    body = {"messages": [USER], "input": "a", "max_tokens": 1}
    assert reason(body, path) == "unsupported_by_engine"


def test_front_end_of_sglang_is_not_read() -> None:
    dialect = dialect_of(Engine(SGLANG, Release(0, 5, 23), RUST))
    with pytest.raises(RequestError, match="unsupported_by_engine"):
        parse(CHAT_PATH, json.dumps({"messages": [USER]}).encode(), lambda _: dialect)


def test_probabilities_of_the_prompt_are_computed_anew() -> None:
    for field in ({"prompt_logprobs": 0}, {"echo": True}):
        content = json.dumps({"messages": [USER], **field}).encode()
        assert not rust_chat.parse(content, DIALECT).reads_cache


def test_conversation_of_the_other_front_end_is_read_in_its_terms() -> None:
    body = {
        "messages": [USER, ASKED, RESULT],
        "tools": [TOOL],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    (other,) = parse(CHAT_PATH, json.dumps(body).encode()).prompts
    assert isinstance(other, Chat)
    assert rust_chat.in_its_terms(other, DIALECT) == read(body)
    without = {"messages": [USER]}
    (other,) = parse(CHAT_PATH, json.dumps(without).encode()).prompts
    assert isinstance(other, Chat)
    assert rust_chat.in_its_terms(other, DIALECT) == read(without)


def test_known_messages_are_read_once() -> None:
    first, second = (read({"messages": [USER, ASKED, RESULT]}) for _ in range(2))
    assert first.messages[1] is second.messages[1]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["role", "content", "tool_calls", "reasoning", "thinking", "tool_call_id", "tools", "type"]
)
ROLES = st.sampled_from(["user", "assistant", "tool", "developer", "function", "other"])
MESSAGES = st.builds(
    lambda role, more: {**more, "role": role}, ROLES | VALUES, st.dictionaries(KEYS, VALUES)
)


@given(
    st.lists(MESSAGES | VALUES, max_size=3),
    st.dictionaries(st.sampled_from(["tools", "tool_choice", "documents", "n"]), VALUES),
)
def test_anything_is_read_or_refused(messages: list[Any], more: dict[str, Any]) -> None:
    try:
        chat = read({"messages": messages, **more})
    except RequestError:
        return
    assert chat.forms & FRONT_END
