import json
from typing import Any

import pytest

from extproc.errors import RequestError
from extproc.requests.messages_request import parse
from extproc.requests.prompt import Chat, InferenceRequest

USER = {"role": "user", "content": "hello"}
TOOL = {"name": "f", "description": "d", "input_schema": {"properties": {}}}
IMAGE = {"type": "image", "source": {"type": "base64", "data": "AA=="}}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def request(**fields: Any) -> InferenceRequest:
    return parse(json.dumps({"messages": [USER], **fields}).encode())


def chat(**fields: Any) -> Chat:
    (prompt,) = request(**fields).prompts
    assert isinstance(prompt, Chat)
    return prompt


def turn(role: str, *blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return chat(messages=[{"role": role, "content": [*blocks]}, USER]).messages[:-1]


def test_a_conversation_asks_for_an_answer() -> None:
    variables = {"add_generation_prompt": True, "continue_final_message": False}
    assert request(model="m", cache_salt="s") == InferenceRequest(
        "m", [Chat([USER], variables)], "s"
    )


@pytest.mark.parametrize(
    "system",
    [
        "be brief",
        [text("be "), text("brief")],
        [text("x-anthropic-billing-header: cch=1"), text("be brief"), {"type": "other"}],
    ],
)
def test_the_system_prompt_is_one_message(system: object) -> None:
    assert chat(system=system).messages == [{"role": "system", "content": "be brief"}, USER]


def test_no_system_prompt_is_no_message() -> None:
    assert chat(system="").messages == chat(system=None).messages == [USER]


def test_one_block_of_text_is_a_text_and_more_are_parts() -> None:
    assert turn("user", text("a"), text("")) == [{"role": "user", "content": "a"}]
    parts = [text("a"), text("b")]
    assert turn("user", *parts) == [{"role": "user", "content": parts}]


def test_images_are_media() -> None:
    assert turn("user", IMAGE) == [{"role": "user", "content": [{"type": "image"}]}]


def test_a_models_turn_holds_its_calls_and_thoughts() -> None:
    thoughts = [{"type": "thinking", "thinking": "w"}, {"type": "redacted_thinking", "data": "x"}]
    (message,) = turn("assistant", *thoughts, thoughts[0], text("a"), USE)
    call = {"id": "1", "function": {"arguments": {"a": 1}, "name": "f"}, "type": "function"}
    assert message == {
        "role": "assistant",
        "content": "a",
        "reasoning": "ww",
        "tool_calls": [call],
    }
    assert turn("assistant", USE)[0]["content"] is None


def test_results_of_tools_come_before_what_the_user_says() -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text("a"), text("b"), IMAGE]}
    assert turn("user", text("so?"), result) == [
        {"role": "tool", "content": "a\nb", "tool_call_id": "1"},
        {"role": "user", "content": [{"type": "image"}]},
        {"role": "user", "content": "so?"},
    ]
    plain = {"type": "tool_result", "content": "c"}
    assert turn("user", plain) == [{"role": "tool", "content": "c", "tool_call_id": ""}]


def test_tools_are_what_chat_completions_call_tools() -> None:
    function = {
        "name": "f",
        "description": "d",
        "parameters": {"properties": {}, "type": "object"},
    }
    expected = [{"type": "function", "function": function}]
    for choice in (None, {"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}):
        assert chat(tools=[TOOL], tool_choice=choice).variables["tools"] == expected
    typed = {**TOOL, "input_schema": {"type": "string"}}
    (tool,) = chat(tools=[typed]).variables["tools"]
    assert tool["function"]["parameters"] == {"type": "string"}


def test_an_effort_is_left_to_templates_that_do_not_read_it() -> None:
    assert chat(thinking={"type": "disabled"}).has_reasoning_effort
    assert chat(output_config={"effort": "low"}).has_reasoning_effort
    assert not chat(thinking={"type": "enabled", "budget_tokens": 2048}).has_reasoning_effort


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": []}, "empty_prompt"),
        ({"chat_template_kwargs": {"a": 1}}, "unsupported_template_kwargs"),
        ({"kv_transfer_params": {"prompt_token_ids": [1]}}, "unsupported_kv_transfer"),
        ({"system": [text("")]}, "unsupported_content"),
        ({"tools": []}, "unsupported_tools"),
        ({"tools": [{"type": "web_search", "name": "w"}]}, "unsupported_tools"),
        ({"tools": [{**TOOL, "strict": True}]}, "unsupported_tools"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "unsupported_tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, "unsupported_tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": []}}, "unsupported_tool_choice"),
        ({"messages": [{"role": "system", "content": "s"}]}, "unsupported_inline_system"),
    ],
)
def test_what_releases_do_differently_is_not_claimed(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        request(**fields)


@pytest.mark.parametrize(
    ("role", "block", "reason"),
    [
        ("user", {"type": "document"}, "unsupported_content"),
        ("user", {"type": "image", "source": {}}, "unsupported_content"),
        ("user", USE, "unsupported_content"),
        ("assistant", {"type": "tool_result", "content": "c"}, "unsupported_content"),
        (
            "user",
            {"type": "tool_result", "content": [{"type": "tool_reference", "tool_name": "f"}]},
            "unsupported_content",
        ),
        ("assistant", {**USE, "id": ""}, "bad_request"),
        ("assistant", {**USE, "name": None}, "bad_request"),
        ("assistant", {**USE, "input": "i"}, "bad_request"),
    ],
)
def test_blocks_that_are_not_understood_say_so(
    role: str, block: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        turn(role, block)
