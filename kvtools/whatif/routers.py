"""Routers in front of engines in simulated time, with the real decisions and accounting.

Routers that share exchange real messages. None is lost, and each takes a millisecond. Envoy alone,
with one of its own policies, is also here, for comparison.
"""

import heapq
import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice, pairwise
from random import Random
from typing import Any, NamedTuple, Protocol

import xxhash

from extproc.config.schema import Config, Policy
from extproc.config.sections import Disaggregation, HoldSettings
from extproc.disaggregation.legs import with_source
from extproc.features.fetching.offers import NOTHING_PULLABLE, StoredPrefix
from extproc.features.fetching.pulling import Pull, Pulling, with_priced_source
from extproc.features.fetching.term import FetchTerm, fetch_terms
from extproc.features.holding.hold import REFUSED, Hold
from extproc.requests.request import PLAIN_REQUEST
from extproc.routing.candidates.eligibility import Candidate, Roster
from extproc.routing.candidates.sampling import sample_size
from extproc.routing.claims.claim_table import Claim, ClaimTable, Holdings
from extproc.routing.claims.homes import Homes
from extproc.routing.claims.line import NO_PLACE, Place
from extproc.routing.claims.lines import Lines
from extproc.routing.claims.marks import FIRST_LENGTHS, LENGTHS, Marks, packed
from extproc.routing.claims.occupancy import occupancy_of
from extproc.routing.cost.fetch import Fetch
from extproc.routing.decide import decide
from extproc.routing.decision import Decision
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.endpoint_load import EndpointLoad, LoadSample, Ticket
from extproc.routing.load.loads import PREFILL_TOKENS_PER_SECOND, Loads
from extproc.routing.priorities import SECONDS_OF_PREFILL
from extproc.routing.store_share import StoreShare
from extproc.routing.warmth import Warmth, warmth_of
from extproc.sharing.messages import keys_of, worker_id
from extproc.sharing.other_routers import OtherRouters, SharedWorker
from extproc.sharing.reporter import LEAST_UNCACHED_TOKENS, Reporter
from kvstate.overlap import Overlap, Prompt
from kvtools.whatif.engines import (
    BLOCK_TOKENS,
    STORE,
    ModelledFleet,
    ModelledSpeed,
    ModelledStore,
    Request,
    Result,
    result_of,
)
from kvtools.whatif.envoy_policies import (
    BY_SESSION,
    WITHOUT_SESSIONS,
    Balancer,
    balancer_of,
)

# Envoy's own policies.
ENVOY = (*WITHOUT_SESSIONS, *BY_SESSION)

# Requests between two reports of progress.
NOTIFY_EVERY = 64

# Time until a worker that refuses connections is left out: three scrapes.
UNFIT_SECONDS = 3.0


class Stage(NamedTuple):
    """The engines of a run, and what happens to them."""

    # The speed of each engine.
    speeds: Sequence[ModelledSpeed]
    # How many blocks an engine can hold.
    cache_blocks: int
    # The time until an event reaches the router.
    delay_seconds: float = 0.02
    # When an engine's speed changes, and to what.
    turns: Sequence[tuple[float, int, ModelledSpeed]] = ()
    # The time in seconds from which the first engine accepts no new request: the proxy then uses
    # the next endpoint of the pick, and the router knows `UNFIT_SECONDS` later.
    lost_at: float = math.inf
    # How many tokens a block has.
    block_tokens: int = BLOCK_TOKENS
    # The time until which the last engine is not there.
    joins_at: float = 0.0
    # Tokens a second that an engine sends to others.
    transfer_rate: float = math.inf
    # Makes the engines' common store, None without one.
    store: Callable[[], ModelledStore] | None = None

    def fleet(self) -> ModelledFleet:
        """Returns the engines, idle and with empty caches."""
        return ModelledFleet(
            self.speeds,
            self.cache_blocks,
            self.delay_seconds,
            turns=self.turns,
            block_tokens=self.block_tokens,
            transfer_rate=self.transfer_rate,
            store=None if self.store is None else self.store(),
        )


