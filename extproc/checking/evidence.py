"""Compares an engine's stored tokens with KVSteer's: proves that they match, or where they differ.

A match is easy to prove: the engine stored KVSteer's blocks. A difference is not: the stored blocks
may belong to another request with the same beginning. They count as this request's only if they
contain, after the difference, runs of tokens that no earlier request had.

`Chains` keeps the blocks that one rank stored while it was listened to. A store names its parent by
a hash. If that hash is known, the tokens up to the parent's end are known too, from the prompt's
first token on if the chain began with it. Chains are bounded; the one that grew least recently is
forgotten first.
"""

import functools
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstate.events import BlockHash, BlocksStored
from kvstate.overlap import Extra, Prompt, Tier, Tokens, shared_tokens, tier_of
from kvstate.scan import RUN_TOKENS
from kvstate.scan import runs as runs_in

# Limits for one rank. SGLang's blocks may have only one token, so blocks are limited as well.
MAX_TOKENS = 65_536
MAX_BLOCKS = 4_096

Key = tuple[int | None, BlockHash]


@dataclass(eq=False, slots=True)
class Chain:
    """Tokens stored one after the other.

    is_rooted: they begin a prompt; otherwise the tokens before them are unknown. lora: as in the
    event. first: the extra keys of the root block; () if the chain has no root.
    """

    tokens: Tokens
    block_size: int
    is_rooted: bool
    lora: str | int | None
    first: Extra = ()
    keys: list[Key] = field(default_factory=list)


class Growth(NamedTuple):
    """What a store added: the tokens of this chain from `begin` on."""

    chain: Chain
    begin: int


