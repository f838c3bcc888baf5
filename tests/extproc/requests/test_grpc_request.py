import struct
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import RequestError
from extproc.pb import kvsteer_generate_pb2 as pb
from extproc.requests.grpc_request import MAX_TOKENS, PATHS, parse

VLLM = "/vllm.grpc.engine.VllmEngine/Generate"
SGLANG = "/sglang.grpc.scheduler.SglangScheduler/Generate"
TRTLLM = "/trtllm.TrtllmService/Generate"
TOKENSPEED = "/tokenspeed.grpc.scheduler.TokenSpeedScheduler/Generate"
MESSAGES: dict[str, Any] = {
    VLLM: pb.VllmRequest,
    SGLANG: pb.SglangRequest,
    TRTLLM: pb.TrtllmRequest,
    TOKENSPEED: pb.TokenspeedRequest,
}
IDS = {"input_ids": [1, 2, 300_000]}


def framed(message: bytes, flags: int = 0) -> bytes:
    return struct.pack(">BI", flags, len(message)) + message


def body(path: str, **fields: Any) -> bytes:
    return framed(MESSAGES[path](tokenized=IDS, **fields).SerializeToString())


def refusal(path: str, content: bytes) -> str:
    with pytest.raises(RequestError) as caught:
        parse(path, content)
    return caught.value.reason


@pytest.mark.parametrize("path", MESSAGES)
def test_grpc_prompt_is_its_token_ids(path: str) -> None:
    request = parse(path, body(path))
    assert request.prompts == [array("I", [1, 2, 300_000])]
    assert request.model is None
    assert request.reads_cache


def test_grpc_fields_have_the_numbers_of_the_services() -> None:
    # GenerateRequest{request_id="r", tokenized{original_text="t", input_ids=[5, 300]}, stream=true}
    message = bytes.fromhex("0a017212080a0174120305ac022801")
    for path in (VLLM, "/vllm.grpc.engine.VllmEngine/Embed"):
        assert parse(path, framed(message)).prompts == [array("I", [5, 300])]


def test_prompt_logprobs_read_no_cache() -> None:
    assert not parse(VLLM, body(VLLM, sampling_params={"prompt_logprobs": 0})).reads_cache
    assert not parse(SGLANG, body(SGLANG, return_logprob=True)).reads_cache
    assert parse(SGLANG, body(SGLANG, return_logprob=True, logprob_start_len=-1)).reads_cache


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        (VLLM, {"sampling_params": {"truncate_prompt_tokens": 5}}, "unsupported_truncation"),
        (VLLM, {"mm_inputs": b""}, "unsupported_media"),
        (VLLM, {"media_refs": b""}, "unsupported_media"),
        (VLLM, {"extra_mm_inputs": b""}, "unsupported_media"),
        (VLLM, {"text": b"t"}, "unsupported_text"),
        (SGLANG, {"mm_inputs": b""}, "unsupported_media"),
        (SGLANG, {"input_embeds": [0.5]}, "unsupported_embeddings"),
        (SGLANG, {"lora_id": "l"}, "unsupported_lora"),
        (TRTLLM, {"multimodal_input": b""}, "unsupported_media"),
        (TRTLLM, {"prompt_tuning_config": b""}, "unsupported_embeddings"),
        (TRTLLM, {"lora_config": b""}, "unsupported_lora"),
        (TRTLLM, {"cache_salt_id": 0}, "unsupported_cache_salt"),
        (TOKENSPEED, {"mm_inputs": b""}, "unsupported_media"),
    ],
)
def test_grpc_fields_beyond_token_ids_are_refused(
    path: str, fields: dict[str, Any], reason: str
) -> None:
    assert refusal(path, body(path, **fields)) == reason


def test_grpc_query_tokens_are_media() -> None:
    message = pb.TrtllmRequest(tokenized={**IDS, "query_token_ids": [1]}).SerializeToString()
    assert refusal(TRTLLM, framed(message)) == "unsupported_media"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "bad_request"),
        (b"\0\0\0\0", "bad_request"),
        (framed(b"")[:-1], "bad_request"),
        (framed(b"") + b"more", "bad_request"),
        (framed(b"", flags=1), "unsupported_compression"),
        (framed(b"\xff"), "bad_request"),
        (framed(b""), "empty_prompt"),
    ],
)
def test_grpc_body_of_other_than_one_message_names_its_reason(content: bytes, reason: str) -> None:
    assert refusal(VLLM, content) == reason


@given(st.sampled_from([*PATHS]), st.binary(max_size=200))
def test_grpc_parse_gives_a_request_or_a_reason_for_any_bytes(path: str, content: bytes) -> None:
    for each in (content, framed(content)):
        try:
            request = parse(path, each)
        except RequestError:
            continue
        assert request.prompts


@pytest.mark.parametrize("path", [VLLM, TOKENSPEED])
def test_grpc_token_ids_are_keyed_up_to_the_limit(path: str) -> None:
    def sent(count: int) -> bytes:
        return framed(MESSAGES[path](tokenized={"input_ids": range(count)}).SerializeToString())

    assert parse(path, sent(MAX_TOKENS)).prompts == [array("I", range(MAX_TOKENS))]
    assert refusal(path, sent(MAX_TOKENS + 1)) == "too_many_parts"