class Contestant(NamedTuple):
    """A way to pick."""

    # The name by which it is shown.
    name: str
    # The router's policy, or one of Envoy's own.
    policy: str
    # The settings of its policy.
    rules: Policy = Policy()
    # Whether the router gets events.
    sees_events: bool = True
    # Whether it also counts the prompts that it sent to an engine.
    expects: bool = False
    # The speed that it assumes for the engines, in tokens per second.
    prefill_rate: float = PREFILL_TOKENS_PER_SECOND
    # The interval at which the router reads their metrics, 0 if it does not read them.
    scrape_seconds: float = 0.0
    # How many routers there are; each request goes to one of them.
    routers: int = 1
    # The interval of the routers' messages to each other, 0 for none.
    tick_seconds: float = 0.0
    # Whether the routers learn each engine's speed.
    learns: bool = False
    # Whether they know each engine's true speed, also as it changes.
    knows: bool = False
    # How engines pull from each other, None if they do not.
    transfers: Disaggregation | None = None
    # The worth of a token in the common store, as a percentage of one that need not be loaded; 0 if
    # the store is not known.
    store_percent: int = 0
    # How long what that store holds counts, where it tells of no removals.
    max_age_seconds: float = math.inf
    # Who waits for room in the caches.
    hold: HoldSettings = HoldSettings()
    # Whether engines compute first what came earlier and has less to compute.
    hits_first: bool = False


@dataclass(slots=True)
class Tokens:
    """Stands in for token ids where only their number and their marks are needed."""

    count: int
    blocks: Sequence[int]
    block_tokens: int = BLOCK_TOKENS

    def __len__(self) -> int:
        return self.count

    def marks(self) -> Marks:
        """Returns the marks of the whole blocks' tokens."""
        return marks_of_blocks(self.blocks, self.block_tokens)


def tokens_sent() -> ClaimTable:
    """Returns a table of claims that uses the marks of `Tokens` as they are."""
    return ClaimTable(1, marks=_known_marks)


def _known_marks(prompt: Prompt) -> Marks:
    return prompt.tokens.marks()  # type: ignore[attr-defined,no-any-return]


