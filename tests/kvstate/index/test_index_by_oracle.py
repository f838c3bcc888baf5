"""The index against a brute-force one, under whatever workers may send."""

from hashlib import blake2b
from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstate.events import (
    AllCleared,
    BlockHash,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
)
from kvstate.index.index import Index
from kvstate.index.owner import Owner
from kvstate.overlap import Extra, Prompt, Tier, Tokens
from kvstate.steps import finished
from tests.kvstate.oracle import Block, Place, Rank, best_overlaps
from tests.oracles.plain_index import PlainIndex

SIZES = {2, 3}
DEPTH = 3
RANKS = (("w1", 0), ("w1", 1), ("w2", 0))
PLACES = (Place("GPU", None), Place("GPU", 1), Place("CPU", None), Place("STORAGE", None))

# Namespaces of the engine's blocks: block size, adapter, what the first block and the others carry
# besides tokens. The first two have the same contents under different hashes.
ROOTS: tuple[tuple[int, str | None, Extra, Extra], ...] = (
    (2, None, (), ()),
    (2, None, (), ()),
    (3, None, (), ()),
    (2, "adapter", (), ()),
    (2, None, ("salt",), ()),
    (3, "adapter", ("salt",), ()),
    (2, None, (), (("image", 0),)),
)


# The blocks of a chain are zeros or ones throughout.
FILLS = ((0, 0, 0), (0, 1, 1), (0, 0, 1))


def _chains() -> list[list[Block]]:
    """The chains of all roots; the hashes of every second root are bytes."""
    chains = []
    for (root, (size, lora, first, later)), fills in product(enumerate(ROOTS), FILLS):
        chain: list[Block] = []
        for depth in range(1, DEPTH + 1):
            name = f"{root}:{fills[:depth]}".encode()
            number = int.from_bytes(blake2b(name, digest_size=8).digest(), "big")
            block: BlockHash = name if root % 2 else number
            content = (fills[depth - 1],) * size, first if depth == 1 else later
            parent = chain[-1] if chain else None
            path = (*parent.path, content) if parent else (content,)
            chain.append(Block(block, parent and parent.block, lora, size, path))
        chains.append(chain)
    return chains


CHAINS = _chains()
BLOCKS = list({block.block: block for chain in CHAINS for block in chain}.values())
PROMPTS = [
    Prompt("m", Tokens("I", [fill for fill in fills for _ in range(size)] + end), lora, salt)
    for size in SIZES
    for fills, end in ((FILLS[0], []), *((fills, [9]) for fills in FILLS))
    for lora in (None, "adapter")
    for salt in (None, "salt")
]

# Mostly the first ones, so that they often coincide.
ranks = st.sampled_from((0, 0, 0, 0, 1, 2))
places = st.sampled_from(PLACES[:1] * 5 + PLACES)
chains = st.sampled_from(CHAINS[: 2 * len(FILLS)] * 3 + CHAINS)


def stored(place: Place, chain: list[Block]) -> BlocksStored:
    """The event that stores these blocks."""
    contents = [block.path[-1] for block in chain]
    return BlocksStored(
        hashes=[block.block for block in chain],
        parent=chain[0].parent,
        tokens=Tokens("I", [token for tokens, _ in contents for token in tokens]),
        block_size=chain[0].size,
        lora=chain[0].lora,
        extras=[extra for _, extra in contents],
        medium=place.medium,
        group=place.group,
    )


