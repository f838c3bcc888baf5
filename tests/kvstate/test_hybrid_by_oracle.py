"""Models with several kinds of attention against a brute-force index, whatever an engine sends."""

from hashlib import blake2b
from itertools import product

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstate.events import BlockHash
from kvstate.index.index import Index
from kvstate.overlap import Prompt, Tokens
from kvstate.reuse import ReuseRules
from kvstate.steps import finished
from tests.kvstate.hybrid_oracle import DEVICE, HybridRank, OtherGroup
from tests.kvstate.oracle import Block
from tests.oracles.plain_index import PlainIndex

SIZE, DEPTH = 2, 6

# Windows of three sizes, and states: with blocks as large as those of full attention, or larger.
GROUPS = (OtherGroup(1, 2, 3), OtherGroup(2, 2, 3), OtherGroup(3, 2, 1), OtherGroup(4, 4, 7))
MODELS = ((), GROUPS[:1], GROUPS[:2], GROUPS[2:3], GROUPS[:3], GROUPS[3:], GROUPS)
KINDS = {1: "mamba", 3: "sliding_window", 7: "sliding_window_mla"}


def _chains() -> list[list[Block]]:
    chains = []
    for fills in product((0, 1), (0, 1), (2,), (2,), (2, 3), (2,)):
        chain: list[Block] = []
        for depth, fill in enumerate(fills, start=1):
            number = int.from_bytes(blake2b(repr(fills[:depth]).encode(), digest_size=8).digest())
            parent = chain[-1] if chain else None
            path = (*(parent.path if parent else ()), ((fill,) * SIZE, ()))
            chain.append(Block(number, parent and parent.block, None, SIZE, path))
        chains.append(chain)
    return chains


CHAINS = _chains()
PROMPTS = [
    Prompt("m", Tokens("I", [t for tokens, _ in chain[-1].path for t in tokens] + [9]))
    for chain in CHAINS
]
chains, depths = st.sampled_from(CHAINS[:1] * 6 + CHAINS), st.integers(0, DEPTH - 1)


def store_event(chain: list[Block], group: OtherGroup | None, named: list[Block]) -> object:
    """What vLLM 0.32 sends for these blocks of a chain; of other groups, only some are named."""
    size = group.block_size if group else SIZE
    tokens = [token for block in chain for token in block.path[-1][0]]
    return {
        "type": "BlockStored",
        "block_hashes": [block.block for block in named],
        "parent_block_hash": chain[0].parent,
        "token_ids": tokens,
        "block_size": size,
        "medium": "GPU",
        "group_idx": group.number if group else DEVICE.group,
        "kv_cache_spec_kind": KINDS[group.reach] if group else "full_attention",
        "kv_cache_spec_sliding_window": group.reach + 1 if group and group.reach > 1 else None,
    }


