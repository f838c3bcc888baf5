"""The index's question and answer: how much of a prompt is held, and on which tier."""

from array import array
from collections.abc import Sequence
from enum import IntEnum
from operator import mul
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec


class Tier(IntEnum):
    """A class of media that cost about the same to restore from, nearest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3


# The value of a block on this tier, as a share of one on the device.
RESTORE_WEIGHT = {Tier.DEVICE: 1.0, Tier.HOST: 0.8, Tier.DISK: 0.4, Tier.REMOTE: 0.2}

# vLLM 0.32: GPU, CPU, STORAGE (Mooncake's connector writes lower case). SGLang: CPU_TIER1 is pinned
# host memory, CPU_TIER2 its remote storage back end (0.5.9), later CPU_PINNED, DISK, EXTERNAL.
# SMG's relay also writes DEVICE. kvstate/native/wire.c has the same media in the same order.
_TIER_OF_MEDIUM = {
    "GPU": Tier.DEVICE,
    "DEVICE": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "DISK": Tier.DISK,
    "NVME": Tier.DISK,
    "STORAGE": Tier.DISK,
    "CPU_TIER2": Tier.DISK,
    "EXTERNAL": Tier.REMOTE,
    "REMOTE": Tier.REMOTE,
    "NETWORK": Tier.REMOTE,
    "SHARED": Tier.REMOTE,
}

DEFAULT_MEDIUM = "GPU"


def tier_of(medium: str) -> Tier | None:
    """Returns the tier of a medium, named as on the wire; None if the medium is unknown."""
    return _TIER_OF_MEDIUM.get(medium.upper())


# Token ids as one buffer of uint32.
if TYPE_CHECKING:
    Tokens: TypeAlias = array[int]
else:
    Tokens = array

# Ids from here on stand for longer ones. No vocabulary is as large.
FIRST_WIDE_TOKEN = 0x8000_0000
_LARGEST_TOKEN = 0x7FFF_FFFF_FFFF_FFFF
_LARGEST_NARROW = 0xFFFF_FFFF


def tokens_of(ids: Sequence[int]) -> Tokens:
    """Returns ids as one buffer, with FIRST_WIDE_TOKEN and the last 31 bits for longer ones.

    SGLang 0.5.23 fills an image's place with ids of 62 bits, of a digest of the image, so their
    last bits differ as well (_compute_pad_values in srt/managers/schedule_batch.py).
    kvstate/native/wire.c does the same.

    Raises:
        TypeError, OverflowError: one is no integer of 63 bits.
    """
    try:
        return array("I", ids)
    except OverflowError:
        return array("I", [_narrowed(token) for token in ids])


def _narrowed(token: int) -> int:
    if _LARGEST_NARROW < token <= _LARGEST_TOKEN:
        return FIRST_WIDE_TOKEN | (token & (FIRST_WIDE_TOKEN - 1))
    return token


def shared_tokens(one: Tokens, other: Tokens) -> int:
    """Returns how many leading tokens two prompts have in common."""
    equal, differ = 0, min(len(one), len(other)) + 1  # a lower and an upper bound
    while differ - equal > 1:
        middle = (equal + differ) // 2
        if one[equal:middle].tobytes() == other[equal:middle].tobytes():
            equal = middle
        else:
            differ = middle
    return equal


def usable_tokens(tokens: Tokens, block_size: int) -> int:
    """Returns how many tokens of a prompt can be reused: whole blocks, and never its last token."""
    return (len(tokens) - 1) // block_size * block_size


# Extra keys that distinguish blocks with the same tokens, besides LoRA: salt, image hashes.
Extra = tuple[Any, ...]


def encoded(extra: Extra) -> bytes | None:
    """Encodes a block's extra keys for the core; None if it has none."""
    return msgspec.msgpack.encode(extra) if extra else None


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """One prompt in its namespace.

    tokens: all its ids. salt: its cache salt, if any. lora: the adapter's name, if any, or its
    number to find blocks known only by number. sure_tokens: how many of its first ids are surely
    the engine's, None if all are.
    """

    model: str
    tokens: Tokens
    lora: str | int | None = None
    salt: str | None = None
    sure_tokens: int | None = None

    @property
    def namespace(self) -> Extra:
        """The extra keys of its first block (the only one in which vLLM puts the salt)."""
        return () if self.salt is None else (self.salt,)


class Overlap(NamedTuple):
    """The leading blocks of one prompt that one rank holds, without a hole.

    tiers: certain blocks, each counted once on its best tier. uncertain: the blocks after those.
    Counts are in blocks of block_size tokens. rank: the worker's rank that holds them. unusable:
    further blocks that it holds, but that its engine cannot reuse: another attention group lacks
    what it needs there, or a draft model makes it compute them again. They are worth nothing.
    """

    block_size: int
    tiers: tuple[int, int, int, int] = (0, 0, 0, 0)
    uncertain: int = 0
    rank: int = 0
    unusable: int = 0

    @property
    def certain_tokens(self) -> int:
        """Tokens in certain blocks, on any tier."""
        return sum(self.tiers) * self.block_size

    @property
    def uncertain_tokens(self) -> int:
        """Tokens in uncertain blocks."""
        return self.uncertain * self.block_size

    @property
    def unusable_tokens(self) -> int:
        """Tokens in blocks that are held and cannot be reused."""
        return self.unusable * self.block_size

    @property
    def held_tokens(self) -> int:
        """Tokens in all blocks, also in those that cannot be reused."""
        return (sum(self.tiers) + self.uncertain + self.unusable) * self.block_size

    @property
    def rank_order(self) -> tuple[int, int, int]:
        """A sort key for overlaps of one prompt; the better one has the greater key."""
        on_device = self.tiers[Tier.DEVICE] * self.block_size
        return (self.certain_tokens, self.uncertain_tokens, on_device)


def within(overlap: Overlap, sure_tokens: int) -> Overlap:
    """Returns an overlap of which only blocks within the first tokens are certain."""
    left = sure_tokens // overlap.block_size
    tiers: list[int] = []
    for count in overlap.tiers:
        tiers.append(min(count, left))
        left -= tiers[-1]
    device, host, disk, remote = tiers
    unsure = sum(overlap.tiers) - sum(tiers) + overlap.uncertain
    return Overlap(overlap.block_size, (device, host, disk, remote), unsure, overlap.rank)


def of_any_rank(best: Overlap, least: Overlap | None = None) -> Overlap:
    """Returns the overlap for a request that cannot choose its rank.

    Only blocks that all ranks hold are certain. best: of the rank that holds the most. least: of
    the rank that certainly holds the least; None if a rank holds nothing.
    """
    whole = sum(best.tiers) + best.uncertain
    if least is None or least.block_size != best.block_size:
        return best._replace(tiers=(0, 0, 0, 0), uncertain=whole)
    return best._replace(tiers=least.tiers, uncertain=max(0, whole - sum(least.tiers)))


_TIER_WEIGHTS = tuple(RESTORE_WEIGHT[tier] for tier in Tier)


def worth_tokens(overlap: Overlap, uncertain_weight: float = 0.5) -> float:
    """Returns how many prompt tokens an overlap saves; blocks of lower tiers count for less.

    uncertain_weight: the value of an uncertain token, as a share of a certain one.
    """
    block_size, tiers, uncertain, _, _ = overlap
    device, host, disk, remote = tiers
    if not (host or disk or remote or uncertain):  # the usual case
        return block_size * device
    certain: float = sum(map(mul, _TIER_WEIGHTS, tiers))
    return block_size * (certain + uncertain_weight * uncertain)
