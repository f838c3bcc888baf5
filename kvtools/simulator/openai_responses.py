"""POST /v1/responses: OpenAI's requests as chats, and the form of its answers.

Sources: OpenAI's Responses API and its streaming events; for what becomes of a request, vLLM 0.32
(entrypoints/openai/responses/utils.py). Nothing is kept, so no response can be continued by its id.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvtools.simulator.answers import Body, Choice, StreamEvent, ToolCall, UsageCounts, named_event
from kvtools.simulator.requests import ChatRequest, Messages, Positive
from kvtools.simulator.responses import bad_request


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/responses."""

    input: str | Messages
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    model: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None

    def as_chat(self) -> ChatRequest:
        """Returns the conversation to which the engine converts it.

        Raises:
            ApiError: it continues a response, or has an item of an unknown kind.
        """
        if self.previous_response_id is not None:
            raise bad_request("no response is kept here", "previous_response_id")
        turns = _Turns()
        if self.instructions:
            turns.messages.append({"role": "system", "content": self.instructions})
        items = self.input
        for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
            turns.add(item)
        functions = (tool for tool in self.tools or () if tool.get("type") == "function")
        return ChatRequest(
            messages=turns.messages,
            model=self.model,
            max_tokens=self.max_output_tokens,
            tools=[_function(tool) for tool in functions] or None,
            stream=self.stream,
            cache_salt=self.cache_salt,
            kv_transfer_params=self.kv_transfer_params,
        )


class _Turns:
    """The turns that items make; neighbouring items of the model become one turn."""

    def __init__(self) -> None:
        self.messages: list[Body] = []

    def add(self, item: Body) -> None:
        """Adds an item.

        Raises:
            ApiError: its kind is unknown.
        """
        match item.get("type", "message"):
            case "function_call_output" | "custom_tool_call_output":
                self.messages.append({"role": "tool", "content": item.get("output")})
            case "function_call" | "custom_tool_call":
                arguments = item.get("arguments", item.get("input"))
                function = {"name": item.get("name"), "arguments": arguments}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                self._turn_without("").setdefault("tool_calls", []).append(call)
            case "reasoning":
                self._turn_without("reasoning")["reasoning"] = ""
            case "message" if item.get("role") == "assistant":
                self._turn_without("content")["content"] = _first_text(item.get("content"))
            case "message" if "role" in item:
                self.messages.append({"role": item["role"], "content": item.get("content")})
            case kind:
                raise bad_request(f"Unsupported input item type: {kind}", "input")

    def _turn_without(self, key: str) -> Body:
        """Returns the model's last turn if it has no such part yet, else a new turn."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or key in last:
            last = {"role": "assistant"}
            self.messages.append(last)
        return last


def _first_text(content: object) -> object:
    if not isinstance(content, list):
        return content
    return next((part.get("text") for part in content if isinstance(part, dict)), "")


def _function(tool: Body) -> Body:
    named = {key: tool.get(key) for key in ("name", "description", "parameters")}
    return {"type": "function", "function": named}


@dataclass(slots=True, kw_only=True)
class ResponseForm:
    """One response, whole or as numbered events, with one item: a text, or a call.

    created: in seconds since the epoch. events: how many it has given.
    """

    id: str
    created: int
    model: str
    call: ToolCall | None = None
    events: int = 0

    def whole(self, choices: Sequence[Choice]) -> Body:
        """Returns the answer to a request without `stream`."""
        (choice,) = choices
        is_cut = self.call is None and choice.reason == "length"
        status = "incomplete" if is_cut else "completed"
        details = {"reason": "max_output_tokens"} if is_cut else None
        body = self._response(status, [self._item(choice.text, status)], _counted(choice.usage))
        return body | {"incomplete_details": details}

    def piece(self, choice: Choice, text: str) -> Iterator[StreamEvent]:
        """Yields the token's text, or at last the call's arguments."""
        if choice.begins:
            yield from self._opening()
        if self.call is None:
            yield self._event("output_text.delta", **self._place, delta=text, logprobs=[])
        elif choice.reason:
            place = {"item_id": self._item_id, "output_index": 0}
            yield self._event("function_call_arguments.delta", **place, delta=self.call.json)
            yield self._event("function_call_arguments.done", **place, arguments=self.call.json)

    def _opening(self) -> Iterator[StreamEvent]:
        """Yields the response without output, and the beginning of its item."""
        began = self._response("in_progress", [], None)
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=began)
        item = self._item("", "in_progress")
        item["content" if self.call is None else "arguments"] = [] if self.call is None else ""
        yield self._event("output_item.added", output_index=0, item=item)
        if self.call is None:
            yield self._event("content_part.added", **self._place, part=_text(""))

    def closing(self, choices: Sequence[Choice]) -> Iterator[StreamEvent]:
        """Yields the item whole, and the response whole."""
        whole = self.whole(choices)
        text = choices[0].text
        if self.call is None:
            yield self._event("output_text.done", **self._place, text=text, logprobs=[])
            yield self._event("content_part.done", **self._place, part=_text(text))
        yield self._event("output_item.done", output_index=0, item=whole["output"][0])
        yield self._event(whole["status"], response=whole)

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        number, self.events = self.events, self.events + 1
        return named_event({"type": f"response.{kind}", "sequence_number": number, **fields})

    @property
    def _item_id(self) -> str:
        return f"{'msg' if self.call is None else 'fc'}_{self.id}"

    @property
    def _place(self) -> Body:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _item(self, text: str, status: str) -> Body:
        named = {"id": self._item_id, "status": status}
        if self.call is None:
            return {"type": "message", **named, "role": "assistant", "content": [_text(text)]}
        called = {"name": self.call.name, "arguments": self.call.json}
        return {"type": "function_call", **named, "call_id": f"call_{self.id}", **called}

    def _response(self, status: str, output: list[Body], usage: Body | None) -> Body:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage,
        }


def _text(text: str) -> Body:
    return {"type": "output_text", "text": text, "annotations": []}


def _counted(usage: UsageCounts) -> Body:
    """Returns the counts as this API names them."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
