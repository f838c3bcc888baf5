"""KV-cache events, before a dialect encodes them.

Fields are named and ordered as in vLLM 0.32; a dialect leaves out those that it does not have.
"""

from collections.abc import Sequence

import msgspec

from kvtools.simulator.hashing import ShownToken

DEVICE = "GPU"
"""Engines call their own cache "GPU" on every backend, the CPU one included."""
ATTENTION = "full_attention"

# vLLM sends 64-bit numbers by default and whole digests on request.
WireHash = int | bytes


class BlockStored(msgspec.Struct, frozen=True, tag=True, tag_field="type", omit_defaults=True):
    """Consecutive full blocks of one request became reusable in one scheduler step."""

    block_hashes: Sequence[WireHash]
    parent_block_hash: WireHash | None
    """The block before the first of these; None at the start of a prompt."""
    token_ids: Sequence[ShownToken]
    """The tokens of all these blocks, one after the other."""
    block_size: int
    """Tokens a block."""
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: Sequence[Sequence[object] | None] | None = None
    """One entry a block: the LoRA name and the cache salt that its hash contains, or None."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    """Tokens; None for attention without a window."""
    session_id: str | None = None
    cache_salt: str | None = None
    """The salt, as SGLang names it."""


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, tag_field="type", omit_defaults=True):
    """One copy of each block was overwritten; other copies of the same hash may remain."""

    block_hashes: Sequence[WireHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """The whole cache was reset."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
