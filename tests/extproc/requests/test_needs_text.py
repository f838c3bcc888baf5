"""Requests whose engine needs the text of the prompt, even if it is given the ids."""

import json
from typing import Any

import pytest

from extproc.base.engine import VLLM, Engine, Release
from extproc.requests.dialect import dialect_of
from extproc.requests.request import CHAT_PATH, InferenceRequest, parse

USER = {"role": "user", "content": "hello"}
TURN = {"role": "assistant", "content": "hi"}
MESSAGES, RESPONSES, COMPLETIONS = "/v1/messages", "/v1/responses", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT_PATH: {"messages": [USER]},
    MESSAGES: {"messages": [USER], "max_tokens": 1},
    RESPONSES: {"input": "hello"},
    COMPLETIONS: {"prompt": "hello"},
}
TRANSFER = {"kv_transfer_params": {"do_remote_decode": True}}


def read(path: str, **fields: Any) -> InferenceRequest:
    body = json.dumps({**BODIES[path], **fields}).encode()
    return parse(path, body, lambda _: dialect_of(Engine(VLLM, Release(0, 33))))


@pytest.mark.parametrize("path", BODIES)
def test_usual_requests_do_not_need_it(path: str) -> None:
    assert not read(path).needs_text
    assert not read(path, temperature=0, stream=True, stop=["a"]).needs_text


@pytest.mark.parametrize("path", [CHAT_PATH, MESSAGES, RESPONSES])
def test_it_is_needed_where_a_client_says_what_is_transferred(path: str) -> None:
    assert read(path, **TRANSFER).needs_text


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS])
@pytest.mark.parametrize("fields", [{"echo": True}, {"truncate_prompt_tokens": 8}])
def test_it_is_needed_where_the_answer_repeats_it_or_it_is_cut(
    path: str, fields: dict[str, Any]
) -> None:
    assert read(path, **fields).needs_text


def test_it_is_needed_where_the_answer_goes_on_with_it() -> None:
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    assert read(CHAT_PATH, messages=[USER, TURN], **goes_on).needs_text
