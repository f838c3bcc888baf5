"""What it gains to follow what a hybrid model's engines can reuse, not what they hold.

python benchmarks/routing_hybrids.py [--quick | --smoke] [--json FILE]
"""

import itertools
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from random import Random
from typing import NamedTuple

from measure import Figure, Goal, Row
from rows import arguments, run

from extproc.requests.request import PLAIN_REQUEST
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.decide import decide
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.loads import Load
from kvstate.events import BlockHash, BlocksRemoved, BlocksStored, Event, OtherGroupStored
from kvstate.index.index import Index
from kvstate.overlap import Overlap, Prompt, Tokens
from kvstate.reuse import ReuseRules

METHOD = """\
How: eight engines as vLLM 0.32 caches hybrid models: blocks of 64 tokens in one pool for all
groups, least recently used out first. Full attention keeps all blocks. Windows: five groups of
1,024 tokens keep the last ones of each chunk of 2,048 tokens, prompt and answer, and free them when
the window moves on. States: three groups keep one block at the end of each prompt and answer. What
is not reused is stored anew. Their events go through the router's own index, and its own decide()
picks by policy cost; an engine computes 12,000 prompt tokens a second. Held: what full attention
holds counts, as before. Usable: what all groups allow. Same arrivals for all; ratios are paired by
seed.
"""

BLOCK = 64
FULL, OTHERS = 0, 1
ENGINES = 8
POOL_BLOCKS = 4_000
TOKENS_PER_SECOND = 12_000.0


class Model(NamedTuple):
    """The groups of a model beside full attention, which are alike.

    reach: tokens that they need before the end of a prefix. groups: how many there are.
    chunk_blocks: at whose ends they are stored while a prompt is computed.
    """

    reach: int
    groups: int
    chunk_blocks: int

    @property
    def need(self) -> int:
        """How many blocks they need."""
        return (self.reach - 1) // BLOCK + 1


