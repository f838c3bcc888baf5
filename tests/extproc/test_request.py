import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import RequestError
from extproc.request import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    MAX_BYTES,
    MAX_MESSAGES,
    MAX_PROMPTS,
    Chat,
    InferenceRequest,
    Text,
    is_inference,
    model_of,
    parse,
    path_of,
)

USER = {"role": "user", "content": "hello"}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


def chat(**fields: Any) -> InferenceRequest:
    return parse(CHAT_PATH, json.dumps({"messages": [USER], **fields}).encode())


def completion(**fields: Any) -> InferenceRequest:
    return parse(COMPLETIONS_PATH, json.dumps(fields).encode())


def refusal(path: str, content: bytes) -> str:
    with pytest.raises(RequestError) as caught:
        parse(path, content)
    return caught.value.reason


def test_a_conversation_keeps_what_changes_the_prompt() -> None:
    request = chat(
        model="m",
        tools=[TOOL],
        documents=[{"text": "d"}],
        chat_template_kwargs={"enable_thinking": False},
        add_generation_prompt=False,
        continue_final_message=True,
        cache_salt="s",
        temperature=0.5,
    )
    assert (request.model, request.cache_salt) == ("m", "s")
    assert request.prompts == [
        Chat(
            [USER],
            {
                "enable_thinking": False,
                "add_generation_prompt": False,
                "continue_final_message": True,
                "tools": [TOOL],
                "documents": [{"text": "d"}],
            },
        )
    ]


def test_text_parts_are_kept_for_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (prompt,) = chat(messages=[{"role": "user", "content": parts}]).prompts
    assert isinstance(prompt, Chat)
    assert prompt.messages[0]["content"] == parts


@pytest.mark.parametrize(
    ("arguments", "parsed"), [('{"a": 1}', {"a": 1}), ("", {}), (None, {}), ({"a": 1}, {"a": 1})]
)
def test_tool_call_arguments_become_objects(arguments: object, parsed: object) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    (prompt,) = chat(messages=[{"role": "assistant", "tool_calls": [call]}]).prompts
    assert isinstance(prompt, Chat)
    assert prompt.messages[0]["tool_calls"][0]["function"]["arguments"] == parsed


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", [Text("text")]),
        (["a", "b"], [Text("a"), Text("b")]),
        ([1, 2, 3], [array("I", [1, 2, 3])]),
        ([[1], [2]], [array("I", [1]), array("I", [2])]),
    ],
)
def test_completions_take_text_and_token_ids(prompt: object, expected: list[object]) -> None:
    assert completion(prompt=prompt).prompts == expected


