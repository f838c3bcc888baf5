"""One event of vLLM, SGLang or TensorRT-LLM: from the values of its msgpack to a typed one.

Events are tagged arrays (vLLM before 0.24, SGLang before 0.5.20) or tagged maps (since, and
TensorRT-LLM). Positions and names are those of `vllm.distributed.kv_events`; SGLang and
TensorRT-LLM use the same ones, and a few of their own that are named here where they are read.
"""

from array import array
from collections.abc import Mapping
from typing import Any

from kvstate.events import (
    AllCleared,
    BlockHash,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
    Event,
    OtherGroupStored,
    Tokens,
)
from kvstate.wire.admission import (
    INTEGERS,
    Skipped,
    checked_group,
    checked_medium,
    holds_prefix,
    reject_foreign,
)
from kvstate.wire.extras import extras_of, with_root

MAX_BLOCK_SIZE = 65_536
# The longest that engines have are of 32.
MAX_HASH_BYTES = 64

_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")

Fields = Mapping[str, Any]


def tag_of(raw: object) -> object:
    """What kind of event this says it is; None if it says nothing."""
    if isinstance(raw, list):
        return raw[0] if raw else None
    return raw.get("type") if isinstance(raw, Mapping) else None


def decode_event(raw: object) -> Event:
    """The typed event.

    Raises:
        Skipped: it cannot be indexed, under the name it is counted by.
    """
    tag = tag_of(raw)
    if tag == "BlockStored":
        return _stored(raw)
    if tag == "BlockRemoved":
        return _removed(_named(raw, _REMOVED_FIELDS))
    if tag == "AllBlocksCleared":
        fields = _named(raw, ())
        reject_foreign(fields.get("locality"), fields.get("ownership"))
        return AllCleared()
    raise Skipped("unknown_event" if isinstance(tag, str) else "malformed_event")


def _named(raw: object, names: tuple[str, ...]) -> Fields:
    """An event by field names; a value of an array has the name of its position."""
    if isinstance(raw, list):
        return dict(zip(names, raw[1:], strict=False))
    return raw if isinstance(raw, Mapping) else {}


def _stored(raw: object) -> Event:
    fields = _named(raw, _STORED_FIELDS)
    reject_foreign(fields.get("locality"), fields.get("ownership"))
    kind = fields.get("kv_cache_spec_kind")
    if kind is not None and not holds_prefix(kind):
        return OtherGroupStored(checked_group(fields.get("group_idx")))
    hashes = _hashes(fields.get("block_hashes"))
    if fields.get("block_size") == 0 or fields.get("token_ids") == []:
        # vLLM's offloading connector, which knows no more of its blocks
        return BlocksCopied(hashes, *_place(fields))
    return _chain(fields, hashes, is_array=isinstance(raw, list))


def _chain(fields: Fields, hashes: list[BlockHash], *, is_array: bool) -> BlocksStored:
    block_size, parent = fields.get("block_size"), fields.get("parent_block_hash")
    if type(block_size) is not int or not 0 < block_size <= MAX_BLOCK_SIZE:
        raise Skipped("bad_block_size")
    tokens, first_token = _tokens(fields.get("token_ids"))
    if len(tokens) != block_size * len(hashes):
        raise Skipped("misaligned_tokens")
    name, salt, salt_follows = fields.get("lora_name"), fields.get("cache_salt"), False
    if is_array and isinstance(name, Mapping):
        # SGLang 0.5.18 and 0.5.19: one more element, a map, where there is a salt
        salt, name, salt_follows = name.get("cache_salt"), None, True
    lora = _lora(name, fields.get("lora_id"))
    extras = extras_of(fields.get("extra_keys"), fields.get("mm_keys"), lora, len(hashes))
    if parent is None:  # what a chain begins with is in its parent's key otherwise
        extras = with_root(extras, first_token, salt, len(hashes))
    medium, group = _place(fields)
    return BlocksStored(
        hashes=hashes,
        parent=None if parent is None else _hash(parent),
        tokens=tokens,
        block_size=block_size,
        lora=lora,
        extras=extras,
        medium=medium,
        group=group,
        kind=fields.get("kv_cache_spec_kind"),
        bigrams=first_token is not None,
        names_salts=not is_array or salt_follows or "extra_keys" in fields,
        names_loras=_names_loras(fields, salt_follows=salt_follows, is_array=is_array),
    )


def _names_loras(fields: Fields, *, salt_follows: bool, is_array: bool) -> bool | None:
    """SGLang's maps have names since 0.5.22 only, and leave them out where there is none."""
    if "lora_name" in fields:
        return not salt_follows
    return False if is_array else None


def _removed(fields: Fields) -> BlocksRemoved:
    reject_foreign(fields.get("locality"), fields.get("ownership"))
    return BlocksRemoved(_hashes(fields.get("block_hashes")), *_place(fields))


def _place(fields: Fields) -> tuple[str, int | None]:
    return checked_medium(fields.get("medium")), checked_group(fields.get("group_idx"))


def _hash(raw: object) -> BlockHash:
    if type(raw) is int:
        return raw & 0xFFFF_FFFF_FFFF_FFFF
    if isinstance(raw, bytes):
        if len(raw) > MAX_HASH_BYTES:
            raise Skipped("huge_hash")
        return raw
    raise Skipped("bad_hash")


def _hashes(raw: object) -> list[BlockHash]:
    if not isinstance(raw, list):
        raise Skipped("bad_hash")
    return [_hash(item) for item in raw]


def _tokens(raw: object) -> tuple[Tokens, int | None]:
    """The tokens of all blocks; of bigrams the second ones, and the first of all apart."""
    if not isinstance(raw, list):
        raise Skipped("bad_tokens")
    if raw and isinstance(raw[0], list):
        return _bigrams(raw)
    try:
        return array("I", raw), None
    except (TypeError, OverflowError):  # TensorRT-LLM may have texts for tokens
        raise Skipped("bad_tokens") from None


def _bigrams(raw: list[Any]) -> tuple[Tokens, int]:
    try:
        firsts = array("I", [first for first, _ in raw])
        seconds = array("I", [second for _, second in raw])
    except (TypeError, ValueError, OverflowError):
        raise Skipped("bad_tokens") from None
    if firsts[1:] != seconds[:-1]:
        raise Skipped("broken_bigrams")
    return seconds, firsts[0]


def _lora(name: object, number: object) -> str | int | None:
    if isinstance(name, str):
        return name
    if name is None and (number is None or (type(number) is int and number in INTEGERS)):
        return number
    raise Skipped("bad_lora")
