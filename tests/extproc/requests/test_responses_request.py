import json
from typing import Any

import pytest

from extproc.base.engine import VLLM, Engine, Release
from extproc.base.errors import RequestError
from extproc.requests.dialect import NEWEST, Dialect, dialect_of
from extproc.requests.prompt import (
    ITEMS,
    LEFT_OUT,
    NO_TOOLS,
    TOOL_FIELDS,
    Chat,
    InferenceRequest,
)
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


def test_input_text_is_a_user_turn_behind_the_instructions() -> None:
    assert chat().messages == [USER]
    system = {"role": "system", "content": "be brief"}
    assert chat(instructions="be brief").messages == [system, USER]


def test_responses_tokenizer_may_add_special_tokens() -> None:
    assert chat().add_special_tokens
    assert chat().special_tokens_vary
    assert chat().variables == {"add_generation_prompt": True, "continue_final_message": False}


def test_effort_is_left_to_templates_that_do_not_read_it() -> None:
    assert chat(reasoning={"effort": "low"}).effort
    assert not chat(reasoning={"summary": "auto"}).effort


def test_input_items_become_messages() -> None:
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


def test_function_call_and_its_output_become_messages() -> None:
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
        ({"chat_template_kwargs": {"a": 1}}, "unsupported_content"),
        ({"kv_transfer_params": {"prompt_token_ids": [1]}}, "unsupported_kv_transfer"),
    ],
)
def test_fields_that_releases_treat_differently_are_refused(
    fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        request(**fields)


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        ([{**USER, "status": "in_progress"}], "unsupported_items"),
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
def test_input_items_that_releases_merge_differently_are_refused(
    items: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        request(input=items)


def test_salt_and_other_transfer_parameters_are_accepted() -> None:
    parsed = request(model="m", cache_salt="s", kv_transfer_params={}, tools=[])
    assert (parsed.model, parsed.cache_salt) == ("m", "s")


def dialect(minor: int) -> Dialect:
    found = dialect_of(Engine(VLLM, Release(0, minor)))
    assert found is not None
    return found


def spoken(*items: dict[str, Any], rules: Dialect = NEWEST, **fields: Any) -> Chat:
    body = json.dumps({"input": [USER, *items], **fields}).encode()
    (prompt,) = parse(body, lambda _: rules).prompts
    assert isinstance(prompt, Chat)
    return prompt


def why(*items: dict[str, Any], rules: Dialect = NEWEST, **fields: Any) -> str:
    with pytest.raises(RequestError) as caught:
        spoken(*items, rules=rules, **fields)
    return caught.value.reason


SAID = {"role": "assistant", "type": "message", "content": [{"type": "output_text", "text": "a"}]}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "t", "text": "why"}]}
PATCH = {"type": "custom_tool_call", "call_id": "1", "name": "p", "input": "diff"}
PATCHED = {"type": "custom_tool_call_output", "call_id": "1", "output": "done"}


def called(name: str = "f", arguments: object = None) -> dict[str, Any]:
    function = {"name": name, "arguments": {"a": 1} if arguments is None else arguments}
    return {"id": "1", "function": function, "type": "function"}


def test_items_of_one_turn_become_one_message() -> None:
    result = spoken(THOUGHT, SAID, CALL, CALL, OUTPUT)
    assert result.messages[1:] == [
        {
            "role": "assistant",
            "content": "a",
            "reasoning": "why",
            "tool_calls": [called(), called()],
        },
        {"role": "tool", "content": "o", "tool_call_id": "1"},
    ]
    assert result.forms == ITEMS


def test_second_text_or_thought_begins_a_new_message() -> None:
    contents = [one["content"] for one in spoken(SAID, SAID, THOUGHT, THOUGHT).messages[1:]]
    assert contents == ["a", "a", None]


def test_items_stay_apart_in_releases_that_merge_none() -> None:
    result = spoken(SAID, CALL, rules=dialect(14))
    assert [one["role"] for one in result.messages] == ["user", "assistant", "assistant"]
    assert not result.add_special_tokens


def test_bare_text_of_a_model_joins_its_turn_from_025_on() -> None:
    bare = {"role": "assistant", "content": "a"}
    assert len(spoken(THOUGHT, bare).messages) == 2
    apart = spoken(THOUGHT, bare, rules=dialect(24))
    assert (len(apart.messages), apart.forms) == (3, ITEMS)
    assert spoken(bare, rules=dialect(24)).forms == 0


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"type": "reasoning", "summary": [{"text": "short"}]}, "short"),
        ({"type": "reasoning", "content": [], "summary": []}, ""),
    ],
)
def test_reasoning_without_content_is_its_summary(item: dict[str, Any], text: str) -> None:
    assert spoken(item).messages[1]["reasoning"] == text


def test_only_the_first_part_of_a_models_text_counts() -> None:
    several = {**SAID, "content": [*SAID["content"], {"type": "output_text", "text": "b"}]}
    result = spoken(several)
    assert (result.messages[1]["content"], result.forms) == ("a", ITEMS)


