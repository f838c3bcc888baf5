"""POST /v1/messages: Anthropic's requests as chats, and the form of its answers.

Sources: Anthropic's Messages API and its streaming events; for what becomes of a request, vLLM 0.32
(entrypoints/anthropic/serving.py). Texts, tool calls and their results are converted, nothing else.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvtools.simulator.answers import Body, Choice, StreamEvent, ToolCall, UsageCounts, named_event
from kvtools.simulator.requests import ChatRequest, Messages, Positive

# A line that some clients change with every request; the engine leaves it out.
_BILLING_LINE = "x-anthropic-billing-header"


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/messages."""

    messages: Messages
    max_tokens: Positive
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None

    def as_chat(self) -> ChatRequest:
        """Returns the conversation to which the engine converts it."""
        turns = _system(self.system or "")
        for message in self.messages:
            turns += _turns(message)
        return ChatRequest(
            messages=turns,
            model=self.model,
            max_tokens=self.max_tokens,
            tools=None if self.tools is None else [_function(tool) for tool in self.tools],
            stream=self.stream,
            cache_salt=self.cache_salt,
            kv_transfer_params=self.kv_transfer_params,
        )


def _system(content: object) -> list[Body]:
    """Returns a system turn with its texts joined, none if it has no text."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else _blocks(content)
    texts = (str(block.get("text", "")) for block in blocks if block.get("type") == "text")
    text = "".join(text for text in texts if not text.startswith(_BILLING_LINE))
    return [{"role": "system", "content": text}] if text else []


def _turns(message: Body) -> list[Body]:
    """Returns the turns of a message: results of tools become turns of their own, first."""
    role, content = message.get("role"), message.get("content")
    if role == "system":
        return _system(content)
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    results: list[Body] = []
    parts: list[Body] = []
    calls: list[Body] = []
    for block in _blocks(content):
        match block.get("type"):
            case "tool_result":
                results.append(_result(block))
            case "tool_use":
                calls.append(_call(block))
            case "thinking" | "redacted_thinking":
                pass  # the model's template does not print it
            case _ if block.get("text") != "":
                parts.append(block)
    turn: Body = {"role": role, "content": parts}
    if calls:
        turn["tool_calls"] = calls
    return [*results, turn] if parts or calls or role != "user" else results


def _blocks(content: object) -> list[Body]:
    return [one for one in content if isinstance(one, dict)] if isinstance(content, list) else []


def _result(block: Body) -> Body:
    content = block.get("content")
    texts = [str(one.get("text", "")) for one in _blocks(content) if one.get("type") == "text"]
    text = content if isinstance(content, str) else "\n".join(texts)
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}


def _call(block: Body) -> Body:
    function = {"name": block.get("name"), "arguments": block.get("input") or {}}
    return {"id": block.get("id"), "type": "function", "function": function}


def _function(tool: Body) -> Body:
    described = {key: tool.get(key) for key in ("name", "description")}
    return {"type": "function", "function": {**described, "parameters": tool.get("input_schema")}}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """One message, whole or as events, with one block: a text, or a call."""

    id: str
    model: str
    call: ToolCall | None = None

    def whole(self, choices: Sequence[Choice]) -> Body:
        """Returns the answer to a request without `stream`."""
        (choice,) = choices
        block = self._block(choice.text, {} if self.call is None else dict(self.call.arguments))
        return self._message([block], self._reason(choice.reason), _counted(choice.usage))

    def piece(self, choice: Choice, text: str) -> Iterator[StreamEvent]:
        """Yields the token's text, or at last the call's arguments."""
        if choice.begins:
            yield from self._opening(choice.usage)
        if self.call is not None:
            text = self.call.json if choice.reason else ""
        if text:
            kind = ("text_delta", "text") if self.call is None else _ARGUMENTS
            delta = {"type": kind[0], kind[1]: text}
            yield named_event({"type": "content_block_delta", "index": 0, "delta": delta})

    def _opening(self, usage: UsageCounts) -> Iterator[StreamEvent]:
        """Yields the message without content and reason, and the beginning of its block."""
        counted = {"input_tokens": usage.prompt_tokens, "output_tokens": 0}
        began = self._message([], None, counted)
        yield named_event({"type": "message_start", "message": began})
        block = self._block("", {})
        yield named_event({"type": "content_block_start", "index": 0, "content_block": block})

    def closing(self, choices: Sequence[Choice]) -> Iterator[StreamEvent]:
        """Yields the end of the block, the reason with the usage, and the end of the message."""
        (choice,) = choices
        yield named_event({"type": "content_block_stop", "index": 0})
        ended = {"stop_reason": self._reason(choice.reason), "stop_sequence": None}
        usage = _counted(choice.usage)
        yield named_event({"type": "message_delta", "delta": ended, "usage": usage})
        yield named_event({"type": "message_stop"})

    def _block(self, text: str, arguments: Body) -> Body:
        if self.call is None:
            return {"type": "text", "text": text}
        named = {"id": f"toolu_{self.id}", "name": self.call.name}
        return {"type": "tool_use", **named, "input": arguments}

    def _reason(self, reason: str | None) -> str:
        if self.call is not None:
            return "tool_use"
        return "max_tokens" if reason == "length" else "end_turn"

    def _message(self, content: list[Body], reason: str | None, usage: Body) -> Body:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": usage,
        }


_ARGUMENTS = ("input_json_delta", "partial_json")


def _counted(usage: UsageCounts) -> Body:
    """Returns the counts as Anthropic's API names them: cached tokens do not count as input."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
    }
