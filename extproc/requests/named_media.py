"""Finds media that a request names instead of sending them.

vLLM keeps media that it has processed under the `uuid` of their part, if a client gives one, and
under `mm_hashes` of `features` (/inference/v1/generate), and a later request may send the name
alone. These names know no tenants: by another one's name a model describes another one's image.
Sources: vLLM 0.32's `renderers/chat_utils.py`, `multimodal/processing/inputs.py`,
`entrypoints/scale_out/token_in_token_out/protocol.py`.
"""

import msgspec

from kvstate import scan
from kvstate.undecodable import UNDECODABLE

TOKENS_PATH = "/inference/v1/generate"

# No engine reads parts in deeper lists and objects.
MAX_DEPTH = 8

_NULL = msgspec.Raw(b"null")


class _Body(msgspec.Struct):
    messages: msgspec.Raw = _NULL
    input: msgspec.Raw = _NULL


class _Part(msgspec.Struct):
    """A message, or a part of one: what is in it, and by which name it stands for an item."""

    content: msgspec.Raw = _NULL
    output: msgspec.Raw = _NULL
    uuid: msgspec.Raw = _NULL


_body = msgspec.json.Decoder(_Body)
_part = msgspec.json.Decoder(_Part)
_list = msgspec.json.Decoder(list[msgspec.Raw])


def names_media(path: str, body: bytes) -> bool:
    """Returns whether a body names media, or is not to be read and might.

    path: of the request. The body is a JSON object.
    """
    if path == TOKENS_PATH:
        return scan.members(body, (b"features",)) != ()
    if b"uuid" not in body and b"\\u00" not in body:
        return False
    try:
        read = _body.decode(body)
        return _is_named(read.messages, MAX_DEPTH) or _is_named(read.input, MAX_DEPTH)
    except UNDECODABLE:
        return True


def _is_named(value: msgspec.Raw, depth: int) -> bool:
    first = bytes(memoryview(value)[:1])
    if first not in (b"[", b"{"):
        return False
    if not depth:
        return True
    if first == b"[":
        return any(_is_named(one, depth - 1) for one in _list.decode(value))
    part = _part.decode(value)
    is_named = bytes(part.uuid) != b"null"
    return is_named or _is_named(part.content, depth - 1) or _is_named(part.output, depth - 1)
