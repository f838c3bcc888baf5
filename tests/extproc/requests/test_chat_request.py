import json
from typing import Any

import pytest
from msgspec import structs

from extproc.base.engine import SGLANG, TRTLLM, Engine, Release
from extproc.base.errors import RequestError
from extproc.requests.chat_request import parse, roles_of
from extproc.requests.dialect import NEWEST, Dialect, dialect_of
from extproc.requests.prompt import Chat, InferenceRequest

USER = {"role": "user", "content": "hello"}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def called(arguments: object) -> dict[str, Any]:
    """A turn that calls a function with these arguments."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def request(**fields: Any) -> InferenceRequest:
    return parse(json.dumps({"messages": [USER], **fields}).encode())


def chat(**fields: Any) -> Chat:
    (prompt,) = request(**fields).prompts
    assert isinstance(prompt, Chat)
    return prompt


def test_chat_keeps_every_field_that_changes_the_prompt() -> None:
    parsed = request(
        model="m",
        tools=[TOOL],
        documents=[{"text": "d"}],
        chat_template_kwargs={"enable_thinking": False},
        add_generation_prompt=False,
        continue_final_message=True,
        add_special_tokens=True,
        reasoning_effort="low",
        cache_salt="s",
        temperature=0.5,
    )
    variables = {
        "enable_thinking": False,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "tools": [TOOL],
        "documents": [{"text": "d"}],
    }
    conversation = Chat(
        [USER], variables, add_special_tokens=True, effort="low", sent=[USER], roles=("user",)
    )
    assert parsed == InferenceRequest("m", [conversation], "s", needs_text=True)


def test_has_media_is_true_for_an_image() -> None:
    assert not chat().has_media
    assert chat(messages=[USER, {"role": "user", "content": [IMAGE]}]).has_media


def test_truncated_prompt_keeps_its_last_tokens() -> None:
    parsed = request(truncate_prompt_tokens=5)
    assert parsed.keep_last_tokens == 5
    assert not chat(truncate_prompt_tokens=5).special_tokens_vary
    assert chat(truncate_prompt_tokens=5, add_special_tokens=True).special_tokens_vary


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 0}, {"echo": True}])
def test_prompt_logprobs_read_no_cache(fields: dict[str, Any]) -> None:
    assert request(echo=None).reads_cache
    assert not request(**fields).reads_cache


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": []}, "empty_prompt"),
        ({"chat_template": "{{ 1 }}"}, "unsupported_client_template"),
        ({"truncate_prompt_tokens": -1}, "unsupported_truncation"),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, "unsupported_truncation"),
        (
            {"truncate_prompt_tokens": 5, "messages": [{"role": "user", "content": [IMAGE]}]},
            "unsupported_truncation",
        ),
        ({"continue_final_message": True}, "bad_request"),
        ({"messages": [called({"word": "fox"})]}, "bad_request"),
        ({"messages": [called(None)]}, "bad_request"),
        ({"chat_template_kwargs": {"messages": []}}, "unsupported_template_kwargs"),
        ({"chat_template_kwargs": {"return_dict": True}}, "unsupported_template_kwargs"),
        ({"chat_template_kwargs": {"x": None}}, "unsupported_content"),
        (
            {"chat_template_kwargs": {"enable_thinking": "auto"}, "reasoning_effort": "low"},
            "unsupported_template_kwargs",
        ),
        ({"kv_transfer_params": {"prompt_token_ids": [1]}}, "unsupported_kv_transfer"),
        ({"tools": []}, "unsupported_tools"),
        ({"tools": [TOOL], "tool_choice": "none"}, "unsupported_tool_choice"),
    ],
)
def test_unkeyable_conversations_name_their_reason(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        request(**fields)
    assert caught.value.reason == reason


def test_other_transfer_parameters_leave_the_prompt_unchanged() -> None:
    assert request(kv_transfer_params={"do_remote_decode": True}).prompts


def test_next_turn_parses_as_it_does_alone() -> None:
    turns = [{"role": "user", "content": str(number) * 20_000} for number in range(3)]
    assert chat(messages=turns[:1]).messages == turns[:1]
    assert chat(messages=turns[:2]).messages == turns[:2]
    assert chat(messages=turns, documents=[]).messages == turns
    assert chat(messages=turns, documents=[]).variables["documents"] == []


def test_next_turn_that_is_malformed_is_refused() -> None:
    long = {"role": "user", "content": "w" * 20_000}
    request(messages=[long])
    with pytest.raises(RequestError, match="bad_request"):
        request(messages=[long, {"content": "no role"}])


SYSTEM = {"role": "system", "content": "s"}
CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": []}
BILLED = {"role": "system", "content": "x-anthropic-billing-header: 1"}


@pytest.mark.parametrize(
    ("messages", "roles"),
    [
        ([USER], ("user",)),
        ([SYSTEM, USER, {"role": "assistant", "content": ""}], ("system", "user", "assistant")),
        ([BILLED, USER], None),
        ([{"content": "a", "role": "user"}], None),
        ([{"role": "user", "content": None}], None),
        ([{"role": ["user"], "content": "a"}], None),
        ([{"role": "tool", "content": "a"}], None),
        ([], None),
    ],
)
def test_roles_are_those_of_plain_messages(messages: list[Any], roles: Any) -> None:
    assert roles_of(messages) == roles


DIALECTS = {
    "agreed": None,
    "newest": NEWEST,
    "sglang": dialect_of(Engine(SGLANG, Release(0, 5, 23))),
    "foreign": dialect_of(Engine(TRTLLM, Release(1, 0))),
    "own template": structs.replace(NEWEST, has_own_template=True),
}


@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [BILLED, USER], [CALLED], []])
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_plain_request_is_read_as_any_other(messages: list[Any], dialect: Dialect | None) -> None:
    def read(**fields: Any) -> InferenceRequest | str:
        body = {"messages": messages, "model": "m", "temperature": 1.0, **fields}
        try:
            return parse(json.dumps(body).encode(), lambda _: dialect)
        except RequestError as error:
            return error.reason

    assert read() == read(n=1)
