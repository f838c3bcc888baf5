"""A fleet of engines in simulated time: caches, queues and steps, without clocks or randomness.

An engine computes prompts one after the other, in chunks that share steps with the answers under
way, as engines with chunked prefill do. Between two changes, everything proceeds at constant speed,
so only changes are events. Prefixes are cached in blocks. The least recently used ones are evicted
first, but none that a request uses. Stores and removals reach the router after a delay.

One engine may compute a prompt for another one, to which its blocks are then transferred. The
answering engine begins the answer as soon as it has computed its current prompt, before all prompts
that wait there.

An engine may also pull the blocks of a prompt from another one before it computes the rest, or load
them from a store, to which the engines that mount it copy what they compute. An engine sends to
one other at a time; the store has as much speed for each engine.

As vLLM 0.32 does (`Scheduler.schedule` and OffloadingConnector's tiers), an engine begins to fetch
when a request is the next to be computed, not when it arrives, and computes others meanwhile. The
request keeps its place: once its blocks are there, it waits for the current prompt only. Until then
it takes no room in the cache, since blocks arrive in host memory. Left out is the copy from there,
which takes a step or more, in which vLLM may begin one more prompt.
"""

import heapq
import itertools
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from statistics import fmean, pstdev
from typing import NamedTuple

# Default size of a block, in tokens.
BLOCK_TOKENS = 128

# Time until two engines are connected, however much is transferred then.
HANDOVER_SECONDS = 0.010

# Largest remainders of a prompt's tokens, and of steps, that rounding may leave.
_NO_TOKENS, _NO_STEPS = 1e-6, 1e-9


@dataclass(frozen=True, slots=True)
class ModelledSpeed:
    """The speed of a model on its machine.

    A step takes step_seconds, request_seconds for each answer under way, and the time for its
    chunk of prompt tokens at prefill_rate (tokens per second).
    """

    prefill_rate: float = 12_000.0
    chunk_tokens: int = 2048
    step_seconds: float = 0.010
    request_seconds: float = 0.000_15
    max_running: int = 256

    def slower(self, factor: float) -> "ModelledSpeed":
        """Returns this speed with each step taking so many times as long."""
        return ModelledSpeed(
            self.prefill_rate / factor,
            self.chunk_tokens,
            self.step_seconds * factor,
            self.request_seconds * factor,
            self.max_running,
        )


@dataclass(slots=True)
class Request:
    """One request of a run. Times are in seconds."""

    # When it arrives.
    at: float
    # The numbers of the blocks of its prompt.
    blocks: Sequence[int]
    # How many tokens its prompt has.
    tokens: int
    # How many tokens its answer has.
    answer_tokens: int
    # The numbers of the blocks that its answer fills.
    answer_blocks: Sequence[int] = ()
    # The engine that answers. This, and all from `fetched` on, is set by the run.
    worker: int = -1
    # Whether it comes from our routers, not from other senders.
    is_own: bool = True
    # What its client names its conversation, "" if nothing.
    session: str = ""
    # What the engines' queues are sorted by, before the order of arrival.
    rank: float = 0.0
    # The engine that computes the prompt for the one that answers, -1 if the latter does so itself.
    prefill: int = -1
    # The request whose prompt this one computes for another engine.
    whole: "Request | None" = None
    # The engine from which it pulls blocks, -1 for none.
    source: int = -1
    # How many leading blocks it need not compute because they were pulled or loaded.
    fetched: int = 0
    # When these have arrived.
    fetched_at: float = float("inf")
    # How many tokens of its prompt it need not compute.
    cached: int = 0
    # When its first token is there.
    first_token_at: float = 0.0
    # When its answer is complete.
    done_at: float = 0.0


class _Use(NamedTuple):
    """The leading blocks of a chain that one request uses."""

    blocks: Sequence[int]
    length: int


