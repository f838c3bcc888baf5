from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.events import BlocksStored
from kvstate.index.index import Index
from kvstate.media import (
    FIRST_PAD,
    TURNS,
    ItemStart,
    MediaIds,
    beginnings,
    goes_on,
    has_media,
    padded,
    plain_keys,
    runs_of,
    tokens_in,
)
from kvstate.overlap import FIRST_WIDE_TOKEN, Overlap, Prompt, tokens_of, within
from kvstate.steps import finished

SIZE = 4
IDS = array("I", [1, 2, 9, 9, 9, 9, 9, 3])


def stored(*extras: tuple[Any, ...], parent: int | None = None) -> BlocksStored:
    return BlocksStored([1, 2], parent, IDS, SIZE, extras=list(extras))


ITEM = stored((["cat", 2], "red"), (["cat", -2],))


def test_beginnings_are_in_order_and_each_once() -> None:
    both = stored((["cat", 2],), (["cat", -2], ["mm", b"dog", 3]))
    assert beginnings(both) == [ItemStart(2, "cat", 8), ItemStart(7, b"dog", 8)]
    assert beginnings(stored((["cat", -9],), ())) == [ItemStart(-9, "cat", 4)]


@pytest.mark.parametrize("key", ["salt", 7, ["cat"], ["cat", "2"], ["mm", None, 2], ["a", "b", 2]])
def test_other_keys_name_no_item(key: object) -> None:
    event = stored((key,), ())
    assert not has_media(event)
    assert plain_keys((key, ["cat", 2])) == (key,)
    assert beginnings(event) == []


def test_fold_puts_an_item_into_the_ids_and_leaves_other_keys() -> None:
    media_ids = MediaIds(1)
    folded = media_ids.with_items(ITEM)
    assert folded.tokens == array("I", [1, 2, media_ids.token("cat", 9), *IDS[3:]])
    assert folded.extras == [("red",), ()]
    assert media_ids.with_items(stored((), (["cat", -2],))).extras is None
    assert (
        len({media_ids.token("cat", 9), media_ids.token("dog", 9), MediaIds(2).token("cat", 9)})
        == 3
    )


def test_padded_ids_begin_where_they_change() -> None:
    first, second = FIRST_PAD + 5, FIRST_PAD + 6
    ids = array("I", [1, first, first, second, 2, first])
    assert padded(ids) == [ItemStart(1, None, 3), ItemStart(3, None, 4), ItemStart(5, None, 6)]


def test_index_finds_an_item_by_the_ids_alone() -> None:
    index = Index(7)
    owner = index.add("w", 0, "tiny")
    owner.trust(trusted=True)
    index.apply(owner, [ITEM])
    tokens = array("I", [*IDS, 0])
    assert not index.overlaps(Prompt("tiny", tokens, salt="red"))
    tokens[2] = index.media_ids.token("cat", 9)
    assert index.overlaps(Prompt("tiny", tokens, salt="red"))["w"].certain_tokens == 8
    tokens[2] = index.media_ids.token("dog", 9)
    assert not index.overlaps(Prompt("tiny", tokens, salt="red"))


def test_index_finds_an_item_of_ids_of_62_bits() -> None:
    index = Index(7)
    owner = index.add("w", 0, "tiny")
    owner.trust(trusted=True)
    pads = [FIRST_PAD + 2**61 + turn for turn in range(TURNS)]
    store = {
        "type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None,
        "token_ids": [1, *pads, *pads[:2], 9], "block_size": SIZE, "lora_id": None,
    }  # fmt: skip
    finished(owner.applying(msgspec.msgpack.encode([1.0, [store], 0])))
    ids = tokens_of([1, *pads, *pads[:2], 9, 0])
    assert min(ids[1:7]) >= FIRST_WIDE_TOKEN
    assert index.overlaps(Prompt("tiny", ids))["w"].certain_tokens == 8


