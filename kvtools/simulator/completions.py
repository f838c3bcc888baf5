"""The form of answers to completions and chats: OpenAI's, as vLLM fills it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvtools.simulator.answers import Body, Choice, StreamEvent, ToolCall, UsageCounts

_DONE = StreamEvent("", b"[DONE]")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionForm:
    """One response, whole or in chunks, with the fields that all its parts repeat.

    created: in seconds since the epoch. ends_with_usage: whether a stream tells the usage. call:
    what a chat answers instead of its text. prompt_token_ids: those that are shown, None if none
    are.
    """

    id: str
    created: int
    model: str
    chat: bool
    ends_with_usage: bool = False
    call: ToolCall | None = None
    prompt_token_ids: tuple[int, ...] | None = None

    def whole(self, choices: Sequence[Choice]) -> Body:
        """Returns the answer to a request without `stream`."""
        listed = [
            self._choice(choice.index, self._content(choice.text), self._reason(choice.reason))
            for choice in choices
        ]
        shown = self.prompt_token_ids
        whole = self._envelope(listed, usage=_counted(choices[0].usage))
        return whole if shown is None else {**whole, "prompt_token_ids": shown}

    def piece(self, choice: Choice, text: str) -> Iterator[StreamEvent]:
        """Yields a role, with which chats begin, and the token's text, or at last the call."""
        index = choice.index
        if self.chat and choice.begins:
            yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)
        if self.call is None:
            content = {"delta": {"content": text}} if self.chat else {"text": text}
            yield self._chunk(index, content, choice.reason)
        elif choice.reason:
            yield self._chunk(index, {"delta": {"tool_calls": [self._called()]}}, None)
            yield self._chunk(index, {"delta": {}}, "tool_calls")

    def closing(self, choices: Sequence[Choice]) -> Iterator[StreamEvent]:
        """Yields the usage, for requests that ask for it, and the end."""
        if self.ends_with_usage:
            body = self._envelope([], chunk=True, usage=_counted(choices[0].usage))
            yield StreamEvent("", msgspec.json.encode(body))
        yield _DONE

    def _content(self, text: str) -> Body:
        if not self.chat:
            return {"text": text}
        if self.call is None:
            return {"message": {"role": "assistant", "content": text}}
        message = {"role": "assistant", "content": None, "tool_calls": [self._called()]}
        return {"message": message}

    def _reason(self, reason: str | None) -> str | None:
        return reason if self.call is None else "tool_calls"

    def _called(self) -> Body:
        assert self.call is not None
        function = {"name": self.call.name, "arguments": self.call.json}
        return {"index": 0, "id": f"call_{self.id}", "type": "function", "function": function}

    def _chunk(self, index: int, content: Mapping[str, Any], reason: str | None) -> StreamEvent:
        body = self._envelope([self._choice(index, content, reason)], chunk=True)
        return StreamEvent("", msgspec.json.encode(body))

    def _choice(self, index: int, content: Mapping[str, Any], reason: str | None) -> Body:
        return {"index": index, **content, "logprobs": None, "finish_reason": reason}

    def _envelope(self, choices: list[Body], *, chunk: bool = False, **rest: Body) -> Body:
        chat_object = "chat.completion.chunk" if chunk else "chat.completion"
        return {
            "id": self.id,
            "object": chat_object if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **rest,
        }


def _counted(usage: UsageCounts) -> Body:
    """Returns the counts as the OpenAI API names them."""
    is_named = usage.names_no_hits or usage.cached_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens} if is_named else None,
    }