class IndexMachine(RuleBasedStateMachine):
    make_index: type[Index] = Index

    def __init__(self) -> None:
        super().__init__()
        self.index = self.make_index(12345678)
        self.owners: list[Owner] = []
        self.ranks: list[Rank] = []
        for worker, number in RANKS:
            self.owners.append(self.index.add(worker, number, "m"))
            self.ranks.append(Rank(worker, number))
        for owner, rank in zip(self.owners, self.ranks, strict=True):
            owner.trusted = rank.trusted = True

    @rule(
        rank=ranks,
        place=places,
        chain=chains,
        first=st.integers(0, DEPTH - 1),
        length=st.integers(1, DEPTH),
        times=st.integers(1, 3),
    )
    def store(
        self, rank: int, place: Place, chain: list[Block], first: int, length: int, times: int
    ) -> None:
        for _ in range(times):
            self._store(rank, place, chain[first : first + length])

    @rule(rank=ranks, place=places, chain=chains)
    def store_children_first(self, rank: int, place: Place, chain: list[Block]) -> None:
        for block in reversed(chain):
            self._store(rank, place, [block])

    @rule(rank=ranks, place=places, chain=chains, fill=st.integers(2, 3))
    def store_a_leaf_with_other_tokens(
        self, rank: int, place: Place, chain: list[Block], fill: int
    ) -> None:
        leaf = chain[-1]
        other = leaf._replace(path=(*leaf.path[:-1], ((fill,) * leaf.size, ())))
        elsewhere = [
            copy
            for copy in self.ranks[rank].copies
            if copy.held.block == leaf.block and copy.place != place
        ]
        waiting = [block for _, block in self.ranks[rank].orphans if block.block == leaf.block]
        if not elsewhere and not waiting and self._holds(rank, chain[-2]):
            self._store(rank, place, [other])

    @rule(rank=ranks, place=places, blocks=st.lists(st.sampled_from(BLOCKS), max_size=4))
    def remove_any(self, rank: int, place: Place, blocks: list[Block]) -> None:
        self._remove(rank, place, [block.block for block in blocks])

    @rule(rank=ranks, data=st.data(), times=st.integers(1, 3))
    def remove_held(self, rank: int, data: st.DataObject, times: int) -> None:
        copies = [(copy.place, copy.held.block) for copy in self.ranks[rank].copies]
        copies += [(place, block.block) for place, block in self.ranks[rank].orphans]
        if copies:
            for place, block in data.draw(st.lists(st.sampled_from(copies), max_size=3)):
                self._remove(rank, place, [block] * times)

    @rule(rank=ranks, data=st.data(), left=st.integers(0, 3))
    def remove_held_and_tell_what_is_left(self, rank: int, data: st.DataObject, left: int) -> None:
        copies = [(copy.place, copy.held.block) for copy in self.ranks[rank].copies]
        if copies:
            place, block = data.draw(st.sampled_from(copies))
            self._remove(rank, place, [block], left)

    @rule(rank=ranks, place=places, data=st.data(), times=st.integers(1, 2))
    def copy(self, rank: int, place: Place, data: st.DataObject, times: int) -> None:
        held = [copy.held for copy in self.ranks[rank].copies]
        meant = [block for block in held * 5 + BLOCKS if not self._has_two_meanings(rank, block)]
        blocks = data.draw(st.lists(st.sampled_from(meant), max_size=3)) * times
        hashes = [block.block for block in blocks]
        event = BlocksCopied(hashes, place.medium, place.group)
        self.index.apply(self.owners[rank], [event])
        for block in hashes:
            self.ranks[rank].copy(place, block)

    @rule(rank=ranks)
    def clear(self, rank: int) -> None:
        self.index.apply(self.owners[rank], [AllCleared()])
        self.ranks[rank].clear()

    @rule(rank=ranks, slots=st.sampled_from((1, 7, 100_000)))
    def expire(self, rank: int, slots: int) -> None:
        while not self.index.expire(self.owners[rank], slots):
            self.index.check()
        self.ranks[rank].expire()

    @rule(rank=ranks)
    def demote(self, rank: int) -> None:
        self.index.demote(self.owners[rank])
        self.ranks[rank].demote()

    @rule(rank=ranks, chain=chains, first=st.integers(0, DEPTH - 1))
    def store_partly_again_after_a_hole(self, rank: int, chain: list[Block], first: int) -> None:
        self._store(rank, PLACES[0], chain)
        self.demote(rank)
        self._store(rank, PLACES[0], chain[: first + 1])

    @rule(rank=ranks, trusted=st.booleans())
    def trust(self, rank: int, *, trusted: bool) -> None:
        self.owners[rank].trusted = self.ranks[rank].trusted = trusted

    @rule(rank=ranks)
    def replace_rank(self, rank: int) -> None:
        worker, number = RANKS[rank]
        self.index.remove(self.owners[rank])
        self.owners[rank] = self.index.add(worker, number, "m")
        self.ranks[rank] = Rank(worker, number)

    @rule(rank=ranks)
    def save_and_restore(self, rank: int) -> None:
        worker, number = RANKS[rank]
        before, rows = self.owners[rank], list[bytes]()
        saved = finished(before.saving(rows))
        self.index.remove(before)
        owner = self.owners[rank] = self.index.add(worker, number, "m")
        assert finished(owner.restoring(saved, rows))
        owner.trusted = self.ranks[rank].trusted
        self.ranks[rank].orphans.clear()  # their tokens are not saved

    @invariant()
    def index_is_consistent(self) -> None:
        self.index.check()
        for owner, rank in zip(self.owners, self.ranks, strict=True):
            held = {(copy.place, copy.held.block, copy.certain) for copy in rank.copies}
            assert owner.blocks == len(held)
            assert len(owner.orphans) == len({(place, each.block) for place, each in rank.orphans})

    @invariant()
    def overlaps_are_those_of_the_oracle(self) -> None:
        for prompt in PROMPTS:
            expected = best_overlaps(self.ranks, prompt, SIZES)
            found = self.index.overlaps(prompt)
            assert found.keys() == expected.keys(), prompt
            assert all(found[worker] in expected[worker] for worker in found), prompt

    @invariant()
    def tokens_on_a_tier_are_those_of_the_oracle(self) -> None:
        for prompt in PROMPTS:
            for tier in Tier:
                expected: dict[str, int] = {}
                for rank in self.ranks:
                    tokens = max(rank.tokens_on(prompt, size, tier) for size in SIZES)
                    if tokens > expected.get(rank.worker, 0):
                        expected[rank.worker] = tokens
                assert self.index.tokens_on(prompt, tier) == expected

    def teardown(self) -> None:
        for owner in self.owners:
            self.index.remove(owner)
        self.index.check()

    def _store(self, rank: int, place: Place, chain: list[Block]) -> None:
        self.index.apply(self.owners[rank], [stored(place, chain)])
        self.ranks[rank].store(place, chain)

    def _remove(
        self, rank: int, place: Place, blocks: list[BlockHash], left: int | None = None
    ) -> None:
        told = None if left is None else [left] * len(blocks)
        event = BlocksRemoved(blocks, place.medium, place.group, told)
        self.index.apply(self.owners[rank], [event])
        for block in blocks:
            self.ranks[rank].remove(place, block, left)

    def _has_two_meanings(self, rank: int, block: Block) -> bool:
        """Whether one hash stands for two contents here: then nobody can say which a copy holds."""
        paths = {copy.held.path for copy in self.ranks[rank].copies if copy.held[0] == block[0]}
        return len(paths) > 1

    def _holds(self, rank: int, block: Block) -> bool:
        return any(copy.held.block == block.block for copy in self.ranks[rank].copies)


class PlainIndexMachine(IndexMachine):
    make_index = PlainIndex


# Forty steps per example; the compiled core gets half as many examples as the plain one, which need
# 40 s of CPU if they are thorough: a busy machine takes minutes.
patiently = pytest.mark.timeout(1200)
TestPlainIndexByOracle = pytest.mark.slow(patiently(PlainIndexMachine.TestCase))
TestPlainIndexByOracle.settings = settings(stateful_step_count=40)
TestIndexByOracle = patiently(IndexMachine.TestCase)
TestIndexByOracle.settings = settings(
    stateful_step_count=40, max_examples=settings().max_examples // 2
)