class Listener:
    """Notes what it hears."""

    def __init__(self, *, listens: bool) -> None:
        self._listens = listens
        self.is_idle = not listens
        self.heard: list[BlocksStored] = []

    def listens(self, _: str) -> bool:
        return self._listens

    def hear(self, _: str, event: BlocksStored) -> None:
        self.heard.append(event)


@pytest.mark.parametrize("listens", [False, True])
def test_listener_hears_stores_with_items_and_others_while_it_listens(listens: bool) -> None:
    index, listener = Index(7), Listener(listens=listens)
    index.listen(listener)
    owner = index.add("w", 0, "tiny")
    text = BlocksStored([3], None, array("I", [4, 5, 6, 7]), SIZE)
    index.apply(owner, [ITEM, text])
    assert listener.heard == ([ITEM, text] if listens else [ITEM])


def test_overlap_within_some_tokens_keeps_the_nearest_tiers_certain() -> None:
    overlap = Overlap(SIZE, (2, 1, 1, 0), 1, 3)
    assert within(overlap, 4 * SIZE + 3) == overlap
    assert within(overlap, 3 * SIZE) == Overlap(SIZE, (2, 1, 0, 0), 2, 3)
    assert within(overlap, SIZE + 1) == Overlap(SIZE, (1, 0, 0, 0), 4, 3)


def test_fold_leaves_items_that_began_before_or_have_no_name() -> None:
    media_ids = MediaIds(1)
    assert media_ids.with_items(stored((["cat", -1],), (["cat", -5],))).tokens == IDS
    pads = array("I", [1, 2, *[FIRST_PAD + 5] * 6])
    event = BlocksStored([1, 2], None, pads, SIZE)
    assert media_ids.with_items(event).tokens == pads


def wide(number: int, turn: int = 0) -> int:
    return FIRST_WIDE_TOKEN + 16 * number + turn


def in_turns(number: int, count: int, first: int = 0) -> list[int]:
    return [wide(number, (first + at) % TURNS) for at in range(count)]


def test_long_ids_that_take_turns_are_one_run_and_one_item() -> None:
    ids = array("I", [1, *in_turns(1, 9), *in_turns(2, 8), 2, *in_turns(3, 3), 3])
    assert list(runs_of(ids))[1:3] == [
        ((wide(1), wide(1, 1), wide(1, 2), wide(1, 3)), 9),
        ((wide(2), wide(2, 1), wide(2, 2), wide(2, 3)), 8),
    ]
    assert padded(ids) == [ItemStart(1, None, 10), ItemStart(10, None, 18), ItemStart(19, None, 22)]


@given(st.lists(st.sampled_from([1, 2, FIRST_PAD, *in_turns(1, 4), *in_turns(2, 4)]), max_size=40))
def test_runs_always_hold_all_tokens_in_order(ids: list[int]) -> None:
    tokens = array("I")
    for run, count in runs_of(array("I", ids)):
        tokens.extend(tokens_in(run, count))
    assert tokens.tolist() == ids


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([1, FIRST_PAD, FIRST_PAD], [FIRST_PAD, 2], True),
        ([1, FIRST_PAD, FIRST_PAD], [FIRST_PAD + 1], False),
        ([1, FIRST_PAD, 2], [FIRST_PAD], False),
        ([1, *in_turns(1, 6)], in_turns(1, 3, first=6), True),
        ([1, *in_turns(1, 6)], in_turns(2, 3), False),
        ([1, *in_turns(1, 2)], in_turns(1, 3, first=2), True),
    ],
)
def test_item_goes_on_where_its_ids_do(
    before: list[int], after: list[int], *, expected: bool
) -> None:
    tokens = array("I", before)
    assert goes_on(tokens, padded(tokens)[-1], array("I", after)) is expected


def test_named_item_never_goes_on_by_its_ids() -> None:
    assert not goes_on(array("I", [9, 9]), ItemStart(0, "cat", 2), array("I", [9]))
