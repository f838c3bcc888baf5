"""What every API's form of an answer gives: one body, or the events of a stream."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

Body = dict[str, Any]


class StreamEvent(NamedTuple):
    """One server-sent event. name: "" for none."""

    name: str
    data: bytes

    def encode(self) -> bytes:
        """Returns the event as it is sent."""
        head = f"event: {self.name}\n".encode() if self.name else b""
        return b"%sdata: %s\n\n" % (head, self.data)


def named_event(body: Body) -> StreamEvent:
    """Returns an event that is named by its `type`, as those of messages and responses are."""
    return StreamEvent(body["type"], msgspec.json.encode(body))


class ToolCall(NamedTuple):
    """A call of one of the client's tools, instead of a text."""

    name: str
    arguments: Mapping[str, Any]

    @property
    def json(self) -> str:
        """The arguments as models write them."""
        return msgspec.json.encode(self.arguments).decode()


@dataclass(slots=True)
class UsageCounts:
    """Token counts of one request; several prompts add up, several answers share theirs."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    names_no_hits: bool = True


@dataclass(slots=True)
class Choice:
    """One answer to a prompt as far as it was generated.

    usage: of all answers of the request. tokens: of the text. reason: the engine's finish reason,
    set with the last token.
    """

    index: int
    usage: UsageCounts
    text: str = ""
    tokens: int = 0
    reason: str | None = None

    def add(self, text: str, reason: str | None) -> None:
        """Adds the text of one token."""
        self.text += text
        self.tokens += 1
        self.reason = reason

    @property
    def begins(self) -> bool:
        """Whether this is its first token."""
        return self.tokens == 1


class AnswerForm(Protocol):
    """One API's form of one answer, for a stream or not."""

    def whole(self, choices: Sequence[Choice]) -> Body:
        """Returns the answer to a request without `stream`."""

    def piece(self, choice: Choice, text: str) -> Iterable[StreamEvent]:
        """Returns the events of the token that was added last; text: of this token."""

    def closing(self, choices: Sequence[Choice]) -> Iterable[StreamEvent]:
        """Returns the events after the last token of all choices."""
