"""Checks whether a worker's engine tokenizes as we do, by the tokens that its events carry.

Some requests are watched. Each ends as one of three. Matched: the engine stored our blocks for it.
Mismatched: it did not, though it has computed the request: what it stored holds the request's own
tokens and differs from ours at a named position. Without evidence: everything else, such as a
difference that another request explains which was placed there, or a request that the worker
refused. Retried and aborted requests, short prompts, prompts that were cached already, and workers
that cache nothing store nothing that could tell.

A worker with 3 mismatches among its last 8 checked requests is distrusted, until 6 in a row match.
Time is an argument: seconds of one monotonic clock.

A match is easy to see. A difference is not: what was stored may belong to another request that
begins alike. It counts as this request's only if it holds, after the difference, runs of tokens
that no earlier request had.

`Chains` keeps what one rank stored while it was listened to. A store names its parent by a hash; if
that hash was heard before, the tokens up to there are known as well, from the prompt's first one if
the chain began with it. Chains are bounded, and the one that grew least recently is forgotten
first.
"""

import functools
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstate.events import AllCleared, BlockHash, BlocksStored, Event, Extra, Tokens
from kvstate.overlap import Prompt
from kvstate.tiers import Tier, tier_of

# What is remembered of one rank. SGLang's blocks may be of one token, so blocks count as well.
MAX_TOKENS = 65_536
MAX_BLOCKS = 4_096

Key = tuple[int | None, BlockHash]


@dataclass(eq=False, slots=True)
class Chain:
    """Tokens stored one after the other.

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
    """The chains of one rank, bounded in tokens and blocks."""

    def __init__(self, max_tokens: int = MAX_TOKENS, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_tokens = max_tokens
        self._max_blocks = max_blocks
        self._places: dict[Key, tuple[Chain, int]] = {}  # the tokens up to the end of a block
        self._chains: OrderedDict[int, Chain] = OrderedDict()
        self.tokens = 0

    def clear(self) -> None:
        """Forgets all chains."""
        self._places.clear()
        self._chains.clear()
        self.tokens = 0

    def store(self, event: BlocksStored) -> Growth | None:
        """Takes a store; returns what it added, None if that tells nothing of a device's prompt."""
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
        """Extends the chain if the store continues or repeats it; else begins a branch."""
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
    def runs(self) -> _Runs:
        """All runs of tokens in the prompt, in the order of their places."""
        return _runs(self.tokens)

    @functools.cached_property
    def own(self) -> _Places:
        """The places of runs that occur once in it, and in no earlier prompt.

        Before there is another prompt, nothing is its own: all prompts may have it in common.
        """
        others = [_runs(each) for each in self._references if each != self.tokens]
        if not others:
            return np.zeros(0, np.intp)
        _, first, counts = np.unique(self.runs, return_index=True, return_counts=True)
        places = np.sort(first[counts == 1])
        return places[~np.isin(self.runs[places], np.concatenate(others))]

    @functools.cached_property
    def own_runs(self) -> frozenset[int]:
        """The runs at those places, as a set: looking one up costs no more in a long prompt."""
        return frozenset(self.runs[self.own].tolist())


class Difference(NamedTuple):
    """Where our tokens and the engine's part, and the token ids there.

    engines: None where the engine's tokens are shifted against ours and the place of the shift was
    not seen; the position is then that of the first block which the engine does not hold. in_chain:
    the place in what the engine stored.
    """

    position: int
    ours: int
    engines: int | None
    in_chain: int = 0


def is_stored(asked: Asked, chain: Chain) -> bool:
    """Tells whether a chain has the prompt's own blocks, up to the last one that can be reused."""
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
    """Returns how many tokens of a prompt can be reused: whole blocks, and never its last token."""
    return (len(tokens) - 1) // block_size * block_size


def runs_of(growth: Growth) -> list[int]:
    """Returns the runs of tokens that a store added, for `holds_own`."""
    runs: list[int] = _recent_runs(growth).tolist()
    return runs


