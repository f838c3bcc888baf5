import json
from array import array
from typing import Any

import pytest

from extproc.base.errors import RequestError
from extproc.requests.completion_request import parse_completion
from extproc.requests.prompt import InferenceRequest, Text


def request(**fields: Any) -> InferenceRequest:
    return parse_completion(json.dumps({"prompt": "a", **fields}).encode())


def test_completions_accept_texts_and_token_ids() -> None:
    assert request(model="m").model == "m"
    assert request(prompt=["a", "b"]).prompts == [Text("a"), Text("b")]
    assert request(prompt=[[1], [2]]).prompts == [array("I", [1]), array("I", [2])]


def test_completion_needs_no_prompt_besides_embeddings() -> None:
    with pytest.raises(RequestError, match="unsupported_embeddings"):
        parse_completion(b'{"prompt_embeds": ["AA=="]}')
    with pytest.raises(RequestError, match="bad_request"):
        parse_completion(b"{}")


def test_completions_may_omit_special_tokens() -> None:
    assert request(add_special_tokens=False).prompts == [Text("a", add_special_tokens=False)]


def test_truncated_prompt_keeps_its_last_tokens() -> None:
    plain = Text("a", add_special_tokens=False)
    cut = request(truncate_prompt_tokens=3, add_special_tokens=False)
    assert cut == InferenceRequest(None, [plain], keep_last_tokens=3, needs_text=True)
    cut = request(truncate_prompt_tokens=3, truncation_side="left")
    assert cut.prompts == [Text("a", special_tokens_vary=True)]


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 0}, {"echo": True, "logprobs": 1}])
def test_prompt_logprobs_read_no_cache(fields: dict[str, Any]) -> None:
    assert request(echo=True).reads_cache
    assert request(logprobs=1).reads_cache
    assert not request(**fields).reads_cache


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "unsupported_truncation"),
        ({"suffix": "z"}, "unsupported_suffix"),
        ({"prompt_embeds": "AA=="}, "unsupported_embeddings"),
        ({"prompt": None, "prompt_embeds": "AA=="}, "unsupported_embeddings"),
        ({"prompt": ""}, "empty_prompt"),
    ],
)
def test_completions_with_more_than_their_prompt_are_refused(
    fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        request(**fields)
