"""KV-cache events as vLLM 0.32 puts them on the wire.

Field names, their order, and which of them are left out when unset follow recorded frames:
fields without a default are always sent, even as null; those with one only when they differ.
"""

from collections.abc import Sequence

import msgspec

MEDIUM = "GPU"
"""vLLM calls the engine's own cache "GPU" on every backend, the CPU one included."""
ATTENTION = "full_attention"

# vLLM sends 64-bit numbers by default and whole digests on request.
WireHash = int | bytes


class BlockStored(msgspec.Struct, frozen=True, tag=True, tag_field="type", omit_defaults=True):
    """Consecutive full blocks of one request became reusable in one scheduler step."""

    block_hashes: Sequence[WireHash]
    parent_block_hash: WireHash | None
    """The block before the first of these; None at the start of a prompt."""
    token_ids: Sequence[int]
    """The tokens of all these blocks, one after the other."""
    block_size: int
    """Tokens a block."""
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: Sequence[Sequence[str] | None] | None = None
    """One entry a block: the LoRA name and the cache salt that its hash contains, or None."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, tag_field="type", omit_defaults=True):
    """One copy of a block was overwritten; other copies of the same hash may remain."""

    block_hashes: Sequence[WireHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """The whole cache was reset."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
