import json
from typing import Any

import pytest

from extproc.base.engine import VLLM, Engine, Release
from extproc.base.errors import RequestError
from extproc.requests.dialect import NEWEST, Dialect, Effort, dialect_of
from extproc.requests.messages_request import parse
from extproc.requests.prompt import (
    DISABLED,
    INLINE_SYSTEM,
    LEFT_OUT,
    NO_TOOLS,
    TOOL_FIELDS,
    TOOL_REFERENCES,
    Chat,
    InferenceRequest,
)

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


def test_messages_request_adds_a_generation_prompt() -> None:
    variables = {"add_generation_prompt": True, "continue_final_message": False}
    assert request(model="m", cache_salt="s") == InferenceRequest(
        "m", [Chat([USER], variables, sent=[USER], roles=("user",))], "s"
    )


@pytest.mark.parametrize(
    "system",
    [
        "be brief",
        [text("be "), text("brief")],
        [text("x-anthropic-billing-header: cch=1"), text("be brief"), {"type": "other"}],
    ],
)
def test_system_prompt_is_one_message(system: object) -> None:
    assert chat(system=system).messages == [{"role": "system", "content": "be brief"}, USER]


def test_empty_system_prompt_is_no_message() -> None:
    assert chat(system="").messages == chat(system=None).messages == [USER]


def test_single_text_block_is_a_text_and_several_are_parts() -> None:
    assert turn("user", text("a"), text("")) == [{"role": "user", "content": "a"}]
    parts = [text("a"), text("b")]
    assert turn("user", *parts) == [{"role": "user", "content": parts}]


def test_image_blocks_are_media() -> None:
    assert turn("user", IMAGE) == [{"role": "user", "content": [{"type": "image"}]}]


def test_assistant_turn_holds_its_calls_and_thoughts() -> None:
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


def test_tool_results_precede_the_text_of_the_user() -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text("a"), text("b"), IMAGE]}
    assert turn("user", text("so?"), result) == [
        {"role": "tool", "content": "a\nb", "tool_call_id": "1"},
        {"role": "user", "content": [{"type": "image"}]},
        {"role": "user", "content": "so?"},
    ]
    plain = {"type": "tool_result", "content": "c"}
    assert turn("user", plain) == [{"role": "tool", "content": "c", "tool_call_id": ""}]


def test_tools_equal_those_of_chat_completions() -> None:
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


def test_effort_is_left_to_templates_that_do_not_read_it() -> None:
    assert chat(thinking={"type": "disabled"}).effort
    assert chat(output_config={"effort": "low"}).effort
    assert not chat(thinking={"type": "enabled", "budget_tokens": 2048}).effort


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": []}, "empty_prompt"),
        ({"chat_template_kwargs": {"a": 1}}, "unsupported_content"),
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
def test_fields_that_releases_treat_differently_are_refused(
    fields: dict[str, Any], reason: str
) -> None:
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
def test_unknown_blocks_name_their_reason(role: str, block: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        turn(role, block)


def chat_in(rules: Dialect | None, **fields: Any) -> Chat:
    body = json.dumps({"messages": [USER], **fields}).encode()
    (prompt,) = parse(body, lambda _: rules).prompts
    assert isinstance(prompt, Chat)
    return prompt


OLD = dialect_of(Engine(VLLM, Release(0, 24)))
BILLED = text("x-anthropic-billing-header: cch=1")


@pytest.mark.parametrize("content", ["t", [text("t")], [BILLED, text("t"), {"type": "other"}]])
def test_system_turn_among_the_messages_stays_in_its_place(content: object) -> None:
    parsed = chat_in(NEWEST, messages=[USER, {"role": "system", "content": content}, USER])
    assert parsed.messages == [USER, {"role": "system", "content": "t"}, USER]
    assert parsed.forms == INLINE_SYSTEM


def test_system_turn_without_a_text_is_none() -> None:
    assert chat_in(NEWEST, messages=[USER, {"role": "system", "content": [BILLED]}]).messages == [
        USER
    ]


@pytest.mark.parametrize(
    ("rules", "effort", "parsed"),
    [
        (NEWEST, None, (DISABLED, Effort.SWITCHES)),
        (NEWEST, "high", (DISABLED, Effort.SWITCHES)),
        (OLD, None, (DISABLED, Effort.IGNORED)),
        (OLD, "high", ("high", Effort.SWITCHES)),
        (None, "high", (DISABLED, None)),
    ],
)
def test_thinking_that_is_off_outweighs_the_effort_in_newer_releases(
    rules: Dialect | None, effort: str | None, parsed: tuple[str, Effort | None]
) -> None:
    off = chat_in(rules, thinking={"type": "disabled"}, output_config={"effort": effort})
    assert (off.effort, off.effort_rule) == parsed


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": 100}, {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": 1}}],
)
def test_thoughts_may_be_shorter_than_answers(fields: dict[str, Any]) -> None:
    assert chat_in(NEWEST, thinking={"type": "enabled", "budget_tokens": 99}, **fields).messages


def test_flags_of_tools_are_passed_on_and_other_fields_are_not() -> None:
    tool = {**TOOL, "defer_loading": True, "strict": None, "cache_control": {}, "new": 1}
    parsed = chat_in(NEWEST, tools=[tool])
    (printed,) = parsed.variables["tools"]
    assert list(printed["function"]) == ["name", "description", "parameters", "defer_loading"]
    assert (parsed.forms, printed.keys()) == (TOOL_FIELDS, {"type", "function"})


