"""Token ids that a request brings for its conversation, as each engine's release treats them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.engine import SGLANG, TRTLLM, VLLM, Engine, Release
from extproc.base.errors import RequestError
from extproc.requests.dialect import Dialect, dialect_of
from extproc.requests.prompt import GIVEN, Chat, InferenceRequest, TokenIds, forms_of
from extproc.requests.request import CHAT_PATH, parse

IDS = [5, 6, 7]
USER = {"role": "user", "content": "hello"}
TEXT = {"type": "text", "text": "hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def vllm(minor: int) -> Dialect:
    return dialect_of(Engine(VLLM, Release(0, minor)))


def read(
    dialect: Dialect | None, ids: object = IDS, path: str = CHAT_PATH, **fields: Any
) -> InferenceRequest | str:
    said = {"input": "hello"} if path == RESPONSES else {"messages": [USER]}
    body = {**said, "kv_transfer_params": {"prompt_token_ids": ids}, **fields}
    try:
        return parse(path, json.dumps(body).encode(), lambda _: dialect)
    except RequestError as error:
        return error.reason


def prompt(made: InferenceRequest | str) -> object:
    if isinstance(made, str):
        return made
    (one,) = made.prompts
    return list(one.ids) if isinstance(one, TokenIds) else type(one)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_ids_are_the_prompt_whatever_the_conversation_is(ids: list[int]) -> None:
    fields: dict[str, Any] = {
        "tools": [{"type": "tool"}],
        "chat_template": "x",
        "truncate_prompt_tokens": 2,
    }
    for made in (read(vllm(33), ids), read(vllm(33), ids, **fields)):
        assert isinstance(made, InferenceRequest)
        assert (prompt(made), made.keep_last_tokens) == (ids, None)
        assert forms_of(made.prompts[0]) == GIVEN


def test_request_with_ids_keeps_what_else_counts() -> None:
    made = read(vllm(33), model="m", cache_salt="s", n=3, prompt_logprobs=1)
    assert isinstance(made, InferenceRequest)
    assert (made.model, made.cache_salt, made.answers) == ("m", "s", 3)
    assert not made.reads_cache


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.0], [True], ["1"], "1", 5, {}, [[1]]])
def test_ids_that_are_none_are_refused(ids: object) -> None:
    assert read(vllm(33), ids) == "bad_request"


@pytest.mark.parametrize("path", [CHAT_PATH, MESSAGES, RESPONSES])
def test_apis_of_conversations_read_ids_from_the_release_on_that_does(path: str) -> None:
    assert prompt(read(vllm(33), path=path)) == IDS
    assert prompt(read(vllm(27), path=path)) == IDS
    assert prompt(read(vllm(26), path=path)) is Chat
    assert prompt(read(vllm(33), None, path=path)) is Chat
    assert read(vllm(33), [], path=path) == "empty_prompt"
    assert prompt(read(vllm(31), [], path=path)) is Chat


@pytest.mark.parametrize("dialect", [None, dialect_of(Engine(TRTLLM, Release(1, 2)))])
def test_ids_are_not_keyed_where_the_engine_is_not_known(dialect: Dialect | None) -> None:
    for path in (CHAT_PATH, MESSAGES):
        assert read(dialect, path=path) == "unsupported_kv_transfer"


def test_sglang_renders_the_conversation() -> None:
    assert prompt(read(dialect_of(Engine(SGLANG, Release(0, 5, 23))))) is Chat


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True},
        {"messages": [USER, {"role": "user", "content": [TEXT, IMAGE]}]},
        {"messages": [{"role": "user", "content": [{**TEXT, "image_url": None}]}]},
    ],
)
def test_checked_ids_are_ignored_with_echo_and_with_media(fields: dict[str, Any]) -> None:
    assert prompt(read(vllm(33), **fields)) != IDS
    assert prompt(read(vllm(31), **fields)) == IDS


@pytest.mark.parametrize("part", [TEXT, {"text": "a"}, {"type": "refusal", "refusal": "a"}, "a"])
def test_parts_of_text_leave_the_ids_the_prompt(part: object) -> None:
    assert prompt(read(vllm(33), messages=[{"role": "user", "content": [part]}])) == IDS


@pytest.mark.parametrize("kind", [5, "prompt_embeds", "new"])
def test_parts_of_other_kinds_are_no_text(kind: object) -> None:
    messages = [{"role": "user", "content": [{"type": kind}]}]
    assert prompt(read(vllm(33), messages=messages)) == "unsupported_content"


def test_response_with_media_may_be_rendered_or_not() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    items = [{"type": "message", "role": "user", "content": [image]}]
    assert read(vllm(33), path=RESPONSES, input=items) == "unsupported_kv_transfer"


def test_transfer_parameters_must_be_an_object() -> None:
    assert read(vllm(33), kv_transfer_params=[]) == "bad_request"
    assert prompt(read(vllm(33), kv_transfer_params=None)) is Chat
    assert prompt(read(vllm(33), kv_transfer_params={"do_remote_decode": True})) is Chat
