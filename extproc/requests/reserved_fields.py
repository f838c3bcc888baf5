"""Removes from a body the fields by which only the router may say where KV blocks come from.

With them, a worker would fetch KV blocks from, or hand them to, any host that a client names. The
members of a body's object are found by their bytes, and cut out; a body that is not read with
certainty is searched for the names. None is decoded: a body of 32 MiB takes seconds to decode.
Sources: SGLang's `disaggregation/utils.py`
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

from extproc.requests.draft import MAX_WIDE_BYTES, Draft
from kvstate.scan import Member

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

# The members of a body's object that are looked at.
LOOKED_AT = (*sorted(_BODY.own), *_BODY.inner)

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

# Searched at a time: meanwhile no other thread has a turn.
_PIECE_BYTES = 131_072
_LONGEST = max(map(len, (*NAMES, REPORT_MODE)))

# Byte order marks with which Python's json recognizes other encodings than UTF-8; without one, it
# recognizes them by a NUL among the first bytes.
_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff")
_FIRST_BYTES = 4


def take_out(draft: Draft) -> None:
    """Takes the router's fields out of a body of which the members `LOOKED_AT` are known.

    Raises:
        UnclearError: an engine's own arguments in it are not read with certainty.
    """
    for member in draft.each:
        if member.name in _BODY.own:
            draft.cut(member)
        elif member.name in _BODY.inner:
            _take_out_inside(draft, member, _BODY.inner[member.name])


def _take_out_inside(draft: Draft, holder: Member, fields: _Fields) -> None:
    for member in draft.inside(holder, (*sorted(fields.own), *fields.inner)):
        if member.name in fields.own:
            draft.cut(member, is_inner=True)
        else:
            _take_out_inside(draft, member, fields.inner[member.name])


def may_name(body: bytes) -> bool:
    """Returns whether one of the names may be in a body, in any spelling or encoding."""
    if not _is_wide(body):
        return _has_part(body)
    # unlike `replace`, as fast where there is nothing else
    return len(body) > MAX_WIDE_BYTES or _has_part(body.translate(None, b"\0"))


def _has_part(body: bytes) -> bool:
    for at in range(0, len(body), _PIECE_BYTES):
        is_short = len(body) <= _PIECE_BYTES
        piece = body if is_short else body[at : at + _PIECE_BYTES + _LONGEST]
        if any(part in piece for part in _PARTS) or _LETTER.search(piece):
            return True
    return False


def _is_wide(body: bytes) -> bool:
    """Returns whether Python's json would read a body as UTF-16 or UTF-32."""
    return body.startswith(_ORDER_MARKS) or 0 in body[:_FIRST_BYTES]