def test_custom_tools_are_functions_of_one_text_from_032_on() -> None:
    result = spoken(PATCH, PATCHED, tools=[{"type": "custom", "name": "p", "description": "d"}])
    assert result.messages[1]["tool_calls"] == [called("p", {"input": "diff"})]
    assert result.messages[2] == {"role": "tool", "content": "done", "tool_call_id": "1"}
    (tool,) = result.variables["tools"]
    assert tool["function"]["parameters"]["required"] == ["input"]
    for item in (PATCH, PATCHED):
        assert why(item, rules=dialect(31)) == "unsupported_items"
    assert (
        spoken(rules=dialect(31), tools=[{"type": "custom", "name": "p"}]).variables["tools"] == []
    )


def test_tools_are_printed_as_chats_are_and_namespaces_are_flattened() -> None:
    plain = {"type": "function", "name": "f", "strict": False, "parameters": {}}
    inner = [{**plain, "strict": None}, {"type": "other"}]
    tools = [plain, {"type": "namespace", "name": "n", "tools": inner}, {"type": "web_search"}]
    function: dict[str, Any] = {"name": "f", "description": None, "parameters": {}}
    result = spoken(tools=tools)
    assert result.variables["tools"] == [
        {"type": "function", "function": {**function, "strict": False}},
        {"type": "function", "function": {**function, "name": "n__f"}},
    ]
    assert result.forms == ITEMS
    flattened = spoken({**CALL, "namespace": "n"}).messages[1]["tool_calls"]
    assert flattened == [called("n__f")]


def test_flags_of_functions_are_passed_on_but_not_of_custom_tools() -> None:
    flags = {"strict": False, "defer_loading": True, "allowed_callers": ["direct"]}
    function = {"type": "function", "name": "f", "parameters": {}, **flags}
    result = spoken(tools=[function, {"type": "custom", "name": "c", **flags}])
    printed = [list(tool["function"]) for tool in result.variables["tools"]]
    usual = ["name", "description", "parameters"]
    assert printed == [[*usual, "strict", "defer_loading"], usual]
    assert result.forms == ITEMS | TOOL_FIELDS


def test_answer_that_is_sent_as_an_input_is_an_answer() -> None:
    result = spoken({"role": "assistant", "content": [{"type": "input_text", "text": "yes"}]}, USER)
    assert {"role": "assistant", "content": "yes"} in result.messages
    assert result.forms == ITEMS


def test_arguments_of_templates_are_passed_on_from_024_on() -> None:
    newer, older = (
        spoken(rules=dialect(minor), chat_template_kwargs={"a": 1}) for minor in (24, 19)
    )
    assert (newer.variables.get("a"), "a" in older.variables) == (1, False)
    assert newer.forms == older.forms == LEFT_OUT


@pytest.mark.parametrize(
    ("items", "continues"),
    [
        ([{**SAID, "status": "incomplete"}], True),
        ([{**SAID, "status": "incomplete"}, USER], False),
        ([{**CALL, "status": "in_progress"}], False),
    ],
)
def test_model_goes_on_with_a_message_that_is_last_and_unfinished(
    items: list[dict[str, Any]], continues: bool
) -> None:
    result = spoken(*items)
    assert result.variables["continue_final_message"] is continues
    assert result.variables["add_generation_prompt"] is not continues
    assert result.forms == ITEMS


def test_tools_that_must_not_be_used_are_kept_from_027_on() -> None:
    tools = [{"type": "function", "name": "f"}]
    kept, left = (
        spoken(rules=dialect(minor), tools=tools, tool_choice="none") for minor in (27, 24)
    )
    assert ("tools" in kept.variables, "tools" in left.variables) == (True, False)
    assert kept.forms == left.forms == ITEMS | NO_TOOLS


def test_output_in_parts_is_a_form_of_its_own() -> None:
    result = spoken(CALL, {**OUTPUT, "output": [{"type": "input_text", "text": "o"}]})
    assert result.messages[2]["content"] == [{"type": "text", "text": "o"}]
    assert result.forms == ITEMS


@pytest.mark.parametrize(
    ("items", "fields", "reason"),
    [
        ([], {"tools": [{"type": "namespace", "name": "n"}]}, "bad_request"),
        ([], {"tools": [{"type": "custom", "format": {"type": "grammar"}}]}, "bad_request"),
        ([], {"tools": [{"type": "function", "defer_loading": True}]}, "unsupported_tools"),
        ([{**CALL, "namespace": 5}], {}, "bad_request"),
        ([{**THOUGHT, "encrypted_content": "x"}], {}, "unsupported_items"),
        ([{**THOUGHT, "content": "text"}], {}, "unsupported_items"),
        ([{**PATCH, "input": 5}], {}, "unsupported_items"),
        ([{**OUTPUT, "output": 5}], {}, "unsupported_items"),
        ([{**SAID, "content": []}], {}, "unsupported_items"),
    ],
)
def test_items_and_tools_that_no_engine_takes_are_refused(
    items: list[dict[str, Any]], fields: dict[str, Any], reason: str
) -> None:
    assert why(*items, **fields) == reason
