import json
from array import array
from typing import Any

import pytest

from extproc.base.errors import RequestError
from extproc.requests.completion_request import parse_embeddings
from extproc.requests.prompt import Chat, InferenceRequest, Text

USER = {"role": "user", "content": "hello"}


def request(**fields: Any) -> InferenceRequest:
    return parse_embeddings(json.dumps(fields).encode())


def test_embeddings_accept_texts_and_token_ids() -> None:
    assert request(input="a", model="m") == InferenceRequest("m", [Text("a")])
    assert request(input=["a", [1]]).prompts == [Text("a"), array("I", [1])]
    plain = request(input="a", add_special_tokens=False).prompts
    assert plain == [Text("a", add_special_tokens=False)]


def test_conversation_is_embedded_without_a_generation_prompt() -> None:
    (prompt,) = request(messages=[USER], chat_template_kwargs={"x": 1}).prompts
    variables = {"x": 1, "add_generation_prompt": False, "continue_final_message": False}
    own = Chat([USER], variables, sent=[USER], roles=("user",), takes_defaults=False)
    assert prompt == own
    (prompt,) = request(messages=[USER], add_special_tokens=True).prompts
    assert isinstance(prompt, Chat)
    assert prompt.add_special_tokens


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "empty_prompt"),
        ({"input": []}, "empty_prompt"),
        ({"input": "a", "messages": [USER]}, "bad_request"),
        ({"input": "a", "truncate_prompt_tokens": 3}, "unsupported_truncation"),
        ({"input": "a", "padding": "max_length"}, "unsupported_padding"),
        ({"messages": [USER], "chat_template": "t"}, "unsupported_client_template"),
    ],
)
def test_embeddings_that_releases_treat_differently_are_refused(
    fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        request(**fields)
