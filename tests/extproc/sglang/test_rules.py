"""SGLang's releases read requests differently; what they agree on needs no proof."""

import base64
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.engine import SGLANG, Engine, PromptArguments, Release
from extproc.base.errors import RequestError
from extproc.requests.dialect import Dialect, dialect_of, model_dialects
from extproc.requests.prompt import CONVERTED, GIVEN, ROLES, Chat, TokenIds, forms_of
from extproc.requests.request import parse
from extproc.requests.sglang_fields import as_read
from extproc.requests.sglang_responses import decoded_state
from extproc.requests.sglang_rules import SGLANG_RANGES
from extproc.requests.sglang_schema import with_standard_types
from extproc.templates.chat_template import ChatTemplate
from tests.extproc.sglang.test_recorded_prompts import dialect, prompt

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": "hi"}
FUNCTION = {"parameters": {"type": "object"}, "name": "f"}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
ITEM = {"type": "message", "role": "user", "content": "hi"}
DEVELOPER = {"role": "developer", "content": "rules"}
ANTHROPIC_TOOL = {"name": "f", "input_schema": {"type": "object"}}
FOUND = {"type": "search_result", "title": "t", "source": "s"}
USE = {"type": "tool_use", "id": "i", "name": "f", "input": {}}
CUSTOM = {"type": "custom_tool_call", "name": "f", "call_id": "c", "input": "x"}
PHASES = ("commentary", "final_answer")
STATE = base64.urlsafe_b64encode(zlib.compress(b"hidden")).decode()


def refusal(path: str, body: dict[str, Any], rules: Dialect, name: str = "text") -> str:
    with pytest.raises(RequestError) as raised:
        prompt(path, body, rules, name)
    return raised.value.reason


def test_ranges_are_in_order() -> None:
    since = [one[0] for one in SGLANG_RANGES]
    assert since == sorted(set(since))


TOOLS = [
    (9, '{"type": "function", "function": {"description": null, "name": "f", "parameters":'),
    (10, '"strict": false}}]'),
    (11, '"strict": false}, "defer_loading": null}]'),
    (22, '"strict": false}, "defer_loading": null}]'),
    (23, '{"parameters": {"type": "object"}, "name": "f", "description": null}, "defer_loading"'),
]


@pytest.mark.parametrize(("patch", "printed"), TOOLS)
def test_tools_are_printed_as_the_release_does(patch: int, printed: str) -> None:
    assert printed in prompt(CHAT, {"messages": [USER], "tools": [TOOL]}, dialect(patch))


EFFORTS = [
    (9, {}, "<effort>medium</effort><|assistant|>"),
    (9, {"reasoning_effort": "low"}, "<effort>low</effort><|assistant|>"),
    (10, {}, "hi<|assistant|>"),
    (10, {"reasoning_effort": "none"}, "<thinking>False</thinking><|assistant|><think></think>"),
    (15, {"reasoning_effort": "low"}, "<effort>low</effort><|assistant|>"),
    (16, {"reasoning_effort": "low"}, "<effort>low</effort><thinking>True</thinking><|assistant|>"),
]


@pytest.mark.parametrize(("patch", "fields", "end"), EFFORTS)
def test_effort_sets_what_it_sets_in_the_release(
    patch: int, fields: dict[str, Any], end: str
) -> None:
    assert prompt(CHAT, {"messages": [USER], **fields}, dialect(patch)).endswith(end)


def test_results_of_tools_are_joined_only_from_0_5_11_on() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [USER, {"role": "tool", "content": content}]}
    assert "<|tool|>a b" in prompt(CHAT, body, dialect(11), "parts")
    assert '<|tool|>({"type": "text", "text": "a"})' in prompt(CHAT, body, dialect(10), "parts")


DIFFERENT = [
    (15, MESSAGES, {"messages": [USER], "system": [{"type": "text", "text": "a"}]}),
    (15, MESSAGES, {"messages": [USER], "thinking": {"type": "disabled"}}),
    (15, RESPONSES, {"input": "hi"}),
    (19, RESPONSES, {"input": [CUSTOM]}),
    (16, RESPONSES, {"input": [{"type": "function_call_output", "output": [ITEM]}]}),
    (15, CHAT, {"messages": [USER], "reasoning": {"effort": "low"}}),
]


