"""Reads the tokens that an engine reports from its passing response, whole or in events.

A response may repeat what the client sent, such as the schemas of its tools, and a schema may look
like usage. So only the answer's own fields count: those of its outermost object, or of that of an
event, and of the `response` or `message` directly in it. Fields are found by a decoder that skips
all others; only an event that names tokens is decoded. Of several events the last figures count,
so that those which repeat them (SGLang's, Anthropic's) end with the final ones.

Where engines put usage:

    usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens   chat and text completions
                                                                     (OpenAI, vLLM, SGLang)
    usage.input_tokens, usage.input_tokens_details.cached_tokens     /v1/responses
    usage.input_tokens, usage.cache_read_input_tokens,               /v1/messages (Anthropic)
        usage.cache_creation_input_tokens
    usage.prompt_tokens_details.multimodal_tokens, by kind           chat completions (vLLM 0.32)
    usage.prompt_tokens_details.image_tokens, audio_tokens,          the same (SGLang 0.5.23)
        video_tokens
    meta_info.prompt_tokens, meta_info.cached_tokens                 /generate (SGLang)

For /v1/messages the prompt is the sum of all three: `input_tokens` excludes tokens read from the
cache, and those that vLLM reports as created in it.

`usage` may also be a member of `response` (events of /v1/responses) or `message` (of /v1/messages).
So may be the `id` of a response, which a later request may continue: in the first event of
/v1/responses (`response.created`), and in its document, whose `object` is `response`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

import msgspec

from kvstate.undecodable import UNDECODABLE


class Usage(NamedTuple):
    """An engine's report of a request; None for figures that it leaves out.

    prompt_tokens: as it counted them, including cached ones. cached_tokens: how many of them were
    in its cache. form: the key of its prompt count, which identifies the API; "" if there is none.
    output_tokens: the answer's. media_tokens: those of the prompt's media in all.
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    form: str = ""
    output_tokens: int | None = None
    media_tokens: int | None = None


UNKNOWN = Usage()


# The longest response in JSON, and the longest event, whose usage is read: it is kept until its
# end. Longer ones are embeddings of many inputs.
MAX_DOCUMENT_BYTES = 1024 * 1024

# More tokens than this are no count.
_MAX_TOKENS = 10**9 - 1

# A line without such a name has no usage; nearly all events of a stream are such.
_HINT = b"_tokens"
_CREATED_EVENT = b'"response.created"'
_DATA = b"data:"

# Longer ids are ignored.
_MAX_ID_LETTERS = 512
_SPACE = b" \t\r\n"
_OPENING = (b"{", b"[")

_PROMPT, _INPUT, _CACHED = "prompt_tokens", "input_tokens", "cached_tokens"
_READ, _CREATED = "cache_read_input_tokens", "cache_creation_input_tokens"
_COMPLETION, _OUTPUT = "completion_tokens", "output_tokens"
_FIGURES = (_PROMPT, _INPUT, _CACHED, _READ, _CREATED, _COMPLETION, _OUTPUT)
_MULTIMODAL = "multimodal_tokens"
_BY_KIND = ("image_tokens", "audio_tokens", "video_tokens")
_DETAILS = ("prompt_tokens_details", "input_tokens_details")


_NULL = msgspec.Raw(b"null")


class _UsageFields(msgspec.Struct):
    """The fields of an answer or event that may have usage, whatever they hold."""

    usage: msgspec.Raw = _NULL
    meta_info: msgspec.Raw = _NULL
    response: msgspec.Raw = _NULL
    message: msgspec.Raw = _NULL
    id: msgspec.Raw = _NULL
    object: msgspec.Raw = _NULL


class _Inner(msgspec.Struct):
    """The same for an object in an event."""

    usage: msgspec.Raw = _NULL
    id: msgspec.Raw = _NULL
    object: msgspec.Raw = _NULL


_answer = msgspec.json.Decoder(_UsageFields)
_answers = msgspec.json.Decoder(list[_UsageFields])
_inner = msgspec.json.Decoder(_Inner)
_object = msgspec.json.Decoder(dict[str, Any])
_text = msgspec.json.Decoder(str)


