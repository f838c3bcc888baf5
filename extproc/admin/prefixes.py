"""Shared prefixes among the last prompts, for the admin server.

They are the branching points of the tree of the prompts. In sorted order, prompts with a common
prefix are neighbours, so the length that each shares with the previous one describes the whole
tree, without a node for every token.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import xxhash
from msgspec.structs import replace

from extproc.routing.claims.marks import root_key
from kvstate.overlap import Overlap, Prompt, Tier, shared_tokens

# Limits of the kept prompts: 4 bytes a token, so at most 4 MB.
MAX_PROMPTS = 256
MAX_TOKENS = 1_000_000

# Only the beginning of a longer prompt is compared.
LEADING_TOKENS = 16_384

# Shorter prefixes do not fill a block.
LEAST_TOKENS = 16


class RecentPrompts:
    """The beginnings of the last prompts; they are compared and looked up, but never shown."""

    def __init__(self, prompts: int = MAX_PROMPTS, tokens: int = MAX_TOKENS) -> None:
        self._prompts: deque[Prompt] = deque()
        self._limits = prompts, tokens
        self._tokens = 0

    def add(self, prompt: Prompt) -> None:
        """Keeps the beginning of a prompt, and drops the oldest ones beyond the bounds."""
        if len(prompt.tokens) > LEADING_TOKENS:
            prompt = replace(prompt, tokens=prompt.tokens[:LEADING_TOKENS])
        prompts, tokens = self._limits
        self._prompts.append(prompt)
        self._tokens += len(prompt.tokens)
        while len(self._prompts) > prompts or self._tokens > tokens:
            self._tokens -= len(self._prompts.popleft().tokens)

    def all(self) -> list[Prompt]:
        """Returns the prompts that are kept, the oldest first."""
        return list(self._prompts)


class Prefix(NamedTuple):
    """A prefix of the last prompts.

    key: a hash of its namespace and tokens, keyed with a secret of this process. tokens: its
    length. requests: how many of the prompts begin with it. prompt: one of them, cut one token
    after the prefix, so that the index counts each of the prefix's blocks.
    """

    key: str
    tokens: int
    requests: int
    prompt: Prompt


def prefixes(prompts: Sequence[Prompt], secret: int, limit: int) -> list[Prefix]:
    """Returns the most important prefixes: shared ones by requests x tokens, then single prompts.

    secret: 64 random bits, so that a key reveals nothing about the text. limit: how many.
    """
    found: list[tuple[int, int, Prompt]] = []
    by_tokens = sorted(
        ((_namespace(one), one.tokens.tobytes(), one) for one in prompts), key=_ORDER
    )
    for _, group in groupby(by_tokens, itemgetter(0)):
        found += _tree([one for _, _, one in group])
    found = [node for node in found if node[0] >= LEAST_TOKENS]
    found.sort(key=lambda node: (node[1] == 1, -node[0] * node[1]))
    return [
        Prefix(_key(secret, prompt, tokens), tokens, requests, _cut(prompt, tokens + 1))
        for tokens, requests, prompt in found[:limit]
    ]


_ORDER = itemgetter(0, 1)


def _namespace(prompt: Prompt) -> tuple[str, str, str]:
    return (prompt.model, repr(prompt.lora), repr(prompt.salt))


def _tree(prompts: Sequence[Prompt]) -> Iterator[tuple[int, int, Prompt]]:
    """Yields each node's length in tokens, its number of prompts, and one of these.

    prompts: sorted.
    """
    open_nodes: list[tuple[int, int]] = []  # length and first prompt, each inside the one before
    for at, prompt in enumerate(prompts):
        shared = shared_tokens(prompts[at - 1].tokens, prompt.tokens) if at else 0
        first = at
        while open_nodes and open_nodes[-1][0] > shared:
            length, first = open_nodes.pop()
            yield length, at - first, prompts[first]
        if shared and (not open_nodes or open_nodes[-1][0] < shared):
            open_nodes.append((shared, first))
        if len(prompt.tokens) > shared:
            open_nodes.append((len(prompt.tokens), at))
    for length, first in reversed(open_nodes):
        yield length, len(prompts) - first, prompts[first]


def _cut(prompt: Prompt, tokens: int) -> Prompt:
    return replace(prompt, tokens=prompt.tokens[:tokens])


def _key(secret: int, prompt: Prompt, tokens: int) -> str:
    root = root_key(secret, *_namespace(prompt))
    return f"{xxhash.xxh3_64_intdigest(prompt.tokens[:tokens].tobytes(), root):016x}"[:8]


def spread(prefix: Prefix, overlaps: Mapping[str, Overlap], workers: int) -> dict[str, Any]:
    """Returns one entry of GET /prefixes: a prefix, and the workers that hold a part of it.

    They are sorted by how much they hold, most first. workers: the most workers to show.
    """
    holders = sorted(overlaps.items(), key=lambda one: one[1].rank_order, reverse=True)
    return {
        "key": prefix.key,
        "model": prefix.prompt.model,
        "lora": prefix.prompt.lora,
        "salted": prefix.prompt.salt is not None,
        "tokens": prefix.tokens,
        "cut": prefix.tokens >= LEADING_TOKENS,
        "requests": prefix.requests,
        "held_by": len(holders),
        "workers": [_holder(name, overlap) for name, overlap in holders[:workers]],
    }


def _holder(name: str, overlap: Overlap) -> dict[str, Any]:
    return {
        "name": name,
        "tokens": overlap.certain_tokens,
        "uncertain_tokens": overlap.uncertain_tokens,
        "blocks_by_tier": {tier.name.lower(): overlap.tiers[tier] for tier in Tier},
    }