GEMMA = Model(1_023, 5, 2_048 // BLOCK)
QWEN = Model(1, 3, 1_000_000)


class _Copy(NamedTuple):
    """A block in an engine's pool; the other groups have one each."""

    group: int
    block: int
    serial: int


class Arrival(NamedTuple):
    """A request: the blocks of its prompt, equal where prefixes are, and those of its answer."""

    at: float
    prompt: Sequence[int]
    answer: Sequence[int]


class HybridEngine:
    """The cache of one engine, and when it has computed what it was sent.

    announce: is called with its events.
    """

    def __init__(self, model: Model, announce: Callable[[list[Event]], object]) -> None:
        self._model = model
        self._announce = announce
        self._pool: OrderedDict[_Copy, None] = OrderedDict()  # the oldest first
        self._copies: dict[tuple[int, int], list[_Copy]] = {}
        self._serials = itertools.count()
        self._used = 0
        self.free_at = 0.0

    def serve(self, arrival: Arrival) -> int:
        """Serves a request; returns how many of its prompt's blocks were reused.

        What is not reused is computed and stored anew, also where there is a copy of it.
        """
        prompt, whole = arrival.prompt, [*arrival.prompt, *arrival.answer]
        reused = self._reusable(prompt)
        for block in reversed(whole[:reused]):  # the last blocks are evicted first
            self._use(FULL, block)
        step = self._model.chunk_blocks
        chunks = range(reused + step, len(prompt), step)
        # windows are freed as soon as they have moved on
        events: list[Event] = [self._store_others(whole[:end]) for end in (*chunks, len(prompt))]
        for block in reversed(whole[reused:]):
            self._store(FULL, block)
        events.append(_full(whole[reused:], whole[reused - 1] if reused else None))
        events.append(self._store_others(whole))
        self._announce([*self._evict(), *events])
        return reused

    def _store_others(self, blocks: Sequence[int]) -> OtherGroupStored:
        last = blocks[-self._model.need :]
        for block in reversed(last):
            self._store(OTHERS, block)
        return OtherGroupStored(OTHERS, list(last), BLOCK, self._model.reach, is_sparse=True)

    def _reusable(self, prompt: Sequence[int]) -> int:
        held = next(
            (at for at, block in enumerate(prompt[:-1]) if (FULL, block) not in self._copies),
            len(prompt) - 1,
        )
        need = self._model.need
        for end in range(held, 0, -1):
            if all((OTHERS, block) in self._copies for block in prompt[max(0, end - need) : end]):
                return end
        return 0

    def _blocks_of(self, copy: _Copy) -> int:
        return self._model.groups if copy.group == OTHERS else 1

    def _store(self, group: int, block: int) -> None:
        copy = _Copy(group, block, next(self._serials))
        self._pool[copy] = None
        self._copies.setdefault((group, block), []).append(copy)
        self._used += self._blocks_of(copy)

    def _use(self, group: int, block: int) -> None:
        self._pool.move_to_end(self._copies[group, block][0])

    def _evict(self) -> Iterator[Event]:
        while self._used > POOL_BLOCKS:
            copy, _ = self._pool.popitem(last=False)
            self._used -= self._blocks_of(copy)
            left = self._copies[copy.group, copy.block]
            left.remove(copy)
            if not left:
                del self._copies[copy.group, copy.block]
            yield BlocksRemoved([copy.block], group=copy.group)


def _tokens(blocks: Sequence[int]) -> Tokens:
    return Tokens("I", [block for block in blocks for _ in range(BLOCK)])


def _full(blocks: Sequence[int], parent: int | None) -> BlocksStored:
    hashes: list[BlockHash] = list(blocks)
    return BlocksStored(hashes, parent, _tokens(blocks), BLOCK, group=FULL, kind="full_attention")


class Fleet:
    """Engines behind a router. follows: whether it follows what they can reuse."""

    def __init__(self, model: Model, policy: str, *, follows: bool) -> None:
        self._policy, self._follows = policy, follows
        self._index = Index(12345678)
        self._engines: list[HybridEngine] = []
        self._workers = [Candidate(str(number), str(number)) for number in range(ENGINES)]
        self._now = 0.0
        self._turn = itertools.count()
        self._rng = Random(1)
        self._in_flight: list[list[float]] = [[] for _ in range(ENGINES)]
        for number in range(ENGINES):
            owner = self._index.add(str(number), 0, "m")
            owner.trusted = True
            owner.note_rules(ReuseRules(announces_copies=True))
            self._engines.append(HybridEngine(model, partial(self._index.apply, owner)))

    def run(self, arrivals: Sequence[Arrival]) -> tuple[float, float]:
        """Returns the share of prompt tokens that were reused, and the mean wait in seconds."""
        reused, waits = 0, []
        for arrival in arrivals:
            self._now = arrival.at
            number = self._pick(arrival)
            engine = self._engines[number]
            hit = engine.serve(arrival)
            reused += hit
            computed = (len(arrival.prompt) - hit) * BLOCK / TOKENS_PER_SECOND
            engine.free_at = max(engine.free_at, arrival.at) + computed
            waits.append(engine.free_at - arrival.at)
            self._in_flight[number].append(engine.free_at + 0.03 * BLOCK * len(arrival.answer))
        total = sum(len(arrival.prompt) for arrival in arrivals)
        return reused / total, statistics.fmean(waits)

    def _pick(self, arrival: Arrival) -> int:
        prompt = Prompt("m", _tokens(arrival.prompt))
        held: Mapping[str, Overlap] = self._index.overlaps(prompt)
        if not self._follows:
            held = {name: _all_of(overlap) for name, overlap in held.items()}
        snapshot = Snapshot(self._workers, [held], self._load, self._policy, next(self._turn))
        decision = decide(PLAIN_REQUEST, Query("m", [prompt]), snapshot, self._now, self._rng)
        return int(decision.pick[0])

    def _load(self, endpoint: str, now: float) -> Load:
        number = int(endpoint)
        self._in_flight[number] = [end for end in self._in_flight[number] if end > now]
        backlog = max(0.0, self._engines[number].free_at - now) * TOKENS_PER_SECOND
        return Load(len(self._in_flight[number]), backlog)


def _all_of(overlap: Overlap) -> Overlap:
    return Overlap(overlap.block_size, (overlap.held_tokens // overlap.block_size, 0, 0, 0))


Workload = Callable[[Random, int], list[Arrival]]


def _blocks(numbers: Iterator[int], tokens: float) -> list[int]:
    return list(itertools.islice(numbers, max(1, round(tokens / BLOCK))))


def chats(rng: Random, count: int) -> list[Arrival]:
    """Conversations behind forty system prompts of 3,000 tokens."""
    numbers = itertools.count(1)
    systems = [_blocks(numbers, 3_000) for _ in range(40)]
    made: list[Arrival] = []
    begins = 0.0
    while len(made) < count:
        begins += rng.expovariate(2.5)
        at, history = begins, rng.choice(systems)
        for _ in range(rng.randint(1, 6)):
            history = history + _blocks(numbers, rng.lognormvariate(5.8, 0.8))
            answer = _blocks(numbers, rng.lognormvariate(5.6, 0.7))
            made.append(Arrival(at, history, answer))
            history = history + answer
            at += 5 + rng.expovariate(1 / 15)
    return sorted(made, key=lambda one: one.at)[:count]


def branches(rng: Random, count: int) -> list[Arrival]:
    """Questions about documents of 8,000 tokens, and others about some beginning of them."""
    numbers = itertools.count(1)
    documents = [_blocks(numbers, 8_000) for _ in range(30)]
    made, at = list[Arrival](), 0.0
    for _ in range(count):
        at += rng.expovariate(6.0)
        document = rng.choice(documents)
        cut = len(document) if rng.random() < 0.6 else rng.choice((40, 80, 100))
        prompt = document[:cut] + _blocks(numbers, 300)
        made.append(Arrival(at, prompt, _blocks(numbers, 250)))
    return made


CELLS: Mapping[str, tuple[Model, Workload]] = {
    "windows, chats": (GEMMA, chats),
    "windows, branches": (GEMMA, branches),
    "states, chats": (QWEN, chats),
}
CONTESTANTS = {"usable": ("cost", True), "held": ("cost", False), "random": ("random", True)}


def compare(name: str, seeds: int, count: int) -> Iterator[Row]:
    """Yields the rows of one cell."""
    model, workload = CELLS[name]
    results: dict[str, list[tuple[float, float]]] = {one: [] for one in CONTESTANTS}
    for seed in range(seeds):
        arrivals = workload(Random(seed), count)
        for contestant, (policy, follows) in CONTESTANTS.items():
            results[contestant].append(Fleet(model, policy, follows=follows).run(arrivals))
    for place, what in enumerate(("share reused", "mean wait")):
        columns = {one: [each[place] for each in found] for one, found in results.items()}
        means = {one: round(statistics.fmean(column), 3) for one, column in columns.items()}
        print(f"{name}: {what}: {means}", flush=True)
        goal = Goal(0.98, ">= 0.98", at_least=True) if place == 0 else Goal(1.02, "<= 1.02")
        yield Row(f"{name}: {what}, usable / held", *_pair(columns), goal)


def _pair(columns: Mapping[str, Sequence[float]]) -> tuple[Figure, Figure]:
    return Figure(columns["usable"]), Figure(columns["held"])


def main() -> None:
    """Runs all cells."""
    with run(arguments(METHOD, "two seeds, and half as many requests"), METHOD) as one:
        seeds, count = one.amount(1, 2, 5), one.amount(150, 1_500, 3_000)
        for name in CELLS:
            one.add(compare(name, seeds, count))


if __name__ == "__main__":
    main()
