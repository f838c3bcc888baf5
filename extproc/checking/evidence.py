"""What an engine's stored tokens prove of ours.

That they are the same is easy to see: the engine stored our blocks. That they differ is not: what
was stored may belong to another request that begins alike. It is taken for ours only if it holds
what is our request's own, runs of tokens that no request before it had, behind the difference.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from extproc.checking.chains import Chain, Growth
from kvstate.events import Tokens
from kvstate.overlap import Prompt

# Tokens in a run. Shorter ones are common to many texts, longer ones break at every difference.
RUN_TOKENS = 8

# Our own runs that must be found again.
MIN_RUNS = 4

# Places in a prompt where what was stored may lie.
MAX_TRIES = 32

_MULTIPLIER = 0x9E3779B97F4A7C15
_POWERS = np.array(
    [pow(_MULTIPLIER, place, 1 << 64) for place in reversed(range(RUN_TOKENS))], np.uint64
)

# Tokens compared first where two may be equal: most that differ do so at their ends.
_END_TOKENS = 8

_Runs = NDArray[np.uint64]
_Places = NDArray[np.intp]


class Asked:
    """A prompt as we tokenized it.

    held_tokens: what the worker held of it before. references: prompts that came before it.
    """

    def __init__(
        self, prompt: Prompt, held_tokens: int = 0, references: Sequence[Tokens] = ()
    ) -> None:
        self.prompt = prompt
        self.tokens = prompt.tokens
        self.held_tokens = held_tokens
        self._references = references

    @functools.cached_property
    def runs(self) -> _Runs:
        """All its runs, by their places."""
        return _runs(self.tokens)

    @functools.cached_property
    def own(self) -> _Places:
        """Where the runs are that it has once, and no prompt before it has.

        Before there is another prompt, nothing can be told from what all have in common.
        """
        others = [_runs(each) for each in self._references if each != self.tokens]
        if not others:
            return np.zeros(0, np.intp)
        _, first, counts = np.unique(self.runs, return_index=True, return_counts=True)
        places = np.sort(first[counts == 1])
        return places[~np.isin(self.runs[places], np.concatenate(others))]

    @functools.cached_property
    def own_runs(self) -> frozenset[int]:
        """The runs there, to look up those of an event at a cost that no prompt's length raises."""
        return frozenset(self.runs[self.own].tolist())


class Difference(NamedTuple):
    """Where our tokens and the engine's part, and the ids there.

    engines: None where the engine's tokens are shifted against ours and the place of the shift
    was not seen; the position is then that of the first block which the engine does not hold.
    in_chain: the place in what the engine stored.
    """

    position: int
    ours: int
    engines: int | None
    in_chain: int = 0


def is_stored(asked: Asked, chain: Chain) -> bool:
    """Whether a chain has the prompt's own blocks, up to the last one that can be reused."""
    ours, theirs = asked.tokens, chain.tokens
    usable = usable_tokens(ours, chain.block_size)
    start = 0 if chain.is_rooted else asked.held_tokens
    count = usable - start
    if not 0 < count <= len(theirs) or not _may_be_of(asked, chain):
        return False
    end = max(0, count - _END_TOKENS)
    if theirs[end:count] != ours[start + end : usable]:  # before both are copied
        return False
    return theirs[:count] == ours[start:usable]


def usable_tokens(tokens: Tokens, block_size: int) -> int:
    """What of a prompt can be reused: whole blocks, and never its last token."""
    return (len(tokens) - 1) // block_size * block_size


def runs_of(growth: Growth) -> list[int]:
    """The runs of tokens that a store added, for `holds_own`."""
    runs: list[int] = _recent_runs(growth).tolist()
    return runs


def holds_own(asked: Asked, chain: Chain, runs: Iterable[int]) -> bool:
    """Whether something of what was stored is this prompt's own: it may be about this prompt.

    runs: those that a store added to the chain, found once for all prompts that are watched.
    """
    return not asked.own_runs.isdisjoint(runs) and _may_be_of(asked, chain)


def difference(asked: Asked, growth: Growth) -> Difference | None:
    """Where a chain that was stored for this prompt differs from it; None if that is not proved.

    growth: for which `holds_own` was true; what the chain has become since counts too.
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
    """Whether a chain is another prompt's: the same beyond the difference, as far as both go.

    tokens: of a prompt that was placed there too. Where it could lie in more places than can be
    tried, it is taken to explain the chain.
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
    """Whether the namespaces agree; an adapter's number does not tell its name."""
    if chain.lora != asked.prompt.lora:
        return False
    return not chain.is_rooted or chain.first == asked.prompt.namespace


class _Found:
    """Which of a prompt's own runs are among the tokens that were stored."""

    def __init__(self, asked: Asked, growth: Growth) -> None:
        self.asked = asked
        self._begin = _recent(growth)
        self._stored = _recent_runs(growth)
        self._is_found = np.isin(asked.runs[asked.own], self._stored)

    def is_ours_after(self, position: int) -> bool:
        """Whether most of them are, of those behind a position up to the last that is."""
        own = self.asked.own
        found = own[self._is_found & (own > position)]
        if len(found) < MIN_RUNS:
            return False
        wanted = (own > position) & (own <= found[-1])
        return 2 * len(found) >= int(np.count_nonzero(wanted))

    def offset(self) -> int:
        """By how much most places in the prompt are ahead of those in what was stored."""
        places = self.asked.own[self._is_found]
        order = np.argsort(self._stored, kind="stable")
        there = order[np.searchsorted(self._stored, self.asked.runs[places], sorter=order)]
        offsets, counts = np.unique(places - there - self._begin, return_counts=True)
        return int(offsets[np.argmax(counts)])


def _behind(found: _Found, chain: Chain, start: int) -> Difference | None:
    """The first difference to a chain that begins at this token of the prompt, if it is ours."""
    ours = found.asked.tokens[start:]
    equal = _equal_tokens(ours, chain.tokens)
    if equal == min(len(ours), len(chain.tokens)) or not found.is_ours_after(start + equal):
        return None
    return Difference(start + equal, ours[equal], chain.tokens[equal], equal)


def _equal_tokens(one: Tokens, other: Tokens) -> int:
    """How many tokens two begin with alike."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(_ids(one)[:length] != _ids(other)[:length])
    return int(differ[0]) if len(differ) else length


def _recent(growth: Growth) -> int:
    """Where the first run begins that was not there before."""
    return max(0, growth.begin - RUN_TOKENS + 1)


def _recent_runs(growth: Growth) -> _Runs:
    return _runs(growth.chain.tokens[_recent(growth) :])


def _runs(tokens: Tokens) -> _Runs:
    """A number for each run of tokens, in order; equal ones for equal runs."""
    if len(tokens) < RUN_TOKENS:
        return np.zeros(0, np.uint64)
    return np.correlate(_ids(tokens).astype(np.uint64), _POWERS)


def _ids(tokens: Tokens) -> NDArray[np.uint32]:
    return np.frombuffer(tokens, np.uint32) if len(tokens) else np.zeros(0, np.uint32)
