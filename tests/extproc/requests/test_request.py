import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import RequestError
from extproc.requests.request import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    MAX_BYTES,
    PATHS,
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


def test_parsers_cover_every_api() -> None:
    assert BODIES.keys() == set(PATHS)
    for path, body in BODIES.items():
        assert is_inference("POST", path)
        assert len(parse(path, json.dumps(body).encode()).prompts) == 1


def test_grpc_requests_are_recognized_by_path() -> None:
    assert is_inference("POST", GRPC_PATH)
    assert refusal(GRPC_PATH, b"") == "bad_request"


@pytest.mark.parametrize("path", BODIES)
def test_cache_salt_is_part_of_every_key(path: str) -> None:
    body = json.dumps({**BODIES[path], "cache_salt": "s"}).encode()
    assert parse(path, body).cache_salt == "s"


@pytest.mark.parametrize("path", BODIES)
def test_body_of_other_types_is_refused(path: str) -> None:
    for key in BODIES[path]:
        assert refusal(path, json.dumps({key: 5.5}).encode()) == "bad_request"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b'{"messages": [' * 5000, b'{"model": "\xff"}']
)
def test_body_that_is_no_json_is_bad_json(content: bytes) -> None:
    assert refusal(CHAT_PATH, content) == "bad_json"
    assert model_of(content) is None


def test_body_that_costs_too_much_is_not_decoded() -> None:
    assert refusal(CHAT_PATH, b"{" * (MAX_BYTES + 1)) == "too_many_bytes"


@given(st.binary(max_size=300))
def test_parse_gives_a_request_or_a_reason_for_any_bytes(content: bytes) -> None:
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
def test_parse_gives_a_request_or_a_reason_for_any_json(fields: dict[str, Any], path: str) -> None:
    try:
        request = parse(path, json.dumps({**BODIES[path], **fields}).encode())
    except RequestError:
        return
    assert request.prompts
    assert all(prompt.messages for prompt in request.prompts if isinstance(prompt, Chat))


def test_model_of_is_read_where_the_prompt_is_not() -> None:
    assert model_of(b'{"model": "m", "messages": 5}') == "m"
    assert model_of(b"{}") is None
    assert model_of(b"{") is None


def test_path_of_ignores_query_strings_and_trailing_slashes() -> None:
    assert path_of("/v1/chat/completions?api=1") == CHAT_PATH
    assert path_of("/v1/completions/") == COMPLETIONS_PATH


def test_why_unkeyed_distinguishes_unkeyed_calls_from_calls_without_a_model() -> None:
    assert why_unkeyed("POST", CHAT_PATH) == ""
    assert {why_unkeyed("POST", path) for path in UNKEYED_PATHS} == {"unkeyed_api"}
    others = [("GET", "/v1/models"), ("GET", "/score"), ("OPTIONS", CHAT_PATH), ("POST", "/api/x")]
    assert {why_unkeyed(*one) for one in others} == {"not_inference"}


@pytest.mark.parametrize("path", ["/v1/models", "/tokenize", "/v1/messages/count_tokens"])
def test_is_inference_needs_post_and_a_known_path(path: str) -> None:
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
def test_model_of_a_long_body_is_found_at_either_end(fields: dict[str, Any], length: int) -> None:
    text = 'say "model": "d", ' * (length // 18)
    fields = {**fields, "messages": [*fields["messages"], {"content": text}]}
    body = json.dumps(fields).encode()
    began = time.process_time()
    assert model_of(body) == fields["model"]
    assert time.process_time() - began < 0.05


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("length", [0, 2 * 10**6])
def test_model_of_an_odd_body_is_found(length: int, encoding: str, *, is_last: bool) -> None:
    model, messages = {"model": "a"}, {"messages": [{"content": "x" * length}]}
    fields = {**messages, **model} if is_last else {**model, **messages}
    numbers = {"temperature": float("nan"), "top_p": float("inf")}
    for odd in ({**fields, **numbers}, {**numbers, **fields}):
        assert model_of(json.dumps(odd).encode(encoding)) == "a"


@pytest.mark.parametrize("fields", [{}, {"model": None}, {"metadata": {"model": "a"}}])
def test_model_of_is_none_where_no_model_is_named(fields: dict[str, Any]) -> None:
    messages = [{"content": "x" * 10**6}]
    assert model_of(json.dumps({**fields, "messages": messages}).encode()) is None
    assert model_of(json.dumps({"messages": messages, **fields}).encode()) is None


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH, "/v1/messages"])
def test_parse_without_a_path_finds_the_api_by_the_body(path: str) -> None:
    fields = BODIES[path] | ({"system": "b"} if path == "/v1/messages" else {})
    body = json.dumps(fields | {"model": "m"}).encode()
    assert is_inference("", "")
    assert parse("", body) == parse(path, body)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings", "/generate"])
def test_parse_without_a_path_refuses_a_body_of_several_apis(path: str) -> None:
    assert refusal("", json.dumps(BODIES[path]).encode()) == "unkeyed_api"
    assert refusal("", b"{") == "bad_json"
    assert not is_inference("POST", "")


secrets = st.recursive(
    st.just("A SECRET") | st.just("A\ud800SECRET") | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "A SECRET"]), inner)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(FIELDS), secrets, max_size=4), st.sampled_from([*BODIES]))
def test_reason_is_a_plain_name_that_quotes_nothing(fields: dict[str, Any], path: str) -> None:
    reason = "none"
    try:
        parse(path, json.dumps({**BODIES[path], **fields}).encode())
    except RequestError as error:
        reason = str(error)
    assert reason.replace("_", "").isalpha()
    assert reason.islower()


@pytest.mark.parametrize("before", ["", "a", "\\ud83d\\ude00" * 9])
@pytest.mark.parametrize("lone", ["\\ud800", "\\udc00", "\\udbff x"])
@pytest.mark.parametrize("path", [COMPLETIONS_PATH, CHAT_PATH])
def test_lone_surrogate_ends_the_parsing_before_tokenizing(
    before: str, lone: str, path: str
) -> None:
    text = f'"{before}{lone * 9}"'
    body = f'{{"prompt": {text}, "messages": [{{"role": "user", "content": {text}}}]}}'
    with pytest.raises(RequestError, match="bad_json"):
        parse(path, body.encode())
