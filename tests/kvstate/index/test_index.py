import msgspec
import pytest
from msgspec.structs import replace

from kvstate.events import (
    AllCleared,
    BatchResult,
    BlockHash,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
    Event,
    EventBatch,
)
from kvstate.index.owner import BYTES_PER_BLOCK, MAX_NUMBERED_ADAPTERS, IndexLimits
from kvstate.overlap import Extra, Overlap, Prompt, Tokens
from kvstate.steps import finished
from tests.kvstate.cores import new_index
from tests.kvstate.small_index import an_index, prompt, stored, tiers

LOST = "an event that may have been a removal could not be read"


def test_overlap_ends_at_the_first_missing_block() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([1, 2, 3], [1, 1, 2, 2, 3, 3])])
    assert index.overlaps(prompt(1, 1, 2, 2, 9)) == {"w": Overlap(2, (2, 0, 0, 0))}
    index.apply(owner, [BlocksRemoved([2])])
    assert tiers(index, prompt(1, 1, 2, 2, 3, 3, 9)) == (1, 0, 0, 0)
    assert index.overlaps(prompt(2, 2, 9)) == {}
    index.check()


def test_last_token_is_always_computed() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([1, 2], [1, 1, 2, 2])])
    assert tiers(index, prompt(1, 1, 2, 2)) == (1, 0, 0, 0)
    assert index.overlaps(prompt(1, 1)) == {}
    assert index.overlaps(prompt()) == {}


def test_block_counts_at_its_best_tier() -> None:
    index, owner = an_index()
    index.apply(owner, [BlocksRemoved([9], medium) for medium in ("CPU", "EXTERNAL")])
    index.apply(owner, [stored([1, 2, 3], [1, 2, 3], medium="CPU"), stored([1], [1])])
    index.apply(owner, [stored([4], [4], 3, medium="EXTERNAL")])
    assert tiers(index, prompt(1, 2, 3, 4, 9)) == (1, 2, 0, 1)
    assert index.blocks_by_tier("w") == (1, 3, 0, 1)
    assert index.blocks_by_tier("other") == (0, 0, 0, 0)


def test_adapters_and_salts_separate_chains() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([1], [1], lora="a"), stored([2], [1], extras=[("s",)])])
    index.apply(owner, [stored([3], [1], lora=7)])
    assert index.overlaps(prompt(1, 9)) == {}
    assert tiers(index, prompt(1, 9, lora="a")) == (1, 0, 0, 0)
    assert tiers(index, prompt(1, 9, salt="s")) == (1, 0, 0, 0)
    assert index.overlaps(prompt(1, 9, lora="7")) == {}


def test_models_separate_chains() -> None:
    index, _ = an_index()
    other = index.add("x", 0, "other")
    index.apply(other, [stored([1], [1])])
    assert index.overlaps(prompt(1, 9)) == {}
    assert index.overlaps(Prompt("other", Tokens("I", [1, 9]))) == {"x": Overlap(1, uncertain=1)}


def test_overlap_of_a_worker_is_that_of_its_best_rank() -> None:
    index, first = an_index()
    second, third = index.add("w", 1, "m"), index.add("w", 2, "m")
    second.trusted = third.trusted = True
    index.apply(first, [stored([1], [1])])
    index.apply(second, [stored([1, 2], [1, 2])])
    index.apply(third, [stored([1], [1])])
    assert tiers(index, prompt(1, 2, 9)) == (2, 0, 0, 0)


def test_block_sizes_are_looked_up_separately() -> None:
    index, owner = an_index()
    events: list[Event] = [stored([1], [1, 1]), stored([2], [1, 1, 1])]
    finished(owner.applying(EventBatch(1.0, events)))
    assert index.overlaps(prompt(1, 1, 1, 9))["w"] == Overlap(3, (1, 0, 0, 0))
    assert owner.block_size == 3


