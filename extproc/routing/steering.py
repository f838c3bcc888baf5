"""Chooses which requests are steered: a share of all conversations, identified by their beginning.

Every turn of a conversation begins with the same messages, so a hash of these decides the same for
all its turns on every router, and routers need not agree on anything. A conversation is steered if
its hash is below the share; so raising the share never excludes a conversation again.
"""

from collections.abc import Iterator, Sequence

import msgspec
import xxhash

from extproc.base.errors import RequestError
from extproc.config.sections import ALL_PERCENT, session_headers
from extproc.requests import grpc_request
from extproc.requests.costly_json import MAX_ID_COMMAS, refuse_costly
from extproc.requests.messages_request import BILLING_LINE
from extproc.requests.prompt import NULL, is_given
from extproc.requests.request import MAX_BYTES
from kvstate.undecodable import UNDECODABLE

# How much is hashed of a prompt that is one text, or a list of token ids.
BEGINNING_CHARACTERS = 4_096
BEGINNING_IDS = 1_024

_HASHES = 1 << 64


class Steering:
    """The share of requests that are steered; the others are decided, but left to the proxy.

    headers: the request headers of which the first that a request has is hashed instead of its
    conversation's beginning, in lower case. is_partial: whether any request may be left to the
    proxy.
    """

    def __init__(
        self, percent: float = ALL_PERCENT, header: str | tuple[str, ...] | None = None
    ) -> None:
        self.headers = session_headers(header)
        self.percent = ALL_PERCENT
        self.is_partial = False
        self._limit = _HASHES
        self.change(percent)

    def change(self, percent: float) -> None:
        """Sets the percentage of requests that are steered from now on: 0 to 100, with decimals."""
        self.percent = percent
        self.is_partial = percent < ALL_PERCENT
        self._limit = int(percent / ALL_PERCENT * _HASHES)

    def steers(self, conversation: int, chance: float) -> bool:
        """Returns whether a conversation is steered.

        conversation: its hash, 0 if unknown; then chance decides, a number from 0 to below 1.
        """
        if not conversation:
            return chance * ALL_PERCENT < self.percent
        return conversation < self._limit


def hash_of(beginning: bytes) -> int:
    """Returns the 64-bit hash of a conversation's beginning, 0 if that is empty: unknown."""
    return xxhash.xxh3_64_intdigest(beginning) if beginning else 0


class _SteeringMessage(msgspec.Struct, gc=False):
    role: str = ""
    content: msgspec.Raw = NULL


class _Part(msgspec.Struct, gc=False):
    text: str = ""


class _SteeringBody(msgspec.Struct, gc=False):
    messages: list[_SteeringMessage] = []
    system: msgspec.Raw = NULL
    instructions: msgspec.Raw = NULL
    input: msgspec.Raw = NULL
    prompt: msgspec.Raw = NULL
    text: msgspec.Raw = NULL
    input_ids: msgspec.Raw = NULL
    token_ids: msgspec.Raw = NULL


_body = msgspec.json.Decoder(_SteeringBody)
_messages = msgspec.json.Decoder(list[_SteeringMessage])
_parts = msgspec.json.Decoder(list[_Part])
_text = msgspec.json.Decoder(str)


def beginning_of(path: str, body: bytes) -> bytes:
    """Returns what all turns of a request's conversation have in common; b"" if unknown.

    For a conversation: the system's texts, and the messages up to the user's first one. For a text,
    its first characters; for token ids, the first of them. Images and the like do not count.
    """
    if len(body) > MAX_BYTES:
        return b""
    try:
        if path in grpc_request.PATHS:
            return grpc_request.ids_of(path, body)[:BEGINNING_IDS].tobytes()
        refuse_costly(body, MAX_ID_COMMAS)
        return _conversation_text(_body.decode(body))
    except (RequestError, *UNDECODABLE):
        return b""


def _conversation_text(body: _SteeringBody) -> bytes:
    if body.messages:
        return _of_messages((body.system,), body.messages)
    for prompt in (body.input, body.prompt, body.text, body.input_ids, body.token_ids):
        if is_given(prompt):
            return _of_prompt(prompt, body.instructions)
    return b""


def _of_messages(before: Sequence[msgspec.Raw], messages: Sequence[_SteeringMessage]) -> bytes:
    """Returns the system's texts, in whichever field, and the messages up to the user's first."""
    said = [text for raw in before for text in _texts(raw)]
    first = next((at for at, one in enumerate(messages) if one.role == "user"), 0)
    for message in messages[: first + 1]:
        said += (message.role, *_texts(message.content))
    return "\0".join(said).encode("utf-8", "surrogatepass")


def _of_prompt(prompt: msgspec.Raw, instructions: msgspec.Raw) -> bytes:
    raw = bytes(prompt)
    if raw[:1] == b'"':
        return _text.decode(raw)[:BEGINNING_CHARACTERS].encode("utf-8", "surrogatepass")
    within = raw[1:].lstrip()[:1]
    if within == b"{":
        return _of_messages((instructions,), _messages.decode(raw))
    if within == b'"':
        return raw[:BEGINNING_CHARACTERS]
    return b",".join(raw.split(b",", BEGINNING_IDS)[:BEGINNING_IDS])


def _texts(raw: msgspec.Raw) -> Iterator[str]:
    """Returns a content's texts, without the line that some clients change with every request."""
    kind = bytes(memoryview(raw)[:1])
    texts = [_text.decode(raw)] if kind == b'"' else []
    if kind == b"[":
        texts = [part.text for part in _parts.decode(raw)]
    return (text for text in texts if not text.startswith(BILLING_LINE))
