import json
from array import array
from typing import Any

import pytest

from extproc.base.errors import RequestError
from extproc.requests.completion_request import parse_generate, parse_tokens
from extproc.requests.prompt import MAX_PROMPTS, InferenceRequest, Text


def sglang(**fields: Any) -> InferenceRequest:
    return parse_generate(json.dumps(fields).encode())


def vllm(**fields: Any) -> InferenceRequest:
    return parse_tokens(json.dumps({"token_ids": [1, 2], **fields}).encode())


def test_sglang_generate_accepts_texts_or_token_ids() -> None:
    assert sglang(text="a").prompts == [Text("a")]
    assert sglang(text=["a", "b"]).prompts == [Text("a"), Text("b")]
    assert sglang(input_ids=[1, 2]).prompts == [array("I", [1, 2])]
    assert sglang(input_ids=[[1], [2]]).prompts == [array("I", [1]), array("I", [2])]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"text": []}, "empty_prompt"),
        ({"text": ["a"] * (MAX_PROMPTS + 1)}, "too_many_prompts"),
        ({"input_ids": [[1]] * (MAX_PROMPTS + 1)}, "too_many_prompts"),
    ],
)
def test_sglang_generate_accepts_a_bounded_number_of_prompts(
    fields: dict[str, Any], reason: str
) -> None:
    assert len(sglang(text=["a"] * MAX_PROMPTS).prompts) == MAX_PROMPTS
    with pytest.raises(RequestError, match=reason):
        sglang(**fields)


def test_sglang_adapter_is_named_by_the_model() -> None:
    request = sglang(text="a", lora_path="sql", cache_salt="s")
    assert (request.model, request.cache_salt) == ("sql", "s")


def test_prompt_logprobs_read_no_cache() -> None:
    assert sglang(text="a", return_logprob=True).reads_cache
    assert sglang(text="a", logprob_start_len=0).reads_cache
    assert not sglang(text="a", return_logprob=True, logprob_start_len=0).reads_cache
    assert vllm(sampling_params={}).reads_cache
    assert not vllm(sampling_params={"prompt_logprobs": 1}).reads_cache


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "bad_request"),
        ({"text": "a", "input_ids": [1]}, "bad_request"),
        ({"text": ""}, "empty_prompt"),
        ({"input_embeds": [[0.5]]}, "unsupported_embeddings"),
        ({"text": "a", "image_data": "x"}, "unsupported_media"),
        ({"text": "a", "session_params": {"id": "1"}}, "unsupported_session"),
        ({"text": "a", "extra_key": "k"}, "unsupported_extra_key"),
        ({"text": ["a"], "lora_path": ["l"]}, "unsupported_lora"),
        ({"text": "a", "lora_id": "1"}, "unsupported_lora"),
        ({"text": ["a"], "cache_salt": ["s"]}, "unsupported_cache_salt"),
    ],
)
def test_sglang_fields_that_change_the_keys_are_refused(
    fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        sglang(**fields)


def test_vllm_generate_accepts_token_ids() -> None:
    assert vllm(model="m", cache_salt="s") == InferenceRequest("m", [array("I", [1, 2])], "s")
    with pytest.raises(RequestError, match="empty_prompt"):
        vllm(token_ids=[])


@pytest.mark.parametrize("fields", [{"features": {}}, {"content_parts": [{}]}])
def test_media_beside_token_ids_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="unsupported_media"):
        vllm(**fields)
