"""SGLang checks, orders and completes conversations of MiniMax-M3 before the template gets them."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import RequestError
from extproc.requests.prompt import CONVERTED, ROLES, Chat, Conversion
from extproc.requests.request import parse
from extproc.templates.chat_template import ChatTemplate
from extproc.templates.minimax_m3 import MODEL_TYPE, check_pairs, in_call_order, with_thinking
from tests.extproc.sglang.test_recorded_prompts import dialect

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": "hi"}
SOURCE = (
    "{# <mm:think> #}{% for m in messages %}{{ m.content }};{% endfor %}"
    "{{ thinking_mode }} {{ reasoning_effort }}"
)


def calls(*ids: str | None) -> dict[str, Any]:
    named = [{"id": one, "function": {"name": "f", "arguments": "{}"}} for one in ids]
    return {"role": "assistant", "content": "", "tool_calls": named}


def result(call_id: str | None, role: str = "tool") -> dict[str, Any]:
    return {"role": role, "content": f"of {call_id}", "tool_call_id": call_id}


PAIRED = [
    [USER, calls("a", "b"), result("b"), result("a"), USER],
    [USER, calls("a"), result("a"), calls("a"), result("a")],
    [USER, calls(None, "b"), result("x"), result("x"), USER],
    [USER, calls("a")],
]
UNPAIRED = [
    [USER, result("a")],
    [USER, calls("a"), USER],
    [USER, calls("a"), result("a"), result("a")],
    [USER, calls("a"), result("b")],
    [USER, calls("a", "b"), result("a")],
    [USER, calls("a"), result("a", "function")],
    [USER, {"role": "user", "content": "x", "tool_calls": calls("a")["tool_calls"]}, result("a")],
]


@pytest.mark.parametrize("messages", PAIRED)
def test_calls_with_their_results_are_accepted(messages: list[dict[str, Any]]) -> None:
    check_pairs(messages, is_continued=False)


@pytest.mark.parametrize("messages", UNPAIRED)
def test_calls_and_results_that_do_not_pair_are_refused(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError, match="bad_request"):
        check_pairs(messages, is_continued=False)


def test_calls_before_the_turn_that_is_continued_need_results() -> None:
    with pytest.raises(RequestError, match="bad_request"):
        check_pairs([USER, calls("a")], is_continued=True)


@given(st.permutations(["a", "b", "c"]), st.booleans())
def test_results_are_in_the_order_of_their_calls(order: list[str], goes_on: bool) -> None:
    rest = [USER] if goes_on else []
    turns = [USER, calls("a", "b", "c"), *(result(one) for one in order), *rest]
    assert [one.get("tool_call_id") for one in in_call_order(turns)[2:5]] == ["a", "b", "c"]
    assert len(in_call_order(turns)) == len(turns)


@pytest.mark.parametrize(
    ("call_ids", "result_ids"),
    [
        (("a", None), ("a", "a")),
        (("a", "a"), ("a", "b")),
        (("a", "b"), ("b", "b")),
        (("a", "b"), ("b", "c")),
        (("a", "b"), ("b", None)),
    ],
)
def test_results_that_cannot_be_ordered_stay(call_ids: Any, result_ids: Any) -> None:
    turns = [USER, calls(*call_ids), *map(result, result_ids), USER]
    assert in_call_order(turns) == turns


@pytest.mark.parametrize(
    ("given", "config", "left"),
    [
        ({"reasoning_effort": "low"}, None, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, None, {"thinking_mode": "disabled"}),
        ({"reasoning_effort": "minimal"}, {"type": "enabled"}, {"thinking_mode": "enabled"}),
        ({"reasoning_effort": "high"}, {"type": "disabled"}, {"thinking_mode": "disabled"}),
        ({"thinking_mode": "adaptive"}, {"type": "enabled"}, {"thinking_mode": "adaptive"}),
    ],
)
def test_thinking_is_set_as_the_template_reads_it(
    given: dict[str, Any], config: Any, left: dict[str, Any]
) -> None:
    conversion = Conversion(thinking_config=config)
    assert with_thinking({"x": 1, **given}, conversion) == {"x": 1, **left}


@pytest.mark.parametrize("config", [{"type": "on"}, {}, "enabled", {"type": 1}])
def test_thinking_of_another_kind_is_refused(config: Any) -> None:
    with pytest.raises(RequestError, match="bad_request"):
        with_thinking({}, Conversion(thinking_config=config))


def test_two_efforts_are_refused() -> None:
    with pytest.raises(RequestError, match="unsupported_reasoning_effort"):
        with_thinking({"reasoning_effort": "low"}, Conversion(effort="high"))


def render(
    path: str, body: dict[str, Any], patch: int = 23, kind: str = MODEL_TYPE
) -> tuple[str, int]:
    (chat,) = parse(path, msgspec.json.encode(body), lambda _: dialect(patch)).prompts
    assert isinstance(chat, Chat)
    return ChatTemplate(SOURCE, {}, model_type=kind).render(chat)


TURNS = [USER, calls("a", "b"), result("b"), result("a"), USER]


@pytest.mark.parametrize(
    ("patch", "kind", "text"),
    [
        (23, MODEL_TYPE, "hi;;of a;of b;hi; "),
        (22, MODEL_TYPE, "hi;;of b;of a;hi; "),
        (23, "minimax_m3", "hi;;of b;of a;hi; "),
    ],
)
def test_release_and_type_of_the_model_decide(patch: int, kind: str, text: str) -> None:
    assert render(CHAT, {"messages": TURNS}, patch, kind) == (text, CONVERTED | ROLES)


def test_model_of_unknown_type_is_refused_what_would_be_changed() -> None:
    with pytest.raises(RequestError, match="unsupported_by_engine"):
        render(CHAT, {"messages": TURNS}, kind="")
    assert render(CHAT, {"messages": [USER]}, kind="") == ("hi; ", 0)
    assert render(CHAT, {"messages": TURNS}, 22, kind="")[1] == CONVERTED | ROLES


def test_thinking_that_a_chat_completion_asks_for_needs_proof() -> None:
    body = {"messages": [USER], "thinking": {"type": "enabled"}}
    assert render(CHAT, body) == ("hi;enabled ", CONVERTED)
    assert render(CHAT, body, 22) == ("hi; ", 0)


def test_calls_are_checked_in_all_apis_but_responses() -> None:
    asked = {"type": "message", "role": "user", "content": "hi"}
    output = {"type": "function_call_output", "call_id": "d", "output": "x"}
    assert render(RESPONSES, {"input": [asked, output, asked]}) == ("hi;x;hi; ", CONVERTED | ROLES)
    stray = {"type": "tool_result", "tool_use_id": "d", "content": "x"}
    with pytest.raises(RequestError, match="bad_request"):
        render(MESSAGES, {"messages": [{"role": "user", "content": [stray]}]})
