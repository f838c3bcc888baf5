"""Agents' streamed conversations by messages and responses, with tools, on simulated workers."""

import json
from typing import Any

import pytest

from tests.system.system import System, running
from tests.waiting import until

TURNS = 3
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SCHEMA = {"type": "object", "properties": {}}
RULES = "Read the files before you change one, and run the tests. " * 30

BODIES: dict[str, dict[str, Any]] = {
    MESSAGES: {
        "max_tokens": 32_000,
        "system": RULES,
        "tools": [{"name": "Bash", "input_schema": SCHEMA}],
    },
    RESPONSES: {
        "instructions": RULES,
        "tools": [{"type": "function", "name": "exec_command", "parameters": SCHEMA}],
    },
}


async def streamed(system: System, path: str, body: dict[str, Any]) -> tuple[str, int, list[Any]]:
    """The worker that answers, the cached tokens that it tells, and its blocks or items."""
    url = f"{system.envoy}{path}"
    async with system.session.post(url, json=body | {"stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        lines = (await answer.text()).splitlines()
    told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    worker = answer.headers["x-worker"]
    if path == RESPONSES:
        response = told[-1]["response"]
        cached = response["usage"]["input_tokens_details"]["cached_tokens"]
        return worker, cached, response["output"]
    block = next(one for one in told if one["type"] == "content_block_start")["content_block"]
    deltas = [one["delta"] for one in told if one["type"] == "content_block_delta"]
    if block["type"] == "text":
        block["text"] = "".join(one["text"] for one in deltas)
    else:
        block["input"] = json.loads("".join(one["partial_json"] for one in deltas))
    cached = next(one for one in told if one["type"] == "message_delta")["usage"]
    return worker, cached["cache_read_input_tokens"], [block]


def answered(path: str, given: list[Any], turn: int) -> list[dict[str, Any]]:
    """An answer as an agent sends it back, and the result of its call or the next question."""
    call, said = given[0], f"And then, in step {turn}?"
    if path == RESPONSES:
        result = {"type": "function_call_output", "call_id": call.get("call_id"), "output": "a b"}
        is_call = call["type"] == "function_call"
        return [*given, result if is_call else {"role": "user", "content": said}]
    result = {"type": "tool_result", "tool_use_id": call.get("id"), "content": "a b"}
    content = [result] if call["type"] == "tool_use" else said
    return [{"role": "assistant", "content": given}, {"role": "user", "content": content}]


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_turns_of_a_streaming_agent_stay_and_are_cached_as_predicted(path: str) -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "List the files."}]
    workers, kinds = set(), []
    async with running(workers=3, blocks=8_192, max_model_len_tokens=65_536) as system:
        predicted = 0
        for turn in range(TURNS):
            body = {"model": "tiny", **BODIES[path]}
            body["input" if path == RESPONSES else "messages"] = turns
            worker, cached, given = await streamed(system, path, body)
            assert cached >= predicted
            workers.add(worker)
            kinds.append(given[0]["type"])

            async def holds(body: dict[str, Any] = body, worker: str = worker) -> int:
                told = await system.explain(body, path)
                (one,) = [each for each in told["candidates"] if each["endpoint"] == worker]
                held = int(one["overlap_tokens"] + one["uncertain_tokens"])
                return held if held >= told["prompt_tokens"] - 16 else 0

            await until(holds, "the worker is known to hold the prompt")
            predicted = await holds()
            turns = [*turns, *answered(path, given, turn)]
    assert len(workers) == 1
    assert kinds == [
        "tool_use" if path == MESSAGES else "function_call",
        *["text" if path == MESSAGES else "message"] * (TURNS - 1),
    ]