@pytest.mark.parametrize(("patch", "path", "body"), DIFFERENT)
def test_what_a_release_reads_otherwise_is_refused(
    patch: int, path: str, body: dict[str, Any]
) -> None:
    assert refusal(path, body, dialect(patch)) in (
        "unsupported_by_engine",
        "unsupported_reasoning_effort",
        "bad_request",
    )


def test_messages_of_texts_are_the_same_before_0_5_16() -> None:
    body = {"messages": [USER], "system": "be brief"}
    assert prompt(MESSAGES, body, dialect(9)).startswith("<|system|>be brief<|user|>hi")


def test_system_turns_of_a_response_stay_from_0_5_22_on() -> None:
    body = {"input": [ITEM, DEVELOPER], "instructions": "be brief"}
    assert prompt(RESPONSES, body, dialect(19)).startswith("<|system|>be brief\n\nrules<|user|>")
    labelled = "<|user|>hi<|system|>Developer instructions:\nrules"
    assert labelled in prompt(RESPONSES, body, dialect(22))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [USER], "extra_key": "x"}, "unsupported_extra_key"),
    (CHAT, {"messages": [USER], "session_params": {}}, "unsupported_session"),
    (CHAT, {"messages": [USER], "lora_path": "x"}, "unsupported_lora"),
    (CHAT, {"messages": [USER], "reasoning": {"effort": True}}, "bad_request"),
    (CHAT, {"messages": [USER], "reasoning": {"effort": "x"}}, "bad_request"),
    (CHAT, {"messages": [USER], "reasoning_effort": 1.5}, "bad_request"),
    (CHAT, {"messages": [USER] * 8193}, "too_many_messages"),
    *(
        (CHAT, {"messages": [USER], "chat_template_kwargs": given}, "bad_request")
        for given in ({"tools": 1}, {"tokenize": True}, {"continue_final_message": True})
    ),
    (CHAT, {"messages": [USER], "tools": [TOOL], "tool_choice": "x"}, "bad_request"),
    (CHAT, {"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "auto"}}, "bad_request"),
    (CHAT, {"messages": [USER], "tool_choice": "required"}, "bad_request"),
    *(
        (CHAT, {"messages": [USER], "tools": [{"function": function}]}, "bad_request")
        for function in (
            *(1, {"name": 1}, {"name": "f", "description": 1}, {"name": "f", "strict": 2}),
            *({"name": "f", "strict": "maybe"}, {"name": "f", "defer_loading": []}),
            {"name": "f", "parameters": {"maximum": 10**400}},
        )
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": "x"}], "continue_final_message": True},
        "empty_prompt",
    ),
    (CHAT, {"messages": [{"role": "assistant", "content": "x", "prefix": 2}]}, "bad_request"),
    (CHAT, {"messages": [{"role": "assistant", "phase": "x"}]}, "bad_request"),
    (CHAT, {"messages": [{"role": 1}]}, "bad_request"),
    (CHAT, {"messages": [{"role": "user", "content": 1}]}, "bad_request"),
    (CHAT, {"messages": [{"role": "system", "content": "x", "tools": 1}]}, "bad_request"),
    (CHAT, {"messages": [{"role": "system", "content": "x", "tools": [1]}]}, "bad_request"),
    (CHAT, {"messages": [{"role": "tool", "content": "x", "name": 1}]}, "bad_request"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": 1}]}, "bad_request"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [1]}]}, "bad_request"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": 1}]}]}, "bad_request"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]},
        "bad_request",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "unsupported_media",
    ),
    *(
        (CHAT, {"messages": [{"role": role, "content": [part]}]}, "bad_request")
        for role, part in (
            *(("user", {"type": "x"}), ("user", {"type": "thinking", "thinking": "a"})),
            ("assistant", {"type": "reasoning", "thinking": "a", "text": "b"}),
            *(("user", {"type": "text", "text": 1}), ("tool", {"type": "tool_reference"})),
        )
    ),
    *(
        (
            CHAT,
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"arguments": given}}]}
                ]
            },
            "bad_request",
        )
        for given in ("", "null", "[1]", '{"a": 1', 5)
    ),
    (MESSAGES, {"messages": [{"role": "x", "content": "a"}]}, "bad_request"),
    (MESSAGES, {"messages": [USER], "thinking": {"type": "adaptive"}}, "bad_request"),
    (MESSAGES, {"messages": [USER], "thinking": {"type": "x"}}, "bad_request"),
    (MESSAGES, {"messages": [USER], "output_config": {"effort": "none"}}, "bad_request"),
    (MESSAGES, {"messages": [USER], "tool_choice": {"type": "x"}}, "bad_request"),
    (MESSAGES, {"messages": [USER], "tools": [{"name": "f"}]}, "bad_request"),
    (MESSAGES, {"messages": [USER], "tools": [{**ANTHROPIC_TOOL, "strict": None}]}, "bad_request"),
    (MESSAGES, {"messages": [USER], "system": [{"type": "x"}]}, "bad_request"),
    (MESSAGES, {"messages": [USER], "system": [{"type": "text"}]}, "bad_request"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "empty_prompt"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "bad_request"),
    *(
        (MESSAGES, {"messages": [{"role": "user", "content": [FOUND | given]}]}, "bad_request")
        for given in ({"title": 1}, {"content": 1}, {"content": [{"type": "text", "text": 1}]})
    ),
    (
        MESSAGES,
        {"messages": [{"role": "assistant", "content": [{**USE, "id": ""}]}]},
        "unsupported_content",
    ),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 1}]}]},
        "bad_request",
    ),
    (
        MESSAGES,
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]},
        "bad_request",
    ),
    (RESPONSES, {"input": "hi", "previous_response_id": "r"}, "unsupported_previous_response"),
    (RESPONSES, {"input": "hi", "extra_key": "x"}, "unsupported_extra_key"),
    (RESPONSES, {"input": "hi", "tools": [{"type": "shell"}]}, "bad_request"),
    (RESPONSES, {"input": "hi", "tools": [{"type": "function", "strict": 1}]}, "bad_request"),
    (RESPONSES, {"input": [{**ITEM, "content": [{"type": "input_image"}]}]}, "unsupported_media"),
    (
        RESPONSES,
        {"input": [{"type": "function_call_output", "output": [{"text": 1}]}]},
        "bad_request",
    ),
    (RESPONSES, {"input": [{"type": "function_call_output", "output": 1}]}, "bad_request"),
    (RESPONSES, {"input": [{"type": "reasoning", "summary": 1}]}, "bad_request"),
    (RESPONSES, {"input": [{"type": "reasoning"}]}, "empty_prompt"),
]


