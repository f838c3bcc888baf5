"""Decodes TensorRT-LLM's events, the answers of `POST /kv_cache_events`, for each rank.

The answer is a JSON list. Every event has a number, `event_id`, counted by each rank from 0 since
the server's start, and becomes a batch of its own. Names are those of `KVCacheEventSerializer`
(tensorrt_llm/_utils.py): created, stored, removed and updated, of the pool with this `window_size`
(the attention window in tokens).

A block in JSON is {"block_hash", "tokens": [{"token_id", "token_extra_id"}], "cache_level",
"mm_keys"?, "cache_salt"?, "lora_id"?}; the last three came later; no release sends the adapter's
number yet. The last block of a prompt may be partial.
"""

from array import array
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvstate.errors import WireError
from kvstate.events import BlockHash, BlocksCopied, BlocksRemoved, BlocksStored, Event, EventBatch
from kvstate.overlap import DEFAULT_MEDIUM, Extra, Tokens
from kvstate.undecodable import UNDECODABLE
from kvstate.wire.extras import HARMLESS, INTEGERS, MAX_GROUP, Skipped, extras_of, with_root
from kvstate.wire.zmq_wire import MAX_BLOCK_SIZE

MAX_SEQUENCE = 0xFFFF_FFFF_FFFF_FFFF

# The most events of one answer. The engine's queue (`event_buffer_max_size`) usually has 1,024.
MAX_EVENTS = 65_536

# A longer list is parsed only up to the first item that is not an event: 16 MiB of zeros would be 8
# million items, and block the event loop for seconds.
MAX_SPOILT_BYTES = 64 * 1024

# The errors that msgspec raises for invalid bytes.


class DrainedEvent(NamedTuple):
    """One event, decoded up to the fields that all kinds share.

    sequence: its event_id. window_tokens: of its pool, None if the server has only one. data: the
    rest, as JSON.
    """

    rank: int
    sequence: int
    window_tokens: int | None
    data: msgspec.Raw


class _EventEnvelope(msgspec.Struct):
    event_id: int
    data: msgspec.Raw = msgspec.Raw(b"")
    window_size: int | None = None
    attention_dp_rank: int | None = None


class _Numbered(msgspec.Struct):
    event_id: msgspec.Raw


class _Error(msgspec.Struct):
    error: object


_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_numbered_decoder = msgspec.json.Decoder(list[_Numbered])
_envelope_decoder = msgspec.json.Decoder(_EventEnvelope)
_error_decoder = msgspec.json.Decoder(_Error)


def parse_drain(body: bytes) -> list[msgspec.Raw]:
    """Returns the events of an answer, undecoded.

    Raises:
        WireError: it is not a JSON list, or would take too long to parse.
    """
    if body.count(b'"event_id"') > MAX_EVENTS:
        raise WireError(f"answer of more than {MAX_EVENTS} events")
    try:
        if len(body) > MAX_SPOILT_BYTES:
            _numbered_decoder.decode(body)  # ends at the first item that is not an event
        return _list_decoder.decode(body)
    except UNDECODABLE:
        raise WireError("answer is no JSON list of events") from None


def error_of(body: bytes) -> str | None:
    """Returns the server's error text if it answers {"error": ...}, else None."""
    try:
        error = _error_decoder.decode(body).error
    except UNDECODABLE:
        return None
    return error if isinstance(error, str) else "an error"


def parse_event(raw: msgspec.Raw) -> DrainedEvent:
    """Parses one event of an answer.

    Raises:
        WireError: it has no number.
    """
    try:
        event = _envelope_decoder.decode(raw)
    except UNDECODABLE:
        raise WireError("event has no number") from None
    if not 0 <= event.event_id <= MAX_SEQUENCE:
        raise WireError("event has no number")
    return DrainedEvent(event.attention_dp_rank or 0, event.event_id, event.window_size, event.data)


# By cache_level: the pool in the device's memory and the one in the host's.
_MEDIA = ("GPU", "CPU")


