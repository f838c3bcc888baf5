"""Reads requests with SGLang's own request models; runs where SGLang is installed.

    PYTHON-WITH-SGLANG sglang_models.py

Answers lines of JSON with `path` and `body` with a line each: empty, or `refused`, the models'
words. First of all it writes a line with `version`. It imports nothing of KVSteer.
"""

import json
import os
import sys
from importlib.metadata import version
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")


def main() -> None:
    """Answers until standard input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints is no answer
    from pydantic import BaseModel
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest

    models: dict[str, type[BaseModel]] = {
        "/v1/chat/completions": ChatCompletionRequest,
        "/v1/messages": AnthropicMessagesRequest,
        "/v1/responses": ResponsesRequest,
    }
    print(json.dumps({"version": version("sglang")}), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            models[asked["path"]].model_validate(asked["body"])
        except ValueError as error:
            answer = {"refused": str(error)[:500]}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