@pytest.mark.parametrize(("path", "body", "reason"), REFUSED)
def test_request_is_refused_with_its_reason(path: str, body: dict[str, Any], reason: str) -> None:
    assert refusal(path, body, dialect()) == reason


def test_token_ids_replace_the_conversation() -> None:
    body = msgspec.json.encode({"messages": [USER], "input_ids": [1, 2]})
    (ids,) = parse(CHAT, body, lambda _: dialect()).prompts
    assert isinstance(ids, TokenIds)
    assert (list(ids.ids), forms_of(ids)) == ([1, 2], GIVEN)


@pytest.mark.parametrize(("role", "form"), [("tool", ROLES), ("user", 0), ("developer", ROLES)])
def test_turn_that_the_engines_own_templates_refuse_is_a_form(role: str, form: int) -> None:
    body = {"messages": [{"role": role, "content": [{"type": "text", "text": "hi"}]}, USER]}
    (made,) = parse(CHAT, msgspec.json.encode(body), lambda _: dialect()).prompts
    assert forms_of(made) & ROLES == form


def test_developer_content_of_any_shape_is_labelled() -> None:
    def parsed(content: object) -> str:
        turn = {"role": "developer", "content": content}
        return prompt(RESPONSES, {"input": [turn, ITEM]}, dialect(), "parts")

    assert parsed([{"type": "input_text", "text": "a"}]).startswith(
        "<|system|>Developer instructions:\na<|user|>"
    )
    assert parsed([]).startswith("<|system|>Developer instructions:<|user|>")
    assert parsed(None).startswith("<|user|>hi")


def test_arguments_of_calls_become_objects() -> None:
    def parsed(arguments: object) -> str:
        item = {"type": "function_call", "id": "i", "name": "f", "arguments": arguments}
        return prompt(RESPONSES, {"input": [ITEM, item, ITEM]}, dialect(), "parts")

    assert [parsed(one).count('f{"a": 1}') for one in ('{"a": 1}', {"a": 1}, "[", None)] == [
        1,
        1,
        0,
        0,
    ]


