"""What a body says of where its prompt is computed, for engines whose two requests go out at once.

The fields are written as the last ones of the JSON object, and all else stays as it is, byte for
byte. A client's own fields of these names would have a worker fetch KV blocks from, or hand them
to, whomever the client names: they are taken out of every body. Sources: SGLang's
`disaggregation/utils.py` and its gateway (bootstrap_*, lists for several prompts), vLLM 0.32's
`v1/kv_offload/tiering/p2p/manager.py` and `mooncake_connector.py` (kv_transfer_params).
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from extproc import address
from extproc.config.sections import MOONCAKE, SGLANG

# A longer body is not changed: a request of one worker then.
MAX_EDITED_BYTES = 4 * 1024 * 1024

# Where engines read these fields.
PATHS = ("/v1/chat/completions", "/v1/completions")
SGLANG_PATHS = (*PATHS, "/generate")

_NAMES = (
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
    *("decode_tp_size", "kv_transfer_params"),
)
_SPACE = b" \t\r\n"

# What a prefill worker is asked for instead of an answer; later fields count.
_ONE_TOKEN = {
    "max_tokens": 1,
    "min_tokens": 0,
    "stream": False,
    "stream_options": None,
}
_CHAT = {"max_completion_tokens": 1}


class _Own(msgspec.Struct, frozen=True):
    """A client's own fields of these names."""

    bootstrap_host: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    bootstrap_port: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    bootstrap_room: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    bootstrap_pair_key: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    decode_tp_size: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    kv_transfer_params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class Transfer(NamedTuple):
    """The end of both bodies; prefill is "" where both workers get the same one."""

    decode: bytes
    prefill: bytes = b""


class Edited(NamedTuple):
    """A body, and its end for the prefill worker: how many bytes go, and what comes instead."""

    body: bytes
    tail: str = ""


def may_split(connector: str, path: str, body: bytes | None) -> bool:
    """Tells whether a request can carry such fields. body: None if it is not to be changed."""
    paths = SGLANG_PATHS if connector == SGLANG else PATHS
    return body is not None and path in paths and len(body) <= MAX_EDITED_BYTES


def transfer(
    connector: str, prefiller: str, port: int, path: str, rooms: Sequence[int]
) -> Transfer:
    """Returns the fields of both bodies.

    prefiller: ip:port of the worker that computes the prompt; port: where it hands it over. rooms:
    a random number of 63 bits for each prompt.
    """
    host = address.parse(prefiller).host
    if connector == SGLANG:
        many = len(rooms) > 1
        fields: dict[str, object] = {
            "bootstrap_host": [host] * len(rooms) if many else host,
            "bootstrap_port": [port] * len(rooms) if many else port,
            "bootstrap_room": list(rooms) if many else rooms[0],
        }
        return Transfer(_members(fields))
    number = f"{rooms[0]:016x}"
    here: dict[str, object]
    there: dict[str, object]
    if connector == MOONCAKE:
        place = f"http://{address.Address(host, port)}"
        here = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": number}
        here |= {"remote_bootstrap_addr": place, "remote_engine_id": prefiller}
        there = {"do_remote_prefill": False, "do_remote_decode": True, "transfer_id": number}
    else:
        place_of = {"remote_host": host, "remote_port": port}
        here = {"remote_prefiller": {"kv_request_id": number, **place_of}}
        there = {"remote_decoder": {"kv_request_id": number}}
    one = _ONE_TOKEN | (_CHAT if path == PATHS[0] else {})
    return Transfer(
        _members({"kv_transfer_params": here}), _members({"kv_transfer_params": there, **one})
    )


def pulled(source: str, port: int, number: int) -> Transfer:
    """Returns the field of a body whose worker is to pull a part of the prompt from another one.

    source: ip:port of that one; port: where it hands over. number: a random one of 63 bits.
    """
    place = {"remote_host": address.parse(source).host, "remote_port": port}
    return Transfer(
        _members(
            {
                "kv_transfer_params": {
                    "remote_kv_source": {"kv_request_id": f"{number:016x}", **place}
                }
            }
        )
    )


def _members(fields: dict[str, object]) -> bytes:
    return msgspec.json.encode(fields)[1:-1]


def edited(body: bytes, fields: Transfer | None) -> Edited | None:
    """Returns a body with these fields and none of the client's own; None if it is no object."""
    try:
        own = msgspec.json.decode(body, type=_Own)
        if own != _NOTHING:
            members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            kept = {name: raw for name, raw in members.items() if name not in _NAMES}
            body = msgspec.json.encode(kept)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if fields is None:
        return Edited(body)
    head = body.rstrip(_SPACE)[:-1]  # without the brace at its end
    comma = b"" if head.rstrip(_SPACE) == b"{" else b","
    end = b"%b%b}" % (comma, fields.decode)
    tail = ""
    if fields.prefill:
        tail = f"{len(end)}:{(comma + fields.prefill).decode()}}}"
    return Edited(head + end, tail)


_NOTHING = _Own()


def may_hide(body: bytes) -> bool:
    """Tells whether a body that is no object to us may be one to an engine, with such fields.

    Python's json reads more than JSON: NaN, and other encodings.
    """
    plain = body.replace(b"\0", b"")
    return b"\\u" in plain or any(name.encode() in plain for name in _NAMES)
