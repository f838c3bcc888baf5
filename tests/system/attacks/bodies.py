"""Bodies of HTTP requests that cost a client little and could cost a router much."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

from extproc.requests.request import MAX_BYTES

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
USER = b'{"messages": [{"role": "user", "content": "x"}], '
TOO_MANY = "too_many_parts"


@dataclass(frozen=True)
class Body:
    """reason: why its prompt gets no block keys, "" where it gets them.

    made: its content, or what makes it: together, they take hundreds of megabytes.
    """

    name: str
    path: str
    made: bytes | Callable[[], bytes] = field(repr=False)
    reason: str = TOO_MANY

    @cached_property
    def content(self) -> bytes:
        return self.made if isinstance(self.made, bytes) else self.made()

    @property
    def has_field(self) -> bool:
        """Whether it has a field that only the router may write."""
        return self.content.startswith((b'{"kv_transfer_params"', b'{"bootstrap'))

    def __str__(self) -> str:
        return self.name


def _filled(before: bytes, unit: bytes, behind: bytes, length: int = MAX_BYTES) -> bytes:
    """A body of this length, with a list of as many units as fit."""
    count = (length - len(before) - len(behind)) // (len(unit) + 1)
    return before + (unit + b",") * (count - 1) + unit + behind


def _body(
    name: str, path: str, before: bytes, unit: bytes, behind: bytes, reason: str = TOO_MANY
) -> Body:
    return Body(name, path, partial(_filled, before, unit, behind), reason)


_TOOL = b'{"type": "function", "function": {"name": "a"}}'
_CALL = b'{"function": {"name": "a"}}'
_ARGUMENTS = b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "['
_PART = b'{"type": "text", "text": "a"}'
_USE = b'{"type": "tool_use", "id": "a", "name": "b"}'
_ITEM = b'{"role": "user", "content": "a"}'

BODIES = [
    _body("template variables", CHAT, USER + b'"chat_template_kwargs": {"a": [', b"[]", b"]}}"),
    _body("tools", CHAT, USER + b'"tools": [', _TOOL, b"]}"),
    _body("calls", CHAT, b'{"messages": [{"role": "assistant", "tool_calls": [', _CALL, b"]}]}"),
    _body("arguments of a call", CHAT, _ARGUMENTS, b"[]", b']"}}]}]}'),
    _body("parts", CHAT, b'{"messages": [{"role": "user", "content": [', _PART, b"]}]}"),
    _body("messages", CHAT, b'{"messages": [', _ITEM, b"]}"),
    _body("an unknown field", CHAT, b'{"messages": [{"role": "user", "a": [', b"[]", b"]}]}"),
    _body("texts", CHAT, b'{"messages": [{"role": "user", "a": [', b'"a"', b"]}]}"),
    _body("numbers", CHAT, b'{"messages": [{"role": "user", "a": [', b"1.5", b"]}]}"),
    _body(
        "uses of tools",
        MESSAGES,
        b'{"messages": [{"role": "assistant", "content": [',
        _USE,
        b"]}]}",
    ),
    _body("blocks", MESSAGES, b'{"messages": [{"role": "user", "content": [', _PART, b"]}]}"),
    _body("items", "/v1/responses", b'{"input": [', _ITEM, b"]}"),
    _body("prompts", COMPLETIONS, b'{"prompt": [', b"[1]", b"]}"),
    _body("prompts of text", COMPLETIONS, b'{"prompt": [', b'"a"', b"]}"),
    _body("short token ids", COMPLETIONS, b'{"prompt": [', b"1", b"]}"),
    _body("token ids", COMPLETIONS, b'{"prompt": [', b"12345", b"]}", ""),
    _body("inputs", "/v1/embeddings", b'{"input": [', b"[1]", b"]}"),
    _body("lists of ids", "/generate", b'{"input_ids": [', b"[]", b"]}"),
    _body("embeddings", "/generate", b'{"text": "a", "input_embeds": [', b"[]", b"]}"),
]


# Bodies that are costly where the router takes its own fields out of them: with such a field, with
# a name of one in a text, with one that is spelled otherwise, or written again and again.
_FIELD = b'{"kv_transfer_params": 1, '
_LARGE = 28 * 1024 * 1024


def _own(name: str, before: bytes, unit: bytes, behind: bytes, length: int = MAX_BYTES) -> Body:
    return Body(name, COMPLETIONS, partial(_filled, before, unit, behind, length))


def _field_bodies(size: str, length: int) -> list[Body]:
    return [
        _own(f"a field and members, {size}", _FIELD, b'"0":1', b"}", length),
        _own(f"fields, {size}", b"{", b'"kv_transfer_params":1', b"}", length),
        _own(f"a field and lists, {size}", _FIELD + b'"a": [', b"[]", b"]}", length),
        _own(
            f"an escaped field, {size}",
            b'{"bootstrap\\u005froom": 1, "a": [',
            b'"a"',
            b"]}",
            length,
        ),
        _own(f"a name in a text, {size}", b'{"a": [', b'"kv_transfer_params"', b"]}", length),
        _own(f"escapes, {size}", b'{"prompt": ["', b"\\u00\\u00", b'"]}', length),
        _own(f"deep, {size}", _FIELD + b'"a": ', b"[[[[[[[[", b"}", length),
        Body(f"zeros, {size}", COMPLETIONS, partial(bytes, length)),
        _own(f"surrogates, {size}", b'{"prompt": "', b"\\ud800\\ud800", b'"}', length),
    ]


FIELD_BODIES = _field_bodies("4 MiB", MAX_BYTES)


def _large(before: bytes, unit: bytes, behind: bytes) -> bytes:
    return before + unit * (_LARGE // len(unit)) + behind


# Bodies that are costly where tenants are kept apart: media are looked for in every part.
_NAMED = b'{"model": "m", "x": "uuid", "messages": ['
MEDIA_BODIES = [
    Body(f"parts, {size}", CHAT, partial(_filled, _NAMED, b"0", b"]}", length))
    for size, length in (("1 MiB", 1024 * 1024), ("4 MiB", MAX_BYTES), ("28 MiB", _LARGE))
] + [
    Body("text, 28 MiB", CHAT, partial(_large, b'{"model": "m", "prompt": "', b"uuid ", b'"}')),
    Body("salt, 28 MiB", CHAT, partial(_large, b'{"cache_salt": "', b"uuid ", b'"}')),
    Body("model, 28 MiB", CHAT, partial(_large, b'{"model": "', b"\xff", b'"}')),
    Body("spaces, 28 MiB", CHAT, partial(_large, b'{"cache_salt": ', b" ", b"1}")),
]
_COSTLIEST = ("a field and members", "zeros", "surrogates")
LARGE_FIELD_BODIES = [
    body for body in _field_bodies("28 MiB", _LARGE) if body.name.startswith(_COSTLIEST)
]