class Cache:
    """The blocks of one engine, the least recently used ones out first.

    A block's number stands for all blocks before it as well, so a block is there only if all
    before it are: the last ones of a chain are evicted first. That holds for those in use as well.

    changed: called with the blocks stored and the blocks removed.
    """

    def __init__(
        self, capacity_blocks: int, changed: Callable[[Sequence[int], Sequence[int]], None]
    ) -> None:
        self._capacity = capacity_blocks
        self._changed = changed
        # All blocks, and the number of the last request that stopped using each.
        self._held: dict[int, int] = {}
        self._used: set[int] = set()
        self._uses: dict[int, _Use] = {}  # by the request's id
        self._reserved = 0
        # Blocks that a request stopped using, by its number. Some may be used again, or may have
        # been used later.
        self._left: deque[tuple[int, list[int]]] = deque()
        self._ended = 0

    def overlap(self, blocks: Sequence[int]) -> int:
        """Returns how many leading blocks can be reused; the last block is always computed."""
        return _leading(blocks, self._held, 0, len(blocks) - 1)

    def take(self, request: Request, overlap: int) -> bool:
        """Makes room for a whole request; returns False, without any change, if there is none."""
        in_use = _leading(request.blocks, self._used, 0, overlap)
        needed = len(request.blocks) - overlap + len(request.answer_blocks)
        free = self._capacity - len(self._used) - self._reserved - (overlap - in_use)
        if needed > free and (self._used or self._reserved):
            return False
        self._used.update(request.blocks[in_use:overlap])
        self._uses[id(request)] = _Use(request.blocks, overlap)
        self._reserved += needed
        self._evict(len(self._held) + self._reserved - self._capacity)
        return True

    def fill(self, request: Request) -> None:
        """Stores a prompt for which room was reserved, since it has been computed."""
        overlap = self._uses[id(request)].length
        self._uses[id(request)] = _Use(request.blocks, len(request.blocks))
        self._store(request.blocks, overlap)

    def finish(self, request: Request) -> None:
        """Stores an answer; its request then uses nothing any more."""
        del self._uses[id(request)]
        chain = [*request.blocks, *request.answer_blocks]
        self._store(chain, len(request.blocks))
        unused = chain[max((_common(chain, one) for one in self._uses.values()), default=0) :]
        self._used.difference_update(unused)
        self._ended += 1
        self._held.update(dict.fromkeys(unused, self._ended))
        self._left.append((self._ended, unused))

    def _store(self, blocks: Sequence[int], begin: int) -> None:
        """Stores the blocks from `begin` on, some of which may have come to be there meanwhile."""
        stored = blocks[_leading(blocks, self._held, begin, len(blocks)) :]
        self._used.update(blocks[begin:])
        self._reserved -= len(blocks) - begin
        if stored:
            self._held.update(dict.fromkeys(stored, 0))
            self._changed(stored, ())

    def _evict(self, count: int) -> None:
        """Removes so many blocks, or all that are not used."""
        held, used, left = self._held, self._used, self._left
        removed: list[int] = []
        while len(removed) < count and left:
            number, blocks = left[0]
            if not blocks or held.get(blocks[-1]) != number or blocks[-1] in used:
                left.popleft()  # all blocks before one that was used later were used then, too
                continue
            removed.append(blocks.pop())
            del held[removed[-1]]
        if removed:
            self._changed((), removed)


def _leading(blocks: Sequence[int], there: Container[int], low: int, high: int) -> int:
    """Returns how many leading blocks are there, which is known to be from low to high."""
    while low < high:
        middle = (low + high) // 2
        if blocks[middle] in there:
            low = middle + 1
        else:
            high = middle
    return low