def holds_own(asked: Asked, chain: Chain, runs: Iterable[int]) -> bool:
    """Tells whether what was stored holds this prompt's own runs, so that it may be about it.

    runs: those that a store added to the chain, found once for all prompts that are watched.
    """
    return not asked.own_runs.isdisjoint(runs) and _may_be_of(asked, chain)


def difference(asked: Asked, growth: Growth) -> Difference | None:
    """Returns where a chain stored for this prompt differs from it; None if that is not proved.

    growth: one for which `holds_own` was true; what the chain has become since counts too.
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
    """Tells whether a chain is another prompt's: equal beyond the difference, as far as both go.

    tokens: of a prompt that was placed there too. Where it could lie in more places than can be
    tried, it is assumed to explain the chain.
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
    """Tells whether the namespaces agree; an adapter's number does not tell its name."""
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
        """Tells whether most own runs after a position, up to the last one found, were stored."""
        own = self.asked.own
        found = own[self._is_found & (own > position)]
        if len(found) < MIN_RUNS:
            return False
        wanted = (own > position) & (own <= found[-1])
        return 2 * len(found) >= int(np.count_nonzero(wanted))

    def offset(self) -> int:
        """Returns by how much most places in the prompt are ahead of those in what was stored."""
        places = self.asked.own[self._is_found]
        order = np.argsort(self._stored, kind="stable")
        there = order[np.searchsorted(self._stored, self.asked.runs[places], sorter=order)]
        offsets, counts = np.unique(places - there - self._begin, return_counts=True)
        return int(offsets[np.argmax(counts)])


def _behind(found: _Found, chain: Chain, start: int) -> Difference | None:
    """Returns the proved first difference to a chain that begins at token `start`, or None."""
    ours = found.asked.tokens[start:]
    equal = _equal_tokens(ours, chain.tokens)
    if equal == min(len(ours), len(chain.tokens)) or not found.is_ours_after(start + equal):
        return None
    return Difference(start + equal, ours[equal], chain.tokens[equal], equal)


