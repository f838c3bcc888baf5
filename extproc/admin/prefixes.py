"""Which prefixes the last prompts share: the branching points of the tree that they make.

Sorted, prompts that share a prefix are neighbours; so the shared length of each with the one before
it tells the whole tree, without a node for every token.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import xxhash

from extproc.picking.marks import root_key
from kvstate.overlap import Prompt

# What is remembered of the last prompts: 4 bytes a token, so 4 MB at the most.
MAX_PROMPTS = 256
MAX_TOKENS = 1_000_000

# Of a longer prompt, only its beginning is compared.
LEADING_TOKENS = 16_384

# Shorter prefixes fill no block.
LEAST_TOKENS = 16


class Prompts:
    """The beginnings of the last prompts; they are compared and asked for, and never shown."""

    def __init__(self, prompts: int = MAX_PROMPTS, tokens: int = MAX_TOKENS) -> None:
        self._kept: deque[Prompt] = deque()
        self._limits = prompts, tokens
        self._tokens = 0

    def add(self, prompt: Prompt) -> None:
        """Keeps the beginning of a prompt; the oldest ones make room for it."""
        if len(prompt.tokens) > LEADING_TOKENS:
            prompt = prompt._replace(tokens=prompt.tokens[:LEADING_TOKENS])
        prompts, tokens = self._limits
        self._kept.append(prompt)
        self._tokens += len(prompt.tokens)
        while len(self._kept) > prompts or self._tokens > tokens:
            self._tokens -= len(self._kept.popleft().tokens)

    def all(self) -> list[Prompt]:
        """What is kept, the oldest first."""
        return list(self._kept)


class Prefix(NamedTuple):
    """A prefix of the last prompts.

    key: of its namespace and tokens, with a secret of this process. tokens: its length. requests:
    how many of the prompts begin with it. prompt: such a prompt, cut one token behind the prefix,
    so that the index counts each of its blocks.
    """

    key: str
    tokens: int
    requests: int
    prompt: Prompt


def prefixes(prompts: Sequence[Prompt], secret: int, limit: int) -> list[Prefix]:
    """The prefixes that matter most: shared ones, by requests x tokens, then single prompts.

    secret: 64 random bits, so that a key tells nothing about the text.
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
    """Length, prompts and one of them, of every node of the tree; the prompts are sorted."""
    open_nodes: list[tuple[int, int]] = []  # length and first prompt, each inside the one before
    for at, prompt in enumerate(prompts):
        shared = _shared(prompts[at - 1], prompt) if at else 0
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


def _shared(one: Prompt, other: Prompt) -> int:
    """Tokens that two prompts have in common from the start."""
    length = min(len(one.tokens), len(other.tokens))
    left, right = (np.frombuffer(each.tokens, np.uint32, length) for each in (one, other))
    differ = np.flatnonzero(left != right)
    return int(differ[0]) if differ.size else length


def _cut(prompt: Prompt, tokens: int) -> Prompt:
    return prompt._replace(tokens=prompt.tokens[:tokens])


def _key(secret: int, prompt: Prompt, tokens: int) -> str:
    root = root_key(secret, *_namespace(prompt))
    return f"{xxhash.xxh3_64_intdigest(prompt.tokens[:tokens].tobytes(), root):016x}"[:8]