class Token(msgspec.Struct):
    """One token; token_extra_id is not 0 if images or drafts distinguish it from plain text."""

    token_id: int | str
    token_extra_id: int = 0


class Block(msgspec.Struct):
    """One stored block, full or not."""

    block_hash: int
    tokens: list[Token]
    cache_level: int | None = 0
    mm_keys: list[dict[str, object]] | None = None
    cache_salt: str | msgspec.UnsetType | None = msgspec.UNSET
    lora_id: int | msgspec.UnsetType | None = msgspec.UNSET


class StoredData(msgspec.Struct):
    """A store: each block is the child of the one before, the first of `parent_hash`."""

    blocks: list[Block]
    parent_hash: int | None = None


def unsigned(number: int) -> BlockHash:
    """Returns a hash as unsigned 64 bits."""
    return number & 0xFFFF_FFFF_FFFF_FFFF


def medium_of(cache_level: int | None) -> str | None:
    """Returns the medium of a cache level, None if unknown."""
    level = cache_level or 0
    return _MEDIA[level] if 0 <= level < len(_MEDIA) else None


def largest(blocks: Sequence[Block]) -> int:
    """Returns the tokens of the largest block, which is full if any block is; 0 for no blocks.

    Raises:
        Skipped: bad_block_size.
    """
    size = max((len(block.tokens) for block in blocks), default=0)
    if size > MAX_BLOCK_SIZE:
        raise Skipped("bad_block_size")
    return size


def full(blocks: Sequence[Block], block_size: int) -> Sequence[Block]:
    """Returns the blocks before the first partial one, which cannot have children."""
    for position, block in enumerate(blocks):
        if len(block.tokens) != block_size:
            return blocks[:position]
    return blocks


def chains(blocks: Sequence[Block], parent: int | None, group: int | None) -> list[BlocksStored]:
    """Converts a chain of full blocks to one event for each run on the same medium.

    Raises:
        Skipped: they cannot be indexed; the text is the name of the fault.
    """
    loras = {block.lora_id for block in blocks}
    if len(loras) > 1:
        raise Skipped("mixed_blocks")
    if any(isinstance(lora, int) and lora not in INTEGERS for lora in loras):
        raise Skipped("bad_lora")
    events: list[BlocksStored] = []
    for medium, run in groupby(blocks, lambda block: medium_of(block.cache_level)):
        if medium is None:
            raise Skipped("unknown_medium")
        members = list(run)
        events.append(_chain(members, parent, medium, group))
        parent = members[-1].block_hash
    return events


def _chain(
    blocks: Sequence[Block], parent: int | None, medium: str, group: int | None
) -> BlocksStored:
    salt, lora = blocks[0].cache_salt, blocks[0].lora_id
    images = [block.mm_keys for block in blocks]
    extras = extras_of(None, images, None, len(blocks), len(blocks[0].tokens))
    extras = _with_token_extras(extras, blocks)
    if parent is None and isinstance(salt, str):
        extras = with_root(extras, None, salt, len(blocks))
    return BlocksStored(
        hashes=[unsigned(block.block_hash) for block in blocks],
        parent=None if parent is None else unsigned(parent),
        tokens=_tokens(blocks),
        block_size=len(blocks[0].tokens),
        lora=lora if isinstance(lora, int) else None,
        extras=extras,
        medium=medium,
        group=group,
        kind="full_attention",  # `RankDecoder` leaves out the other windows
        names_salts=salt is not msgspec.UNSET,
        names_loras=lora is not msgspec.UNSET,
    )


def _tokens(blocks: Sequence[Block]) -> Tokens:
    token_ids: list[Any] = [token.token_id for block in blocks for token in block.tokens]
    try:
        return array("I", token_ids)
    except (TypeError, OverflowError):
        raise Skipped("bad_tokens") from None


# Begins the key of a token's extra id, so that it is not read as that of an item.
_EXTRA_ID = "token_extra_id"


