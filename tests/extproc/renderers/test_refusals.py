"""Conversations that the engines' code refuses, and those that are not keyed though it does not."""

from typing import Any

import msgspec
import pytest

from extproc.base.engine import VLLM, Engine, Release
from extproc.base.errors import RequestError
from extproc.requests.dialect import Effort, dialect_of
from tests.extproc.renderers.test_recorded_prompts import RENDERERS, chat_of

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"

USER = {"role": "user", "content": "hi"}
DEVELOPER = {"role": "developer", "content": "be kind"}
NOBODY = {"role": "developer", "content": ""}
ANSWER = {"role": "assistant", "content": "hello"}
WEIRD = {"role": "weird", "content": "x"}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "ok"}
A_B = {"name": "a b", "arguments": "{}"}
CALL = {"role": "assistant", "tool_calls": [{"id": "c", "function": A_B}]}
REFUSAL = {"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}
LATE = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
ODD = {"role": "user", "content": [{"type": "image_url", "image_url": {}, "text": 5}]}
NAMED = {"role": "user", "content": [{"type": "tool_reference", "name": "f"}]}
THINKS = {"thinking": True}


def chat(*messages: dict[str, Any], **body: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": list(messages), **body}


def response(*items: dict[str, Any], **body: Any) -> tuple[str, dict[str, Any]]:
    return RESPONSES, {"input": list(items), **body}


@pytest.mark.parametrize(
    ("model", "request_", "reason"),
    [
        ("deepseek-v3.2", chat(NOBODY), "template_failed"),
        ("deepseek-v3.2", chat(WEIRD), "template_failed"),
        ("deepseek-v3.2", chat(USER, RESULT), "template_failed"),
        (
            "deepseek-v3.2",
            chat(DEVELOPER, USER, chat_template_kwargs=THINKS),
            "template_failed",
        ),
        (
            "deepseek-v3.2",
            chat(USER, ANSWER, chat_template_kwargs=THINKS),
            "template_failed",
        ),
        ("deepseek-v4", chat(NOBODY), "template_failed"),
        ("deepseek-v4", chat(WEIRD), "template_failed"),
        ("deepseek-v4", chat(NAMED), "template_failed"),
        ("deepseek-v4", chat({**USER, "task": "action"}), "unsupported_task"),
        ("deepseek-v4.1", chat({**USER, "wo_eos": True}), "unsupported_content"),
        ("deepseek-v4.1", chat(NAMED), "template_failed"),
        ("deepseek-v4.1", chat(REFUSAL), "template_failed"),
        ("deepseek-v4.1", chat(USER, reasoning_effort="medium"), "template_failed"),
        (
            "deepseek-v4.1",
            chat(USER, chat_template_kwargs={"reasoning_effort": 101}),
            "template_failed",
        ),
        ("gpt-oss", chat(WEIRD), "template_failed"),
        ("gpt-oss", chat(USER, reasoning_effort="max"), "template_failed"),
        ("gpt-oss", chat(USER, CALL), "unsupported_tools"),
        ("gpt-oss", chat(LATE), "unsupported_content"),
        ("gpt-oss", chat(ODD), "unsupported_content"),
        ("gpt-oss", response({"role": "user", "content": None}), "bad_request"),
        ("gpt-oss", response(USER, tools=[{"type": "web_search"}]), "template_failed"),
        ("gpt-oss", response(WEIRD, USER), "template_failed"),
        (
            "gpt-oss",
            response(USER, {"type": "custom_tool_call", "name": "c", "call_id": "c", "input": "x"}),
            "template_failed",
        ),
        (
            "gpt-oss",
            response(USER, {"type": "function_call_output", "call_id": "c", "output": "x"}),
            "template_failed",
        ),
    ],
)
def test_refused_conversation_has_a_reason(
    model: str, request_: tuple[str, dict[str, Any]], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        RENDERERS[model].render(chat_of(*request_), budget_seconds=1.0)


@pytest.mark.parametrize("model", ["deepseek-v4", "deepseek-v4.1"])
def test_result_that_names_a_tool_is_a_remark(model: str) -> None:
    content = [{"type": "text", "text": "found"}, *NAMED["content"]]
    request = chat(USER, {**RESULT, "content": content})
    text, _ = RENDERERS[model].render(chat_of(*request), budget_seconds=1.0)
    assert "<tool_result>found\n\n[Unsupported tool_reference]</tool_result>" in text


INLINE = {"messages": [USER, {"role": "system", "content": "later"}, ANSWER, USER], "system": "S"}


def rendered(release: Release, body: dict[str, Any]) -> str:
    chat = chat_of(MESSAGES, body)
    dialect = dialect_of(Engine(VLLM, release))
    old = msgspec.structs.replace(chat, dialect=dialect, effort_rule=dialect.messages_effort)
    return RENDERERS["deepseek-v4"].render(old, budget_seconds=1.0)[0]


def test_inline_system_turn_follows_the_release() -> None:
    assert "Slater" in rendered(Release(0, 32), INLINE)
    with pytest.raises(RequestError, match="bad_request"):
        rendered(Release(0, 19), INLINE)


def test_effort_of_a_release_that_passes_it_switches_nothing() -> None:
    chat = chat_of(CHAT, {"messages": [USER], "reasoning_effort": "low"})
    v32 = RENDERERS["deepseek-v3.2"]
    passed = msgspec.structs.replace(chat, effort_rule=Effort.PASSED)
    assert v32.render(chat, budget_seconds=1.0)[0].endswith("<think>")
    assert v32.render(passed, budget_seconds=1.0)[0].endswith("</think>")


def test_later_system_turn_without_a_text_is_left_out_for_gpt_oss() -> None:
    empty = {"role": "system", "content": []}
    with_it, without = (chat_of(CHAT, {"messages": one}) for one in ([USER, empty], [USER]))
    render = RENDERERS["gpt-oss"].render
    assert render(with_it, budget_seconds=1.0)[0] == render(without, budget_seconds=1.0)[0]


def test_effort_of_messages_follows_the_release() -> None:
    body = {"messages": [USER], "output_config": {"effort": "max"}}
    assert "Beyond maximum" in rendered(Release(0, 32), body)
    assert "Beyond maximum" not in rendered(Release(0, 19), body)
