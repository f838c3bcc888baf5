"""The fields of a body by which engines hand KV blocks over, and how a body gets them.

If both requests are sent at once, the engines learn of it from the body: fields are added at the
end of the JSON object, and all other bytes stay. A client's own fields with these names have been
removed before (`requests.reserved_fields`). Sources: SGLang's `disaggregation/utils.py` and its
gateway (bootstrap_*, lists for several prompts), vLLM 0.32's `v1/kv_offload/tiering/p2p/manager.py`
and `mooncake_connector.py` (kv_transfer_params).
"""

from collections.abc import Sequence
from typing import NamedTuple

from extproc._core import id_list
from extproc.base import address
from extproc.config.sections import (
    MOONCAKE,
    SGLANG,
)
from extproc.requests.added_fields import Body, members, with_members
from kvstate.overlap import Tokens

# The paths on which engines read these fields.
PATHS = ("/v1/chat/completions", "/v1/completions")


SGLANG_PATHS = (*PATHS, "/generate")

# Longer bodies are not split.
MAX_EDITED_BYTES = 4 * 1024 * 1024


# Added for a prefill worker, so that it generates one token; the later of two equal names counts.
_ONE_TOKEN = {
    "max_tokens": 1,
    "min_tokens": 0,
    "stream": False,
    "stream_options": None,
}


_CHAT = {"max_completion_tokens": 1}

# How the fields of vLLM's connectors begin, for both workers.
_OPENING = b'"kv_transfer_params":{'


class Transfer(NamedTuple):
    """The fields added to both bodies; prefill is empty if both workers get the same body."""

    decode: bytes
    prefill: bytes = b""


class EditedBody(NamedTuple):
    """A body, and its end for the prefill worker: how many bytes to cut, and what replaces them."""

    body: Body
    tail: str = ""


def may_split(connector: str, path: str, body: bytes | None) -> bool:
    """Returns whether a request can carry these fields. body: None if it must not be changed."""
    paths = SGLANG_PATHS if connector == SGLANG else PATHS
    return body is not None and path in paths and len(body) <= MAX_EDITED_BYTES


def transfer(
    connector: str, prefiller: str, port: int, path: str, rooms: Sequence[int]
) -> Transfer:
    """Returns the fields for both bodies.

    prefiller: ip:port of the worker that computes the prompt; port: its port for handing over.
    rooms: a random number of 63 bits for each prompt.
    """
    host = address.parse(prefiller).host
    if connector == SGLANG:
        many = len(rooms) > 1
        fields: dict[str, object] = {
            "bootstrap_host": [host] * len(rooms) if many else host,
            "bootstrap_port": [port] * len(rooms) if many else port,
            "bootstrap_room": list(rooms) if many else rooms[0],
        }
        return Transfer(members(fields))
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
        members({"kv_transfer_params": here}), members({"kv_transfer_params": there, **one})
    )


def pulled(source: str, port: int, number: int) -> Transfer:
    """Returns the field that makes a worker pull a part of the prompt from another one.

    source: ip:port of the other worker; port: its port for handing over. number: random, 63 bits.
    """
    place = {"remote_host": address.parse(source).host, "remote_port": port}
    return Transfer(
        members(
            {
                "kv_transfer_params": {
                    "remote_kv_source": {"kv_request_id": f"{number:016x}", **place}
                }
            }
        )
    )


def edited(body: Body, fields: Transfer, tokens: Tokens | None = None) -> EditedBody | None:
    """Returns a body with these fields at its end; None if it is not an object.

    tokens: the ids of the prompt, for engines that take them beside the fields; None for none. Both
    workers get them, since they stand before the end that is cut.
    """
    shared, (decode, prefill) = b"", fields
    if tokens is not None and decode.startswith(_OPENING):
        shared = b'%b"prompt_token_ids":%b,' % (_OPENING, id_list(tokens))
        decode, prefill = decode.removeprefix(_OPENING), prefill.removeprefix(_OPENING)
    written = with_members(body, shared + decode)
    if written is None:
        return None
    cut_bytes = len(decode) + len(b"}")
    tail = f"{cut_bytes}:{prefill.decode()}}}" if prefill else ""
    return EditedBody(written, tail)