class UsageScanner:
    """Reads the usage of one response; the result does not depend on how it is split.

    response_id: the id of the response, of /v1/responses, as soon as it is read; "" before.
    """

    def __init__(self) -> None:
        self.response_id = ""
        self._figures: dict[str, int] = {}
        self._pieces: list[bytes] = []
        self._buffered_bytes = 0
        self._is_document: bool | None = None  # None until its first character
        self._is_too_long = False

    def read(self, piece: bytes) -> None:
        """Reads the next piece of the response's body."""
        if self._is_document is None:
            piece = piece.lstrip(_SPACE)
            if not piece:
                return
            self._is_document = piece.startswith(_OPENING)
        if self._is_document or b"\n" not in piece:
            self._keep(piece)
            return
        first, _, others = piece.partition(b"\n")
        self._keep(first)
        self._read_line(b"".join(self._pieces))
        self._forget()
        whole, _, rest = others.rpartition(b"\n")
        if self._is_worth(whole):
            for line in whole.split(b"\n"):
                self._read_line(line)
        self._keep(rest)

    @property
    def buffered_bytes(self) -> int:
        """How much of the response is kept: at most MAX_DOCUMENT_BYTES."""
        return self._buffered_bytes

    @property
    def is_streamed(self) -> bool:
        """Whether the response came in events, so that its first byte is of its first token."""
        return self._is_document is False

    @property
    def usage(self) -> Usage:
        """The usage reported so far."""
        if self._is_document and self._pieces:
            document = b"".join(self._pieces)
            self._forget()
            if self._is_worth(document):
                self._read_answer(document)
        return _usage_of(self._figures)

    def _keep(self, piece: bytes) -> None:
        """Keeps a piece of what is not whole yet, unless that becomes too long."""
        if not piece or self._is_too_long:
            return
        self._pieces.append(piece)
        self._buffered_bytes += len(piece)
        if self._buffered_bytes > MAX_DOCUMENT_BYTES:
            self._forget()
            self._is_too_long = True

    def _forget(self) -> None:
        self._pieces.clear()
        self._buffered_bytes = 0
        self._is_too_long = False

    def _read_line(self, line: bytes) -> None:
        is_read = len(line) <= MAX_DOCUMENT_BYTES and line.startswith(_DATA)
        if is_read and self._is_worth(line):
            self._read_answer(line[len(_DATA) :])

    def _is_worth(self, text: bytes) -> bool:
        """Returns whether a part of the response may have what is looked for."""
        return _HINT in text or (not self.response_id and _CREATED_EVENT in text)

    def _read_answer(self, text: bytes) -> None:
        try:
            answers = _answers.decode(text) if text.startswith(b"[") else [_answer.decode(text)]
            for answer in answers[-1:]:
                self._figures.update(_figures_of(answer))
                self.response_id = self.response_id or _id_of(answer)
        except UNDECODABLE:
            return


def _figures_of(answer: _UsageFields) -> dict[str, int]:
    """Returns the figures of the answer's own level."""
    found: dict[str, int] = {}
    for outer in (answer.response, answer.message):
        if bytes(outer).startswith(b"{"):
            found.update(_counts_in(_inner.decode(outer).usage))
    found.update(_counts_in(answer.meta_info))
    found.update(_counts_in(answer.usage))
    return found


def _id_of(answer: _UsageFields) -> str:
    """Returns the id of the response that an answer is or has, "" if there is none."""
    response = _inner.decode(answer.response) if _is_object(answer.response) else answer
    if bytes(response.object) != b'"response"' or not bytes(response.id).startswith(b'"'):
        return ""
    found = _text.decode(response.id)
    return found if len(found) <= _MAX_ID_LETTERS else ""


def _is_object(raw: msgspec.Raw) -> bool:
    return bytes(raw).startswith(b"{")


def _counts_in(raw: msgspec.Raw) -> Iterator[tuple[str, int]]:
    if not bytes(raw).startswith(b"{"):
        return
    whole = _object.decode(raw)
    for one in (whole, *(whole.get(name) for name in _DETAILS)):
        if isinstance(one, Mapping):
            for name in _FIGURES if one is whole else (_CACHED,):
                value = one.get(name)
                if _is_count(value):
                    yield name, value
            kinds = one.get(_MULTIMODAL)
            if kinds is None and one is not whole and len(one) > 1:
                kinds = {name: one[name] for name in _BY_KIND if one.get(name)}
            if isinstance(kinds, Mapping) and kinds and all(map(_is_count, kinds.values())):
                yield _MULTIMODAL, sum(kinds.values())


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _MAX_TOKENS


def _usage_of(found: Mapping[str, int]) -> Usage:
    output = found.get(_COMPLETION, found.get(_OUTPUT))
    if _PROMPT in found or _INPUT not in found:
        form = "prompt" if _PROMPT in found else ""
        media = found.get(_MULTIMODAL)
        return _sane(Usage(found.get(_PROMPT), found.get(_CACHED), form, output, media))
    if _CACHED in found:
        return _sane(Usage(found[_INPUT], found[_CACHED], "responses", output))
    cached = found.get(_READ)
    whole = found[_INPUT] + (cached or 0) + found.get(_CREATED, 0)
    return Usage(whole, cached, "messages", output)


def _sane(usage: Usage) -> Usage:
    """Returns a report without cached tokens if they are more than the prompt's."""
    prompt, cached = usage.prompt_tokens, usage.cached_tokens
    if prompt is None or cached is None or cached <= prompt:
        return usage
    return usage._replace(cached_tokens=None)