def _common(blocks: Sequence[int], use: _Use) -> int:
    """Returns how many leading blocks another request uses."""
    other, low, high = use.blocks, 0, min(len(blocks), use.length)
    if high and blocks[0] != other[0]:
        return 0
    while low < high:
        middle = (low + high) // 2
        if blocks[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low


_arrival = attrgetter("at")
_rank = attrgetter("rank")


@dataclass(slots=True)
class ModelledEngine:
    """One engine. Its state is as of the time `at`, in seconds."""

    # How fast it is now.
    speed: ModelledSpeed
    # The blocks that it holds.
    cache: Cache
    # Begins to fetch what a request needs; returns False if nothing is to be fetched.
    fetch: Callable[[Request], bool]
    # How many tokens a block has.
    block_tokens: int = BLOCK_TOKENS
    # The time up to which it was advanced.
    at: float = 0.0
    # How many steps it has made, fractions included.
    steps: float = 0.0
    # Requests in order of arrival.
    waiting: deque[Request] = field(default_factory=deque)
    # Requests whose blocks have arrived since, which go first.
    fetched: deque[Request] = field(default_factory=deque)
    # Requests whose prompts other engines computed; they are answered first.
    received: deque[Request] = field(default_factory=deque)
    # The request whose prompt is being computed, None for none.
    head: Request | None = None
    # How many leading blocks of its prompt are there.
    overlap: int = 0
    # How many of its tokens are still to be computed.
    remaining_tokens: float = 0.0
    # Requests whose answers are generated: (the step at which it ends, number, request), a heap.
    running: list[tuple[float, int, Request]] = field(default_factory=list)
    # How many prompt tokens it has computed in all.
    computed_tokens: int = 0
    _count: int = 0

    def _step_seconds(self) -> float:
        speed = self.speed
        seconds = speed.step_seconds + speed.request_seconds * len(self.running)
        if self.head is not None:
            seconds += speed.chunk_tokens / speed.prefill_rate
        return seconds

    def advance(self, now: float) -> None:
        """Advances the state to now; no change may be due before."""
        passed, self.at = now - self.at, now
        if self.head is None and not self.running:
            return
        steps = passed / self._step_seconds()
        self.steps += steps
        if self.head is not None:
            self.remaining_tokens -= steps * self.speed.chunk_tokens

    def next_change(self) -> float:
        """Returns when the next prompt is computed or answer complete; infinity if none is due."""
        step = self._step_seconds()
        changes = [float("inf")]
        if self.head is not None:
            changes.append(
                self.at + max(0.0, self.remaining_tokens) / self.speed.chunk_tokens * step
            )
        if self.running:
            changes.append(self.at + max(0.0, self.running[0][0] - self.steps) * step)
        return min(changes)

    def change(self) -> list[Request]:
        """Does what is due now; returns the requests that have ended."""
        over = []
        if self.head is not None and self.remaining_tokens <= _NO_TOKENS:
            self._answer(self.head)
        while self.running and self.running[0][0] <= self.steps + _NO_STEPS:
            request = heapq.heappop(self.running)[2]
            self.cache.finish(request)
            request.done_at = self.at
            over.append(request)
        self._begin()
        return over

    def add(self, request: Request) -> None:
        """Adds a request that arrives."""
        insort(self.waiting, request, key=_rank)
        self._begin()

    def resume(self, request: Request) -> None:
        """Gives a request whose blocks have been fetched its place back."""
        insort(self.fetched, request, key=_arrival)
        self._begin()

    def receive(self, request: Request) -> None:
        """Accepts the blocks of a prompt that another engine computed."""
        self.received.append(request)
        self._begin()

    def _begin(self) -> None:
        while self.head is None and self.received:
            if len(self.running) >= self.speed.max_running:
                return
            overlap = self.cache.overlap(self.received[0].blocks)
            if not self.cache.take(self.received[0], overlap):
                return
            self.overlap = overlap
            self._answer(self.received.popleft())
        if self.head is not None or len(self.running) >= self.speed.max_running:
            return
        while self.waiting and not self.fetched and self.fetch(self.waiting[0]):
            self.waiting.popleft()
        queue = self.fetched or self.waiting
        if not queue:
            return
        request = queue[0]
        overlap = self.cache.overlap(request.blocks)
        if not self.cache.take(request, overlap):
            return
        self.head = queue.popleft()
        self.overlap = overlap
        request.cached = max(overlap, request.fetched) * self.block_tokens
        self.remaining_tokens = float(request.tokens - request.cached)
        self.computed_tokens += request.tokens - request.cached

    def _answer(self, request: Request) -> None:
        self.cache.fill(request)
        self.head = None
        request.first_token_at = self.at
        self._count += 1
        heapq.heappush(self.running, (self.steps + request.answer_tokens, self._count, request))


@dataclass(slots=True)
class ModelledStore:
    """A store of blocks, the least recently stored ones out first.

    mounted_by: the engines that load from it and copy to it. load_rate: tokens a second, for each
    engine. tells_removals: whether removals are published. failing: the engines that mount it, but
    load nothing.
    """

    capacity_blocks: int
    mounted_by: frozenset[int]
    load_rate: float
    tells_removals: bool = True
    failing: frozenset[int] = frozenset()
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def put(self, blocks: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Stores blocks; returns those that it tells of: stored and removed."""
        for block in blocks:
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        removed = []
        while len(self.blocks) > self.capacity_blocks:
            removed.append(self.blocks.popitem(last=False)[0])
        return blocks, removed if self.tells_removals else ()

    def overlap(self, blocks: Sequence[int], own: int) -> int:
        """Returns how many leading blocks an engine has that holds `own` and loads the others."""
        for at in range(own, len(blocks) - 1):
            if blocks[at] not in self.blocks:
                return at
        return max(own, len(blocks) - 1)


# In what is published, the number of the store.
STORE = -1


@dataclass(slots=True)
class ModelledFleet:
    """Engines and what they publish."""

    # The speed of each engine.
    speeds: Sequence[ModelledSpeed]
    # How many blocks each engine can hold.
    cache_blocks: int
    # The time from an event until the router sees it.
    delay_seconds: float
    # The time, in seconds.
    now: float = 0.0
    # (when, engine, its speed from then on), in order of time.
    turns: Sequence[tuple[float, int, ModelledSpeed]] = ()
    # Tokens per second from one engine to another.
    transfer_rate: float = float("inf")
    # How many tokens a block has.
    block_tokens: int = BLOCK_TOKENS
    # The engines' common store, None without one; what it stores and removes is published under
    # STORE.
    store: ModelledStore | None = None
    # The engines, by their numbers.
    engines: list[ModelledEngine] = field(default_factory=list)
    # What was published: (when it is visible, engine, stored, removed).
    published: deque[tuple[float, int, Sequence[int], Sequence[int]]] = field(default_factory=deque)
    _changes: list[tuple[float, int, int]] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)
    _transfers: list[tuple[float, int, Request]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _free_at: dict[int, float] = field(default_factory=dict)  # when a source has sent all
    _arriving: dict[int, dict[int, float]] = field(default_factory=dict)  # blocks being fetched

    def __post_init__(self) -> None:
        for number, speed in enumerate(self.speeds):
            cache = Cache(self.cache_blocks, self._publisher(number))
            fetch = partial(self._fetch, number)
            self.engines.append(ModelledEngine(speed, cache, fetch, self.block_tokens))
            self._versions.append(0)

    def _publisher(self, number: int) -> Callable[[Sequence[int], Sequence[int]], None]:
        def publish(stored: Sequence[int], removed: Sequence[int]) -> None:
            visible_at, store = self.now + self.delay_seconds, self.store
            self.published.append((visible_at, number, stored, removed))
            if store is not None and stored and number in store.mounted_by:
                self.published.append((visible_at, STORE, *store.put(stored)))

        return publish

    def run(
        self,
        requests: Iterable[Request],
        pick: Callable[[Request, float], int],
        over: Callable[[Request, float], None],
    ) -> None:
        """Serves all requests, which come in order of time.

        pick: returns the engine for a request. over: called with each request that has ended, and
        the time.
        """
        turns = deque(self.turns)
        for request in requests:
            while turns and turns[0][0] <= request.at:
                at, number, speed = turns.popleft()
                self.advance_to(at, over)
                self.engines[number].advance(at)
                self.engines[number].speed = speed
                self._plan(number)
            self.advance_to(request.at, over)
            self.now = request.at
            request.worker = number = pick(request, request.at)
            first = request
            if request.prefill >= 0:
                number = request.prefill
                first = Request(
                    request.at, request.blocks, request.tokens, 0, whole=request, worker=number
                )
            engine = self.engines[number]
            engine.advance(request.at)
            engine.add(first)
            self._plan(number)
        self.advance_to(float("inf"), over)

    def _fetch(self, number: int, request: Request) -> bool:
        """Begins to pull or load a request's blocks; returns False if there are none to fetch.

        Blocks that the engine is fetching for another request are awaited.
        """
        source, store = request.source, self.store
        arriving = self._arriving.setdefault(number, {})
        if source < 0 and store is None and not arriving:
            return False
        own = self.engines[number].cache.overlap(request.blocks)
        here, arrives_at = own, self.now
        while here < len(request.blocks) - 1 and request.blocks[here] in arriving:
            arrives_at = max(arrives_at, arriving[request.blocks[here]])
            here += 1
        there = here
        if source >= 0:
            there = max(here, self.engines[source].cache.overlap(request.blocks))
            begins_at = max(self.now, self._free_at.get(source, 0.0))
            seconds = (there - here) * self.block_tokens / self.transfer_rate
            if there > here:
                arrives_at = self._free_at[source] = begins_at + seconds
        elif store is not None and number in store.mounted_by - store.failing:
            there = store.overlap(request.blocks, here)
            seconds = (there - here) * self.block_tokens / store.load_rate
            arrives_at = max(arrives_at, self.now + seconds)
        if there == own or arrives_at <= self.now:
            return False
        arrives_at += HANDOVER_SECONDS
        request.fetched = there
        arriving.update(dict.fromkeys(request.blocks[here:there], arrives_at))
        heapq.heappush(self._transfers, (arrives_at, next(self._numbers), request))
        return True

    def _note_arrival(self, request: Request, arrived_at: float) -> None:
        request.fetched_at = arrived_at
        arriving = self._arriving[request.worker]
        later = arrived_at + HANDOVER_SECONDS / 2
        fetched = request.blocks[: request.fetched]
        for block in [one for one in fetched if arriving.get(one, arrived_at) < later]:
            arriving.pop(block, None)

    def _plan(self, number: int) -> None:
        """Schedules the next change of an engine, instead of the one scheduled before."""
        self._versions[number] += 1
        at = self.engines[number].next_change()
        if at != float("inf"):
            heapq.heappush(self._changes, (at, number, self._versions[number]))

    def advance_to(self, time: float, over: Callable[[Request, float], None]) -> None:
        """Does everything that is due until a time, in order of time.

        Whoever makes the requests of `run` may call it, to learn which answers have ended by then.
        """
        changes, transfers = self._changes, self._transfers
        while True:
            arrives_at = transfers[0][0] if transfers else float("inf")
            changes_at = changes[0][0] if changes else float("inf")
            if min(arrives_at, changes_at) > time or not (changes or transfers):
                return
            if arrives_at < changes_at:
                request = heapq.heappop(transfers)[2]
                self.now = arrives_at
                self.engines[request.worker].advance(arrives_at)
                if request.prefill >= 0:
                    self.engines[request.worker].receive(request)
                else:
                    self._note_arrival(request, arrives_at)
                    self.engines[request.worker].resume(request)
                self._plan(request.worker)
                continue
            at, number, version = heapq.heappop(changes)
            if version == self._versions[number]:
                self.now = at
                self._change(number, over)

    def _change(self, number: int, over: Callable[[Request, float], None]) -> None:
        engine = self.engines[number]
        engine.advance(self.now)
        for request in engine.change():
            if request.whole is None:
                over(request, self.now)
            else:
                self._transfer(request, request.whole)
        self._plan(number)

    def _transfer(self, computed: Request, request: Request) -> None:
        """Sends the part of a computed prompt that the answering engine does not hold."""
        request.cached = computed.cached
        held = self.engines[request.worker].cache.overlap(request.blocks)
        tokens = request.tokens - held * self.block_tokens
        arrives_at = self.now + HANDOVER_SECONDS + tokens / self.transfer_rate
        heapq.heappush(self._transfers, (arrives_at, next(self._numbers), request))


class Result(NamedTuple):
    """The results of one run.

    hit_rate: share of prompt tokens that were cached. p50, p90, p99: time to the first token, in
    seconds. throughput: requests per second. spread: standard deviation of the tokens that each
    engine computed, as a share of their mean.
    """

    hit_rate: float
    p50: float
    p90: float
    p99: float
    throughput: float
    spread: float


def result_of(requests: Sequence[Request], computed: Sequence[int]) -> Result:
    """Returns the results of served requests; computed: prompt tokens computed by each engine."""
    waits = sorted(one.first_token_at - one.at for one in requests)
    ended = max(one.done_at for one in requests)
    return Result(
        hit_rate=sum(one.cached for one in requests) / sum(one.tokens for one in requests),
        p50=quantile(waits, 0.5),
        p90=quantile(waits, 0.9),
        p99=quantile(waits, 0.99),
        throughput=len(requests) / (ended - requests[0].at),
        spread=pstdev(computed) / max(1.0, fmean(computed)),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Returns the value below which such a share of ordered values lies."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