class Chains:
    """The chains of one rank, bounded in tokens and blocks."""

    def __init__(self, max_tokens: int = MAX_TOKENS, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_tokens = max_tokens
        self._max_blocks = max_blocks
        self._places: dict[Key, tuple[Chain, int]] = {}  # a block's chain, and its end there
        self._chains: OrderedDict[int, Chain] = OrderedDict()
        self.tokens = 0

    def clear(self) -> None:
        """Forgets all chains."""
        self._places.clear()
        self._chains.clear()
        self.tokens = 0

    def store(self, event: BlocksStored) -> Growth | None:
        """Adds a store; returns what it added, None if it says nothing about a device's prompt."""
        if event.bigrams or not event.hashes or tier_of(event.medium) is not Tier.DEVICE:
            return None
        parent = None if event.parent is None else self._places.get((event.group, event.parent))
        growth = self._grow(event, *parent) if parent else self._begin(event)
        self._note(growth, event)
        self._forget_oldest()
        return growth

    def _begin(self, event: BlocksStored) -> Growth:
        is_rooted = event.parent is None
        first = event.extras[0] if is_rooted and event.extras else ()
        return Growth(Chain(event.tokens[:], event.block_size, is_rooted, event.lora, first), 0)

    def _grow(self, event: BlocksStored, chain: Chain, end: int) -> Growth:
        """Extends the chain if the store continues or repeats it; otherwise begins a branch."""
        if end == len(chain.tokens):
            chain.tokens.extend(event.tokens)
            self.tokens += len(event.tokens)
        elif chain.tokens[end : end + len(event.tokens)] != event.tokens:
            begun = chain.tokens[:end] + event.tokens
            chain = Chain(begun, chain.block_size, chain.is_rooted, chain.lora, chain.first)
        return Growth(chain, end)

    def _note(self, growth: Growth, event: BlocksStored) -> None:
        chain, begin = growth
        if id(chain) not in self._chains:
            self._chains[id(chain)] = chain
            self.tokens += len(chain.tokens)
        self._chains.move_to_end(id(chain))
        for number, block in enumerate(event.hashes, start=1):
            key = (event.group, block)
            if self._places.get(key, (None, 0))[0] is not chain:
                chain.keys.append(key)
            self._places[key] = (chain, begin + number * event.block_size)

    def _forget_oldest(self) -> None:
        while self.tokens > self._max_tokens or len(self._places) > self._max_blocks:
            _, chain = self._chains.popitem(last=False)
            self.tokens -= len(chain.tokens)
            for key in chain.keys:
                place = self._places.get(key)
                if place is not None and place[0] is chain:
                    del self._places[key]


# How many of a prompt's own runs must be found.
MIN_RUNS = 4

# Most positions in a prompt that are tried for stored tokens.
MAX_TRIES = 32

# How many last tokens of two sequences are compared first: most that differ, differ there.
_END_TOKENS = 8


class Asked:
    """A prompt as KVSteer tokenized it.

    held_tokens: how many of its tokens the worker held before. references: earlier prompts.
    """

    def __init__(
        self, prompt: Prompt, held_tokens: int = 0, references: Sequence[Tokens] = ()
    ) -> None:
        self.prompt = prompt
        self.tokens = prompt.tokens
        self.held_tokens = held_tokens
        self._references = references

    @functools.cached_property
    def own(self) -> dict[int, int]:
        """The runs that occur once in the prompt and in no earlier one, each with its place.

        They are in the order of their places. If no earlier prompt differs from this one, there are
        none, since all prompts may share them.
        """
        others = [runs_in(each) for each in self._references if each != self.tokens]
        if not others:
            return {}
        ours = runs_in(self.tokens)
        once = Counter(ours)
        for other in others:
            for run in once.keys() & other:
                del once[run]
        return {run: place for place, run in enumerate(ours) if once.get(run) == 1}


class Difference(NamedTuple):
    """The first position where KVSteer's tokens and the engine's differ, and the ids there.

    engines: None if the engine's tokens are shifted and the place of the shift is unknown; the
    position is then that of the first block that the engine does not hold. in_chain: the position
    in the engine's chain.
    """

    position: int
    ours: int
    engines: int | None
    in_chain: int = 0


def is_stored(asked: Asked, chain: Chain) -> bool:
    """Returns whether a chain has the prompt's own blocks, up to the last reusable one."""
    ours, theirs = asked.tokens, chain.tokens
    usable = usable_tokens(ours, chain.block_size)
    start = 0 if chain.is_rooted else asked.held_tokens
    count = usable - start
    if not 0 < count <= len(theirs) or not _may_be_of(asked, chain):
        return False
    end = max(0, count - _END_TOKENS)
    if theirs[end:count] != ours[start + end : usable]:  # before both are copied whole
        return False
    return theirs[:count] == ours[start:usable]


def usable_tokens(tokens: Tokens, block_size: int) -> int:
    """Returns how many tokens of a prompt can be reused: whole blocks, and never its last token."""
    return (len(tokens) - 1) // block_size * block_size


def runs_of(growth: Growth) -> list[int]:
    """Returns the runs of tokens that a store added, for `holds_own`."""
    return _recent_runs(growth).tolist()


def holds_own(asked: Asked, chain: Chain, runs: Iterable[int]) -> bool:
    """Returns whether a chain contains this prompt's own runs, so that it may be about the prompt.

    runs: those that a store added to the chain, computed once for all watched prompts.
    """
    return not asked.own.keys().isdisjoint(runs) and _may_be_of(asked, chain)


def difference(asked: Asked, growth: Growth) -> Difference | None:
    """Returns where a chain stored for this prompt differs from it; None if that is not proved.

    growth: one for which `holds_own` was true; what was added to its chain since then counts too.
    """
    chain = growth.chain
    found = _Found(asked, growth)
    if chain.is_rooted:
        return _behind(found, chain, 0)
    held, size = asked.held_tokens, chain.block_size
    if chain.tokens[:size] == asked.tokens[held : held + size]:
        return _behind(found, chain, held)
    if not found.is_ours_after(held - 1):
        return None
    offset = found.offset()
    if offset % size:
        return Difference(held, asked.tokens[held], None)
    return _behind(found, chain, offset) if offset >= 0 else None


def explains(tokens: Tokens, chain: Chain, found: Difference) -> bool:
    """Returns whether a chain may be another prompt's: they are equal beyond the difference.

    They are compared up to the end of the shorter one. tokens: of a prompt that was placed there
    too. If more than MAX_TRIES places in it are possible, it is assumed to explain the chain.
    """
    stored, least = chain.tokens, found.in_chain + 1
    tries = 0
    for offset in range(0, 1 if chain.is_rooted else len(tokens), chain.block_size):
        both = min(len(tokens) - offset, len(stored))
        if both < least:
            return False
        if tokens[offset] != stored[0] or tokens[offset + least - 1] != stored[least - 1]:
            continue
        tries += 1
        if tries > MAX_TRIES or tokens[offset : offset + both] == stored[:both]:
            return True
    return False


def _may_be_of(asked: Asked, chain: Chain) -> bool:
    """Returns whether the namespaces agree; an adapter known only by its number matches no name."""
    if chain.lora != asked.prompt.lora:
        return False
    return not chain.is_rooted or chain.first == asked.prompt.namespace


class _Found:
    """Which of a prompt's own runs are among the tokens that were stored."""

    def __init__(self, asked: Asked, growth: Growth) -> None:
        self.asked = asked
        begin = _recent(growth)
        stored: dict[int, int] = {}
        for place, run in enumerate(_recent_runs(growth), start=begin):
            stored.setdefault(run, place)
        self._places = [  # of each run found: in the prompt, and in the chain
            (place, stored[run]) for run, place in asked.own.items() if run in stored
        ]

    def is_ours_after(self, position: int) -> bool:
        """Returns whether most own runs after a position, up to the last one found, were stored."""
        found = [place for place, _ in self._places if place > position]
        if len(found) < MIN_RUNS:
            return False
        wanted = sum(position < place <= found[-1] for place in self.asked.own.values())
        return 2 * len(found) >= wanted

    def offset(self) -> int:
        """Returns how far most places in the prompt are ahead of those in the chain, in tokens."""
        counts = Counter(place - there for place, there in self._places)
        return min(counts, key=lambda offset: (-counts[offset], offset))


def _behind(found: _Found, chain: Chain, start: int) -> Difference | None:
    """Returns the proved first difference to a chain that begins at token `start` of the prompt.

    None if there is none, or it is not proved.
    """
    ours = found.asked.tokens[start:]
    equal = shared_tokens(ours, chain.tokens)
    if equal == min(len(ours), len(chain.tokens)) or not found.is_ours_after(start + equal):
        return None
    return Difference(start + equal, ours[equal], chain.tokens[equal], equal)


def _recent(growth: Growth) -> int:
    """Returns where the first run that a store added begins in its chain."""
    return max(0, growth.begin - RUN_TOKENS + 1)


def _recent_runs(growth: Growth) -> "array[int]":
    return runs_in(growth.chain.tokens[_recent(growth) :])
