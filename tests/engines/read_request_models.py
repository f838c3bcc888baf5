"""Reads which fields vLLM's request models know, and what becomes of others; runs beside vLLM.

    PYTHON-WITH-VLLM read_request_models.py

Prints JSON: the engine's release, and of each kind of object in a request the fields that its model
names, whether it keeps others (`extra`), and which fields its templates get (`shown`), where it
prints them for these. It needs no model, and imports nothing of KVSteer.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, get_args

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", CUDA_VISIBLE_DEVICES="")

# A field that no release knows, to see what becomes of such ones.
UNKNOWN = "kvsteer_unknown"

EXTRA = {"allow": "kept", "forbid": "forbidden"}


def described(model: Any, shown: list[str] | None = None) -> dict[str, Any]:
    """Returns what is known of a pydantic model, or of a TypedDict."""
    if hasattr(model, "model_fields"):
        names = [field.alias or name for name, field in model.model_fields.items()]
        extra = model.model_config.get("extra")
    else:
        names = sorted(model.__annotations__)
        extra = getattr(model, "__pydantic_config__", {}).get("extra")
    found: dict[str, Any] = {"extra": EXTRA.get(extra, "dropped"), "fields": names}
    return found if shown is None else {**found, "shown": shown}


def tools() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a chat completion's tool and its function, with what is printed of them."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

    model = ChatCompletionToolsParam.model_fields["function"].annotation
    function = {UNKNOWN: 1, "defer_loading": True, "strict": True, "parameters": {}, "name": "f"}
    tool = {UNKNOWN: 1, "defer_loading": True, "function": {**function, "description": "d"}}
    printed = ChatCompletionToolsParam.model_validate(tool).model_dump()
    yield "chat tool", described(ChatCompletionToolsParam, list(printed))
    yield "chat function", described(model, list(printed["function"]))


def parts_and_messages() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a chat's messages by their roles, and its text parts, with what templates get."""
    from vllm.renderers.chat_utils import chat_message, types

    config = SimpleNamespace(enable_prompt_embeds=False, multimodal_config=None)
    tracker = SimpleNamespace(
        create_parser=lambda **_: SimpleNamespace(model_config=config, mm_placeholder_storage=dict)
    )
    custom = types.CustomChatCompletionMessageParam
    fields = sorted(custom.__annotations__)
    known = sorted(chat_message._KNOWN_CONTENT_PART_FIELDS)

    def shown(role: str) -> dict[str, Any]:
        values = dict.fromkeys(fields, "x") | {"tool_calls": [], "tools": [], UNKNOWN: "x"}
        part = dict.fromkeys(known) | {"type": "text", "text": "a", UNKNOWN: 1}
        message = {**values, "role": role, "content": [part]}
        (made,) = chat_message.parse_chat_message_content(message, tracker, "openai", False)
        return dict(made)

    for role in ("user", "assistant", "system", "tool", "developer", UNKNOWN):
        yield f"chat message of {role}", described(custom, list(shown(role)))
    (part,) = shown("user")["content"]
    yield "chat part", {"extra": "kept", "fields": known, "shown": list(part)}
    kinds = sorted(chat_message.MM_PARSER_MAP)
    yield "kinds of chat parts", {"extra": "forbidden", "fields": kinds}


def request_bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the bodies of the APIs whose prompts are keyed."""
    from vllm.entrypoints.anthropic import protocol as anthropic
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    yield "chat body", described(ChatCompletionRequest)
    yield "completion body", described(CompletionRequest)
    yield "messages body", described(anthropic.AnthropicMessagesRequest)
    yield "messages message", described(anthropic.AnthropicMessage)
    yield "messages block", described(anthropic.AnthropicContentBlock)
    kinds = get_args(anthropic.AnthropicContentBlock.model_fields["type"].annotation)
    yield "kinds of messages blocks", {"extra": "forbidden", "fields": sorted(kinds)}
    yield "messages tool", described(anthropic.AnthropicTool)
    yield "messages tool_choice", described(anthropic.AnthropicToolChoice)
    yield "messages output_config", described(anthropic.AnthropicOutputConfig)
    yield "responses body", described(ResponsesRequest)


def responses_tools() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a response's function, with what templates get of it."""
    from vllm.entrypoints.openai.responses.utils import construct_tool_dicts
    from vllm.tool_parsers.utils import FunctionTool

    tool = {UNKNOWN: 1, "type": "function", "name": "f", "strict": True, "defer_loading": True}
    (made,) = construct_tool_dicts([FunctionTool.model_validate(tool)], "auto") or [{}]
    yield "responses function", described(FunctionTool, list(made["function"]))


READERS: tuple[Callable[[], Iterator[tuple[str, dict[str, Any]]]], ...] = (
    tools,
    parts_and_messages,
    request_bodies,
    responses_tools,
)


def main() -> None:
    """Prints what all readers find."""
    from vllm import __version__

    asyncio.set_event_loop(asyncio.new_event_loop())
    objects = {name: found for reader in READERS for name, found in reader()}
    json.dump({"release": __version__, "objects": objects}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