def test_parts_of_one_turn_are_one_message() -> None:
    def parsed(*contents: object) -> str:
        items = [{"role": "assistant", "content": content} for content in contents]
        return prompt(RESPONSES, {"input": [ITEM, *items, ITEM]}, dialect(), "parts")

    texts = [{"type": "output_text", "text": "b"}]
    assert "<|assistant|>a\n\nb<" in parsed("a", "b")
    assert '<|assistant|>({"type": "text", "text": "a"})({"type"' in parsed("a", texts)
    assert "<|assistant|>b<" in parsed("", "b")


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (f"sglang-reasoning-v1.{STATE}", "hidden"),
        (f"sglang-reasoning-v1.{STATE[:-8]}", ""),
        ("sglang-reasoning-v1.!", ""),
        ("gAAA", ""),
        (None, ""),
    ],
)
def test_reasoning_that_comes_back_encoded_is_read(state: object, text: str) -> None:
    assert decoded_state(state) == text


def test_reasoning_that_unpacks_to_more_than_a_body_is_refused() -> None:
    packed = base64.urlsafe_b64encode(zlib.compress(b"a" * 5_000_000)).decode()
    with pytest.raises(RequestError, match="too_many_bytes"):
        decoded_state(f"sglang-reasoning-v1.{packed}")


PARSERS = [
    ({"reasoning_parser": "mistral"}, "<effort>medium</effort><|assistant|>"),
    ({"reasoning_parser": "hunyuan"}, "<effort>medium</effort><|assistant|>"),
    ({"reasoning_parser": "deepseek-r1"}, "hi<|assistant|>"),
    ({"reasoning_parser": "kimi_k2"}, "<thinking>True</thinking><|assistant|>"),
]
BARE = "{% for m in messages %}{{ m.content }}{% endfor %}"
ENDED = (
    "{% if reasoning_effort %}<effort>{{ reasoning_effort }}</effort>{% endif %}"
    "{% if thinking is defined %}<thinking>{{ thinking }}</thinking>{% endif %}<|assistant|>"
)


def render(body: dict[str, Any], rules: Dialect, source: str) -> str:
    (chat,) = parse(MESSAGES, msgspec.json.encode(body), lambda _: rules).prompts
    assert isinstance(chat, Chat)
    return ChatTemplate(source, {}).render(chat)[0]


@pytest.mark.parametrize(("parsers", "end"), PARSERS)
def test_parser_decides_how_thinking_is_switched_on(parsers: dict[str, str], end: str) -> None:
    body = {"messages": [USER], "thinking": {"type": "adaptive"}}
    assert render(body, dialect(23, **parsers), BARE + ENDED).endswith(end)


OFF = {"messages": [USER], "thinking": {"type": "disabled"}}
ON = {"messages": [USER], "thinking": {"type": "adaptive"}}
SPECIAL = [
    ("mistral", "{# reasoning_effort [THINK] #}", OFF, "<effort>none</effort><|assistant|>"),
    ("qwen3", "<|channel|>", ON, "hi<|assistant|>"),
    (
        "hunyuan",
        "{# reasoning_effort reasoning_mode_token no_think #}",
        ON,
        "<effort>high</effort>",
    ),
    ("hunyuan", "{# reasoning_effort reasoning_mode_token no_think #}", OFF, "<effort>no_think<"),
    (
        "hunyuan",
        "{# reasoning_mode_token no_think #}",
        {"messages": [USER]},
        "<effort>high</effort>",
    ),
    (
        "hunyuan",
        "{# reasoning_mode_token no_think #}",
        {"messages": [USER], "output_config": {"effort": "low"}},
        "<effort>low</effort>",
    ),
    (
        "nemotron_3",
        "{% if low_effort %}<low>{% endif %}{# truncate_history_thinking #}",
        {"messages": [USER], "output_config": {"effort": "low"}},
        "<low>hi<effort>low</effort>",
    ),
]


@pytest.mark.parametrize(("parser", "source", "body", "expected"), SPECIAL)
def test_template_decides_how_thinking_is_switched(
    parser: str, source: str, body: dict[str, Any], expected: str
) -> None:
    assert expected in render(body, dialect(reasoning_parser=parser), source + BARE + ENDED)


