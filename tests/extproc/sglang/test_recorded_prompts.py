"""Prompts that SGLang 0.5.23's own conversions made, without an engine, are made here as well.

prompts.jsonl: one request a line, with what its OpenAIServingChat, OpenAIServingResponses and
AnthropicServing made of it with each of the two templates here, and the reasoning parser "qwen3";
null where it refused.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from extproc.base.engine import SGLANG, Engine, PromptArguments, Release
from extproc.base.errors import RequestError
from extproc.requests.dialect import Dialect, model_dialects
from extproc.requests.prompt import Chat
from extproc.requests.request import parse
from extproc.templates.chat_template import ChatTemplate

HERE = Path(__file__).parent
ROWS = [json.loads(line) for line in (HERE / "prompts.jsonl").read_text().splitlines()]
SPECIAL = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate((HERE / f"{name}.jinja").read_text(), SPECIAL)


def dialect(patch: int = 23, **arguments: Any) -> Dialect:
    engine = Engine(SGLANG, Release(0, 5, patch))
    return model_dialects({"w": engine}, (), {"w": PromptArguments(**arguments)}).first


def prompt(path: str, body: dict[str, Any], rules: Dialect, name: str = "text") -> str:
    (chat,) = parse(path, json.dumps(body).encode(), lambda _: rules).prompts
    assert isinstance(chat, Chat)
    return template(name).render(chat)[0]


@pytest.mark.parametrize("name", ["text", "parts"])
@pytest.mark.parametrize("row", range(len(ROWS)))
def test_prompt_is_what_sglang_made_of_the_request(row: int, name: str) -> None:
    path, body, expected = ROWS[row]["path"], ROWS[row]["body"], ROWS[row][name]
    rules = dialect(reasoning_parser="qwen3")
    if expected is not None:
        assert prompt(path, body, rules, name) == expected
        return
    with pytest.raises(RequestError) as raised:
        prompt(path, body, rules, name)
    refused = ("bad_request", "empty_prompt", "template_failed", "unsupported_tool_arguments")
    assert raised.value.reason in refused
