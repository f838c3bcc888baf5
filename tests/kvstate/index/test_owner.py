import msgspec
import pytest

from kvstate.events import BlocksStored
from kvstate.index.index import Index
from kvstate.index.owner import IndexLimits, Owner
from kvstate.overlap import Tokens
from kvstate.steps import finished
from tests.kvstate.cores import new_index

STORED = ["BlockStored", [1], None, [5], 1, None]


def an_owner() -> tuple[Index, Owner]:
    index = new_index()
    return index, index.add("w", 0, "m")


def message(*events: object) -> bytes:
    return msgspec.msgpack.encode([1.0, list(events), 0])


def names(event: object) -> tuple[bool | None, bool | None]:
    """Whether a store's layout names salts, and adapters; None where that is not known."""
    _, owner = an_owner()
    finished(owner.applying(message(event)))
    return owner.names_salts, owner.names_loras


def as_map(**fields: object) -> dict[str, object]:
    stored = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id")
    return dict(zip(stored, STORED, strict=True)) | fields


def test_layout_is_unknown_before_the_first_store() -> None:
    _, owner = an_owner()
    assert (owner.names_salts, owner.names_loras) == (None, None)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (STORED, (False, False)),  # vLLM before 0.10, SGLang before 0.5.9
        ([*STORED, "GPU"], (False, False)),  # vLLM before 0.14, SGLang before 0.5.18
        ([*STORED, "GPU", None], (False, True)),  # vLLM before 0.17
        ([*STORED, "GPU", None, None], (True, True)),  # vLLM before 0.24
        ([*STORED, "GPU", {"cache_salt": "s"}], (True, False)),  # SGLang before 0.5.20
        (as_map(lora_name=None), (True, True)),  # vLLM since 0.24
        (as_map(), (True, None)),  # SGLang since 0.5.20
        (as_map(cache_salt="s", lora_name="a"), (True, True)),
    ],
)
def test_layout_shows_which_names_it_carries(
    event: object, expected: tuple[bool | None, bool | None]
) -> None:
    assert names(event) == expected


def test_layout_is_that_of_the_most_expressive_store() -> None:
    _, owner = an_owner()
    finished(owner.applying(message(STORED, [*STORED, "GPU", {"cache_salt": "s"}], STORED)))
    finished(owner.applying(message([*STORED, "GPU", None])))
    assert (owner.names_salts, owner.names_loras) == (True, True)


def test_layout_of_typed_stores_is_stated_by_them() -> None:
    index, owner = an_owner()
    index.apply(owner, [BlocksStored([1], None, Tokens("I", [5]), 1, names_loras=False)])
    assert (owner.names_salts, owner.names_loras) == (None, False)


def test_layout_is_unknown_after_a_restart() -> None:
    index, owner = an_owner()
    for event in (STORED, [*STORED, "GPU", None, None], as_map(cache_salt="s", lora_name="a")):
        finished(owner.applying(message(event)))
        index.clear(owner)
        assert (owner.names_salts, owner.names_loras) == (None, None)


def test_trust_is_kept() -> None:
    _, owner = an_owner()
    assert not owner.trusted
    owner.trusted = True
    owner.trusted = owner.trusted
    assert owner.trusted


def test_counts_combine_those_of_the_owner_and_the_core() -> None:
    _, owner = an_owner()
    finished(
        owner.applying(message(["BlockRemoved", [7]], ["BlockStored", [8], None, [], 0, None]))
    )
    owner.count("something")
    assert owner.counts == {"removed_unknown": 1, "copied_unknown": 1, "something": 1}


def test_block_size_is_that_of_the_last_store() -> None:
    _, owner = an_owner()
    before = owner.block_size
    finished(owner.applying(message(STORED)))
    assert (before, owner.block_size) == (None, 1)


def test_blocks_are_certain_until_they_are_demoted() -> None:
    index, owner = an_owner()
    finished(owner.applying(message(STORED)))
    before = owner.uncertain_blocks
    index.demote(owner)
    assert (owner.blocks, before, owner.uncertain_blocks) == (1, 0, 1)


def test_doubted_blocks_are_those_of_media_without_removals() -> None:
    _, owner = an_owner()
    finished(owner.applying(message(STORED, [*STORED, "cpu"])))
    assert (owner.blocks, owner.uncertain_blocks, owner.doubted_blocks) == (2, 0, 1)
    finished(owner.applying(message(["BlockRemoved", [7], "cpu"])))
    assert owner.doubted_blocks == 0


def test_limits_are_shared_by_the_ranks_of_a_worker() -> None:
    whole = IndexLimits(bytes=256 * 1024 * 1024, orphans=65_536, orphan_bytes=32 * 1024 * 1024)
    assert whole.share(1) == whole
    assert whole.share(8) == IndexLimits(32 * 1024 * 1024, 8_192, 4 * 1024 * 1024)


def test_limits_of_a_rank_have_a_minimum_of_blocks() -> None:
    assert IndexLimits().share(1_024).blocks == 65_536
    assert IndexLimits(bytes=640).share(1_024).blocks == 10