@pytest.mark.parametrize(
    ("parser", "source", "body"),
    [("qwen3", "<|channel|>", OFF), ("qwen3", "<mm:think>", ON), ("deepseek-r1", "", OFF)],
)
def test_model_that_always_thinks_cannot_be_switched_off(
    parser: str, source: str, body: dict[str, Any]
) -> None:
    with pytest.raises(RequestError):
        render(body, dialect(reasoning_parser=parser), source + BARE)


@pytest.mark.parametrize(
    "parsers", [{"reasoning_parser": "beam"}, {"tool_call_parser": "deepseekv4"}]
)
def test_worker_whose_parsers_need_code_is_told_no_conversation(parsers: dict[str, str]) -> None:
    assert (
        refusal(CHAT, {"messages": [USER]}, dialect(23, **parsers))
        == "unsupported_engine_arguments"
    )


@given(st.lists(st.sampled_from(["user", "assistant", "system"]), min_size=1, max_size=5))
def test_only_what_all_engines_read_alike_needs_no_proof(roles: list[str]) -> None:
    messages = [{"role": role, "content": "x"} for role in roles]
    body = msgspec.json.encode({"messages": messages})
    (chat,) = parse(CHAT, body, lambda _: dialect()).prompts
    (plain,) = parse(CHAT, body, lambda _: None).prompts
    assert isinstance(chat, Chat)
    assert isinstance(plain, Chat)
    text, forms = ChatTemplate(BARE, {}).render(chat)
    assert forms == (0 if roles[-1] == "user" else CONVERTED)
    assert text == ChatTemplate(BARE, {}).render(plain)[0]


def test_template_that_writes_the_first_token_needs_proof() -> None:
    body = msgspec.json.encode({"messages": [USER]})
    (chat,) = parse(CHAT, body, lambda _: dialect()).prompts
    assert isinstance(chat, Chat)
    text, forms = ChatTemplate("{{ bos_token }}" + BARE, {"bos_token": "<s>"}).render(chat)
    assert (text[:3], forms) == ("<s>", CONVERTED)


def test_thinking_that_is_off_changes_nothing_without_a_parser() -> None:
    body = {"messages": [USER], "thinking": {"type": "disabled"}}
    assert prompt(MESSAGES, body, dialect()) == prompt(MESSAGES, {"messages": [USER]}, dialect())


def test_deferral_of_a_function_precedes_that_of_its_tool() -> None:
    def printed(function: dict[str, Any]) -> str:
        tool = {"type": "function", "function": {**FUNCTION, **function}, "defer_loading": True}
        return prompt(CHAT, {"messages": [USER], "tools": [tool]}, dialect())

    assert printed({"defer_loading": False}) != printed({})


def test_parts_of_a_developer_that_are_no_texts_stay_before_the_label() -> None:
    turn = {"role": "developer", "content": [{"type": "x"}, {"type": "input_text", "text": "a"}]}
    assert refusal(RESPONSES, {"input": [turn, ITEM]}, dialect(), "parts")


def test_state_that_does_not_unpack_is_no_reasoning() -> None:
    assert decoded_state("sglang-reasoning-v1.AAAA") == ""