def _equal_tokens(one: Tokens, other: Tokens) -> int:
    """Returns how many leading tokens two have in common."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(_ids(one)[:length] != _ids(other)[:length])
    return int(differ[0]) if len(differ) else length


def _recent(growth: Growth) -> int:
    """Returns where the first run begins that a store added."""
    return max(0, growth.begin - RUN_TOKENS + 1)


def _recent_runs(growth: Growth) -> _Runs:
    return _runs(growth.chain.tokens[_recent(growth) :])


def _runs(tokens: Tokens) -> _Runs:
    """Returns a number for each run of tokens, in order; equal runs have equal numbers."""
    if len(tokens) < RUN_TOKENS:
        return np.zeros(0, np.uint64)
    return np.correlate(_ids(tokens).astype(np.uint64), _POWERS)


def _ids(tokens: Tokens) -> NDArray[np.uint32]:
    return np.frombuffer(tokens, np.uint32) if len(tokens) else np.zeros(0, np.uint32)


# So many of the last checked requests must differ before a worker is distrusted, and so many must
# match in a row before it is trusted again: more, since prompts of some forms only may differ.
MISMATCHES = 3
LAST_CHECKED = 8
MATCHES_TO_HEAL = 6

# Events of a request may come after its answer; SGLang and TensorRT-LLM store it at its end.
GRACE_SECONDS = 1.0

# One that takes longer has been computed long ago, or never will be.
MAX_WATCH_SECONDS = 60.0

# What is watched of one worker: so many requests at once, and after as many these a second; the
# fewer while all is well.
MAX_PENDING = 8
WATCHED_PER_SECOND = 2.0
WATCHED_PER_SECOND_WHILE_WELL = 0.2

# Longer prompts are not watched: comparing them takes milliseconds.
MAX_PROMPT_TOKENS = 16_384

# Chains that may be about one request.
MAX_CHAINS = 8

# What is remembered of prompts that were placed on a worker while it is watched, in tokens: so many
# that no engine computes them while one request is watched.
MAX_PLACED_TOKENS = 1 << 20


# What listening to one worker may cost: this share of a core, and so many CPU seconds at once. A
# store costs 50 us to 1 ms, and an engine, or an attacker, may store without end.
EFFORT_SHARE = 0.005
EFFORT_BURST_SECONDS = 0.25


class Effort:
    """The CPU time that listening to one worker may take."""

    def __init__(self) -> None:
        self._left_seconds = EFFORT_BURST_SECONDS
        self._at = 0.0
        self._is_spent = False

    def may_begin(self, now: float) -> bool:
        """Tells whether listening may begin; once all is spent, half is saved up first."""
        self._save(now)
        if self._left_seconds >= EFFORT_BURST_SECONDS / 2:
            self._is_spent = False
        return not self._is_spent

    def spend(self, cpu_seconds: float, now: float) -> bool:
        """Subtracts what was spent; returns whether any is left."""
        self._save(now)
        self._left_seconds -= cpu_seconds
        self._is_spent |= self._left_seconds <= 0
        return not self._is_spent

    def _save(self, now: float) -> None:
        saved = self._left_seconds + EFFORT_SHARE * (now - self._at)
        self._left_seconds = min(EFFORT_BURST_SECONDS, saved)
        self._at = now


class Placed:
    """Prompts placed on a worker lately, watched or not: what is stored may be theirs."""

    def __init__(self) -> None:
        self._prompts: deque[tuple[float, Tokens]] = deque()
        self._tokens = 0
        self._forgot_at = -math.inf

    def add(self, tokens: Tokens, now: float) -> None:
        """Adds a prompt; forgets the oldest ones beyond the limits of size and age."""
        self._prompts.append((now, tokens))
        self._tokens += len(tokens)
        oldest_at = now - 2 * MAX_WATCH_SECONDS
        while self._tokens > MAX_PLACED_TOKENS or self._prompts[0][0] < oldest_at:
            self._forgot_at, oldest = self._prompts.popleft()
            self._tokens -= len(oldest)
            if not self._prompts:
                return

    def may_explain(self, chain: Chain, found: Difference, since: float) -> bool:
        """Tells whether a chain may belong to another prompt than the one it differs from.

        since: when that one was placed. If a prompt placed later has been forgotten, it may be that
        one's.
        """
        if self._forgot_at >= since:
            return True
        return any(explains(tokens, chain, found) for _, tokens in self._prompts)


@dataclass(eq=False, slots=True)
class Watched:
    """A request in flight to a worker.

    is_heard: whether the worker is listened to meanwhile; else only the index tells, at the end.
    grown: by chain, what was stored since it was placed and may be about it.
    """

    asked: Asked
    started_at: float
    is_heard: bool = True
    ended_at: float | None = None
    grown: dict[int, Growth] = field(default_factory=dict)

    def is_due(self, now: float) -> bool:
        """Tells whether no more can be heard of it."""
        if now - self.started_at >= MAX_WATCH_SECONDS:
            return True
        return self.ended_at is not None and now - self.ended_at >= GRACE_SECONDS


@dataclass(slots=True)
class Result:
    """Requests counted by how their check ended, and the last difference that was found."""

    matched: int = 0
    mismatched: int = 0
    without_evidence: int = 0
    is_distrusted: bool = False
    difference: Difference | None = None


class WorkerCheck:
    """The check of one worker."""

    def __init__(self) -> None:
        self.result = Result()
        self.pending: list[Watched] = []
        self.placed = Placed()
        self.effort = Effort()
        self._own_runs: frozenset[int] | None = None  # of all that are pending, None: to be found
        self._chains: dict[int, Chains] = {}
        self._last: deque[bool] = deque(maxlen=LAST_CHECKED)  # whether it matched
        self._unsuspicious = 0  # checks in a row that gave no reason to listen
        self._allowance = float(MAX_PENDING)
        self._allowance_at = 0.0

    @property
    def is_well(self) -> bool:
        """Whether nothing was found for so long that it need not be listened to."""
        return self._unsuspicious >= LAST_CHECKED

    def may_watch(self, now: float) -> bool:
        """Tells whether one more request may be watched now."""
        rate = WATCHED_PER_SECOND_WHILE_WELL if self.is_well else WATCHED_PER_SECOND
        self._allowance += rate * (now - self._allowance_at)
        self._allowance = min(MAX_PENDING, self._allowance)
        self._allowance_at = now
        return self._allowance >= 1 and len(self.pending) < MAX_PENDING

    def watch(self, asked: Asked, now: float) -> Watched | None:
        """Watches a request that is being placed, if one more may be; returns it or None."""
        if not self.may_watch(now):
            return None
        self._allowance -= 1
        watched = Watched(asked, now, is_heard=not self.is_well)
        self.pending.append(watched)
        self._own_runs = None
        return watched

    def stored(self, rank: int, events: Iterable[Event]) -> None:
        """Takes the events of a rank."""
        chains = self._chains.setdefault(rank, Chains())
        for event in events:
            if isinstance(event, AllCleared):
                chains.clear()
            elif isinstance(event, BlocksStored):
                growth = chains.store(event)
                if growth is not None:
                    self._grow(growth)

    def due(self, now: float) -> list[Watched]:
        """Returns the watched requests that are to be concluded."""
        return [watched for watched in self.pending if watched.is_due(now)]

    def conclude(self, watched: Watched, *, is_held: bool) -> None:
        """Ends a check with what was found.

        is_held: the worker is known to hold all of the prompt that can be reused, as we have it.
        """
        if is_held:
            self._matched(watched)
            return
        proofs = (self._proof(watched, growth) for growth in watched.grown.values())
        proof = next((proof for proof in proofs if proof is not None), None)
        if proof is None:
            self.give_up(watched)
            if not watched.is_heard:  # nobody listened, so nobody knows why: the next ones tell
                self._unsuspicious = 0
            return
        self.pending.remove(watched)
        self._unsuspicious = 0
        self.result.mismatched += 1
        self.result.difference = proof
        self._last.append(False)
        if self._last.count(False) >= MISMATCHES:
            self.result.is_distrusted = True

    def give_up(self, watched: Watched) -> None:
        """Ends a check without evidence."""
        self.pending.remove(watched)
        self._unsuspicious += 1
        self.result.without_evidence += 1

    def forget_chains(self) -> None:
        """Frees what was heard; a new listening begins anew."""
        self._chains.clear()

    def _proof(self, watched: Watched, growth: Growth) -> Difference | None:
        """Returns where the stored tokens differ from the prompt, if they can be nobody else's."""
        found = difference(watched.asked, growth)
        if found and self.placed.may_explain(growth.chain, found, watched.started_at):
            return None
        return found

    def _grow(self, growth: Growth) -> None:
        name = id(growth.chain)
        matching = [one for one in self.pending if is_stored(one.asked, growth.chain)]
        for watched in matching:
            self._matched(watched)
        if matching:  # it is theirs, however much it is like another's
            for watched in self.pending:
                watched.grown.pop(name, None)
            return
        runs = runs_of(growth) if self.pending else []
        if self._is_nobodys(runs):
            return
        for watched in self.pending:
            may_grow = name not in watched.grown and len(watched.grown) < MAX_CHAINS
            if may_grow and holds_own(watched.asked, growth.chain, runs):
                watched.grown[name] = growth

    def _is_nobodys(self, runs: list[int]) -> bool:
        """Whether none of these runs is a pending request's own: one look instead of one each."""
        if self._own_runs is None:
            self._own_runs = frozenset().union(*(one.asked.own_runs for one in self.pending))
        return self._own_runs.isdisjoint(runs)

    def _matched(self, watched: Watched) -> None:
        self.pending.remove(watched)
        self._unsuspicious += 1
        self.result.matched += 1
        self._last.append(True)
        if self.result.is_distrusted and all(list(self._last)[-MATCHES_TO_HEAL:]):
            self.result.is_distrusted = False
            self._last.clear()
