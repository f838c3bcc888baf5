"""What a message changed, repeated by another core, which leaves what is damaged."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.index.core import Core
from kvstate.relay.records import HEAD, MARK, Kind, Mark
from tests.kvstate.cores import new_core
from tests.kvstate.publishing import block, chain, payload

PARENTS = {1: None, 2: 1, 3: 2, 4: 3}
EVENTS = st.lists(
    st.one_of(
        st.builds(lambda number: block(number, PARENTS[number]), st.integers(1, 4)),
        st.builds(lambda hashes: ["BlockRemoved", hashes], st.lists(st.integers(1, 5), max_size=3)),
        st.builds(lambda one: ["BlockRemoved", [one], "CPU"], st.integers(1, 4)),
        st.just(["AllBlocksCleared"]),
    ),
    max_size=4,
)


class Side:
    """A core with one owner, which is the rank 0 of records."""

    def __init__(self) -> None:
        self.core: Core = new_core()
        self.model = self.core.add_model(b"m")
        self.owner = self.core.add_owner(0, self.model, 0)
        self.core.trust(self.owner, True)
        self.marks = bytearray(MARK.size)

    def repeat(self, records: bytes) -> int:
        """Repeats records; returns how many bytes of them."""
        at, outcome = self.core.apply_run(
            records, 0, array("I", [self.owner + 1]), self.marks, 1_000_000
        )
        return at if outcome is None else at + HEAD.size + HEAD.unpack_from(records, at)[2]

    @property
    def knowledge(self) -> object:
        """All that shows of it."""
        tokens = chain(4).tokens
        held = self.core.overlaps(self.model, tokens, None, None, ["w"])
        return held, self.core.status(self.owner), self.core.layout(self.owner)


@given(st.lists(EVENTS, max_size=6))
def test_changes_repeat_what_messages_did(messages: list[list[object]]) -> None:
    one, other = Side(), Side()
    for number, events in enumerate(messages):
        body = payload(number, *events)
        one.core.apply(one.owner, body)
        is_whole = one.core.pass_on(one.owner, 0, number, 1.5)
        records = one.core.passed_on()
        if not is_whole:
            records = HEAD.pack(0, Kind.BATCH, len(body), number, 1.5) + body
        stop = other.repeat(records)
        if stop < len(records):  # what is left to typed events differs from what was applied
            return
        assert other.knowledge == one.knowledge
        other.core.check()


def test_a_message_that_stores_and_removes_is_passed_on_once() -> None:
    side = Side()
    side.core.apply(side.owner, payload(0, block(1), ["BlockRemoved", [1]]))
    length = side.core.pass_on(side.owner, 0, 7, 1.5)
    assert side.core.pass_on(side.owner, 0, 7, 1.5) == 0
    record = side.core.passed_on()
    assert (len(record), side.core.passed_on()) == (length, b"")
    assert side.repeat(record) == length
    assert MARK.unpack(side.marks) == Mark(7, 1.5)


@pytest.mark.parametrize(
    "body",
    [
        payload(0, ["AllBlocksCleared"]),
        payload(0, block(2, 1)),  # of an unknown parent
        payload(0, *[block(number) for number in range(1, 12)]),  # more than its limit
        b"no message",
    ],
    ids=["cleared", "orphan", "over limit", "damaged"],
)
def test_other_messages_are_not_passed_on(body: bytes) -> None:
    side = Side()
    side.core.apply(side.owner, body)
    assert side.core.pass_on(side.owner, 0, 0, 1.5) == 0


def test_a_message_is_not_passed_on_for_the_one_that_typed_events_follow() -> None:
    side = Side()
    side.core.apply(side.owner, payload(0, block(1)))
    side.core.begin_message(side.owner)
    assert side.core.pass_on(side.owner, 0, 1, 1.5) == 0


@given(st.binary(max_size=80), st.integers(0, 200))
def test_damaged_changes_are_left(junk: bytes, at: int) -> None:
    side = Side()
    side.core.apply(side.owner, payload(0, block(1), block(2, 1)))
    side.core.pass_on(side.owner, 0, 0, 1.5)
    good = side.core.passed_on()[HEAD.size :]
    damaged = good[:at] + junk + good[at + len(junk) :]
    reader = Side()
    reader.repeat(HEAD.pack(0, Kind.CHANGES, len(damaged), 0, 1.5) + damaged)
    reader.core.check()