def test_reasoning_behind_an_answer_joins_its_turn() -> None:
    def reasoned(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

    answer = {"role": "assistant", "content": "x"}
    items = [ITEM, reasoned("a"), reasoned("b"), answer, reasoned("c"), ITEM]
    assert prompt(RESPONSES, {"input": items}, dialect(), "parts")


@pytest.mark.parametrize("choice", [{"type": "x"}, {"type": "function"}, "auto"])
def test_choice_that_cannot_be_forced_is_none(choice: object) -> None:
    tools = [{"type": "function", **FUNCTION}, {"type": "custom", "name": "g", "format": {}}]
    body = {"input": "hi", "tools": tools}
    chosen = prompt(RESPONSES, {**body, "tool_choice": choice}, dialect())
    assert chosen == prompt(RESPONSES, body, dialect())


def keyed(rules: Dialect, **keywords: Any) -> tuple[str, int]:
    (chat,) = parse(CHAT, msgspec.json.encode({"messages": [USER]}), lambda _: rules).prompts
    assert isinstance(chat, Chat)
    return ChatTemplate(BARE + ENDED, {}, keywords=keywords).render(chat)


def test_workers_own_arguments_for_templates_are_followed_once_proved() -> None:
    rules = dialect(23, default_chat_template_kwargs='{"thinking": false}')
    expected = "hi<thinking>False</thinking><|assistant|>", CONVERTED
    assert keyed(rules) == expected
    assert keyed(rules, thinking=True) == expected


def test_configured_arguments_hold_where_the_worker_shows_none() -> None:
    text, forms = keyed(dialect_of(Engine(SGLANG, Release(0, 5, 23))), thinking=True)
    assert (text, forms) == ("hi<thinking>True</thinking><|assistant|>", CONVERTED)


def test_worker_that_shows_the_configured_arguments_has_no_rules_of_its_own() -> None:
    arguments = PromptArguments(default_chat_template_kwargs='{"thinking":true}')
    engines = {"w": Engine(SGLANG, Release(0, 5, 23))}
    parsed = model_dialects(engines, (), {"w": arguments}, keywords={"thinking": True})
    assert parsed.first == dialect_of(engines["w"])


def test_effort_among_a_workers_arguments_is_not_followed() -> None:
    rules = dialect(23, default_chat_template_kwargs='{"reasoning_effort": "low"}')
    assert refusal(CHAT, {"messages": [USER]}, rules) == "unsupported_engine_arguments"


def test_phases_divide_turns_as_the_release_has_it() -> None:
    def parsed(patch: int) -> str:
        thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]}
        turns = [{"role": "assistant", "content": "x", "phase": one} for one in PHASES]
        items = [ITEM, thought, *turns, ITEM]
        return prompt(RESPONSES, {"input": items}, dialect(patch), "parts")

    assert [parsed(patch).count("<|assistant|>") for patch in (19, 22, 23)] == [2, 4, 3]


def test_strict_of_a_message_s_tool_is_read_from_0_5_23_on() -> None:
    body = {"messages": [USER], "tools": [{**ANTHROPIC_TOOL, "strict": True}]}
    assert ['"strict": true' in prompt(MESSAGES, body, dialect(patch)) for patch in (22, 23)] == [
        False,
        True,
    ]


def test_references_to_tools_are_turns_of_their_own_from_0_5_17_on() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "tool_reference", "tool_name": "f"}]
    unnamed = {"type": "tool_reference"}
    result = {"type": "tool_result", "tool_use_id": "i", "content": [*content, unnamed]}
    body = {"messages": [USER, {"role": "user", "content": [result]}]}
    turns = [
        prompt(MESSAGES, body, dialect(patch), "parts").count("<|tool|>") for patch in (16, 17)
    ]
    assert turns == [1, 2]


ODD: list[tuple[str, dict[str, Any], str]] = [
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "type": "x"}]}]},
        "bad_request",
    ),
    (CHAT, {"messages": [USER], "tools": [1]}, "bad_request"),
    (
        CHAT,
        {
            "messages": [{"role": "system", "tools": [{}]}],
            "tool_choice": {"function": {"name": "g"}},
        },
        "bad_request",
    ),
    (
        RESPONSES,
        {"input": "hi", "reasoning": {"reasoning_effort": "none"}},
        "unsupported_reasoning_effort",
    ),
    (
        RESPONSES,
        {"input": "hi", "chat_template_kwargs": {"reasoning_effort": None}},
        "unsupported_template_kwargs",
    ),
]


@pytest.mark.parametrize(("path", "body", "reason"), ODD)
def test_odd_request_is_refused_with_its_reason(
    path: str, body: dict[str, Any], reason: str
) -> None:
    with pytest.raises((RequestError, msgspec.DecodeError)) as raised:
        prompt(path, body, dialect())
    assert getattr(raised.value, "reason", "bad_request") == reason


def test_wide_integers_are_floats_wherever_they_stand() -> None:
    wide = 2**64
    assert as_read({"a": [wide, 1, "x", {"b": -wide}]}) == {
        "a": [float(wide), 1, "x", {"b": -float(wide)}]
    }
    assert isinstance(as_read([wide])[0], float)


def test_lists_of_schemas_are_replaced_wherever_schemas_stand() -> None:
    schema = {"items": [{"type": "str"}, True], "additionalProperties": {"type": "bool"}}
    assert with_standard_types(schema) == {
        "items": [{"type": "string"}, True],
        "additionalProperties": {"type": "boolean"},
    }


def test_image_with_its_data_is_media_in_messages() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    body = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    (chat,) = parse(MESSAGES, msgspec.json.encode(body), lambda _: dialect()).prompts
    assert isinstance(chat, Chat)
    assert chat.has_media
