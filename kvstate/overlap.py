"""What is asked of the index, and what it answers."""

from typing import NamedTuple

from kvstate.events import Extra, Tokens
from kvstate.tiers import Tier


class Prompt(NamedTuple):
    """One prompt in its namespace.

    tokens: all its ids. salt: its cache salt, if any. lora: the adapter's name, if any;
    its number to ask for what is known by number only.
    """

    model: str
    tokens: Tokens
    lora: str | int | None = None
    salt: str | None = None

    @property
    def namespace(self) -> Extra:
        """What its first block carries besides tokens (vLLM puts the salt there only)."""
        return () if self.salt is None else (self.salt,)


class Overlap(NamedTuple):
    """The leading blocks of one prompt that one rank holds, without a hole.

    tiers: certain blocks, each counted once at its best tier. uncertain: blocks behind those.
    Counts are blocks of block_size tokens. rank: of its worker, the one that holds them.
    """

    block_size: int
    tiers: tuple[int, int, int, int] = (0, 0, 0, 0)
    uncertain: int = 0
    rank: int = 0

    @property
    def certain_tokens(self) -> int:
        """Tokens in certain blocks, on any tier."""
        return sum(self.tiers) * self.block_size

    @property
    def uncertain_tokens(self) -> int:
        """Tokens in uncertain blocks."""
        return self.uncertain * self.block_size

    @property
    def rank_order(self) -> tuple[int, int, int]:
        """Orders overlaps of one prompt, the better one greater."""
        on_device = self.tiers[Tier.DEVICE] * self.block_size
        return (self.certain_tokens, self.uncertain_tokens, on_device)


def of_any_rank(best: Overlap, least: Overlap | None = None) -> Overlap:
    """What a request finds that cannot choose its rank: certain is only what every rank holds.

    best: of the rank that holds most. least: certainly held by all, None where one holds nothing.
    """
    whole = sum(best.tiers) + best.uncertain
    if least is None or least.block_size != best.block_size:
        return Overlap(best.block_size, uncertain=whole, rank=best.rank)
    return Overlap(best.block_size, least.tiers, max(0, whole - sum(least.tiers)), best.rank)