def test_completions_may_leave_special_tokens_out() -> None:
    assert completion(prompt="a", add_special_tokens=False).prompts == [Text("a", False)]  # noqa: FBT003


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": []}, "empty_prompt"),
        ({"messages": [USER] * (MAX_MESSAGES + 1)}, "too_many_messages"),
        ({"chat_template": "{{ 1 }}"}, "unsupported_client_template"),
        ({"truncate_prompt_tokens": 5}, "unsupported_truncation"),
        ({"messages": [{"content": "no role"}]}, "bad_request"),
        ({"messages": [{"role": "user", "content": 5}]}, "bad_request"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "unsupported_content",
        ),
        ({"messages": [{"role": "user", "content": ["bare"]}]}, "unsupported_content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "a"}]}]},
            "unsupported_content",
        ),
        ({"messages": [{"role": "developer", "tools": [TOOL]}]}, "unsupported_tools"),
        ({"continue_final_message": True}, "bad_request"),
        ({"chat_template_kwargs": {"messages": []}}, "unsupported_template_kwargs"),
        ({"tools": []}, "unsupported_tools"),
        ({"tools": [{"type": "function"}]}, "unsupported_tools"),
        ({"tools": [{**TOOL, "type": "custom"}]}, "unsupported_tools"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "unsupported_tools"),
        ({"tools": [{"function": {**FUNCTION, "strict": True}}]}, "unsupported_tools"),
        ({"tools": [TOOL], "tool_choice": "none"}, "unsupported_tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "unsupported_tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]}, "bad_request"),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "bad_request"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
            "bad_request",
        ),
        ({"messages": "hello"}, "bad_request"),
        ({"model": 5}, "bad_request"),
    ],
)
def test_conversations_that_cannot_be_keyed_say_why(fields: dict[str, Any], reason: str) -> None:
    assert refusal(CHAT_PATH, json.dumps({"messages": [USER], **fields}).encode()) == reason


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("", "empty_prompt"),
        ([], "empty_prompt"),
        ([[]], "empty_prompt"),
        (["a"] * (MAX_PROMPTS + 1), "too_many_prompts"),
        ([1, "a"], "bad_request"),
        (["a", 1], "empty_prompt"),
        ([-1], "bad_request"),
        ([2**32], "bad_request"),
        ([1.5], "bad_request"),
        (None, "bad_request"),
    ],
)
def test_prompts_that_cannot_be_keyed_say_why(prompt: object, reason: str) -> None:
    assert refusal(COMPLETIONS_PATH, json.dumps({"prompt": prompt}).encode()) == reason


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        (b'"truncate_prompt_tokens": 3', "unsupported_truncation"),
        (b'"suffix": "z"', "unsupported_suffix"),
        (b'"prompt_embeds": "AA=="', "unsupported_embeddings"),
    ],
)
def test_completions_with_more_than_their_prompt_are_not_claimed(field: bytes, reason: str) -> None:
    assert refusal(COMPLETIONS_PATH, b'{"prompt": "a", ' + field + b"}") == reason


def test_a_body_that_takes_too_long_to_read_is_not_read() -> None:
    assert refusal(CHAT_PATH, b"{" * (MAX_BYTES + 1)) == "too_many_bytes"


def test_tools_have_the_order_of_keys_in_which_engines_print_them() -> None:
    backwards = {"function": dict(reversed(FUNCTION.items()))}
    (prompt,) = chat(tools=[backwards], tool_choice="auto").prompts
    assert isinstance(prompt, Chat)
    assert json.dumps(prompt.variables["tools"]) == json.dumps([TOOL])


def test_templates_see_of_a_message_only_what_an_engine_shows_them() -> None:
    said = {"role": "assistant", "content": None, "name": "n", "refusal": "r", "reasoning": "w"}
    result = {"role": "tool", "content": "c", "tool_call_id": "1", "tool_calls": [5]}
    (prompt,) = chat(messages=[said, result], reasoning_effort="low").prompts
    assert prompt == Chat(
        [
            {"role": "assistant", "content": "", "name": "n", "reasoning": "w"},
            {"role": "tool", "content": "c", "tool_call_id": "1"},
        ],
        {"add_generation_prompt": True, "continue_final_message": False},
        has_reasoning_effort=True,
    )


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"messages": [' * 5000])
def test_what_is_no_json_says_so(content: bytes) -> None:
    assert refusal(CHAT_PATH, content) == "bad_json"


@given(st.binary(max_size=300))
def test_any_bytes_give_a_request_or_a_reason(content: bytes) -> None:
    for path in (CHAT_PATH, COMPLETIONS_PATH):
        try:
            request = parse(path, content)
        except RequestError:
            continue
        assert request.prompts


def test_the_model_is_read_also_where_the_prompt_is_not() -> None:
    assert model_of(b'{"model": "m", "messages": 5}') == "m"
    assert model_of(b"{}") is None
    assert model_of(b"{") is None


def test_query_strings_and_trailing_slashes_do_not_hide_a_path() -> None:
    assert path_of("/v1/chat/completions?api=1") == CHAT_PATH
    assert path_of("/v1/completions/") == COMPLETIONS_PATH


def test_only_posts_to_known_paths_carry_prompts() -> None:
    assert is_inference("POST", CHAT_PATH)
    assert not is_inference("GET", CHAT_PATH)
    assert not is_inference("POST", "/v1/models")
