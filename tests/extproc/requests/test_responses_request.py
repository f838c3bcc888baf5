import json
from typing import Any

import pytest

from extproc.errors import RequestError
from extproc.requests.prompt import Chat, InferenceRequest
from extproc.requests.responses_request import parse

USER = {"role": "user", "content": "hello"}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "o"}


def request(**fields: Any) -> InferenceRequest:
    return parse(json.dumps({"input": "hello", **fields}).encode())


def chat(**fields: Any) -> Chat:
    (prompt,) = request(**fields).prompts
    assert isinstance(prompt, Chat)
    return prompt


def test_a_text_is_a_users_turn_behind_the_instructions() -> None:
    assert chat().messages == [USER]
    system = {"role": "system", "content": "be brief"}
    assert chat(instructions="be brief").messages == [system, USER]


def test_the_tokenizer_may_add_its_special_tokens_to_the_templates() -> None:
    assert chat().add_special_tokens
    assert chat().special_tokens_vary
    assert chat().variables == {"add_generation_prompt": True, "continue_final_message": False}


def test_an_effort_is_left_to_templates_that_do_not_read_it() -> None:
    assert chat(reasoning={"effort": "low"}).has_reasoning_effort
    assert not chat(reasoning={"summary": "auto"}).has_reasoning_effort


def test_items_become_messages() -> None:
    items = [
        {"type": "message", "role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"role": "assistant", "content": "plain"},
        USER,
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "a", "annotations": []}],
        },
    ]
    assert chat(input=items).messages == [
        {"role": "developer", "content": "d", "tools": None},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": "plain"},
        USER,
        {"role": "assistant", "content": "a"},
    ]


def test_a_call_and_its_output_become_messages() -> None:
    _, call, output = chat(input=[USER, CALL, OUTPUT]).messages
    assert call["content"] is None
    assert json.dumps(call["tool_calls"]) == (
        '[{"id": "1", "function": {"name": "f", "arguments": {"a": 1}}, "type": "function"}]'
    )
    assert output == {"role": "tool", "content": "o", "tool_call_id": "1"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"input": []}, "empty_prompt"),
        ({"previous_response_id": "r"}, "unsupported_previous_response"),
        ({"previous_input_messages": []}, "unsupported_previous_response"),
        ({"prompt": {"id": "p"}}, "unsupported_previous_response"),
        ({"tools": [{"type": "function", "name": "f"}]}, "unsupported_tools"),
        ({"truncation": "auto"}, "unsupported_truncation"),
        ({"chat_template_kwargs": {"a": 1}}, "unsupported_template_kwargs"),
        ({"kv_transfer_params": {"prompt_token_ids": [1]}}, "unsupported_kv_transfer"),
    ],
)
def test_what_releases_do_differently_is_not_claimed(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        request(**fields)


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        ([{**USER, "status": "in_progress"}], "unsupported_continuation"),
        ([{"type": "reasoning", "summary": []}], "unsupported_items"),
        ([{"type": "message", "content": "no role"}], "unsupported_items"),
        ([CALL, CALL], "unsupported_items"),
        ([CALL, {"role": "assistant", "content": "a"}], "unsupported_items"),
        ([{**CALL, "namespace": "n"}], "unsupported_items"),
        ([{**OUTPUT, "output": [{"type": "input_text"}]}], "unsupported_items"),
        ([{"role": "assistant", "content": []}], "unsupported_items"),
        ([{"role": 5, "content": "a"}], "bad_request"),
    ],
)
def test_items_that_releases_merge_differently_are_not_claimed(
    items: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        request(input=items)


def test_a_salt_and_other_transfer_parameters_are_no_hindrance() -> None:
    parsed = request(model="m", cache_salt="s", kv_transfer_params={}, tools=[])
    assert (parsed.model, parsed.cache_salt) == ("m", "s")