def test_untrusted_rank_has_only_uncertain_blocks() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([1, 2], [1, 2])])
    owner.trusted = False
    assert index.overlaps(prompt(1, 2, 9)) == {"w": Overlap(1, uncertain=2)}


def test_demoted_blocks_are_uncertain_until_they_are_stored_again() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([1, 2], [1, 2])])
    index.demote(owner)
    assert index.overlaps(prompt(1, 2, 9)) == {"w": Overlap(1, uncertain=2)}
    index.apply(owner, [stored([1], [1])])
    assert index.overlaps(prompt(1, 2, 9)) == {"w": Overlap(1, (1, 0, 0, 0), uncertain=1)}
    index.check()


def test_child_of_an_uncertain_block_is_uncertain() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([1], [1])])
    index.demote(owner)
    index.apply(owner, [stored([2], [2], 1)])
    assert index.overlaps(prompt(1, 2, 9)) == {"w": Overlap(1, uncertain=2)}


def test_certain_block_behind_an_uncertain_one_counts_as_uncertain() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([1], [1])])
    index.demote(owner)
    index.apply(owner, [stored([1, 2], [1, 2]), BlocksRemoved([1])])
    index.apply(owner, [stored([7], [7]), stored([1], [1], medium="CPU")])
    index.demote(owner)
    index.apply(owner, [stored([8, 9], [1, 2]), BlocksRemoved([8])])
    assert index.overlaps(prompt(1, 2, 9)) == {"w": Overlap(1, uncertain=2)}


def test_blocks_are_bounded() -> None:
    index, owner = an_index(IndexLimits(bytes=2 * BYTES_PER_BLOCK))
    index.apply(owner, [stored([1, 2], [1, 2]), stored([3], [3])])
    assert (owner.blocks, owner.counts["over_limit"]) == (2, 1)


def test_removal_drops_the_certain_copy_first() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([1, 2], [1, 2])])
    index.demote(owner)
    index.apply(owner, [stored([1], [1]), BlocksRemoved([1])])
    assert index.overlaps(prompt(1, 9)) == {}
    index.apply(owner, [BlocksRemoved([2])])
    assert owner.blocks == 0


def test_cleared_rank_holds_nothing_and_has_no_layout() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([1], [1], extras=[("s",)])])
    index.clear(owner)
    assert (owner.blocks, owner.names_salts) == (0, None)
    assert index.overlaps(prompt(1, 9, salt="s")) == {}


def test_removed_rank_leaves_nothing_to_the_next_one() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([1], [1])])
    index.remove(owner)
    heir = index.add("heir", 0, "m")
    assert heir.number == owner.number
    assert index.overlaps(prompt(1, 9)) == {}


def test_workers_may_be_more_than_64() -> None:
    index, _ = an_index()
    owners = [index.add(f"w{number}", 0, "m") for number in range(100)]
    index.apply(owners[99], [stored([1], [1])])
    assert index.overlaps(prompt(1, 9)).keys() == {"w99"}


def test_overlap_names_the_rank_that_holds_most() -> None:
    index, owner = an_index()
    ranks = [owner, index.add("w", 1, "m"), index.add("w", 2, "m")]
    for rank, count in zip(ranks, (2, 3, 1), strict=True):
        rank.trusted = True
        blocks = range(1, count + 1)
        index.apply(rank, [stored([*blocks], [*blocks])])
    assert index.overlaps(prompt(1, 2, 3, 9)) == {"w": Overlap(1, (3, 0, 0, 0), rank=1)}
    index.remove(ranks[1])
    assert index.overlaps(prompt(1, 2, 3, 9)) == {"w": Overlap(1, (2, 0, 0, 0), rank=0)}


def test_number_of_a_removed_worker_is_reused() -> None:
    index, owner = an_index()
    other = index.add("x", 0, "m")
    index.apply(other, [stored([1], [1])])
    index.remove(owner)
    for name in ("y", "z"):
        index.apply(index.add(name, 0, "m"), [stored([1], [1])])
    assert index.overlaps(prompt(1, 9)).keys() == {"x", "y", "z"}
    assert index.overlaps(Prompt("nobody's", Tokens("I", [1, 9]))) == {}


