"""Renders requests with SGLang's own request models and conversions; runs where SGLang is.

    PYTHON-WITH-SGLANG sglang_renderer.py MODEL_DIRECTORY [OPTIONS]

OPTIONS: a JSON object of arguments of the engine's start (`reasoning_parser`, `tool_call_parser`,
`is_multimodal`, `default_chat_template_kwargs`). Reads lines of JSON with `path` and `body` (an
object, or a text that is sent as it is), and answers each with a line: `ids`, the prompt's token
ids, with `salt` and `extra_key` if there are such, or `refused`, the engine's words. It needs no
weights, no GPU and none of SGLang's kernels, and imports nothing of KVSteer.
"""

import asyncio
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    CUDA_VISIBLE_DEVICES="",
    SGLANG_USE_CPU_ENGINE="1",
)

# What SGLang imports and a machine without a GPU does not have; nothing here calls it.
_KERNELS = ("sgl_kernel", "torchvision", "torchaudio", "flashinfer", "gguf")


class _Nothing(type):
    """Classes that have every attribute, each of the same kind."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for modules that are not installed, so that they can be imported."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []

        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Nothing(name, (), {})

        module.__getattr__ = attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = "0"  # type: ignore[attr-defined]


def stand_in_for_kernels() -> None:
    """Lets SGLang's front end be imported without its kernels."""
    absent = {name for name in _KERNELS if importlib.util.find_spec(name) is None}
    importlib.import_module("transformers.utils")  # looks for some of them before they are here
    sys.meta_path.insert(0, _Absent(absent))


class Made(BaseException):
    """A request for the engine has been made: what it is."""

    def __init__(self, request: Any) -> None:
        super().__init__()
        self.request = request


class _Config(types.SimpleNamespace):
    """Arguments of the engine's start; those that are not set are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Renderer:
    """SGLang's front end of one model, up to where it sends requests to the engine."""

    def __init__(self, directory: str, options: dict[str, Any]) -> None:
        stand_in_for_kernels()
        from sglang.srt.entrypoints.anthropic import protocol as anthropic
        from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
        from sglang.srt.entrypoints.openai import (
            protocol,
            serving_base,
            serving_chat,
            serving_responses,
        )
        from sglang.srt.parser import template_manager
        from transformers import AutoTokenizer

        defaults = options.get("default_chat_template_kwargs")
        config = _Config(
            default_chat_template_kwargs=defaults,
            enable_response_store=True,
            disaggregation_mode="null",
        )
        for module in (serving_base, serving_chat, serving_responses, template_manager):
            for name in ("get_serving", "get_model", "get_disagg", "get_observability"):
                if hasattr(module, name):
                    setattr(module, name, lambda: config)
        raw = json.loads((Path(directory) / "config.json").read_text())
        hf_config = types.SimpleNamespace(**{"architectures": [], "model_type": "", **raw})
        tokenizer = AutoTokenizer.from_pretrained(directory)
        model = types.SimpleNamespace(
            hf_config=hf_config,
            is_multimodal=options.get("is_multimodal", False),
            get_default_sampling_params=dict,
        )
        self._tokenizer = tokenizer
        manager = types.SimpleNamespace(
            tokenizer=tokenizer,
            processor=None,
            model_config=model,
            model_path=directory,
            served_model_name=options.get("served_model_name", "m"),
            server_args=None,
            config_value=options.get,
            request_logger=types.SimpleNamespace(log_requests=False),
            create_abort_task=lambda _: None,
        )
        templates = template_manager.TemplateManager()
        templates.load_chat_template(manager, None, directory)

        class Chat(serving_chat.OpenAIServingChat):  # type: ignore[misc]
            def _convert_to_internal_request(self, request: Any, raw_request: Any = None) -> Any:
                raise Made(super()._convert_to_internal_request(request, raw_request)[0])

        class Responses(serving_responses.OpenAIServingResponses):  # type: ignore[misc]
            def _generate_with_builtin_tools(self, *asked: Any, **_: Any) -> Any:
                raise Made(asked[2])

        self._chat = Chat(manager, templates)
        self._responses = Responses(manager, templates)
        self._messages = AnthropicServing(self._chat)
        self._models = {
            "/v1/chat/completions": (protocol.ChatCompletionRequest, self._chat.handle_request),
            "/v1/responses": (protocol.ResponsesRequest, self._responses.create_responses),
            "/v1/messages": (
                anthropic.AnthropicMessagesRequest,
                self._messages.handle_messages,
            ),
        }

    async def answer(self, path: str, body: object) -> dict[str, Any]:
        """Returns the answer to a line."""
        import orjson

        model, handle = self._models[path]
        sent = orjson.loads(body if isinstance(body, str) else json.dumps(body))
        if not isinstance(sent, dict):
            return {"refused": "no object"}
        try:
            refused = await handle(model.model_validate(sent), None)
        except Made as made:
            return self._told(made.request)
        return {"refused": bytes(refused.body).decode()}

    def _told(self, made: Any) -> dict[str, Any]:
        ids = made.input_ids
        if ids is None:
            ids = self._tokenizer.encode(made.text)
        told = {"ids": list(ids), "salt": made.cache_salt, "extra_key": made.extra_key}
        media = [made.image_data, made.audio_data, made.video_data]
        if any(media):
            told["media"] = sum(len(one) for one in media if one)
        return {name: value for name, value in told.items() if value is not None}


async def main(directory: str, options: dict[str, Any]) -> None:
    """Answers until standard input ends; first of all a line with `version` when it is ready."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints is no answer
    renderer = Renderer(directory, options)
    print(json.dumps({"version": version("sglang")}), file=out, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        try:
            answer = await renderer.answer(asked["path"], asked["body"])
        except Exception as error:  # noqa: BLE001 - the test shows it
            answer = {"refused": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}))
