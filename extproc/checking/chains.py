"""What one rank stored while it was listened to: the engine's own tokens, by the engine's hashes.

A store names its parent by a hash. Where that hash was heard of before, the tokens up to there are
known as well, from the prompt's first one if the chain began with it. Bounded; what grew least
recently is forgotten first.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstate.events import BlockHash, BlocksStored, Extra, Tokens
from kvstate.tiers import Tier, tier_of

# What is remembered of one rank. SGLang's blocks may be of one token, so blocks count as well.
MAX_TOKENS = 65_536
MAX_BLOCKS = 4_096

Key = tuple[int | None, BlockHash]


@dataclass(eq=False, slots=True)
class Chain:
    """Tokens stored behind each other.

    is_rooted: they begin a prompt; else what stands before them is not known. lora: as the event
    has it. first: what the root block carries besides tokens; () where the chain has no root.
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
    """The chains of one rank."""

    def __init__(self, max_tokens: int = MAX_TOKENS, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_tokens = max_tokens
        self._max_blocks = max_blocks
        self._places: dict[Key, tuple[Chain, int]] = {}  # the tokens up to the end of a block
        self._chains: OrderedDict[int, Chain] = OrderedDict()
        self.tokens = 0

    def clear(self) -> None:
        """Forgets all."""
        self._places.clear()
        self._chains.clear()
        self.tokens = 0

    def store(self, event: BlocksStored) -> Growth | None:
        """Takes a store; None where it tells nothing new of a prompt on the device."""
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
        """The same chain where the store continues its end, or tells it again; else a branch."""
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