def test_older_releases_do_not_know_flags_of_tools_nor_arguments_of_templates() -> None:
    rules = dialect_of(Engine(VLLM, Release(0, 19)))
    tool = {**TOOL, "defer_loading": True, "strict": True}
    parsed = chat_in(rules, tools=[tool], chat_template_kwargs={"a": 1})
    assert parsed.variables["tools"] == chat(tools=[TOOL]).variables["tools"]
    assert (parsed.forms, "a" in parsed.variables) == (TOOL_FIELDS | LEFT_OUT, False)
    newest = chat_in(NEWEST, chat_template_kwargs={"a": 1, "b": None})
    assert (newest.forms, newest.variables.get("a"), "b" in newest.variables) == (
        LEFT_OUT,
        1,
        False,
    )


def test_result_that_names_tools_makes_a_second_message() -> None:
    items = [text("found"), {"type": "tool_reference", "tool_name": "f", "name": "no"}]
    items += [{"type": "tool_reference", "name": "g"}, {"type": "tool_reference"}]
    block = {"type": "tool_result", "tool_use_id": "1", "content": items}
    parsed = chat_in(NEWEST, messages=[{"role": "user", "content": [block]}])
    named = [{"type": "tool_reference", "name": name} for name in ("f", "g")]
    assert parsed.messages == [
        {"role": "tool", "content": "found", "tool_call_id": "1"},
        {"role": "tool", "content": named, "tool_call_id": "1"},
    ]
    assert (parsed.forms, parsed.has_media) == (TOOL_REFERENCES, False)


@pytest.mark.parametrize(
    ("role", "blocks", "content"),
    [
        ("user", [{"type": "thinking", "thinking": "hm"}, text("a")], "a"),
        ("user", [{"type": "tool_use", "id": "1"}, text("a")], "a"),
        ("assistant", [text("a"), {"type": "tool_reference"}], "a"),
        ("assistant", [{"type": "tool_result", "content": [{"b": 1}]}], "Tool result: [{'b': 1}]"),
        ("assistant", [{"type": "tool_result", "content": None}], "Tool result: "),
    ],
)
def test_blocks_that_are_not_of_a_role_are_left_out_or_written_as_text(
    role: str, blocks: list[dict[str, Any]], content: str
) -> None:
    parsed = chat_in(NEWEST, messages=[{"role": role, "content": blocks}])
    assert (parsed.messages, parsed.forms) == ([{"role": role, "content": content}], LEFT_OUT)


def test_parts_of_results_of_other_kinds_are_left_out() -> None:
    items = [text("a"), {"type": "document", "title": "t"}]
    block = {"type": "tool_result", "tool_use_id": "1", "content": items}
    parsed = chat_in(NEWEST, messages=[{"role": "user", "content": [block]}])
    result = {"role": "tool", "content": "a", "tool_call_id": "1"}
    assert (parsed.messages, parsed.forms) == ([result], LEFT_OUT)


def test_empty_system_text_makes_no_message() -> None:
    parsed = chat_in(NEWEST, system=[text("")])
    assert parsed.forms == LEFT_OUT
    assert [message["role"] for message in parsed.messages] == ["user"]


def change(kind: str, tool: dict[str, Any]) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": f"tool_{kind}", "tool": tool}]}


def test_tools_are_those_at_the_end_of_the_conversation() -> None:
    deferred = {**TOOL, "name": "g", "defer_loading": True}
    added = {"type": "tool_definition", "definition": {**TOOL, "name": "h"}}
    messages = [
        {"role": "user", "content": "a"},
        change("addition", {"type": "tool_reference", "name": "g"}),
        change("removal", {"type": "tool_reference", "name": "f"}),
        change("addition", added),
    ]
    parsed = chat_in(NEWEST, messages=messages, tools=[TOOL, deferred])
    functions = [tool["function"] for tool in parsed.variables["tools"]]
    assert [one["name"] for one in functions] == ["g", "h"]
    assert not any("defer_loading" in one for one in functions)
    assert parsed.forms & LEFT_OUT


@pytest.mark.parametrize(
    "message",
    [
        change("addition", {"type": "tool_reference", "name": "unknown"}),
        change("removal", {"type": "tool_definition", "definition": TOOL}),
        change("addition", {}),
    ],
)
def test_changes_of_tools_that_the_engine_refuses_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="unsupported_tools"):
        chat_in(NEWEST, messages=[message], tools=[TOOL])


def test_only_system_turns_change_tools() -> None:
    message = change("removal", {"type": "tool_reference", "name": "f"})
    with pytest.raises(RequestError, match="unsupported_content"):
        chat_in(NEWEST, messages=[{**message, "role": "user"}], tools=[TOOL])


def test_tools_that_must_not_be_used_are_a_form_of_their_own() -> None:
    parsed = chat_in(NEWEST, tools=[TOOL], tool_choice={"type": "none"})
    assert parsed.forms == NO_TOOLS
    assert parsed.variables["tools"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"output_config": {"effort": "much"}}, "bad_request"),
        ({"thinking": {"type": "enabled", "budget_tokens": 99}, "max_tokens": 99}, "bad_request"),
        ({"messages": [{"role": "tool", "content": "t"}]}, "bad_request"),
        (
            {"messages": [{"role": "system", "content": [{"type": "tool_removal"}]}]},
            "unsupported_tools",
        ),
    ],
)
def test_messages_that_no_release_takes_or_few_are_refused(
    fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        chat_in(NEWEST, **fields)


@pytest.mark.parametrize("item", [{"type": "text"}, {"type": "image"}, {"no": "type"}, "bare"])
def test_parts_of_results_without_what_their_kind_has_are_not_keyed(item: object) -> None:
    block = {"type": "tool_result", "tool_use_id": "1", "content": [item]}
    with pytest.raises(RequestError, match="unsupported_content"):
        chat_in(NEWEST, messages=[{"role": "user", "content": [block]}])