def _with_token_extras(extras: list[Extra] | None, blocks: Sequence[Block]) -> list[Extra] | None:
    """Adds the extra ids of tokens, with positions: such a block equals no plain one."""
    carried: list[Extra] = [
        tuple(
            [_EXTRA_ID, position, token.token_extra_id]
            for position, token in enumerate(block.tokens)
            if token.token_extra_id
        )
        for block in blocks
    ]
    if not any(carried):
        return extras
    if any(item[-1] not in INTEGERS for extra in carried for item in extra):
        raise Skipped("bad_tokens")
    known = extras or [()] * len(blocks)
    return [(*first, *second) for first, second in zip(known, carried, strict=True)]


# The most blocks outside the device that are remembered for one rank.
MAX_ELSEWHERE = 1_048_576

# Blocks of smaller windows are never stored here.
_HARMLESS = HARMLESS | {"other_attention_group"}
_KINDS = ("stored", "removed", "updated")

_Data = TypeVar("_Data")


class _Kind(msgspec.Struct):
    type: str


class _RemovedData(msgspec.Struct):
    block_hashes: list[int]


class _BlocksChange(msgspec.Struct):
    old_value: int
    new_value: int


class _UpdatedData(msgspec.Struct):
    block_hash: int
    cache_level: _BlocksChange | None = None


_kind_decoder = msgspec.json.Decoder(_Kind)
_stored_decoder = msgspec.json.Decoder(StoredData)
_removed_decoder = msgspec.json.Decoder(_RemovedData)
_updated_decoder = msgspec.json.Decoder(_UpdatedData)


class RankDecoder:
    """Decodes the events of one rank, in order.

    Only the pool of the largest window is indexed: only it holds whole prefixes. Which pool that
    is, and how many tokens a full block has, is learned from the events. A removal does not name
    the block's medium, so blocks that left the device are remembered, up to max_elsewhere.
    """

    def __init__(self, max_elsewhere: int = MAX_ELSEWHERE) -> None:
        self._max_elsewhere = max_elsewhere
        self._last_sequence = -1
        self._forget()

    def decode(self, event: DrainedEvent, timestamp: float) -> EventBatch:
        """Decodes an event to a batch; a bad one to an empty batch that names the fault.

        timestamp: of its drain, in seconds.
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
        self._other_media: dict[tuple[int | None, BlockHash], str] = {}

    def _see_window(self, window_tokens: int | None) -> bool:
        """Notes a window; returns whether blocks were indexed under a smaller one."""
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
            block = unsigned(number)
            medium = self._other_media.pop((window, block), DEFAULT_MEDIUM)
            hashes.setdefault(medium, []).append(block)
        return [BlocksRemoved(blocks, medium, window) for medium, blocks in hashes.items()]

    def _moved(self, updated: _UpdatedData, window: int | None) -> list[Event]:
        if updated.cache_level is None:
            return []  # only the priority changed
        block = unsigned(updated.block_hash)
        old = self._other_media.get((window, block), DEFAULT_MEDIUM)
        new = medium_of(updated.cache_level.new_value)
        if new == old:
            return []
        gone = BlocksRemoved([block], old, window)
        if new is None or not self._place(window, block, new):
            return [gone]  # not credited on its present medium
        return [BlocksCopied([block], new, window), gone]

    def _place_all(self, window: int | None, blocks: list[BlockHash], medium: str) -> bool:
        return all(self._place(window, block, medium) for block in blocks)

    def _place(self, window: int | None, block: BlockHash, medium: str) -> bool:
        """Remembers the medium of a block; returns False if there is no room."""
        self._other_media.pop((window, block), None)
        if medium == DEFAULT_MEDIUM:
            return True
        if len(self._other_media) >= self._max_elsewhere:
            return False
        self._other_media[window, block] = medium
        return True


def _kind_of(data: msgspec.Raw) -> str | None:
    try:
        return _kind_decoder.decode(data).type
    except UNDECODABLE:
        return None


def _decoded(decoder: msgspec.json.Decoder[_Data], data: msgspec.Raw) -> _Data:
    try:
        return decoder.decode(data)
    except UNDECODABLE:
        raise Skipped("malformed_event") from None