def test_memory_is_positive() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([1], [1])])
    assert index.memory() > 0


@pytest.mark.parametrize("extra", [None, [["a"]]])
def test_message_is_applied_on_either_path(extra: object) -> None:
    index, owner = an_index()
    event: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
    }
    event |= {"token_ids": [1], "block_size": 1, "lora_id": None, "medium": "GPU"}
    event |= {"lora_name": None, "extra_keys": extra}
    applied = finished(owner.applying(msgspec.msgpack.encode([1.0, [event], 0])))
    assert applied == BatchResult()
    assert tiers(index, prompt(1, 9, salt="a" if extra else None)) == (1, 0, 0, 0)


def test_message_continues_typed_at_an_unknown_parent() -> None:
    index, owner = an_index()
    chain = [
        ["BlockStored", [1], None, [1], 1, None],
        ["BlockStored", [3], 2, [3], 1, None],
        ["BlockStored", [2], 1, [2], 1, None],
    ]
    assert finished(owner.applying(msgspec.msgpack.encode([1.0, chain]))) == BatchResult()
    assert tiers(index, prompt(1, 2, 3, 9)) == (3, 0, 0, 0)


def test_message_with_a_lost_removal_makes_earlier_blocks_uncertain() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([1], [1])])
    payload = msgspec.msgpack.encode([1.0, [["BlockRemoved", "all"]]])
    assert finished(owner.applying(payload)) == BatchResult(missed=LOST, faults=("bad_hash",))
    assert index.overlaps(prompt(1, 9)) == {"w": Overlap(1, uncertain=1)}


def test_message_with_a_clear_is_marked() -> None:
    _, owner = an_index()
    assert finished(owner.applying(msgspec.msgpack.encode([1.0, [["AllBlocksCleared"]]]))).clears


def test_decoded_batch_is_applied_like_its_message() -> None:
    index, owner = an_index()
    batch = EventBatch(1.0, [stored([1], [1])], faults=("bad_hash",), removal_lost=True)
    assert finished(owner.applying(batch)) == BatchResult(missed=LOST, faults=("bad_hash",))
    assert index.overlaps(prompt(1, 9)) == {"w": Overlap(1, uncertain=1)}
    assert finished(owner.applying(EventBatch(2.0, [AllCleared()]))).clears


def bigrams(hashes: list[BlockHash], ids: list[int], salt: tuple[str, ...] = ()) -> BlocksStored:
    """A chain from a prompt's start as SGLang stores it with EAGLE."""
    seconds, pages = ids[1:], len(hashes)
    extras: list[Extra] = [(ids[0], *salt), *[()] * (pages - 1)]
    tokens, size = Tokens("I", seconds), len(seconds) // pages
    return BlocksStored(hashes, None, tokens, size, extras=extras, bigrams=True)


def test_bigram_pages_count_for_prompts_two_tokens_longer() -> None:
    index, owner = an_index()
    index.apply(owner, [bigrams([1, 2], [1, 2, 3, 4, 5])])
    by_length = [tiers(index, prompt(*range(1, end))) for end in range(1, 8)]
    assert [found[0] for found in by_length] == [0, 0, 0, 0, 1, 1, 2]
    assert index.overlaps(prompt(7, 2, 3, 4, 5, 6)) == {}
    assert index.overlaps(prompt()) == {}


def test_bigram_pages_are_separated_by_salt() -> None:
    index, owner = an_index()
    index.apply(owner, [bigrams([1], [1, 2, 3], ("salt",))])
    assert index.overlaps(prompt(1, 2, 3, 4)) == {}
    assert tiers(index, prompt(1, 2, 3, 4, salt="salt")) == (1, 0, 0, 0)


