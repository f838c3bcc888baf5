"""A conversation is the same prompt through whichever API it comes."""

import json
from typing import Any

import pytest

from extproc.requests.prompt import Chat
from extproc.requests.request import CHAT_PATH, parse
from extproc.templates.chat_template import ChatTemplate
from tests.extproc.template_shapes import SHAPES, SPECIAL_TOKENS

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = {"name": "weather", "arguments": '{"city": "Ulm"}'}

CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "rain?"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "call-0001", "type": "function", "function": CALL}],
        },
        {"role": "tool", "tool_call_id": "call-0001", "content": "no"},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "sun?"},
    ]
}
RESPONSES = {
    "instructions": "be brief",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "rain?"}]},
        {"type": "function_call", "call_id": "call-0001", **CALL},
        {"type": "function_call_output", "call_id": "call-0001", "output": "no"},
        {"type": "message", "role": "assistant", "content": "No."},
        {"role": "user", "content": "sun?"},
    ],
}
MESSAGES = {
    "system": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}],
    "messages": [
        {"role": "user", "content": "rain?"},
        {
            "role": "assistant",
            "content": [
                {
                    "type": "tool_use",
                    "id": "call-0001",
                    "name": "weather",
                    "input": {"city": "Ulm"},
                }
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "call-0001", "content": "no"}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "No."}]},
        {"role": "user", "content": "sun?"},
    ],
}
PLAIN = [turn for turn in CHAT["messages"] if turn["role"] != "tool" and "tool_calls" not in turn]


def text(path: str, body: dict[str, Any], shape: str) -> str:
    (chat,) = parse(path, json.dumps(body).encode()).prompts
    assert isinstance(chat, Chat)
    given = {**chat.variables, "date_string": "today"}
    return ChatTemplate(SHAPES[shape], SPECIAL_TOKENS).render(Chat(chat.messages, given))[0]


@pytest.mark.parametrize("shape", ["chatml", "llama3", "qwen_tools", "deepseek"])
def test_conversation_is_the_same_text_by_every_api(shape: str) -> None:
    expected = text(CHAT_PATH, CHAT, shape)
    assert "sun?" in expected
    assert text("/v1/responses", RESPONSES, shape) == expected
    assert text("/v1/messages", MESSAGES, shape) == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_conversation_in_turns_is_the_same_text_by_every_api(shape: str) -> None:
    expected = text(CHAT_PATH, {"messages": PLAIN}, shape)
    assert text("/v1/responses", {"input": PLAIN}, shape) == expected
    body = {"system": PLAIN[0]["content"], "messages": PLAIN[1:]}
    assert text("/v1/messages", body, shape) == expected


@pytest.mark.parametrize("shape", ["llama3", "qwen_tools", "mistral"])
def test_tools_are_the_same_text_by_every_api(shape: str) -> None:
    function = {"name": "weather", "description": "d", "parameters": SCHEMA}
    chat = {"messages": PLAIN, "tools": [{"type": "function", "function": function}]}
    tool = {"name": "weather", "description": "d", "input_schema": SCHEMA}
    body = {"system": "be brief", "messages": PLAIN[1:], "tools": [tool]}
    expected = text(CHAT_PATH, chat, shape)
    assert '"weather"' in expected
    assert text("/v1/messages", body, shape) == expected
