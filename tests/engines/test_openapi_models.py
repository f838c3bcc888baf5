"""What an engine's OpenAPI document says of its request models."""

import json
import subprocess
from typing import Any

import pytest

from tests.engines import vllm_engine
from tests.engines.openapi_models import differences, objects_in

MISSING = vllm_engine.missing()

# The document of vLLM's own models, without an engine.
PRINT = """
import json
from fastapi import FastAPI
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
application = FastAPI()
for path, model in {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": AnthropicMessagesRequest,
    "/v1/responses": ResponsesRequest,
}.items():
    def post(request): ...
    post.__annotations__["request"] = model
    application.post(path)(post)
print(json.dumps(application.openapi()))
"""


def document(**function: Any) -> dict[str, Any]:
    """A document whose chat completions have tools of a function with these properties."""
    tool = {"properties": {"function": {"$ref": "#/components/schemas/Function"}}}
    tools = {"anyOf": [{"items": tool, "type": "array"}, {"type": "null"}]}
    schemas = {
        "Function": {"properties": function, "additionalProperties": True},
        "Chat": {"properties": {"tools": tools}},
    }
    body = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Chat"}}}}
    path = {"post": {"requestBody": body}}
    return {"components": {"schemas": schemas}, "paths": {"/v1/chat/completions": path}}


def test_fields_are_found_through_references_choices_and_lists() -> None:
    assert objects_in(document(name={}, strict={})) == {
        "chat body": {"extra": "dropped", "fields": ["tools"]},
        "chat tool": {"extra": "dropped", "fields": ["function"]},
        "chat function": {"extra": "kept", "fields": ["name", "strict"]},
    }


def test_new_and_lost_fields_are_named() -> None:
    found = differences(document(name={}, invented={}))
    assert found["chat function"]["new"] == ["invented"]
    assert "description" in found["chat function"]["gone"]
    assert found["chat tool"]["extra"] == ["kept", "dropped"]
    assert found["messages body"] == {"missing": True}


@pytest.mark.parametrize("content", [{}, {"paths": {"/v1/chat/completions": {"post": {}}}}])
def test_document_without_request_models_says_that_they_are_missing(
    content: dict[str, Any],
) -> None:
    assert set(map(str, differences(content).values())) == {"{'missing': True}"}


@pytest.mark.engine
@pytest.mark.timeout(1800)
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_models_of_the_engine_are_those_recorded() -> None:
    run = subprocess.run([vllm_engine.PYTHON, "-c", PRINT], check=True, capture_output=True)
    assert differences(json.loads(run.stdout.splitlines()[-1])) == {}
