import gc
from collections.abc import Callable

import pytest

from extproc.media.identities import MAX_RUNS, MAX_TOKENS, Identity
from extproc.media.item_report import ItemReport
from extproc.sharing.item_reports import MAX_ANSWERED, MAX_ITEM_RUNS, MAX_WAITING, ItemReports
from extproc.sharing.messages import MAX_ITEMS
from tests.extproc.sharing.routers import Router, tell_all

KEY = b"k" * 16
CAT = Identity("CAT", ((90, 1), (91, 300), (92, 1)), lead=1)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def met() -> tuple[Router, Router]:
    """Two routers whose messages count for each other."""
    one, other = Router("one"), Router("other")
    for step in range(8):
        tell_all([one, other], step / 10)
    return one, other


def test_item_that_was_learned_is_known_to_the_others() -> None:
    one, other = met()
    one.reporter.items.note(KEY, CAT)
    tell_all([one, other], 1.0)
    assert other.identities.find(KEY) == CAT


def test_item_whose_ids_take_turns_is_told_and_leaves_the_types_sound() -> None:
    one, other = met()
    turns = Identity(None, (((2**31, 2**31 + 1, 2**31 + 2, 2**31 + 3), 300),))
    one.reporter.items.note(KEY, turns)
    tell_all([one, other], 1.0)
    assert other.identities.find(KEY) == turns
    gc.collect()  # ended the process where msgspec had a tuple of fixed length there


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Identity("CAT", ((90, 1),), 0, is_whole=False), CAT),
        (Identity("DOG", ((90, 1),)), Identity("DOG", ((90, 1),))),
    ],
)
def test_item_that_is_known_to_its_end_stays(before: Identity, after: Identity) -> None:
    one, other = met()
    other.identities.put(KEY, before)
    one.reporter.items.note(KEY, CAT)
    tell_all([one, other], 1.0)
    assert other.identities.find(KEY) == after


def test_item_without_an_end_or_named_by_bytes_is_not_reported() -> None:
    reports = ItemReports()
    reports.note(KEY, Identity("CAT", ((90, 1),), 0, is_whole=False))
    reports.note(KEY, Identity(b"CAT", ((90, 1),)))
    assert not reports


def test_newcomer_is_told_of_the_latest_items() -> None:
    one = Router("one")
    for number in range(MAX_ANSWERED + 8):
        one.identities.put(key(number), CAT)
    other = Router("other")
    for step in range(12):
        tell_all([one, other], step / 10)
    assert other.identities.find(key(0)) is None
    assert all(other.identities.find(key(n)) == CAT for n in range(8, MAX_ANSWERED + 8))


def test_message_has_few_items_and_runs() -> None:
    reports = ItemReports()
    for number in range(MAX_WAITING + 1):
        reports.note(key(number), CAT)
    assert [len(reports.take()) for _ in range(2)] == [MAX_ITEMS, MAX_ITEMS]
    reports = ItemReports()
    rows = Identity("ROWS", tuple((n, 1) for n in range(MAX_ITEM_RUNS - 1)))
    reports.note(KEY, rows)
    reports.note(KEY, CAT)
    assert [len(reports.take()) for _ in range(3)] == [1, 1, 0]


def _too_long(_: ItemReport) -> ItemReport:
    return ItemReport(KEY, "CAT", ((90, MAX_TOKENS), (91, 1)))


def _lead_beyond(_: ItemReport) -> ItemReport:
    return ItemReport(KEY, "CAT", ((90, 3),), 3)


def _too_many_runs(_: ItemReport) -> ItemReport:
    return ItemReport(KEY, "CAT", ((90, 1),) * (MAX_RUNS + 1))


def _short_key(_: ItemReport) -> ItemReport:
    return ItemReport(b"k", "CAT", ((90, 1),))


class Forged(ItemReports):
    """Says one thing, once."""

    def __init__(self, news: ItemReport) -> None:
        super().__init__()
        self._forged = [(news,)]

    def __bool__(self) -> bool:
        return bool(self._forged)

    def take(self) -> tuple[ItemReport, ...]:
        return self._forged.pop() if self._forged else ()


@pytest.mark.parametrize("make", [_too_long, _lead_beyond, _too_many_runs, _short_key])
def test_malformed_items_are_rejected(
    make: Callable[[ItemReport], ItemReport],
) -> None:
    one, other = met()
    one.reporter.items = Forged(make(ItemReport(KEY, "CAT", ((90, 1),))))
    tell_all([one, other], 1.0)
    assert other.others.counts["malformed"] == 1
    assert other.identities.find(KEY) is None


def test_newcomer_is_told_of_nothing_where_nothing_is_known() -> None:
    reports = ItemReports()
    reports.answer()
    assert reports.take() == ()
