"""Kimi K3's prompts, compared with those that vLLM 0.32.0 rendered.

Recorded with the encoding of the checkpoint as vLLM's repository has it later. What is not keyed
of it, the engine renders otherwise than is known here.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from extproc.base.errors import RequestError
from extproc.renderers.kimi_k3 import CONTROLS, KimiK3
from extproc.renderers.segments import ControlMarks
from tests.extproc.renderers.test_recorded_prompts import chat_of

RECORDING = Path(__file__).with_name("vllm_0.32.0_kimi_k3.jsonl")
LINES = [json.loads(line) for line in RECORDING.read_text().splitlines()]

IDS = {name: number for number, name in enumerate(CONTROLS)}
MARKS = ControlMarks(IDS.values())
RENDERER = KimiK3(IDS, MARKS)

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
UNKEYED = {"unsupported_template_kwargs", "unsupported_response_format"}


def rendered(path: str, body: dict[str, Any]) -> str:
    joined, _ = RENDERER.render(chat_of(path, body), budget_seconds=1.0)
    return "".join(CONTROLS[one] if isinstance(one, int) else one for one in MARKS.split(joined))


def test_prompts_are_those_of_the_engine() -> None:
    unkeyed = []
    for line in LINES:
        try:
            assert rendered(line["path"], line["body"]) == line["prompt"], line["body"]
        except RequestError as error:
            unkeyed.append(error.reason)
    assert len(LINES) - len(unkeyed) > 80
    assert set(unkeyed) == UNKEYED


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [USER, {"role": "tool", "tool_call_id": "c", "content": "of no call"}]},
        {"messages": [USER], "reasoning_effort": "medium"},
    ],
)
def test_conversation_is_refused_as_in_the_engine(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="template_failed"):
        rendered(CHAT, body)


def test_each_piece_of_text_is_tokenized_by_itself() -> None:
    body = {"messages": [{**USER, "name": "a"}]}
    joined, _ = RENDERER.render(chat_of(CHAT, body), budget_seconds=1.0)
    assert MARKS.joined(["message", ' role="user"', ' name="a"']) in joined


def test_results_stay_in_place_if_calls_have_no_ids() -> None:
    functions = [{"name": name, "arguments": "{}"} for name in ("", "b")]
    calls = [{"type": "function", "function": one} for one in functions]
    results = [{"role": "tool", "tool_call_id": "b:1", "content": "B"}]
    answer = {"role": "assistant", "tool_calls": calls}
    text = rendered(CHAT, {"messages": [USER, answer, *results, *results]})
    tags = [f'message role="tool" tool="b" index="{number}"<|sep|>B' for number in (1, 2)]
    assert [text.count(tag) for tag in tags] == [1, 1]
