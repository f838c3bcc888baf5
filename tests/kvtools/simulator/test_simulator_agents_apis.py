"""POST /v1/messages and /v1/responses of a simulated worker, as coding agents use them."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvtools.simulator.server import running
from kvtools.simulator.settings import Settings
from tests.kvtools.simulator.readers import Body, Client, post

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
LONG = "The quick brown fox jumps over the lazy dog. " * 8

# The same question by each API, with a tool that runs commands.
SCHEMA = {"type": "object", "properties": {}}
ASKS: dict[str, Body] = {
    CHAT: {
        "tools": [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}],
        "stream_options": {"include_usage": True},
    },
    MESSAGES: {"max_tokens": 32_000, "tools": [{"name": "Bash", "input_schema": SCHEMA}]},
    RESPONSES: {"tools": [{"type": "function", "name": "exec_command", "parameters": SCHEMA}]},
}


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """A client of a worker whose context is as long as agents expect."""
    settings = Settings(blocks=8_192, max_model_len_tokens=65_536)
    async with running(settings) as worker, Client(worker.url) as client:
        yield client


def asked(path: str, text: str, **more: Any) -> Body:
    turns = [{"role": "user", "content": text}]
    return {"input" if path == RESPONSES else "messages": turns, **ASKS[path], **more}


async def events(client: Client, path: str, body: Body) -> list[Body]:
    """The data of a stream's events, in which each name is the data's type."""
    async with client.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        blocks = (await response.text()).strip().split("\n\n")
    shown = []
    for block in blocks:
        name, _, data = block.partition("\n")
        shown.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {shown[-1]['type']}"
    return shown


async def test_streamed_message_equals_the_whole_one(client: Client) -> None:
    body = asked(MESSAGES, "hi", max_tokens=4)
    whole = await post(client, MESSAGES, body)
    began, opened, *deltas, closed, ended, last = await events(client, MESSAGES, body)
    assert began["message"] | {"id": "", "usage": {}} == whole | {
        "id": "",
        "usage": {},
        "content": [],
        "stop_reason": None,
    }
    assert opened["content_block"] == {"type": "text", "text": ""}
    text = "".join(one["delta"]["text"] for one in deltas)
    assert whole["content"] == [{"type": "text", "text": text}]
    assert (closed["type"], last["type"]) == ("content_block_stop", "message_stop")
    assert ended["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert ended["usage"] == whole["usage"]


async def test_streamed_response_equals_the_whole_one(client: Client) -> None:
    body = asked(RESPONSES, "hi", max_output_tokens=4)
    whole = await post(client, RESPONSES, body)
    shown = await events(client, RESPONSES, body)
    assert [one["sequence_number"] for one in shown] == list(range(len(shown)))
    deltas = [one["delta"] for one in shown if one["type"] == "response.output_text.delta"]
    (item,) = whole["output"]
    assert item["content"][0]["text"] == "".join(deltas)
    last = shown[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["output"] == [item | {"id": last["response"]["output"][0]["id"]}]
    assert last["response"]["usage"] == whole["usage"]
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_usage_of_streams_tells_cached_tokens(client: Client, path: str) -> None:
    cached = []
    for _ in range(2):
        shown = await events(client, path, asked(path, LONG))
        usage = shown[-2]["usage"] if path == MESSAGES else shown[-1]["response"]["usage"]
        details = usage.get("input_tokens_details", {})
        cached.append(details.get("cached_tokens", usage.get("cache_read_input_tokens")))
    assert cached[0] == 0
    assert cached[1] >= len(LONG.split()) // 16 * 16


async def test_answer_with_a_generous_limit_ends_by_itself(client: Client) -> None:
    whole = await post(client, MESSAGES, asked(MESSAGES, LONG))
    assert whole["stop_reason"] == "end_turn"
    assert 16 <= whole["usage"]["output_tokens"] < 128


def called(path: str, answer: Body) -> tuple[str, Body]:
    """The name and the arguments of the call in an answer."""
    if path == MESSAGES:
        (block,) = answer["content"]
        assert answer["stop_reason"] == "tool_use"
        return block["name"], block["input"]
    if path == RESPONSES:
        (item,) = answer["output"]
        return item["name"], json.loads(item["arguments"])
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    return call["function"]["name"], json.loads(call["function"]["arguments"])


@pytest.mark.parametrize("path", list(ASKS))
async def test_question_for_files_is_answered_by_a_call_of_the_shell(
    client: Client, path: str
) -> None:
    short = {CHAT: {"max_tokens": 8}, MESSAGES: {"max_tokens": 8}, RESPONSES: {}}[path]
    answer = await post(client, path, asked(path, "List the files, please.", **short))
    name, arguments = called(path, answer)
    assert name in {"bash", "Bash", "exec_command"}
    assert "ls -la" in arguments.values()


@pytest.mark.parametrize("path", list(ASKS))
async def test_call_is_streamed_as_it_is_answered_whole(client: Client, path: str) -> None:
    body = asked(path, "list the files")
    whole = called(path, await post(client, path, body))
    async with client.post(path, json={**body, "stream": True}) as response:
        text = await response.text()
    shown = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if path == MESSAGES:
        deltas = [one["delta"] for one in shown if one["type"] == "content_block_delta"]
        parts = [one["partial_json"] for one in deltas]
    elif path == RESPONSES:
        kind = "response.function_call_arguments.delta"
        parts = [one["delta"] for one in shown if one["type"] == kind]
    else:
        deltas = [one["choices"][0]["delta"] for one in shown if one["choices"]]
        calls = [call for one in deltas for call in one.get("tool_calls", ())]
        parts = [call["function"]["arguments"] for call in calls]
    assert json.loads("".join(parts)) == whole[1]


TEXT_BLOCKS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": TEXT_BLOCKS}
CALL = {"type": "tool_use", "id": "c", "name": "Bash", "input": {}}
MODEL_TURN = [{"type": "thinking", "thinking": "?"}, {"type": "text", "text": "x"}, CALL]
PARTS = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
SAID = {"role": "assistant", "content": [{"type": "output_text", "text": "x"}]}
ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "a"}


@pytest.mark.parametrize(
    ("path", "fields", "chat"),
    [
        (MESSAGES, {"system": TEXT_BLOCKS}, [("system", "ab"), ("user", "q")]),
        (
            MESSAGES,
            {"system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}]},
            [("user", "q")],
        ),
        (
            MESSAGES,
            {
                "messages": [
                    {"role": "user", "content": TEXT_BLOCKS},
                    {"role": "assistant", "content": MODEL_TURN},
                    {"role": "user", "content": [RESULT]},
                    {"role": "system", "content": "s"},
                ]
            },
            [("user", "a\nb"), ("assistant", "x"), ("tool", "a\nb"), ("system", "s")],
        ),
        (RESPONSES, {"instructions": "i"}, [("system", "i"), ("user", "q")]),
        (RESPONSES, {"input": "q"}, [("user", "q")]),
        (
            RESPONSES,
            {
                "input": [
                    {"role": "user", "content": PARTS},
                    {"type": "reasoning", "summary": []},
                    {"type": "message", **SAID},
                    ITEM,
                    OUTPUT,
                ]
            },
            [("user", "a\nb"), ("assistant", "x"), ("tool", "a")],
        ),
        (
            RESPONSES,
            {
                "input": [
                    {"role": "user", "content": "q"},
                    {"role": "developer", "content": PARTS},
                    {"role": "developer", "content": "d"},
                ]
            },
            [("system", "a\nb\n\nd"), ("user", "q")],
        ),
    ],
)
async def test_prompt_is_that_of_the_chat_that_vllm_makes(
    client: Client, path: str, fields: Body, chat: list[tuple[str, str]]
) -> None:
    turns = [{"role": role, "content": content} for role, content in chat]
    expected = (await post(client, "/tokenize", {"messages": turns}))["count"]
    usage = (await post(client, path, asked(path, "q") | fields))["usage"]
    assert usage["input_tokens"] + usage.get("cache_read_input_tokens", 0) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"input": [{"type": "computer_call"}]},
        {"input": []},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
    ],
)
async def test_response_that_the_simulator_cannot_give_is_an_error(
    client: Client, fields: Body
) -> None:
    async with client.post(RESPONSES, json=asked(RESPONSES, "q") | fields) as response:
        assert response.status == 400, await response.text()