def test_overlap_is_that_of_the_better_page_kind() -> None:
    index, owner = an_index()
    other = index.add("x", 0, "m")
    other.trusted = True
    index.apply(owner, [bigrams([1], [1, 2, 3]), stored([2], [1, 2, 3])])
    index.apply(other, [bigrams([1], [1, 2, 3]), stored([2], [1])])
    found = index.overlaps(prompt(1, 2, 3, 4))
    assert found == {"w": Overlap(3, (1, 0, 0, 0)), "x": Overlap(2, (1, 0, 0, 0))}


def test_worker_keeps_its_number_while_a_rank_is_left() -> None:
    index, owner = an_index()
    other = index.add("w", 1, "m")
    index.apply(other, [stored([1], [1])])
    index.remove(owner)
    assert index.overlaps(prompt(1, 9)).keys() == {"w"}


def test_worker_that_is_added_again_before_it_is_removed_keeps_its_new_ranks() -> None:
    index, first = an_index()
    before = [first, index.add("w", 1, "m")]
    after = [index.add("w", rank, "m") for rank in range(2)]
    index.apply(after[1], [stored([1], [1])])
    for owner in before:
        index.remove(owner)
    assert index.overlaps(prompt(1, 9)) == {"w": Overlap(1, uncertain=1, rank=1)}
    for owner in after:
        index.remove(owner)
    assert index.overlaps(prompt(1, 9)) == {}


def test_overlap_without_a_named_rank_is_certain_for_common_blocks_only() -> None:
    index, first = an_index()
    second = index.add("w", 1, "m")
    alone = index.add("x", 0, "m")
    second.trusted = alone.trusted = True
    for owner in (second, alone):
        index.apply(owner, [stored([1, 2, 3], [1, 2, 3])])

    def found() -> dict[str, Overlap]:
        return index.overlaps(prompt(1, 2, 3, 9), names_ranks=False)

    assert found() == {"w": Overlap(1, uncertain=3, rank=1), "x": Overlap(1, (3, 0, 0, 0))}
    index.apply(first, [stored([1], [1])])
    assert found()["w"] == Overlap(1, (1, 0, 0, 0), 2, rank=1)
    assert index.overlaps(prompt(1, 2, 3, 9))["w"] == Overlap(1, (3, 0, 0, 0), rank=1)
    assert index.overlap_of_rank("w", 0, prompt(1, 2, 3, 9)) == Overlap(1, (1, 0, 0, 0))
    assert index.overlap_of_rank("w", 2, prompt(1, 2, 3, 9)) is None
    index.remove(first)
    assert found()["w"] == Overlap(1, (3, 0, 0, 0), rank=1)


def test_message_behind_orphans_attaches_them() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([2], [2], 1)])
    payload = msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [1], 1, None]]])
    finished(owner.applying(payload))
    assert tiers(index, prompt(1, 2, 9)) == (2, 0, 0, 0)


@pytest.mark.parametrize("medium", ["CPU", "STORAGE", "EXTERNAL"])
def test_medium_without_removals_is_never_certain(medium: str) -> None:
    index, owner = an_index()
    index.apply(owner, [stored([1, 2], [1, 2]), stored([1, 2, 3], [1, 2, 3], medium=medium)])
    assert index.overlaps(prompt(1, 2, 3, 9)) == {"w": Overlap(1, (2, 0, 0, 0), uncertain=1)}
    index.apply(owner, [BlocksRemoved([1, 2])])
    assert index.overlaps(prompt(1, 2, 3, 9)) == {"w": Overlap(1, uncertain=3)}
    assert (owner.uncertain_blocks, owner.doubted_blocks) == (0, 3)  # a feed heals all the same


