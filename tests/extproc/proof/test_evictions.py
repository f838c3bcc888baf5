"""Small caches that evict all the time: right tokens are not doubted, and wrong ones are found."""

from collections import deque
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from extproc.proof.lookups import Lookups
from extproc.proof.state import MATCHED, WITHOUT_EVIDENCE, TokenProof
from extproc.proof.trust import Proofs
from extproc.requests.prompt import CONVERSATION
from kvstate.feeds.feed import FeedState
from kvstate.index.index import Index
from kvstate.overlap import Overlap, Prompt, Tokens
from kvstate.steps import finished
from kvtools.simulator.cache import Holding, PrefixCache, Shape
from kvtools.simulator.dialects import DIALECTS
from kvtools.simulator.hashing import CacheNamespace
from kvtools.simulator.publisher import batch

SIZE, CONVERSATIONS, AT_ONCE, REQUESTS = 16, 60, 4, 600
VLLM = DIALECTS["vllm-0.32"]

Ids = list[int]


class Fleet:
    """One worker's cache as its events show it."""

    def __init__(self) -> None:
        self.index, self.sent = Index(12345678), 0
        self.owner = self.index.add("w", 0, "m")
        self.owner.trusted = True
        self.feeds = self.blocks = self

    def publish(self, cache: PrefixCache) -> None:
        if events := cache.take_events():
            self.sent += 1
            finished(self.owner.applying(batch(0.0, VLLM.layout.encode(events))))

    def state(self, _: str) -> FeedState:
        return FeedState.LIVE

    def batches(self, _: str) -> int:
        return self.sent

    def live_batches(self, _: str) -> int:
        return self.sent

    def is_certain(self, _: str) -> bool:
        return True

    def block_size(self, _: str) -> int | None:
        return self.owner.block_size

    def has_removed(self, _: str) -> bool:
        return self.owner.has_removed

    def watch(self, _: str, slot: int, prompt: Prompt, block_size: int) -> bool:
        return self.owner.watch(slot, prompt, block_size)

    def was_stored(self, _: str, slot: int) -> bool:
        return self.owner.was_stored(slot)

    def overlaps(self, prompt: Prompt) -> dict[str, Overlap]:
        return self.index.overlaps(prompt)


def run(blocks: int, seed: int, here: Callable[[Ids], Ids]) -> tuple[TokenProof, int, bool]:
    """Sends requests of conversations that do not fit into the cache, some at a time.

    here: turns the engine's ids of a prompt into the router's. Returns the state of the tokens, how
    many blocks were removed, and whether the tokens were doubted at any time.
    """
    random, fleet, now = Random(seed), Fleet(), [0.0]
    cache = PrefixCache(Shape(blocks=blocks, block_size=SIZE, habits=VLLM.habits))
    record: Any = SimpleNamespace(proof=TokenProof("w"), lookups=Lookups(), must_tell=True)
    as_fleet: Any = fleet
    proofs = Proofs(as_fleet, {"w": record}, lambda: now[0])
    system = random.choices(range(1, 500), k=40)
    turns = [[*system, *random.choices(range(1, 500), k=50)] for _ in range(CONVERSATIONS)]
    running: deque[tuple[Holding, Any]] = deque()
    was_doubted = False
    for _ in range(REQUESTS):
        ids = random.choice(turns)
        prompt = Prompt("m", Tokens("I", here(ids)))
        sent = proofs.note_sent("w", prompt, CONVERSATION, fleet.overlaps(prompt).get("w"))
        while len(running) >= AT_ONCE or (held := cache.begin(ids, CacheNamespace())) is None:
            ended, its = running.popleft()
            cache.release(ended)
            if its is not None:
                proofs.ended(its)
        running.append((held, sent))
        fleet.publish(cache)
        if len(ids) > 20 * SIZE:
            del ids[90:]
        ids += random.choices(range(1, 500), k=random.randrange(5, 60))
        now[0] += random.choice([0.05, 0.3, 2.0])
        was_doubted |= bool(record.proof.doubted)
    return record.proof, fleet.owner.status["removed_certain"], was_doubted


@pytest.mark.parametrize("blocks", [130, 145, 160])
@pytest.mark.parametrize("seed", range(3))
def test_right_tokens_are_not_doubted_however_much_is_evicted(blocks: int, seed: int) -> None:
    proof, removed, was_doubted = run(blocks, seed, lambda ids: ids)
    assert removed > 10 * blocks
    assert proof.findings[MATCHED] > 50
    assert (proof.findings[WITHOUT_EVIDENCE], was_doubted) == (0, False)


WRONG: dict[str, Callable[[Ids], Ids]] = {
    "another first token": lambda ids: [7, *ids],
    "another token after the system turn": lambda ids: [*ids[:40], 501, *ids[41:]],
    "one token less": lambda ids: [*ids[:40], *ids[41:]],
}


@pytest.mark.parametrize("blocks", [130, 160])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_tokens_are_doubted_in_the_same_caches(blocks: int, wrong: str) -> None:
    proof, removed, was_doubted = run(blocks, 0, WRONG[wrong])
    assert removed > 10 * blocks
    assert (proof.findings[MATCHED], was_doubted) == (0, True)
