import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import RequestError
from extproc.requests.request import (
    _PARSERS,
    CHAT_PATH,
    COMPLETIONS_PATH,
    MAX_BYTES,
    UNKEYED_PATHS,
    Chat,
    is_inference,
    model_of,
    parse,
    path_of,
    why_unkeyed,
)

GRPC_PATH = "/vllm.grpc.engine.VllmEngine/Generate"

# A small request of every API that takes JSON; each has its own tests.
BODIES: dict[str, dict[str, Any]] = {
    CHAT_PATH: {"messages": [{"role": "user", "content": "a"}]},
    COMPLETIONS_PATH: {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/embeddings": {"input": "a"},
    "/generate": {"text": "a"},
    "/inference/v1/generate": {"token_ids": [1]},
}


def refusal(path: str, content: bytes) -> str:
    with pytest.raises(RequestError) as caught:
        parse(path, content)
    return caught.value.reason


def test_every_api_has_its_parser() -> None:
    assert BODIES.keys() == _PARSERS.keys()
    for path, body in BODIES.items():
        assert is_inference("POST", path)
        assert len(parse(path, json.dumps(body).encode()).prompts) == 1


def test_requests_over_grpc_are_known_by_their_path() -> None:
    assert is_inference("POST", GRPC_PATH)
    assert refusal(GRPC_PATH, b"") == "bad_request"


@pytest.mark.parametrize("path", BODIES)
def test_a_cache_salt_is_part_of_every_key(path: str) -> None:
    body = json.dumps({**BODIES[path], "cache_salt": "s"}).encode()
    assert parse(path, body).cache_salt == "s"


@pytest.mark.parametrize("path", BODIES)
def test_a_body_of_other_types_is_no_request(path: str) -> None:
    for key in BODIES[path]:
        assert refusal(path, json.dumps({key: 5.5}).encode()) == "bad_request"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b'{"messages": [' * 5000, b'{"model": "\xff"}']
)
def test_what_is_no_json_says_so(content: bytes) -> None:
    assert refusal(CHAT_PATH, content) == "bad_json"
    assert model_of(content) is None


def test_a_body_that_takes_too_long_to_read_is_not_read() -> None:
    assert refusal(CHAT_PATH, b"{" * (MAX_BYTES + 1)) == "too_many_bytes"


@given(st.binary(max_size=300))
def test_any_bytes_give_a_request_or_a_reason(content: bytes) -> None:
    for path in (*BODIES, GRPC_PATH):
        try:
            request = parse(path, content)
        except RequestError:
            continue
        assert request.prompts


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "function", "name", "tool_calls"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
FIELDS = ("messages", "input", "prompt", "system", "tools", "tool_choice", "text", "input_ids")


@given(
    st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4), st.sampled_from([*BODIES])
)
def test_any_json_gives_a_request_or_a_reason(fields: dict[str, Any], path: str) -> None:
    try:
        request = parse(path, json.dumps({**BODIES[path], **fields}).encode())
    except RequestError:
        return
    assert request.prompts
    assert all(prompt.messages for prompt in request.prompts if isinstance(prompt, Chat))


def test_the_model_is_read_also_where_the_prompt_is_not() -> None:
    assert model_of(b'{"model": "m", "messages": 5}') == "m"
    assert model_of(b"{}") is None
    assert model_of(b"{") is None


def test_query_strings_and_trailing_slashes_do_not_hide_a_path() -> None:
    assert path_of("/v1/chat/completions?api=1") == CHAT_PATH
    assert path_of("/v1/completions/") == COMPLETIONS_PATH


def test_a_call_whose_prompt_is_not_keyed_is_told_from_what_calls_no_model() -> None:
    assert why_unkeyed("POST", CHAT_PATH) == ""
    assert {why_unkeyed("POST", path) for path in UNKEYED_PATHS} == {"unkeyed_api"}
    others = [("GET", "/v1/models"), ("GET", "/score"), ("OPTIONS", CHAT_PATH), ("POST", "/api/x")]
    assert {why_unkeyed(*one) for one in others} == {"not_inference"}


@pytest.mark.parametrize("path", ["/v1/models", "/tokenize", "/v1/messages/count_tokens"])
def test_only_posts_to_known_paths_carry_prompts(path: str) -> None:
    assert is_inference("POST", CHAT_PATH)
    assert not is_inference("GET", CHAT_PATH)
    assert not is_inference("POST", path)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "a", "messages": []},
        {"messages": [], "model": "a"},
        {"messages": [{"model": "b", "content": 'x "model": "c"'}], "model": "a", "n": {"m": 1}},
        {"metadata": {"model": "b"}, "model": "a", "messages": [{"model": "b"}]},
        {"n": [{"model": "b"}], "model": 'a \\"', "messages": [], "metadata": {"model": "b"}},
    ],
)
@pytest.mark.parametrize("length", [0, 40 * 2**20])
def test_the_model_of_a_long_body_is_found_at_either_end(
    fields: dict[str, Any], length: int
) -> None:
    text = 'say "model": "d", ' * (length // 18)
    fields = {**fields, "messages": [*fields["messages"], {"content": text}]}
    body = json.dumps(fields).encode()
    began = time.process_time()
    assert model_of(body) == fields["model"]
    assert time.process_time() - began < 0.05


@pytest.mark.parametrize("fields", [{}, {"model": None}, {"metadata": {"model": "a"}}])
def test_no_model_is_found_where_none_is_named(fields: dict[str, Any]) -> None:
    messages = [{"content": "x" * 10**6}]
    assert model_of(json.dumps({**fields, "messages": messages}).encode()) is None
    assert model_of(json.dumps({"messages": messages, **fields}).encode()) is None


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH, "/v1/messages"])
def test_where_no_path_is_shown_the_body_tells_the_api(path: str) -> None:
    fields = BODIES[path] | ({"system": "b"} if path == "/v1/messages" else {})
    body = json.dumps(fields | {"model": "m"}).encode()
    assert is_inference("", "")
    assert parse("", body) == parse(path, body)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings", "/generate"])
def test_where_no_path_is_shown_a_body_of_several_apis_is_not_keyed(path: str) -> None:
    assert refusal("", json.dumps(BODIES[path]).encode()) == "unkeyed_api"
    assert refusal("", b"{") == "bad_json"
    assert not is_inference("POST", "")
