"""Decoding of TensorRT-LLM's events, taken apart by `kvstate.wire.trtllm_drain`, rank by rank.

Every event becomes a batch of its own. Names are those of `KVCacheEventSerializer`
(tensorrt_llm/_utils.py): created, stored, removed and updated, of the pool with some `window_size`
(the attention window in tokens).
"""

from typing import TypeVar

import msgspec

from kvstate.events import BlockHash, BlocksCopied, BlocksRemoved, Event, EventBatch
from kvstate.tiers import DEFAULT_MEDIUM
from kvstate.wire.admission import HARMLESS, MAX_GROUP, Skipped
from kvstate.wire.trtllm_blocks import StoredData, chains, fold, full, largest, medium_of
from kvstate.wire.trtllm_drain import BAD_JSON, DrainedEvent

# Blocks of one rank that lie elsewhere than on the device.
MAX_ELSEWHERE = 1_048_576

# A smaller window's blocks are never stored here.
_HARMLESS = HARMLESS | {"other_attention_group"}
_KINDS = ("stored", "removed", "updated")

_Data = TypeVar("_Data")


class _Kind(msgspec.Struct):
    type: str


class _RemovedData(msgspec.Struct):
    block_hashes: list[int]


class _Change(msgspec.Struct):
    old_value: int
    new_value: int


class _UpdatedData(msgspec.Struct):
    block_hash: int
    cache_level: _Change | None = None


_kind_decoder = msgspec.json.Decoder(_Kind)
_stored_decoder = msgspec.json.Decoder(StoredData)
_removed_decoder = msgspec.json.Decoder(_RemovedData)
_updated_decoder = msgspec.json.Decoder(_UpdatedData)


class RankDecoder:
    """Decodes the events of one rank, in their order.

    Only the pool of the largest window is indexed: it holds whole prefixes, others do not. Which
    one that is, and how many tokens a full block has, is learned from the events. A removal does
    not say where the block lay, so the blocks that left the device are remembered.
    """

    def __init__(self) -> None:
        self._last_sequence = -1
        self._forget()

    def decode(self, event: DrainedEvent, timestamp: float) -> EventBatch:
        """The event as a batch; if it is bad, an empty one that names the fault.

        timestamp: of the drain that it came with, in seconds.
        """
        if event.sequence <= self._last_sequence:
            self._forget()  # the server counts from 0 again
        self._last_sequence = event.sequence
        kind = _kind_of(event.data)
        if event.window_tokens is not None and not 0 <= event.window_tokens <= MAX_GROUP:
            return EventBatch(timestamp, [], event.rank, ("bad_group",), kind != "stored")
        events: list[Event] = []
        faults: list[str] = []
        removal_lost = self._see_window(event.window_tokens)
        if removal_lost:
            faults.append("larger_window")
        try:
            events = self._events(kind, event)
        except Skipped as skipped:
            faults.append(str(skipped))
            removal_lost |= kind != "stored" and str(skipped) not in _HARMLESS
        return EventBatch(timestamp, events, event.rank, tuple(faults), removal_lost)

    def _forget(self) -> None:
        self._largest_tokens = 0
        self._indexed: set[int | None] = set()
        self._block_size = 0
        self._elsewhere: dict[tuple[int | None, BlockHash], str] = {}

    def _see_window(self, window_tokens: int | None) -> bool:
        """Whether what was indexed so far turns out to be of too small a window."""
        if (window_tokens or 0) <= self._largest_tokens:
            return False
        self._largest_tokens = window_tokens or 0
        return bool(self._indexed)

    def _events(self, kind: str | None, event: DrainedEvent) -> list[Event]:
        window = event.window_tokens
        if kind == "created":
            return []
        if kind not in _KINDS:
            raise Skipped("malformed_event" if kind is None else "unknown_event")
        if (window or 0) < self._largest_tokens and (
            kind == "stored" or window not in self._indexed
        ):
            raise Skipped("other_attention_group")
        if kind == "stored":
            return self._stored(_decoded(_stored_decoder, event.data), window)
        if kind == "removed":
            return self._removed(_decoded(_removed_decoder, event.data), window)
        return self._moved(_decoded(_updated_decoder, event.data), window)

    def _stored(self, stored: StoredData, window: int | None) -> list[Event]:
        self._block_size = max(self._block_size, largest(stored.blocks))
        blocks = full(stored.blocks, self._block_size)
        if not blocks or not self._block_size:
            return []
        self._indexed.add(window)
        made = chains(blocks, stored.parent_hash, window)
        return [chain for chain in made if self._place_all(window, chain.hashes, chain.medium)]

    def _removed(self, removed: _RemovedData, window: int | None) -> list[Event]:
        hashes: dict[str, list[BlockHash]] = {}
        for number in removed.block_hashes:
            block = fold(number)
            medium = self._elsewhere.pop((window, block), DEFAULT_MEDIUM)
            hashes.setdefault(medium, []).append(block)
        return [BlocksRemoved(blocks, medium, window) for medium, blocks in hashes.items()]

    def _moved(self, updated: _UpdatedData, window: int | None) -> list[Event]:
        if updated.cache_level is None:
            return []  # another priority
        block = fold(updated.block_hash)
        old = self._elsewhere.get((window, block), DEFAULT_MEDIUM)
        new = medium_of(updated.cache_level.new_value)
        if new == old:
            return []
        gone = BlocksRemoved([block], old, window)
        if new is None or not self._place(window, block, new):
            return [gone]  # wherever it is now, it is not credited there
        return [BlocksCopied([block], new, window), gone]

    def _place_all(self, window: int | None, blocks: list[BlockHash], medium: str) -> bool:
        return all(self._place(window, block, medium) for block in blocks)

    def _place(self, window: int | None, block: BlockHash, medium: str) -> bool:
        """Remembers where a block lies; False if there is no room to."""
        self._elsewhere.pop((window, block), None)
        if medium == DEFAULT_MEDIUM:
            return True
        if len(self._elsewhere) >= MAX_ELSEWHERE:
            return False
        self._elsewhere[window, block] = medium
        return True


def _kind_of(data: msgspec.Raw) -> str | None:
    try:
        return _kind_decoder.decode(data).type
    except BAD_JSON:
        return None


def _decoded(decoder: msgspec.json.Decoder[_Data], data: msgspec.Raw) -> _Data:
    try:
        return decoder.decode(data)
    except BAD_JSON:
        raise Skipped("malformed_event") from None
