"""Outlines: what a conversation says, in a form by which a later turn of it is found again.

Tokens are not always known, but texts are. A body as it is written is no good to compare: clients
order its keys differently, move `cache_control` from turn to turn, and change a billing line with
every request, none of which an engine renders. So an outline has the tools first, then the system's
texts, then the turns, with all objects' keys in order and without what is not rendered. It has a
digest for each of them, so megabytes become a few KiB; long ones are cut.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import xxhash
from msgspec.structs import replace

from extproc.base.errors import RequestError
from extproc.requests.costly_json import refuse_costly
from extproc.requests.media import DIGEST_BYTES, MediaDigests
from extproc.requests.messages_request import BILLING_LINE

# Estimated bytes of one token.
BYTES_PER_TOKEN = 4

# Longer bodies are compared only by their beginning, as it is written: the decoder would hold up
# all other requests. Shorter ones are, if they are no JSON object.
MAX_BYTES = 4 * 1024 * 1024
BEGINNING_BYTES = 128 * 1024

# Longer names of sessions and responses are ignored.
MAX_NAME_LETTERS = 512

# An image or the like has this many bytes in the canonical form, whatever its size: a whole number
# of digests. How many tokens it counts as is decided apart (`Outline.measured`).
MEDIA_BYTES = 4_096
assert MEDIA_BYTES % DIGEST_BYTES == 0

# A digest covers at least this many bytes, fewer than any turn has: a short first question is all
# that tells a conversation from others with the same system. A piece of more than LONG_BYTES, and
# of more than a LONG_SHARE of what is before it, is cut. From MANY digests on, each covers at least
# a MANY_SHARE of what is before it, so a form of MOST_BYTES has less than MOST_DIGESTS; the rest is
# left out.
LEAST_BYTES = 16
LONG_BYTES = 1_024
LONG_SHARE = 16
MANY = 256
MANY_SHARE = 64
MOST_BYTES = 4 * 1024 * 1024
MOST_DIGESTS = 768

# Fields that no engine renders, or by which one only tells calls apart.
_UNRENDERED = frozenset(
    (
        "annotations",
        "cache_control",
        "call_id",
        "client_metadata",
        "id",
        "logprobs",
        "metadata",
        "signature",
        "status",
        "tool_call_id",
        "tool_use_id",
    )
)

# Fields that hold a text, or a list of parts.
_CONTENTS = ("content", "output")
_MEDIA = re.compile("image|audio|video|file|document|screenshot")
_KINDS = frozenset(("image", "audio", "video"))
_TEXT_KINDS = frozenset(("text", "input_text", "output_text"))

# Between two parts; JSON has no such bytes, and its texts have none unescaped.
_TEXT, _VALUE = b"\x00", b"\x01"


class Outline(msgspec.Struct, frozen=True, gc=False):
    """What a conversation says, without its texts.

    lengths: the bytes of its canonical form up to the end of each digest, ascending. digests: of
    what is between two of these ends, 16 bytes each. size: the bytes of the whole form. session:
    the client's name for its session, "" without one. previous: the id of the response that the
    request continues, "" without one. media: where each media item begins in the form, and its
    kind.
    """

    lengths: tuple[int, ...] = ()
    digests: tuple[bytes, ...] = ()
    size: int = 0
    session: str = ""
    previous: str = ""
    media: tuple[tuple[int, str], ...] = ()

    @property
    def tokens(self) -> float:
        """The estimated tokens of the whole form."""
        return self.size / BYTES_PER_TOKEN

    def tokens_from(self, item: int, tokens_of: Callable[[str], float]) -> float:
        """Returns the estimated tokens of the form from one of its media items on.

        tokens_of: as in `measured`.
        """
        rest = self.media[item:]
        if not rest:
            return 0.0
        texts = self.size - rest[0][0] - len(rest) * MEDIA_BYTES
        return texts / BYTES_PER_TOKEN + sum([tokens_of(kind) for _, kind in rest])

    def measured(self, tokens_of: Callable[[str], float]) -> "Outline":
        """Returns the outline with lengths and a size in which each media item has its own tokens.

        tokens_of: returns how many tokens an item of a kind has. Digests stay the same, lengths
        ascend by a token at least, and what is beyond MOST_BYTES has none.
        """
        if not self.media:
            return self
        bytes_of = {kind: BYTES_PER_TOKEN * tokens_of(kind) for _, kind in self.media}
        lengths: list[int] = []
        last, begun, before = 0, 0, 0.0
        for length in (*self.lengths, self.size):
            while begun < len(self.media) and self.media[begun][0] + MEDIA_BYTES <= length:
                before += bytes_of[self.media[begun][1]] - MEDIA_BYTES
                begun += 1
            within = 0.0
            if begun < len(self.media) and self.media[begun][0] < length:
                start, kind = self.media[begun]
                within = (bytes_of[kind] / MEDIA_BYTES - 1) * (length - start)
            last = max(last + BYTES_PER_TOKEN, int(length + before + within))
            lengths.append(last)
        size = lengths.pop()
        if self.lengths[-1:] == (self.size,):
            size = lengths[-1]
        count = bisect_right(lengths, MOST_BYTES)
        return replace(
            self, lengths=tuple(lengths[:count]), digests=self.digests[:count], size=size
        )


class SaidBody(msgspec.Struct, gc=False):
    """The fields of a body, of any API, that say what a conversation says; each holds any JSON."""

    tools: Any = None
    functions: Any = None
    system: Any = None
    instructions: Any = None
    messages: Any = None
    input: Any = None
    prompt: Any = None
    text: Any = None
    prompt_cache_key: Any = None
    metadata: Any = None
    conversation: Any = None
    previous_response_id: Any = None


class _User(msgspec.Struct, gc=False):
    session_id: str = ""


_user = msgspec.json.Decoder(_User)
said_body = msgspec.json.Decoder(SaidBody)
_sorted = msgspec.json.Encoder(order="sorted")


_unkeyed = MediaDigests(b"")


def outline_of(body: bytes, digests: MediaDigests = _unkeyed) -> Outline:
    """Returns the outline of a request's body, of any API; it takes a microsecond for each 0.3 KB.

    A longer conversation's outline begins with that of the shorter one, except for the shorter
    one's last few bytes.

    digests: of its media items, which are digests in the form; the body may be elided by it.
    """
    if len(body) > MAX_BYTES:
        return beginning_of(body)
    try:
        refuse_costly(body)
        said = said_body.decode(body)
        made = _outline(_pieces(said, digests))
        session = session_of(said.metadata, said.conversation, said.prompt_cache_key)
        return replace(made, session=session, previous=_named(said.previous_response_id))
    except (RequestError, msgspec.MsgspecError, UnicodeError, RecursionError):
        return beginning_of(body)


def beginning_of(body: bytes) -> Outline:
    """Returns the outline of a body that is not read: of its beginning, as it is written."""
    return _outline([body[:BEGINNING_BYTES]])


def _outline(pieces: Iterable[bytes]) -> Outline:
    """Returns the outline of a canonical form, which is cut at the ends of long enough pieces."""
    lengths: list[int] = []
    digests: list[bytes] = []
    media: list[tuple[int, str]] = []
    size = last = 0
    digest = xxhash.xxh3_128()
    for piece in pieces:
        start, end = size, min(size + len(piece), MOST_BYTES)
        if isinstance(piece, _Media) and end < MOST_BYTES:
            media.append((end - MEDIA_BYTES, piece.kind))
        while size < end:
            to = min(end, last + max(LONG_BYTES, last // LONG_SHARE))
            digest.update(memoryview(piece)[size - start : to - start])
            size = to
            if size - last >= _least(last, len(digests)):
                lengths.append(size)
                digests.append(digest.digest())
                digest.reset()
                last = size
        if size == MOST_BYTES:
            break
    return Outline(tuple(lengths), tuple(digests), size, media=tuple(media))


def _least(last: int, count: int) -> int:
    """Returns the least bytes of the next digest, by what is before it alone."""
    return LEAST_BYTES if count < MANY else max(LEAST_BYTES, last // MANY_SHARE)


def session_of(metadata: object, conversation: object, prompt_cache_key: object) -> str:
    """Returns the client's name for its session by fields of its body, "" without one.

    OpenAI's `conversation` (an id, or an object with one) and `prompt_cache_key`, and Anthropic's
    `metadata.user_id`: a text, or the JSON of an object with `session_id`, as Claude Code sends it.
    """
    user = _named(metadata.get("user_id") if isinstance(metadata, dict) else None)
    if user.startswith("{"):
        with suppress(msgspec.MsgspecError, RecursionError):
            user = _user.decode(user).session_id or user
    named = conversation.get("id") if isinstance(conversation, dict) else conversation
    return _named(named) or _named(prompt_cache_key) or user


def _named(name: object) -> str:
    """Returns a name, "" if it is none, or too long for one."""
    return name if isinstance(name, str) and len(name) <= MAX_NAME_LETTERS else ""


class _Media(bytes):
    """The digest of a media item, repeated to MEDIA_BYTES; its kind is image, audio or video."""

    kind = ""


def _pieces(body: SaidBody, digests: MediaDigests) -> Iterator[bytes]:
    """Yields the canonical form, which has no more objects at a time than the body."""
    for tools in (body.tools, body.functions):
        for tool in tools if isinstance(tools, list) else ():
            yield _VALUE + _sorted.encode(_tool(tool))
    for said in (body.system, body.instructions):
        for part in said if isinstance(said, list) else (said,):
            yield from _turn({"role": "system", "content": part}, digests)
    for turns in (body.messages, body.input):
        for turn in turns if isinstance(turns, list) else (turns,):
            said_by = turn if isinstance(turn, dict) else {"role": "user", "content": turn}
            yield from _turn(said_by, digests)
    for prompt in (body.prompt, body.text):
        for text in prompt if isinstance(prompt, list) else (prompt,):
            if isinstance(text, str):
                yield _TEXT + _bytes(text)


def _tool(tool: object) -> object:
    """Returns a tool without what is not rendered; inside its schema, every name is rendered."""
    if not isinstance(tool, dict):
        return tool
    shown = {name: value for name, value in tool.items() if name != "cache_control"}
    inner = shown.get("function")
    if isinstance(inner, dict):
        shown["function"] = {name: inner[name] for name in inner if name != "cache_control"}
    return shown


def _turn(turn: dict[str, Any], digests: MediaDigests) -> Iterator[bytes]:
    """Yields a turn: its fields, and its parts; nothing if it says nothing that is rendered."""
    head = {
        name: [_rendered_fields(call) for call in value]
        if name == "tool_calls" and isinstance(value, list)
        else value
        for name, value in turn.items()
        if value and name not in _UNRENDERED and name not in _CONTENTS
    }
    if head.get("type") == "message":  # the same as none
        del head["type"]
    before = _VALUE + _sorted.encode(head)
    is_said = bool(head.keys() - {"role"})
    for name in _CONTENTS:
        for part in _parts(turn.get(name), digests):
            if not isinstance(part, _Media):
                yield before + part
            else:
                yield before
                yield part
            before, is_said = b"", False
    if is_said:
        yield before


def _parts(content: object, digests: MediaDigests) -> Iterator[bytes]:
    """Yields the parts of a content; a text is the same as a list with that text."""
    for part in content if isinstance(content, list) else (content,):
        if isinstance(part, dict) and "content" in part:  # such as the result of a tool
            head = {name: part[name] for name in part if name != "content"}
            yield _VALUE + _sorted.encode(_rendered_fields(head))
            inner = part["content"]
            for one in inner if isinstance(inner, list) else (inner,):
                yield _part(one, digests)
        elif part:
            yield _part(part, digests)


def _part(part: object, digests: MediaDigests) -> bytes:
    """Returns what is rendered of a part, b"" for nothing."""
    if not isinstance(part, dict):
        return _stable_text(part) if isinstance(part, str) else _VALUE + _sorted.encode(part)
    kind, text = part.get("type"), part.get("text")
    if isinstance(text, str) and kind in _TEXT_KINDS:
        return _stable_text(text)
    found = _MEDIA.search(kind) if isinstance(kind, str) else None
    if found is None:
        return _VALUE + _sorted.encode(_rendered_fields(part))
    digest = digests.of(digests.canonical(_rendered_fields(part)))
    piece = _Media(digest * (MEDIA_BYTES // DIGEST_BYTES))
    piece.kind = found[0] if found[0] in _KINDS else "image"
    return piece


def _rendered_fields(thing: object) -> object:
    """Returns an object's fields that are rendered and not empty."""
    if not isinstance(thing, dict):
        return thing
    return {name: value for name, value in thing.items() if value and name not in _UNRENDERED}


def _stable_text(text: str) -> bytes:
    """Returns a text without the line that some clients change with every request."""
    if text.startswith(BILLING_LINE):
        text = text.partition("\n")[2]
    return _TEXT + _bytes(text) if text else b""


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
