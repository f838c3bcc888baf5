from collections import Counter
from typing import Any

import pytest

from kvstate.bridge.mirror import Mirror
from kvstate.events import BlocksCopied, BlocksRemoved, BlocksStored
from kvstate.overlap import Tokens
from kvstate.pb.kvsteer_kv_events_pb2 import KvBlocksStored, KvEventBatch
from kvstate.wire.grpc_encoding import Namespace, encode_store


def store(*hashes: int | bytes, parent: int | bytes | None = None, **fields: Any) -> BlocksStored:
    """Blocks of two tokens."""
    tokens = Tokens("I", range(2 * len(hashes)))
    return BlocksStored(list(hashes), parent, tokens, 2, **fields)


def mirror(*stores: BlocksStored, max_bytes: int = 1_000_000) -> Mirror:
    made = Mirror(max_bytes)
    for stored in stores:
        keep(made, stored)
    return made


def keep(made: Mirror, stored: BlocksStored, engines: BlocksStored | None = None) -> None:
    encoded = encode_store(stored, made.namespace_of(stored))
    made.store(stored, encoded, (engines or stored).tokens)


def told(made: Mirror) -> list[KvBlocksStored]:
    return [KvEventBatch.FromString(copy.entry).events[0].stored for copy in made.in_order()]


def hashes(made: Mirror) -> list[int]:
    return [stored.blocks[0].block_hash for stored in told(made)]


def test_in_order_yields_one_event_a_block() -> None:
    first, second = told(mirror(store(1, 2, lora="a")))
    assert (first.blocks[0].block_hash, list(first.blocks[0].token_ids)) == (1, [0, 1])
    assert (second.blocks[0].block_hash, list(second.blocks[0].token_ids)) == (2, [2, 3])
    assert (first.HasField("parent_block_hash"), second.parent_block_hash) == (False, 1)
    assert {first.lora_name, second.lora_name} == {"a"}


def test_copies_are_kept_and_removed_one_by_one() -> None:
    made = mirror(store(1), store(1), store(1), store(1, medium="CPU"))
    assert Counter(stored.medium for stored in told(made)) == {"GPU": 3, "CPU": 1}
    made.remove(BlocksRemoved([1]))
    assert Counter(stored.medium for stored in told(made)) == {"GPU": 2, "CPU": 1}
    made.remove(BlocksRemoved([1, 1, 1]))
    assert [stored.medium for stored in told(made)] == ["CPU"]


def test_removal_of_another_group_or_an_unknown_block_is_ignored() -> None:
    made = mirror(store(1, group=0))
    made.remove(BlocksRemoved([1], group=1))
    made.remove(BlocksRemoved([2], group=0))
    assert (made.copies, hashes(made)) == (1, [1])


def test_digest_and_number_of_the_same_bits_name_the_same_block() -> None:
    made = mirror(store(b"\x00" * 31 + b"\x07"))
    made.remove(BlocksRemoved([7]))
    assert (made.copies, made.size_bytes, hashes(made)) == (0, 0, [])


def test_parents_come_first_even_if_they_were_stored_again() -> None:
    made = mirror(store(1, 2, 3))
    made.remove(BlocksRemoved([1]))
    keep(made, store(1))
    assert hashes(made) == [1, 2, 3]


def test_blocks_with_missing_or_cyclic_parents_are_included() -> None:
    made = mirror(store(2, parent=1), store(5, parent=5), store(7, parent=8), store(8, parent=7))
    assert sorted(hashes(made)) == [2, 5, 7, 8]


def test_clear_leaves_nothing() -> None:
    made = mirror(store(1, 2))
    made.clear()
    assert (made.copies, made.size_bytes, made.in_order()) == (0, 0, [])


def test_blocks_over_the_limit_are_refused() -> None:
    size = mirror(store(1)).size_bytes
    assert size > len(mirror(store(1)).in_order()[0].entry)
    made = mirror(store(1), store(2), store(3), max_bytes=2 * size)
    assert (hashes(made), made.size_bytes, made.refused) == ([1, 2], 2 * size, 1)
    made.remove(BlocksRemoved([1]))
    keep(made, store(4))
    assert hashes(made) == [2, 4]


def test_children_inherit_the_salt_of_their_root() -> None:
    made = mirror(store(1, 2, extras=[("salt",), ()]), store(3, parent=2), store(4, parent=3))
    assert [stored.cache_salt for stored in told(made)] == ["salt"] * 4


@pytest.mark.parametrize("extras", [None, [()], [(["image", 3],)], [("\ud800",)]])
def test_root_without_a_text_key_has_no_salt(extras: list[Any] | None) -> None:
    assert mirror().namespace_of(store(1, extras=extras)) == Namespace()


def test_salt_behind_an_unknown_parent_is_unknown() -> None:
    child = store(2, parent=1, extras=[("not a salt",)], lora="a")
    assert mirror().namespace_of(child) == Namespace("a", None)


def test_copy_on_another_medium_is_kept_under_its_parent() -> None:
    made = mirror(store(1, 2))
    entries = list(made.copy(BlocksCopied([2, 9], medium="CPU")))
    assert [entry is None for entry in entries] == [False, True]
    assert [(stored.blocks[0].block_hash, stored.medium) for stored in told(made)] == [
        (1, "GPU"),
        (2, "GPU"),
        (2, "CPU"),
    ]
    assert told(made)[2].parent_block_hash == 1
    made.remove(BlocksRemoved([2], medium="CPU"))
    assert made.copies == 2


def test_bigrams_become_their_first_tokens_through_the_whole_chain() -> None:
    made = Mirror(1_000_000)
    root = BlocksStored(
        [1, 2], None, Tokens("I", [11, 12, 13, 14]), 2, extras=[(10, "salt"), ()], bigrams=True
    )
    child = BlocksStored([3], 2, Tokens("I", [15, 16]), 2, bigrams=True)
    for pairs in (root, child):
        plain = made.plain(pairs)
        assert plain is not None
        keep(made, plain, pairs)
    assert [list(stored.blocks[0].token_ids) for stored in told(made)] == [
        [10, 11],
        [12, 13],
        [14, 15],
    ]
    assert [stored.cache_salt for stored in told(made)] == ["salt"] * 3
    assert [key.text for key in told(made)[0].blocks[0].extra_keys] == ["salt"]


@pytest.mark.parametrize(("parent", "extras"), [(9, None), (None, None), (None, [("salt",)])])
def test_bigrams_without_a_known_first_token_are_left_out(
    parent: int | None, extras: list[Any] | None
) -> None:
    pairs = store(1, parent=parent, extras=extras, bigrams=True)
    assert mirror().plain(pairs) is None


def test_tokens_without_bigrams_stay_unchanged() -> None:
    stored = store(1)
    assert mirror().plain(stored) is stored