class HybridMachine(RuleBasedStateMachine):
    make_index: type[Index] = Index

    @initialize(model=st.sampled_from(MODELS), told=st.booleans(), drop=st.integers(0, 1))
    def begin(self, model: tuple[OtherGroup, ...], drop: int, *, told: bool) -> None:
        self.index = self.make_index(12345678)
        self.owner = self.index.add("w", 0, "m")
        self.model, self.announced = model, told
        self.rank = HybridRank("w", drop=drop, announced=told)
        self.owner.trusted = self.rank.trusted = True
        self.owner.note_rules(ReuseRules(told, drop))
        for group in model:
            self._store_ends(CHAINS[0], group, 0, 0)

    @rule(chain=chains, first=depths, length=st.integers(1, DEPTH))
    def store(self, chain: list[Block], first: int, length: int) -> None:
        if first and not self.rank.holds(chain[first - 1].block):
            return
        some = chain[first : first + length]
        may_repeat = not first and self.rank.may_repeat(some, SIZE)
        self._send(store_event(some, None, some))
        self.rank.store(DEVICE, some, may_repeat=may_repeat)

    @rule(chain=chains, data=st.data(), first=depths, length=st.integers(0, DEPTH))
    def store_ends(self, chain: list[Block], data: st.DataObject, first: int, length: int) -> None:
        if self.model:
            self._store_ends(chain, data.draw(st.sampled_from(self.model)), first, length)

    @rule(chain=chains, length=st.integers(1, DEPTH), times=st.integers(1, 3))
    def store_a_prompt(self, chain: list[Block], length: int, times: int) -> None:
        """Every group stores what it has of a new prompt; if it is repeated, maybe no copies."""
        for _ in range(times):
            for group in self.model:
                self._store_ends(chain, group, 0, length)
            self.store(chain, 0, length)

    @rule(chain=chains, depth=depths, left=st.sampled_from((None, None, 0, 1, 2)))
    def remove(self, chain: list[Block], depth: int, left: int | None) -> None:
        self._remove(chain[depth].block, DEVICE.group or 0, left)
        self.rank.remove(DEVICE, chain[depth].block, left)

    @rule(data=st.data(), left=st.sampled_from((None, None, 0, 1, 2)), times=st.integers(1, 2))
    def remove_end(self, data: st.DataObject, left: int | None, times: int) -> None:
        for _ in range(times):
            if not self.rank.ends:
                return
            block, group = data.draw(st.sampled_from(sorted(self.rank.ends, key=repr)))
            assert isinstance(block, int)
            self._remove(block, group, left)
            self.rank.remove_end(block, group, left)

    @rule()
    def restart(self) -> None:
        """The rank is saved, and put into the index of another router."""
        rows: list[bytes] = []
        saved = finished(self.owner.saving(rows))
        self.index = self.make_index(12345678)
        self.owner = self.index.add("w", 0, "m")
        self.owner.note_rules(ReuseRules(self.announced, self.rank.drop))
        assert finished(self.owner.restoring(saved, rows))
        self.owner.trusted = self.rank.trusted

    @rule(how=st.sampled_from(("clear", "demote", "distrust", "trust")))
    def interrupt(self, how: str) -> None:
        if how == "clear":
            self._send({"type": "AllBlocksCleared"})
            self.rank.clear()
        elif how == "demote":
            self.index.demote(self.owner)
            self.rank.demote()
        else:
            self.owner.trusted = self.rank.trusted = how == "trust"

    @invariant()
    def overlaps_are_those_of_the_oracle(self) -> None:
        self.index.check()
        for prompt in PROMPTS:
            assert self.index.overlaps(prompt).get("w") == self.rank.overlap(prompt, SIZE)

    def _store_ends(self, chain: list[Block], group: OtherGroup, first: int, length: int) -> None:
        step = group.block_size // SIZE
        first -= first % step
        some = chain[first : first + length // step * step]
        ends = some[step - 1 :: step]
        sent = chain[first:] if length % 2 or not some else some
        self._send(store_event(sent, group, ends))
        self.rank.store_ends(group, ends, root=not first, whole=sent == some)

    def _remove(self, block: BlockHash, group: int, left: int | None) -> None:
        event = {"type": "BlockRemoved", "block_hashes": [block], "group_idx": group}
        told = {} if left is None else {"remaining_copy_counts": [left]}
        self._send(event | told)

    def _send(self, *events: object) -> None:
        payload = msgspec.msgpack.encode([1.0, events, 0])
        taken = finished(self.owner.applying(payload))
        assert set(taken.faults) <= {"other_attention_group"}


class PlainHybridMachine(HybridMachine):
    make_index = PlainIndex


TestPlainHybridByOracle = pytest.mark.slow(PlainHybridMachine.TestCase)
TestPlainHybridByOracle.settings = settings(stateful_step_count=30)
TestHybridByOracle = HybridMachine.TestCase
TestHybridByOracle.settings = settings(stateful_step_count=30)