def homes_of_blocks(block_tokens: int, secret: int = 1) -> Homes:
    """Returns the homes of conversations, which knows `Tokens` by their blocks."""

    def part(tokens: Any, start: int, stop: int) -> bytes:
        return array("Q", tokens.blocks[start // block_tokens : stop // block_tokens]).tobytes()

    return Homes(secret, part=part)


class View:
    """What the router knows of the engines' blocks: the holders of each, as bits of a number.

    stored_at: when each block of the common store was last stored.
    """

    def __init__(self, fleet: ModelledFleet) -> None:
        self._fleet = fleet
        self.stored_at: dict[int, float] = {}
        self._holders: dict[int, int] = {}
        self._all = (1 << len(fleet.engines)) - 1
        self._names = [str(number) for number in range(len(fleet.engines))]

    def update(self, now: float) -> None:
        """Applies the events that have become visible."""
        published, holders = self._fleet.published, self._holders
        while published and published[0][0] <= now:
            at, number, stored, removed = published.popleft()
            if number == STORE:
                self.stored_at.update(dict.fromkeys(stored, at))
                for block in removed:
                    self.stored_at.pop(block, None)
                continue
            bit = 1 << number
            for block in stored:
                holders[block] = holders.get(block, 0) | bit
            for block in removed:
                left = holders.get(block, 0) & ~bit
                if left:
                    holders[block] = left
                else:
                    holders.pop(block, None)

    def holds(self, number: int, block: int) -> bool:
        """Returns whether an engine is known to hold a block."""
        return bool(self._holders.get(block, 0) & 1 << number)

    def overlaps(self, blocks: Sequence[int]) -> dict[str, Overlap]:
        """Returns the leading blocks that each engine is known to hold, by the engine's name."""
        found: dict[str, Overlap] = {}
        holders, holding, count = self._holders, self._all, 0
        while holding and count < len(blocks) - 1:
            low, high = count, len(blocks) - 1
            while low < high:  # who holds a block holds all before it
                middle = (low + high) // 2
                if holders.get(blocks[middle], 0) & holding == holding:
                    low = middle + 1
                else:
                    high = middle
            count = low
            still = holding & holders.get(blocks[count], 0) if count < len(blocks) - 1 else 0
            self._note(found, holding & ~still, count)
            holding = still
        return found

    def stored(self, blocks: Sequence[int], since: float) -> int:
        """Returns how many leading blocks the store has, of those stored since then."""
        for count, block in enumerate(blocks[:-1]):
            if self.stored_at.get(block, -math.inf) < since:
                return count
        return len(blocks) - 1

    def _note(self, found: dict[str, Overlap], engines: int, count: int) -> None:
        if not count:
            return
        while engines:
            lowest = engines & -engines
            name = self._names[lowest.bit_length() - 1]
            found[name] = Overlap(self._fleet.block_tokens, (count, 0, 0, 0))
            engines ^= lowest


class Arrivals(NamedTuple):
    """The requests of one cell and seed, in order of time, for any number of runs."""

    requests: Sequence[Request]

    def fresh(self) -> list[Request]:
        """Returns copies of the requests, which one run may change."""
        return [
            Request(
                one.at,
                one.blocks,
                one.tokens,
                one.answer_tokens,
                one.answer_blocks,
                is_own=one.is_own,
                session=one.session,
            )
            for one in self.requests
        ]


def marks_of_blocks(blocks: Sequence[int], block_tokens: int) -> Marks:
    """Returns marks that are equal where those of the blocks' tokens would be."""
    count = bisect_right(LENGTHS, len(blocks) * block_tokens - 1)
    view = memoryview(_numbered(blocks)).cast("B")
    keys: list[int] = []
    key = 1
    for part in _parts(block_tokens)[:count]:
        key = xxhash.xxh3_64_intdigest(view[part], key)
        keys.append(key)
    return Marks(FIRST_LENGTHS[count], packed(keys))


def _numbered(blocks: Sequence[int]) -> "array[int]":
    try:
        return array("I", blocks)
    except OverflowError:
        return array("I", [block & 0xFFFF_FFFF for block in blocks])


@cache
def _parts(block_tokens: int) -> Sequence[slice]:
    """Returns which bytes of a prompt's blocks each mark has beyond the one before."""
    ends = [-(-length // block_tokens) * _BLOCK_BYTES for length in LENGTHS]
    return [slice(start, end) for start, end in pairwise((0, *ends))]


# Bytes of a block's number in an array.
_BLOCK_BYTES = 4

# Name and endpoint of the engine that a cell may lose.
_LOST = "0"

# Interval at which the router checks which prompts are computed, as the real one does, and how many
# of each engine it checks.
LOOK_SECONDS = 0.05
MAX_AHEAD = 3


def last_block(blocks: Sequence[int]) -> int:
    """Returns the last block of a prompt that can be reused."""
    return blocks[-2] if len(blocks) > 1 else blocks[-1]


# Delay of a message from a router to all others.
DELAY_SECONDS = 0.001

KEYS = keys_of(b"simulated")


def _forget_seconds(tick_seconds: float) -> float:
    return 10 * tick_seconds + 3.0


class Sharer:
    """One router's part in sharing: makes its messages, and merges those of others."""

    def __init__(
        self,
        number: int,
        endpoints: dict[str, EndpointLoad],
        prefill_rate: float,
        sent: ClaimTable,
        homes: Homes,
        lines: Lines,
        holdings: Mapping[str, Holdings],
        tick_seconds: float,
        *,
        learns: bool = False,
    ) -> None:
        chance = Random(number)
        self.reporter = Reporter(KEYS, f"router-{number}", 1)
        self.loads = Loads(endpoints, prefill_rate, self.reporter.touched, learns=learns)
        places = {worker_id(KEYS, name): SharedWorker(name, one) for name, one in holdings.items()}
        self.others = OtherRouters(
            self.reporter,
            self.loads,
            sent,
            homes,
            lambda: places,
            _forget_seconds(tick_seconds),
            lambda: chance.getrandbits(63),
            lines=lines,
        )
        self.reporter.lines = lines

    def tick(self, now: float) -> Sequence[bytes]:
        """Forgets silent routers, and returns the messages that are due."""
        self.others.forget(now)
        return self.reporter.compose(self.loads, now, _wall_us(now))

    def hear(self, wire: bytes, now: float) -> None:
        """Merges a message of another router."""
        self.others.hear(wire, now, _wall_us(now))


def _wall_us(now: float) -> int:
    return 1_000_000 + int(now * 1e6)


@dataclass(order=True, slots=True)
class _ScheduledMessages:
    """A router's tick, or the arrival of its messages; ordered by time, then by number."""

    at: float
    number: int
    sender: int = field(compare=False)
    messages: Sequence[bytes] | None = field(compare=False, default=None)


class RouterExchange:
    """The messages between routers; the ticks of each begin at a random time."""

    def __init__(self, sharers: Sequence[Sharer], tick_seconds: float, chance: Random) -> None:
        self._sharers = sharers
        self._tick_seconds = tick_seconds
        self._count = 0
        self._appointments: list[_ScheduledMessages] = []
        self._reported_at = [-1.0] * len(sharers)
        for sender in range(len(sharers)):
            self._plan(tick_seconds * chance.random(), sender, None)

    def note_sent(self, sender: int, now: float) -> None:
        """Makes a router that sent a request report at once, if its last report is a tick old."""
        if now - self._reported_at[sender] >= self._tick_seconds:
            self._tell(sender, now)

    def _tell(self, sender: int, now: float) -> None:
        messages = self._sharers[sender].tick(now)
        if messages:
            self._reported_at[sender] = now
            self._plan(now + DELAY_SECONDS, sender, messages)

    def advance_to(self, now: float) -> None:
        """Does everything that is due until now."""
        while self._appointments and self._appointments[0].at <= now:
            due = heapq.heappop(self._appointments)
            if due.messages is None:
                told_at = self._reported_at[due.sender]
                if due.at - told_at >= self._tick_seconds - 1e-9:
                    self._tell(due.sender, due.at)
                    told_at = due.at
                self._plan(told_at + self._tick_seconds, due.sender, None)
                continue
            for receiver, sharer in enumerate(self._sharers):
                if receiver != due.sender:
                    for message in due.messages:
                        sharer.hear(message, due.at)

    def _plan(self, at: float, sender: int, messages: Sequence[bytes] | None) -> None:
        self._count += 1
        heapq.heappush(self._appointments, _ScheduledMessages(at, self._count, sender, messages))


class BlocksInView(Protocol):
    """What a router knows of its engines' blocks, by their numbers."""

    def update(self, now: float) -> None:
        """Applies the events that have become visible."""

    def holds(self, number: int, block: int) -> bool:
        """Returns whether an engine is known to hold a block."""

    def overlaps(self, blocks: Sequence[int]) -> dict[str, Overlap]:
        """Returns the leading blocks that each engine is known to hold, by the engine's name."""

    def stored(self, blocks: Sequence[int], since: float) -> int:
        """Returns how many leading blocks the store has, of those stored since then."""


class SimulatedRouter:
    """One router with its own view of the fleet.

    view: the blocks that the engines hold according to their events, common to all routers. sharer:
    its part in sharing; None if nothing is shared.
    """

    def __init__(
        self,
        stage: Stage,
        contestant: Contestant,
        fleet: ModelledFleet,
        view: BlocksInView,
        number: int,
        seed: int,
    ) -> None:
        self.fleet = fleet
        self._contestant = contestant
        self._lost_at = stage.lost_at
        self._view = view
        names = [str(n) for n in range(len(stage.speeds))]
        endpoints = {name: EndpointLoad() for name in names}
        self._endpoints = endpoints
        self._awaited: list[dict[Ticket, Request]] = [{} for _ in names]
        self._holdings = {name: Holdings(name) for name in endpoints}
        self._present = names
        self._claims = tokens_sent() if contestant.expects else None
        self._homes = homes_of_blocks(stage.block_tokens, KEYS.marks)
        rules = contestant.hold
        self._lines = Lines(KEYS.marks, rules.bound_seconds, rules.max_requests)
        for each in self._holdings.values():
            each.capacity_tokens = stage.cache_blocks * stage.block_tokens
        self._loads = Loads(endpoints, contestant.prefill_rate, learns=contestant.learns)
        self.sharer: Sharer | None = None
        if contestant.tick_seconds and self._claims is not None:
            rate, tick = contestant.prefill_rate, contestant.tick_seconds
            self.sharer = Sharer(
                number,
                endpoints,
                rate,
                self._claims,
                self._homes,
                self._lines,
                self._holdings,
                tick,
                learns=contestant.learns,
            )
            self._loads = self.sharer.loads
        port = None if contestant.transfers is None else 1
        self._workers = [Candidate(name, name, transfer_port=port) for name in names]
        self._absent = {names[-1]: "not there yet"} if stage.joins_at else {}
        self._joins_at = stage.joins_at
        self._roster = Roster(self._workers)
        self._rng = Random(seed + 77 + 1_000 * number)
        self._turn = 0
        self.sent_tokens = 0.0
        self._scraped_at = 0.0
        self._pulling: Pulling | None = None
        self._pulls: list[tuple[Request, Pull]] = []
        if contestant.transfers is not None and contestant.transfers.price_pulls:
            config = Config(disaggregation=contestant.transfers)
            self._pulling = Pulling(config, self._loads, self._on_host)
        self._open: dict[int, tuple[Ticket, Claim | None, Fetch | None]] = {}
        self.hold = Hold(rules, self._records, self._homes, self._lines)
        self._shares: dict[str, StoreShare] = {}

    def _scrape(self, now: float) -> None:
        interval = self._contestant.scrape_seconds
        if not interval or now - self._scraped_at < interval:
            return
        self._scraped_at = now
        for number, engine in enumerate(self.fleet.engines):
            running = len(engine.running) + (engine.head is not None)
            waiting = len(engine.waiting) + len(engine.fetched)
            self._loads.report(str(number), LoadSample(running, waiting, now), now)

    def know(self) -> None:
        """Sets each engine's true speed, if the contestant knows it."""
        if self._contestant.knows:
            for number, engine in enumerate(self.fleet.engines):
                slowness = self._contestant.prefill_rate / engine.speed.prefill_rate
                speed = self._endpoints[str(number)].speed
                speed.slowness, speed.pace = slowness, 1.0 / slowness

    def look(self, now: float) -> None:
        """Checks which prompts are computed, and which pulls have arrived."""
        self._view.update(now)
        delay = self.fleet.delay_seconds
        for request, pull in [one for one in self._pulls if one[0].fetched_at + delay <= now]:
            self._pulls.remove((request, pull))
            pull.note_arrival(delay + LOOK_SECONDS / 2, now)
        for number, awaited in enumerate(self._awaited):
            for ticket, request in list(islice(awaited.items(), MAX_AHEAD)):
                is_first = ticket is next(iter(ticket.load.speed.waiting), None)
                if not ticket.is_sure and not is_first:
                    continue
                if self._view.holds(number, last_block(request.blocks)):
                    self._loads.note_computed(ticket, now)
                    del awaited[ticket]
                elif not ticket.is_sure:
                    held = self._view.overlaps(request.blocks).get(str(number))
                    tokens = request.tokens - (held.certain_tokens if held else 0)
                    self._loads.revise(ticket, tokens)
            self._loads.look(str(number), now)

    def pick(self, request: Request, now: float) -> int:
        self.know()
        self._scrape(now)
        decision = self._decide(request, now)
        self._turn += 1
        self.sent_tokens = decision.uncached_tokens
        if self._contestant.hits_first:
            seconds = decision.uncached_tokens / self._contestant.prefill_rate
            request.rank = now + SECONDS_OF_PREFILL * seconds
        served = decision.pick[0]
        if now >= self._lost_at and served == _LOST:
            served = decision.pick[1]
        if decision.source is not None:
            request.source = int(decision.source.endpoint)
        if decision.source is not None and self._pulling is not None:
            pull = self._pulling.begin_pull(decision, served, now)
            if pull is not None:
                pull.expect()
                self._pulls.append((request, pull))
        is_sure = not decision.basis.claims_on(served).speculative
        is_watched = self._contestant.learns and not self._view.holds(
            int(served), last_block(request.blocks)
        )
        if request.source >= 0 or served in decision.basis.fetches:
            is_watched = False  # it also takes the time of a transfer
        prompt = Prompt("m", array("I")) if is_watched else None
        ticket = self._loads.begin(
            served, decision.uncached_tokens, now, prompt=prompt, is_sure=is_sure
        )
        if is_watched:
            self._awaited[int(served)][ticket] = request
        claim = None if self._claims is None else self._claim(self._claims, decision, served, now)
        fetch = decision.basis.fetches.get(served)
        self._open[id(request)] = (ticket, claim, fetch)
        return int(served)

    def probe(self, request: Request, now: float) -> Warmth:
        """Returns what a request would find at its pick; nothing is booked."""
        self.know()
        decision = self._decide(request, now)
        basis = decision.basis
        at = [worker.name for worker in basis.workers].index(decision.worker)
        load = partial(self._loads.load, now=now)
        return warmth_of(basis, at, load, self._contestant.prefill_rate)

    def _records(self, _: str) -> Iterable[Holdings]:
        return [self._holdings[name] for name in self._present]

    def filled(self, now: float) -> float:
        """Returns the share of the caches that conversations need until they return."""
        occupancy = occupancy_of(self._records("m"), now)
        return 0.0 if occupancy is None else occupancy.needed / occupancy.room

    def place_of(self, request: Request, now: float) -> Place | None:
        """Returns the place of a request that has to wait for room, None if it goes on."""
        self.know()
        absent = self._absent if now < self._joins_at else {}
        lost = {_LOST} if now >= self._lost_at + UNFIT_SECONDS else set()
        self._present = [name for name in self._holdings if name not in absent and name not in lost]
        return self.hold.place_of(self._decide(request, now), now)

    def _claim(self, claims: ClaimTable, decision: Decision, served: str, now: float) -> Claim:
        """Claims that an engine is about to hold a prompt, and notes its conversation there."""
        holdings, turn = self._holdings[served], decision.basis.belonging.turn
        claim = claims.record(holdings, decision.marks[0], now)
        if turn.keys:
            self._homes.turn(turn, holdings, now)
        if self.sharer is not None:
            reporter = self.sharer.reporter
            reporter.begin([claim], served, decision.uncached_tokens)
            if turn.keys:
                reporter.note_turn(turn, served)
        return claim

    def _decide(self, request: Request, now: float) -> Decision:
        held: Mapping[str, Overlap] = {}
        if self._contestant.sees_events:
            self._view.update(now)
            held = self._view.overlaps(request.blocks)
        tokens = Tokens(request.tokens, request.blocks, self.fleet.block_tokens)
        prompt = Prompt("m", tokens)  # type: ignore[arg-type]
        state = "live" if self._contestant.sees_events else "unsupported"
        unfit = {_LOST: "does not answer"} if now >= self._lost_at + UNFIT_SECONDS else {}
        snapshot = Snapshot(
            self._workers,
            [held],
            self._loads.load,
            self._contestant.policy,
            self._turn,
            self._contestant.rules,
            self._claims,
            lambda _: state,
            self._absent if now < self._joins_at else unfit,
            sample=sample_size(self._contestant.rules, is_alone=not self._loads.routers),
            roster=self._roster,
            homes=self._homes,
            records=list(self._holdings.values()),
        )
        query, transfers = Query("m", [prompt]), self._contestant.transfers
        terms = self._terms(request, query, snapshot, now)
        made = decide(PLAIN_REQUEST, query, snapshot, now, self._rng, terms)
        if transfers is None or self._pulling is not None:
            return with_priced_source(made)
        return with_source(query, made, transfers.min_pulled_tokens or 1, snapshot)

    def _terms(
        self, request: Request, query: Query, snapshot: Snapshot, now: float
    ) -> Sequence[FetchTerm]:
        """Returns the credit of engines that could fetch a part of a prompt."""
        stores, pullable = self._stored(request, now), NOTHING_PULLABLE
        if self._pulling is not None:
            pullable = self._pulling.offers(PLAIN_REQUEST, query, snapshot, now)
        return fetch_terms(self._contestant.prefill_rate, snapshot, stores, pullable)

    def _on_host(self, prompt: Prompt) -> Mapping[str, int]:
        """Returns what engines hold of a prompt: all that is on the device is in host memory."""
        blocks = prompt.tokens.blocks  # type: ignore[attr-defined]
        return {name: one.certain_tokens for name, one in self._view.overlaps(blocks).items()}

    def _stored(self, request: Request, now: float) -> Sequence[StoredPrefix]:
        """Returns what engines could load of a prompt from their common store."""
        store, percent = self.fleet.store, self._contestant.store_percent
        if store is None or not percent:
            return ()
        since = now - self._contestant.max_age_seconds
        tokens = self._view.stored(request.blocks, since) * self.fleet.block_tokens
        workers = frozenset(map(str, store.mounted_by))
        shares = {name: one.share(now) for name, one in self._shares.items()}
        return (StoredPrefix("store", tokens, percent / 100, workers, shares),)

    def over(self, request: Request, now: float) -> None:
        self.know()
        ticket, claim, fetch = self._open.pop(id(request))
        if fetch is not None and fetch.peer is None:
            loaded = min(max(0, request.cached - fetch.held), fetch.tokens)
            self._shares.setdefault(ticket.endpoint, StoreShare()).note(fetch.tokens, loaded, now)
        self._awaited[int(ticket.endpoint)].pop(ticket, None)
        self._loads.end(ticket, now)
        if claim is not None and self._claims is not None:
            self._claims.end(claim, now)
            if self.sharer is not None:
                self.sharer.reporter.end(claim)


class _Routers:
    """All routers in front of one fleet; each request goes to a random one."""

    def __init__(self, stage: Stage, contestant: Contestant, given: Arrivals, seed: int) -> None:
        self.fleet = stage.fleet()
        self.requests: Sequence[Request] = given.fresh()
        view, numbers = View(self.fleet), range(contestant.routers)
        self.all = [SimulatedRouter(stage, contestant, self.fleet, view, n, seed) for n in numbers]
        self._chance = Random(seed + 5)
        self._strangers = Random(seed + 99)
        sharers = [one.sharer for one in self.all if one.sharer is not None]
        self._exchange = RouterExchange(sharers, contestant.tick_seconds, self._chance)
        self._by_number: dict[int, SimulatedRouter] = {}
        self._learns = contestant.learns
        self._holds = contestant.hold.enabled
        self._waiting: dict[Place, Request] = {}
        self._looked_at = 0.0

    def _advance_to(self, now: float) -> None:
        """Does what is due until now, in order of time, so that all routers see the same events."""
        while self._learns and self._looked_at + LOOK_SECONDS <= now:
            self._looked_at += LOOK_SECONDS
            self._exchange.advance_to(self._looked_at)
            for router in self.all:
                router.look(self._looked_at)
        self._exchange.advance_to(now)

    def pick(self, request: Request, now: float) -> int:
        self._advance_to(now)
        if not request.is_own:
            return self._strangers.randrange(len(self.fleet.engines))
        router = self._by_number.get(id(request)) or self._drawn(request)
        number = self.all.index(router)
        served = router.pick(request, now)
        if router.sharer is not None and router.sent_tokens >= LEAST_UNCACHED_TOKENS:
            self._exchange.note_sent(number, now)
        return served

    def _drawn(self, request: Request) -> SimulatedRouter:
        router = self._by_number[id(request)] = self._chance.choice(self.all)
        return router

    def must_wait(self, request: Request, now: float) -> bool:
        """Returns whether a request has to wait for room; `let_in` returns it later."""
        if not self._holds or not request.is_own:
            return False
        self._advance_to(now)
        place = self._drawn(request).place_of(request, now)
        if place is not None and place is not NO_PLACE:
            self._waiting[place] = request
        return place is not None

    def let_in(self, now: float) -> Iterator[tuple[Request, bool]]:
        """Yields the requests whose wait ends now, and whether they go on; else they come again."""
        if not self._holds:
            return
        self._advance_to(now)
        for router in self.all:
            for _, place, outcome in router.hold.step(now):
                yield self._waiting.pop(place), outcome != REFUSED

    def filled(self, now: float) -> float:
        self._advance_to(now)
        return self.all[0].filled(now)

    def over(self, request: Request, now: float) -> None:
        self._advance_to(now)
        if request.is_own:
            self._by_number.pop(id(request)).over(request, now)


class _OneEnvoy:
    """One Envoy without a router. active: its requests under way, by engine."""

    def __init__(self, policy: str, addresses: Sequence[str], chance: Random) -> None:
        self._policy = policy
        self._addresses = addresses
        self._chance = chance
        self._present: Sequence[int] = range(len(addresses))
        self._balancer = self._made()
        self.active = [0] * len(addresses)

    def _made(self) -> Balancer:
        addresses = [self._addresses[number] for number in self._present]
        return balancer_of(self._policy, addresses, self._chance)

    def choose(self, session: str, present: Sequence[int], refuses: int) -> int:
        """Returns the engine for a request, and counts it there.

        present: the engines that count as healthy. refuses: one that refuses connections, -1 if
        none does; Envoy then tries others, as retries with the predicate `previous_hosts` do.
        """
        if present != self._present:
            self._present = present
            self._balancer = self._made()
        active = [self.active[number] for number in present]
        number, attempt = refuses, 0
        while attempt == 0 or (number == refuses and len(present) > 1):
            number = present[self._balancer.choose(session, active, attempt)]
            attempt += 1
        self.active[number] += 1
        return number


class _Envoy:
    """Envoy alone, with one of its own policies; each request comes to a random one of several."""

    def __init__(self, stage: Stage, contestant: Contestant, given: Arrivals, seed: int) -> None:
        self.fleet = stage.fleet()
        self.requests: Sequence[Request] = given.fresh()
        self._lost_at, self._joins_at = stage.lost_at, stage.joins_at
        addresses, chance = _addresses(len(stage.speeds), seed), Random(seed + 5)
        self.all = [
            _OneEnvoy(contestant.policy, addresses, chance) for _ in range(contestant.routers)
        ]
        self._by_number: dict[int, _OneEnvoy] = {}
        self._chance = Random(seed + 6)
        self._strangers = Random(seed + 99)

    def _present(self, now: float) -> Sequence[int]:
        last = len(self.fleet.engines) - (now < self._joins_at)
        return range(int(now >= self._lost_at + UNFIT_SECONDS), last)

    def pick(self, request: Request, now: float) -> int:
        if not request.is_own:
            return self._strangers.randrange(len(self.fleet.engines))
        envoy = self._by_number[id(request)] = self._chance.choice(self.all)
        refuses = int(_LOST) if now >= self._lost_at else -1
        return envoy.choose(request.session, self._present(now), refuses)

    def must_wait(self, _request: Request, _now: float) -> bool:
        return False

    def let_in(self, _now: float) -> Iterator[tuple[Request, bool]]:
        return iter(())

    def filled(self, _: float) -> float:
        return 0.0

    def over(self, request: Request, _now: float) -> None:
        if request.is_own:
            self._by_number.pop(id(request)).active[request.worker] -= 1


def _addresses(engines: int, seed: int) -> Sequence[str]:
    """Returns addresses of engines, on which it depends how evenly a ring divides sessions."""
    chance = Random(seed + 8)
    network, hosts = chance.randrange(256), chance.sample(range(1 << 16), engines)
    return [f"10.{network}.{host >> 8}.{host & 255}:8000" for host in hosts]


class Proxy(Protocol):
    """What sends requests to the engines of a fleet: routers, or Envoy alone.

    requests: those that it sends, in the order in which they were given.
    """

    fleet: ModelledFleet
    requests: Sequence[Request]

    def must_wait(self, request: Request, now: float, /) -> bool:
        """Returns whether a request has to wait; `let_in` returns it later."""

    def let_in(self, now: float, /) -> Iterator[tuple[Request, bool]]:
        """Yields the requests whose wait ends now, and whether they go on; else they come again."""

    def filled(self, now: float, /) -> float:
        """Returns the share of the caches that conversations need; 0 if nobody counts it."""

    def pick(self, request: Request, now: float, /) -> int:
        """Returns the engine that gets a request."""

    def over(self, request: Request, now: float, /) -> None:
        """Notes that the answer to a request has ended."""


def proxy_of(stage: Stage, contestant: Contestant, given: Arrivals, seed: int) -> Proxy:
    """Returns the proxy of a contestant in front of idle engines; seed: of its draws."""
    if contestant.policy in ENVOY:
        return _Envoy(stage, contestant, given, seed)
    return _Routers(stage, contestant, given, seed)


def _notify_nobody(_: int) -> None:
    pass


def run(
    stage: Stage,
    contestant: Contestant,
    given: Arrivals,
    seed: int,
    notify: Callable[[int], None] = _notify_nobody,
) -> Result:
    """Serves the arrivals, and returns the results for our own requests.

    notify: called now and then with how many requests have arrived so far.
    """
    proxy = proxy_of(stage, contestant, given, seed)
    proxy.fleet.run(_counted(proxy.requests, notify), proxy.pick, proxy.over)
    requests = [one for one in proxy.requests if one.is_own]
    return result_of(requests, [engine.computed_tokens for engine in proxy.fleet.engines])


def _counted(requests: Sequence[Request], notify: Callable[[int], None]) -> Iterator[Request]:
    for count, request in enumerate(requests):
        if count % NOTIFY_EVERY == 0:
            notify(count)
        yield request
