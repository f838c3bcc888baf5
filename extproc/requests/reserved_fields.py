"""Removes from a body the fields by which only the router may say where KV blocks come from.

With them, a worker would fetch KV blocks from, or hand them to, any host that a client names. The
members of a body's object are found by their offsets, and cut out; a body that is no object is
searched for the names. Without the compiled scan every body is searched first, and scanned only if
a name occurs. None is decoded: an engine's decoder may read what KVSteer's refuses, and a body of
32 MiB takes seconds to decode. Sources: SGLang's `disaggregation/utils.py`
and its gateway (bootstrap_*), vLLM 0.32's `v1/kv_offload/tiering/p2p/manager.py` and
`mooncake_connector.py` (kv_transfer_params), and the same for an encoder's cache
(ec_transfer_params).

vLLM hands on what a request calls `vllm_xargs`, or `sampling_params.extra_args` (/inference/v1/
generate), as it hands on kv_transfer_params: in the sampling parameters' extra_args (vLLM 0.32's
`v1/request.py`). So the name is cut out there, too, and with it the mode in which an engine
announces again what it holds: by that, a client could make a block count as held twice.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from extproc.base.errors import RequestError
from extproc.requests.costly_json import MAX_ID_COMMAS, refuse_costly
from extproc.requests.field_edits import FieldEdit, apply_edits
from kvstate import scan

NAMES = frozenset(
    (
        b"bootstrap_host",
        b"bootstrap_port",
        b"bootstrap_room",
        b"bootstrap_pair_key",
        b"decode_tp_size",
        b"kv_transfer_params",
        b"ec_transfer_params",
    )
)

# The mode in which vLLM announces the blocks that a request reuses, among its extra arguments.
REPORT_MODE = b"kv_cache_report_mode"


class _Fields(NamedTuple):
    """What is cut out of an object.

    own: names of its members. inner: those of objects in it, by their names.
    """

    own: frozenset[bytes]
    inner: Mapping[bytes, "_Fields"]


_ARGUMENTS = _Fields(frozenset((b"kv_transfer_params", b"ec_transfer_params", REPORT_MODE)), {})
_SAMPLING = _Fields(frozenset(), {b"extra_args": _ARGUMENTS})
_BODY = _Fields(NAMES, {b"vllm_xargs": _ARGUMENTS, b"sampling_params": _SAMPLING})

# A longer body is not changed.
MAX_EDITED_BYTES = 4 * 1024 * 1024

# Beginnings of all names. A name that is spelled otherwise has a letter of it as \u005f to \u007a,
# which no usual encoder writes.
_PARTS = (
    b"bootstrap_",
    b"decode_tp_size",
    b"kv_transfer_params",
    b"ec_transfer_params",
    REPORT_MODE,
)
_LETTER = re.compile(rb"\\u00[5-7]")

_OBJECT = re.compile(rb"[ \t\r\n]*\{")

# Searched at a time: meanwhile no other thread has a turn.
_PIECE_BYTES = 131_072
_LONGEST = max(map(len, (*NAMES, REPORT_MODE)))

# Byte order marks with which Python's json recognizes other encodings than UTF-8; without one, it
# recognizes them by a NUL among the first bytes.
_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff")
_FIRST_BYTES = 4


def without_reserved(body: bytes, *, compiled: bool = scan.IS_COMPILED) -> bytes | None:
    """Returns a body without the router's fields: the same object if it has none.

    Returns None if it has some and is not to be changed, because it is too large or too costly; and
    if it may hide some, since it is no object in UTF-8, but has their names in it. All other bytes
    stay as they are.

    compiled: whether the scan is; the plain one is only for bodies that cost it little.
    """
    if _is_wide(body):
        return _wide(body)
    if not compiled and (not _may_name(body) or _is_costly(body)):
        return None if _may_name(body) else body
    edits = _edits(body, _BODY)
    if edits is None:
        return None if _may_name(body) else body
    if not edits:
        return body
    return None if len(body) > MAX_EDITED_BYTES else apply_edits(body, edits)


def _edits(text: bytes, fields: _Fields) -> list[FieldEdit] | None:
    """Returns what takes these fields out of an object, None if it is none.

    Returns None, too, if it has more members of these names than any client writes.
    """
    found = scan.members(text, (*fields.own, *fields.inner))
    if found is None:
        return None
    edits: list[FieldEdit] = []
    for start, end in found:
        name, at = scan.named(text, (start, end))
        inner = fields.inner.get(name)
        if inner is None:
            edits.append(FieldEdit(start, end, None))
        elif _OBJECT.match(text, at, end):
            value = text[at:end]
            new = _clean_object(value, inner)
            if new is None:
                return None
            if new is not value:
                edits.append(FieldEdit(at, end, new))
    return edits


def _clean_object(value: bytes, fields: _Fields) -> bytes | None:
    """Returns an object in another one without these fields: the same object if it has none.

    Returns None if it may hide some: it is none, or too large to be scanned.
    """
    edits = _edits(value, fields) if len(value) <= MAX_EDITED_BYTES else None
    if edits is None:
        return None if _may_name(value) else value
    return apply_edits(value, edits) if edits else value


def _may_name(body: bytes) -> bool:
    """Returns whether one of the names occurs anywhere in a body, in any spelling."""
    for at in range(0, len(body), _PIECE_BYTES):
        is_short = len(body) <= _PIECE_BYTES
        piece = body if is_short else body[at : at + _PIECE_BYTES + _LONGEST]
        if any(part in piece for part in _PARTS) or _LETTER.search(piece):
            return True
    return False


def _is_wide(body: bytes) -> bool:
    """Returns whether Python's json would read a body as UTF-16 or UTF-32."""
    return body.startswith(_ORDER_MARKS) or 0 in body[:_FIRST_BYTES]


def _wide(body: bytes) -> bytes | None:
    """Returns a body in UTF-16 or UTF-32, None if it may have one of the names."""
    if len(body) > MAX_EDITED_BYTES:
        return None
    plain = body.translate(None, b"\0")  # unlike `replace`, as fast where there is nothing else
    return None if _may_name(plain) else body


def _is_costly(body: bytes) -> bool:
    if len(body) > MAX_EDITED_BYTES:
        return True
    try:
        refuse_costly(body, MAX_ID_COMMAS)
    except RequestError:
        return True
    return False
