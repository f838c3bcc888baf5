"""What the Rust front end's renderers in code are given, and what they refuse."""

import json
from typing import Any

import pytest

from extproc.base.engine import RUST, VLLM, Engine, Release
from extproc.base.errors import RequestError
from extproc.renderers.deepseek import EOS
from extproc.renderers.deepseek_v4 import DeepSeekV4
from extproc.renderers.deepseek_v32 import DeepSeekV32
from extproc.renderers.rust_input import as_asked, in_call_order, rust_input
from extproc.requests.dialect import dialect_of
from extproc.requests.prompt import Chat
from extproc.requests.request import CHAT_PATH, parse
from tests.extproc.rust.corpus import ANSWER, CALL, USER

DIALECT = dialect_of(Engine(VLLM, Release(0, 33), RUST))


def read(body: dict[str, Any]) -> Chat:
    (chat,) = parse(CHAT_PATH, json.dumps(body).encode(), lambda _: DIALECT).prompts
    assert isinstance(chat, Chat)
    return chat


def control(effort: str | None = None, **keywords: Any) -> tuple[object, object]:
    body = {"messages": [USER], "reasoning_effort": effort, "chat_template_kwargs": keywords}
    variables = rust_input(read(body), "").variables
    return variables["thinking"], variables["reasoning_effort"]


def test_first_switch_counts_and_an_effort_switches_on() -> None:
    assert control() == (None, None)
    assert control("high") == (True, "high")
    assert control("none") == (False, None)
    assert control("none", thinking=True) == (True, None)
    assert control("high", thinking=False, enable_thinking=True) == (False, None)
    assert control(enable_thinking=True, reasoning_effort="max") == (True, "max")
    with pytest.raises(RequestError):
        control(thinking=1)


def result(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": name}


def calls(*names: str) -> dict[str, Any]:
    return {**ANSWER, "tool_calls": [{**CALL, "id": name} for name in names]}


def test_results_are_in_the_order_of_their_calls() -> None:
    told = in_call_order([USER, calls("a", "b"), result("b"), result("a"), USER])
    assert told == [USER, calls("a", "b"), result("a"), result("b"), USER]


@pytest.mark.parametrize(
    "messages",
    [
        [calls("a"), result("b")],
        [calls("a", "b"), result("a"), result("a")],
        [calls("a", "b"), result("a"), USER],
        [calls("a", "a")],
    ],
)
def test_results_of_other_calls_are_refused(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError):
        in_call_order(messages)


def test_prompt_ends_as_it_is_asked_to() -> None:
    without = {"add_generation_prompt": False}
    for renderer in (DeepSeekV32(), DeepSeekV4()):
        whole = renderer.render(read({"messages": [USER]}), budget_seconds=1)[0]
        ended = renderer.render(read({"messages": [USER], **without}), budget_seconds=1)[0]
        assert whole.startswith(ended)
        assert ended.endswith(USER["content"])
    answered = read({"messages": [USER, ANSWER], **without})
    assert as_asked("text", answered) == "text"


def test_turn_with_calls_that_is_continued_stays_open() -> None:
    body = {"messages": [USER, calls("a")], "add_generation_prompt": False}
    whole, continued = (
        DeepSeekV32().render(read({**body, "continue_final_message": goes_on}), budget_seconds=1)
        for goes_on in (False, True)
    )
    assert whole[0] == continued[0] + EOS