@pytest.mark.parametrize("medium", ["CPU", "STORAGE", "EXTERNAL"])
def test_removal_shows_that_removals_are_announced(medium: str) -> None:
    index, owner = an_index()
    index.apply(owner, [stored([1, 2], [1, 2], medium=medium), BlocksRemoved([7], medium)])
    assert index.overlaps(prompt(1, 2, 9))["w"].certain_tokens == 2
    index.apply(owner, [stored([1, 2], [1, 2], medium=medium), BlocksRemoved([2], medium)])
    assert index.overlaps(prompt(1, 2, 9))["w"].certain_tokens == 1  # copies were not counted
    assert index.expire(owner, 100)
    assert index.expire(owner, 100)
    assert owner.blocks == 1


def test_copy_by_hash_shows_that_removals_of_host_memory_are_announced() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([1], [1]), BlocksCopied([1], "CPU"), BlocksRemoved([1])])
    assert index.overlaps(prompt(1, 9)) == {"w": Overlap(1, (0, 1, 0, 0))}
    index.apply(owner, [BlocksCopied([1], "STORAGE"), BlocksRemoved([1], "CPU")])
    assert index.overlaps(prompt(1, 9)) == {"w": Overlap(1, uncertain=1)}


def test_sglang_host_memory_is_certain_at_once() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([1], [1], medium="CPU_PINNED")])
    assert index.overlaps(prompt(1, 9)) == {"w": Overlap(1, (0, 1, 0, 0))}


def test_doubted_block_expires_unless_it_is_stored_again() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([1, 2], [1, 2], medium="CPU"), stored([3], [3])])
    assert index.expire(owner, 100)
    index.apply(owner, [stored([1], [1], medium="CPU")])
    assert index.overlaps(prompt(1, 2, 9)) == {"w": Overlap(1, uncertain=2)}
    assert index.expire(owner, 100)
    assert index.overlaps(prompt(1, 2, 9)) == {"w": Overlap(1, uncertain=1)}
    assert index.expire(owner, 100)
    assert (index.overlaps(prompt(1, 2, 9)), owner.blocks) == ({}, 1)
    index.check()


def test_restarted_engine_is_doubted_anew() -> None:
    index, owner = an_index()
    index.apply(owner, [BlocksRemoved([7], "CPU"), AllCleared(), stored([1], [1], medium="CPU")])
    assert index.overlaps(prompt(1, 9)) == {"w": Overlap(1, (0, 1, 0, 0))}
    index.clear(owner)
    index.apply(owner, [stored([1], [1], medium="CPU")])
    assert index.overlaps(prompt(1, 9)) == {"w": Overlap(1, uncertain=1)}


def test_ranks_share_the_limits_of_their_worker() -> None:
    index = new_index()
    assert [index.add("w", rank, "m", ranks=4).limits for rank in range(4)] == [
        IndexLimits().share(4)
    ] * 4


def numbered(hashes: list[BlockHash], ids: list[int], number: int) -> BlocksStored:
    return stored(hashes, ids, lora=number)


def test_overlap_by_adapter_number_is_the_best_one_and_uncertain() -> None:
    index, owner = an_index()
    chains = [numbered([1], [1], 1), numbered([2, 3], [1, 2], 2), numbered([4], [1], 3)]
    index.apply(owner, [*chains])
    asked = prompt(1, 2, 9, lora="x")
    assert index.overlaps(asked) == index.overlaps(prompt(1, 2, 9)) == {}
    assert index.overlaps_by_number(asked) == {"w": Overlap(1, uncertain=2)}
    index.apply(owner, [BlocksRemoved([2, 3])])
    assert index.overlaps_by_number(asked) == {"w": Overlap(1, uncertain=1)}
    assert index.overlaps_by_number(replace(asked, model="other")) == {}
    index.clear(owner)
    assert index.overlaps_by_number(asked) == {}


def test_adapters_by_number_are_bounded() -> None:
    index, owner = an_index()
    events = [numbered([n], [n], n) for n in range(100)]
    index.apply(owner, [*events])
    found = [n for n in range(100) if index.overlaps_by_number(prompt(n, 9, lora="x"))]
    assert found == list(range(MAX_NUMBERED_ADAPTERS))
