"""Media in stored blocks: what an item is, in the ids of the tokens that stand for it.

Engines tell images of equal size apart in two ways. SGLang does so by the ids themselves: each is a
number that is made of the item. vLLM repeats one id, and adds an extra key to each block of the
item: what identifies it, and where it begins, relative to the block. This module brings the second
way to the first: the id at which an item begins is replaced by a number that is made of that id and
of the item. All blocks from there on have other keys then, so that a request which knows its items
can be looked up by ids alone.

Source: _gen_mm_extra_hash_keys and to_event_extra_keys in vLLM's v1/core/kv_cache_utils.py
(0.32.0): pairs (identifier, offset) in events; 0.32 names them "mm" before it publishes them.
SGLang's pad values: 1,000,000 and more (MM_PAD_SHIFT_VALUE in srt/managers/schedule_batch.py). Up
to 0.5.22 an item has one of them; in 0.5.23 it has four of 62 bits, which take turns.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec
import xxhash

from kvstate.events import BlocksStored
from kvstate.overlap import FIRST_WIDE_TOKEN, Extra, Tokens

# An engine's own name of an item: its hash, or the name that the caller gave it.
Identifier = str | bytes | int

# Ids from here on stand for items themselves; no vocabulary is as large.
FIRST_PAD = 1_000_000

# How many of an item's own ids take turns, if they are long.
TURNS = 4

# The ids of a run: one that is repeated, or some that take turns.
RunIds = int | tuple[int, ...]

_TAG = "mm"
_ID_MASK = 0xFFFF_FFFF


class ItemStart(NamedTuple):
    """Where an item begins in a chain of blocks, and what identifies it.

    at: the index of its first token, negative if it began before the chain. identifier: None if its
    ids tell what it is. reach: the end of the last block that has some of it, or of its own ids.
    """

    at: int
    identifier: Identifier | None
    reach: int


class StoreListener(Protocol):
    """Takes the blocks that workers store."""

    @property
    def is_idle(self) -> bool:
        """Whether it listens to no worker now."""

    def listens(self, worker: str) -> bool:
        """Returns whether it wants to know of all stores of a worker, not only of those with media.

        While it does, they are decoded one by one.
        """

    def hear(self, worker: str, event: BlocksStored) -> None:
        """Takes a store of a worker, as it was published."""


class MediaIds:
    """Ids of tokens that say which items begin there. secret: 64 random bits of this process."""

    def __init__(self, secret: int) -> None:
        self._secret = secret

    @property
    def secret(self) -> int:
        """The random bits, which are the same after a restart from a state file."""
        return self._secret

    def token(self, identifier: Identifier, token: int) -> int:
        """Returns the id that stands for the first token of an item."""
        named = msgspec.msgpack.encode((identifier, token))
        return int(xxhash.xxh3_64_intdigest(named, seed=self._secret)) & _ID_MASK

    def with_items(self, event: BlocksStored) -> BlocksStored:
        """Returns a store with its items in its ids, and no longer in its extras."""
        tokens = array("I", event.tokens)
        for begun in beginnings(event):
            if begun.at >= 0 and begun.identifier is not None:
                tokens[begun.at] = self.token(begun.identifier, tokens[begun.at])
        extras = [plain_keys(extra) for extra in event.extras or ()]
        return msgspec.structs.replace(event, tokens=tokens, extras=extras if any(extras) else None)


def has_media(event: BlocksStored) -> bool:
    """Returns whether the extras of a store name an item."""
    return event.extras is not None and any(
        _item(one) is not None for extra in event.extras for one in extra
    )


def beginnings(event: BlocksStored) -> list[ItemStart]:
    """Returns where the items of a store begin, in order, each once."""
    found: dict[tuple[int, Identifier], int] = {}
    size = event.block_size
    for block, extra in enumerate(event.extras or ()):
        for one in extra:
            item = _item(one)
            if item is not None and item[1] < size:
                found[block * size + item[1], item[0]] = (block + 1) * size
    return sorted(
        [ItemStart(at, name, reach) for (at, name), reach in found.items()], key=_start_of
    )


def padded(tokens: Tokens) -> list[ItemStart]:
    """Returns where the items begin whose ids tell what they are, in order."""
    found: list[ItemStart] = []
    at, is_short = 0, False
    for ids, count in runs_of(tokens):
        # of an item that is too short to show its turns, each id is a run
        was_short, is_short = is_short, isinstance(ids, int) and ids >= FIRST_WIDE_TOKEN
        if was_short and is_short:
            found[-1] = found[-1]._replace(reach=at + count)
        elif ids_in(ids)[0] >= FIRST_PAD:
            found.append(ItemStart(at, None, at + count))
        at += count
    return found


def goes_on(before: Tokens, begun: ItemStart, after: Tokens) -> bool:
    """Returns whether an item of its own ids that reaches the end of a chain goes on in the next.

    begun: where it begins in the first chain.
    """
    if begun.identifier is not None or begun.reach < len(before):
        return False
    if after[0] < FIRST_WIDE_TOKEN:
        return before[-1] == after[0]
    return len(before) - begun.at < TURNS or before[-TURNS] == after[0]


def plain_keys(extra: Sequence[object]) -> Extra:
    """Returns a block's extra keys that name no item, such as a salt."""
    return tuple([one for one in extra if _item(one) is None])


def _start_of(begun: ItemStart) -> int:
    return begun.at


def _item(key: object) -> tuple[Identifier, int] | None:
    """Returns the item that an extra key names, and its offset; None if it is another key."""
    if not isinstance(key, list):
        return None
    match key[1:] if key[:1] == [_TAG] and len(key) == 3 else key:
        case [str() | bytes() | int() as identifier, int(offset)]:
            return identifier, offset
    return None


def runs_of(tokens: Tokens) -> Iterator[tuple[RunIds, int]]:
    """Yields ids, and how many tokens they have in a row: repeated, or in turns."""
    start = 0
    while start < len(tokens):
        token, end = tokens[start], _end_of_turns(tokens, start)
        if end - start >= 2 * TURNS:
            first, second, third, fourth = tokens[start : start + TURNS]
            yield (first, second, third, fourth), end - start
        else:
            end = start + 1
            while end < len(tokens) and tokens[end] == token:
                end += 1
            yield token, end - start
        start = end


def _end_of_turns(tokens: Tokens, start: int) -> int:
    """Returns where long ids end that take turns from a place on; the place if none do."""
    first = tokens[start : start + TURNS]
    if len(first) < TURNS or min(first) < FIRST_WIDE_TOKEN:
        return start
    end = start + TURNS
    while end < len(tokens) and tokens[end] == tokens[end - TURNS]:
        end += 1
    return end


def ids_in(ids: RunIds) -> tuple[int, ...]:
    """Returns the ids of a run, each once."""
    return (ids,) if isinstance(ids, int) else ids


def tokens_in(ids: RunIds, count: int) -> Tokens:
    """Returns the tokens of a run."""
    turns = array("I", ids_in(ids))
    return (turns * (count // len(turns) + 1))[:count]
