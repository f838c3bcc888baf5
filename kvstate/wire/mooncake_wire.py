"""Decodes what Mooncake's master publishes of its pool (RFC 1527; run at 3b5a5941, August 2026).

The frames are those of vLLM (`kvstate.wire.zmq_wire`), and so is the batch, with a time stamp in
milliseconds. An event is a map for one object: `event_type` is stored or removed, `medium` cpu or
disk, `object_key` the name under which an engine put it (KvEventPublisher::PublishBatch). It has
neither tokens nor a parent, so a block is known by its hash alone, which is part of the key:

    vLLM     [PREFIX@]MODEL@tp_rank:N@pcpN@dcpN@pp_rank:N@group:N@DIGEST   (0.32, PoolKey.to_string)
    SGLang   DIGEST_RANK[_RANK]_k, or _v                    (HiCache with Mooncake; read, not run)

DIGEST is in hexadecimal. vLLM's events name the last eight bytes of it, or all of it
(VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES); SGLang's the first eight. Other keys, such as plain numbers,
are of no engine that is known here.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from kvstate.events import BlockHash
from kvstate.steps import Steps
from kvstate.wire.extras import Skipped, checked_group, checked_medium
from kvstate.wire.zmq_wire import raw_events

_VLLM = re.compile(r"@tp_rank:\d+@.*@group:(\d{1,9})@((?:[0-9a-f]{2}){8,32})\Z")
_SGLANG = re.compile(r"([0-9a-f]{64})(?:_\d+){1,3}(?:_[kv])?\Z")

# Longer keys are of no engine.
MAX_KEY = 1_024


class PoolBlock(NamedTuple):
    """One object that a pool has, or has no more.

    hashes: those under which an engine's events may name the block.
    """

    is_stored: bool
    hashes: tuple[BlockHash, ...]
    medium: str
    group: int | None


def decoding_pool(payload: bytes) -> Steps[tuple[list[PoolBlock], tuple[str, ...]]]:
    """Decodes a payload, event by event; returns the blocks and the names of those skipped.

    Raises:
        WireError: the payload is not an event batch, or exceeds the limits.
    """
    blocks: list[PoolBlock] = []
    faults: list[str] = []
    for raw in raw_events(payload):
        try:
            blocks.append(_block(raw))
        except Skipped as skipped:
            faults.append(str(skipped))
        yield
    return blocks, tuple(faults)


def _block(raw: object) -> PoolBlock:
    if not isinstance(raw, Mapping):
        raise Skipped("malformed_event")
    kind = raw.get("event_type")
    if kind not in ("stored", "removed"):
        raise Skipped("unknown_event")
    hashes, group = _named(raw.get("object_key"))
    return PoolBlock(kind == "stored", hashes, checked_medium(raw.get("medium")), group)


def _named(key: object) -> tuple[tuple[BlockHash, ...], int | None]:
    """Returns the hashes of the block that a key names, and its attention group."""
    if not isinstance(key, str) or len(key) > MAX_KEY:
        raise Skipped("unknown_key")
    found = _VLLM.search(key)
    if found is not None:
        digest = bytes.fromhex(found[2])
        return (int.from_bytes(digest[-8:], "big"), digest), checked_group(int(found[1]))
    found = _SGLANG.match(key)
    if found is None:
        raise Skipped("unknown_key")
    return (int(found[1][:16], 16),), None
