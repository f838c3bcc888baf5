"""Media items of requests: what identifies each, without its bytes.

An item is known by a keyed digest of 16 bytes: of its data, of its URL, or of the name that the
caller gave it, with the other fields of its part. So megabytes of base64 are hashed once and are
not copied, and nobody outside can choose an item whose digest is that of another.

Source: parts of OpenAI's chat completions and responses (image_url, input_image, input_audio,
audio_url, video_url), of Anthropic's messages (image with a source), and vLLM's `uuid` of a part
(0.32.0), by which the engine takes an item instead of its bytes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

# Kinds of media parts.
MEDIA_PARTS = {
    "image_url": "image",
    "input_image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
}

# The tokens of an item until its model's average is known.
USUAL_TOKENS = 1_000.0

DIGEST_BYTES = 16

# Stands for a text of at least SHORT_LETTERS in a part, before its digest in hexadecimal.
_STAND_IN = "kvsteer-media:"
SHORT_LETTERS = 64
# Shorter data stays in the body when it is elided.
ELIDED_BYTES = 4_096

# Data begins behind one of these keys, or is the value of the key "data". In a text, the quotes of
# a key would have a backslash.
_BEGINNING = b'"data'
_KEY_OF_URL = re.compile(
    rb'"(?:url|image_url|file_data|audio_url|video_url)"[ \t\r\n]*:[ \t\r\n]*$'
)
_KEY_OF_DATA = re.compile(rb'"data"[ \t\r\n]*:[ \t\r\n]*"')
_LONGEST_KEY = 64

# Searched within a millisecond; other threads have a turn after each piece.
_PIECE_BYTES = 1024 * 1024

# More beginnings are no honest client's.
MAX_BEGINNINGS = 8_192

_REMOTE = ("http://", "https://", "file://", "s3://", "gs://")

_encoder = msgspec.json.Encoder(order="sorted")


class Item(msgspec.Struct, frozen=True, gc=False):
    """A media item of a request.

    kind: image, audio or video. digest: identifies it. is_exact: whether it stays what it is; what
    lies behind a URL may change.
    """

    kind: str
    digest: bytes
    is_exact: bool = True


class MediaDigests:
    """Makes the digests of media items. key: at most 64 bytes that nobody outside knows."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def of(self, content: bytes | memoryview) -> bytes:
        """Returns the digest of bytes; other threads run meanwhile if there are many."""
        return blake2b(content, key=self._key, digest_size=DIGEST_BYTES).digest()

    def item(self, part: Mapping[str, Any], kind: str) -> Item:
        """Returns the item of a part."""
        name = part.get("uuid")
        if isinstance(name, str) and name:
            return Item(kind, self.of(b"uuid " + name.encode("utf-8", "surrogatepass")))
        return Item(kind, self.of(self.canonical(part)), not _is_remote(part))

    def canonical(self, part: Any) -> bytes:
        """Returns a part as JSON with its keys in order, and with digests for its long texts.

        It is the same whether the part is out of an elided body or not.
        """
        return _encoder.encode(self._short(part))

    def _short(self, thing: Any) -> Any:
        if isinstance(thing, Mapping):
            return {name: self._short(value) for name, value in thing.items()}
        if not isinstance(thing, str) or len(thing) < SHORT_LETTERS or _is_stand_in(thing):
            return thing
        return _STAND_IN + self.of(thing.encode("utf-8", "surrogatepass")).hex()

    def elided(self, body: bytes) -> tuple[bytes, int]:
        """Returns a body with digests for long data of media parts, and how many it has.

        Data that is written with escapes stays. The bytes of the data are looked at by searches
        for one byte, and hashed while other threads run.
        """
        pieces: list[memoryview | bytes] = []
        view, copied = memoryview(body), 0
        for start, end in _long_data(body):
            pieces += (
                view[copied:start],
                _STAND_IN.encode(),
                self.of(view[start:end]).hex().encode(),
            )
            copied = end
        if not pieces:
            return body, 0
        return b"".join([*pieces, view[copied:]]), len(pieces) // 3


def _long_data(body: bytes) -> Iterator[tuple[int, int]]:
    """Yields where long data begins and ends in a body, between its quotes."""
    at = 0
    for _ in range(MAX_BEGINNINGS):
        found = _next_beginning(body, at)
        if found < 0:
            return
        start = _start_of_data(body, found)
        at = found + len(_BEGINNING)
        if start < 0:
            continue
        end = body.find(b'"', start)
        if end < 0:
            return
        at = end
        if end - start >= ELIDED_BYTES and body.find(b"\\", start, end) < 0:
            yield start, end


def _next_beginning(body: bytes, at: int) -> int:
    """Returns where data may begin next, -1 if nowhere."""
    while at < len(body):
        found = body.find(_BEGINNING, at, at + _PIECE_BYTES + len(_BEGINNING) - 1)
        if found >= 0:
            return found
        at += _PIECE_BYTES
    return -1


def _start_of_data(body: bytes, found: int) -> int:
    """Returns where the data begins, behind its quote; -1 if there is none."""
    if body.startswith(b":", found + len(_BEGINNING)):
        is_url = _KEY_OF_URL.search(body, max(0, found - _LONGEST_KEY), found) is not None
        return found + 1 if is_url else -1
    key = _KEY_OF_DATA.match(body, found)
    return -1 if key is None else key.end()


def _is_stand_in(text: str) -> bool:
    return text.startswith(_STAND_IN) and len(text) == len(_STAND_IN) + 2 * DIGEST_BYTES


def stand_ins_of(parts: Sequence[Any]) -> int:
    """Returns how many texts of parts stand for data."""
    return sum(_stand_ins(part) for part in parts)


def _stand_ins(thing: Any) -> int:
    if isinstance(thing, Mapping):
        return sum(map(_stand_ins, thing.values()))
    return isinstance(thing, str) and _is_stand_in(thing)


def _is_remote(thing: Any) -> bool:
    if isinstance(thing, Mapping):
        return any(map(_is_remote, thing.values()))
    return isinstance(thing, str) and thing[:8].lower().startswith(_REMOTE)
