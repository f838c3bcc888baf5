"""Engines that announce blocks again which they hold: vLLM's `kv_cache_report_mode: full`.

A client asks for it with a request. Before the blocks that the request adds, the engine then
announces those that it reuses, from the root of the prompt on, as if they were stored.
"""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import product

from hypothesis import example, given
from hypothesis import strategies as st

from kvstate.events import BlockHash, BlocksRemoved, BlocksStored, Event
from kvstate.index.index import Index
from kvstate.overlap import Prompt, Tokens
from tests.kvstate.test_copies import Rule, removed_twice

LENGTH = 3
PROMPTS = list(product((1, 2), repeat=LENGTH))
Prefix = tuple[int, ...]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["serve", "report", "recompute", "evict", "evict", "evict"]),
        st.sampled_from(PROMPTS),
        st.integers(1, LENGTH),
    ),
    min_size=20,
)


def hash_of(prefix: Prefix) -> int:
    return int("".join(map(str, prefix)))


class Engine:
    """The cache of an engine, in blocks of one token; a prefix may have several copies."""

    def __init__(self, rule: Rule) -> None:
        self.held: Counter[Prefix] = Counter()
        self._rule = rule

    def reused(self, prompt: Prefix) -> int:
        """Returns how many leading blocks of a prompt are held."""
        lengths = range(1, len(prompt) + 1)
        return next((n - 1 for n in lengths if not self.held[prompt[:n]]), len(prompt))

    def serve(self, prompt: Prefix) -> Iterator[Event]:
        """Computes what is not held, and at least the last block."""
        yield from self._store(prompt, min(self.reused(prompt), len(prompt) - 1))

    def report(self, prompt: Prefix) -> Iterator[Event]:
        """Serves a prompt whose request asks for a full report."""
        reused = min(self.reused(prompt), len(prompt) - 1)
        if reused:
            yield _stored(prompt[:reused], 0)
        yield from self._store(prompt, reused)

    def recompute(self, prompt: Prefix) -> Iterator[Event]:
        """Serves a prompt without using the cache, as for `prompt_logprobs`."""
        yield from self._store(prompt, 0)

    def evict(self, prefix: Prefix) -> Iterator[Event]:
        """Removes a copy of a block, if it is held."""
        if not self.held[prefix]:
            return
        self.held[prefix] -= 1
        left = self.held[prefix]
        if self._rule is Rule.TOLD:
            yield BlocksRemoved([hash_of(prefix)], remaining_copies=[left])
        elif self._rule is Rule.EACH or not left:
            yield BlocksRemoved([hash_of(prefix)])

    def act(self, what: str, prompt: Prefix, length: int) -> Iterator[Event]:
        acts = {"serve": self.serve, "report": self.report, "recompute": self.recompute}
        return self.evict(prompt[:length]) if what == "evict" else acts[what](prompt[:length])

    def _store(self, prompt: Prefix, reused: int) -> Iterator[Event]:
        self.held.update(prompt[:n] for n in range(reused + 1, len(prompt) + 1))
        yield _stored(prompt, reused)


def _stored(prompt: Prefix, reused: int) -> BlocksStored:
    hashes: list[BlockHash] = [hash_of(prompt[:n]) for n in range(reused + 1, len(prompt) + 1)]
    parent = hash_of(prompt[:reused]) if reused else None
    return BlocksStored(hashes, parent, Tokens("I", prompt[reused:]), 1)


class Followed:
    """An engine, and the rank of an index that follows it."""

    def __init__(self, rule: Rule) -> None:
        self.engine = Engine(rule)
        self.index = Index(12345678)
        self.rank = self.index.add("w", 0, "m")
        self.rank.trusted = True
        if rule is Rule.EACH:
            self.index.apply(self.rank, removed_twice(9))

    def certain(self, prompt: Prefix) -> int:
        """Returns how many leading blocks of a prompt are credited as certain."""
        found = self.index.overlaps(Prompt("m", Tokens("I", [*prompt, 0]))).get("w")
        return sum(found.tiers) if found else 0

    def is_right(self) -> bool:
        return all(self.certain(one) <= self.engine.reused(one) for one in PROMPTS)


@given(
    rule=st.sampled_from(Rule),
    unseen=STEPS,
    steps=STEPS,
    holes=st.sets(st.integers(0, 40), max_size=2),
    chance=st.randoms(use_true_random=False),
)
@example(
    rule=Rule.EACH,
    unseen=[],
    steps=[("serve", (1, 1, 1), 3), ("report", (1, 1, 1), 3), ("evict", (1, 1, 1), 1)],
    holes=set(),
    chance=random.Random(1),
)
@example(  # an orphan is among the blocks that are announced again
    rule=Rule.EACH,
    unseen=[("serve", (1, 1, 1), 1)],
    steps=[
        ("serve", (1, 1, 1), 2),
        ("report", (1, 1, 2), 3),
        ("evict", (1, 1, 1), 2),
    ],
    holes=set(),
    chance=random.Random(1),
)
def test_credit_is_certain_only_for_held_blocks_whatever_is_announced_again(
    *,
    rule: Rule,
    unseen: list[tuple[str, Prefix, int]],
    steps: list[tuple[str, Prefix, int]],
    holes: set[int],
    chance: random.Random,
) -> None:
    followed = Followed(rule)
    for step in unseen:
        list(followed.engine.act(*step))
    for number, step in enumerate(steps):
        events = [*followed.engine.act(*step)]
        if number in holes:
            followed.index.demote(followed.rank)
        else:
            followed.index.apply(followed.rank, events)
        if chance.random() < 0.2:
            followed.index.expire(followed.rank, 100_000)
        assert followed.is_right()
        followed.index.check()


@given(steps=STEPS)
def test_credit_is_exact_where_nothing_is_announced_again(
    *, steps: list[tuple[str, Prefix, int]]
) -> None:
    followed = Followed(Rule.EACH)
    for what, prompt, length in steps:
        is_leaf = not any(followed.engine.held[(*prompt[:length], one)] for one in (1, 2))
        if (what == "evict" and is_leaf) or (what == "serve" and length > 1):
            followed.index.apply(followed.rank, followed.engine.act(what, prompt, length))
        assert all(followed.certain(one) == followed.engine.reused(one) for one in PROMPTS)
