"""Renders requests with vLLM's own request models and renderer; runs where vLLM is installed.

    PYTHON-WITH-VLLM vllm_renderer.py MODEL_DIRECTORY

Reads lines of JSON with `path` and `body`, or `raw`, the body's bytes in base64, which are read as
the server reads them. Answers each with a line: `ids`, the prompt's token ids, or `refused`, the
engine's words. It needs no model weights and imports nothing of KVSteer.
"""

import asyncio
import base64
import json
import os
import sys
from importlib.metadata import version
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ALLOW_LONG_MAX_MODEL_LEN="1",
    CUDA_VISIBLE_DEVICES="",
)

CONTEXT_TOKENS = 1 << 20


class Renderer:
    """vLLM's renderer of one model, with the parsers that agents need."""

    def __init__(self, directory: str) -> None:
        from vllm.config import ModelConfig, VllmConfig
        from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
        from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
        from vllm.renderers import renderer_from_config
        from vllm.renderers.online_renderer import OnlineRenderer

        model = ModelConfig(
            model=directory,
            tokenizer=directory,
            max_model_len=CONTEXT_TOKENS,
            dtype="bfloat16",
            enforce_eager=True,
        )
        self._online = OnlineRenderer(
            model,
            renderer_from_config(VllmConfig(model_config=model)),
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
            enable_auto_tools=True,
            tool_parser="hermes",
        )
        self._anthropic = AnthropicServingMessages
        self._merges = AnthropicServingMessages._should_merge_inline_system(self._online)
        self._messages = AnthropicMessagesRequest
        self._chat = ChatCompletionRequest
        self._responses = ResponsesRequest

    async def ids_of(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a line."""
        if path == "/v1/responses":
            made = await self._online.render_responses(self._responses.model_validate(body))
            if hasattr(made, "error"):
                return {"refused": made.error.message}
            return {"ids": list(made.engine_input["prompt_token_ids"])}
        if path == "/v1/messages":
            asked = self._messages.model_validate(body)
            chat = self._anthropic.to_chat_completion_request(
                asked, merge_inline_system=self._merges
            )
        else:
            chat = self._chat.model_validate(body)
        made = await self._online.render_chat(chat)
        if hasattr(made, "error"):
            return {"refused": made.error.message}
        (prompt,) = made[1]
        return {"ids": list(prompt["prompt_token_ids"])}


async def body_of(asked: dict[str, Any]) -> Any:
    """Returns the body of a line; its bytes are read by Starlette, as in vLLM's server."""
    from starlette.requests import Request

    if "raw" not in asked:
        return asked["body"]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": base64.b64decode(asked["raw"])}

    return await Request({"type": "http", "headers": []}, receive).json()


async def main(directory: str) -> None:
    """Answers until standard input ends; first of all a line with `version` when it is ready."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    renderer = Renderer(directory)
    print(json.dumps({"version": version("vllm")}), file=out, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        try:
            answer = await renderer.ids_of(asked["path"], await body_of(asked))
        except Exception as error:  # noqa: BLE001 - the test shows it
            answer = {"refused": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
