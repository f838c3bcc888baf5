"""Records between processes: what is read is what was written, and anything else is refused."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.errors import DamagedError
from kvstate.events import (
    AllCleared,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
    EventBatch,
    OtherGroupStored,
)
from kvstate.overlap import Tokens
from kvstate.relay.records import (
    HEAD,
    MAX_PAYLOAD,
    NO_MARK,
    Kind,
    Mark,
    beginning_in,
    encoded,
    record_at,
    status_in,
    typed_batch,
    typed_payload,
)

HASHES = st.lists(st.one_of(st.integers(0, 2**64 - 1), st.binary(max_size=40)), max_size=3)
EVENTS = st.one_of(
    st.builds(
        BlocksStored,
        HASHES,
        st.none() | st.integers(0, 2**64 - 1),
        st.lists(st.integers(0, 2**32 - 1)).map(lambda ids: Tokens("I", ids)),
        st.integers(1, 64),
        st.none() | st.text() | st.integers(0, 9),
        st.none() | st.lists(st.tuples(st.text(), st.binary())),
    ),
    st.builds(BlocksCopied, HASHES),
    st.builds(OtherGroupStored, st.none() | st.integers(0, 9), HASHES),
    st.builds(BlocksRemoved, HASHES),
    st.just(AllCleared()),
)


@given(st.sampled_from(Kind), st.integers(0, 2**32 - 1), st.binary(), st.integers(0, 2**64 - 1))
def test_a_record_is_read_as_it_was_written(
    kind: Kind, rank: int, payload: bytes, number: int
) -> None:
    data = b"before" + encoded(kind, rank, payload, Mark(number, 1.5))
    record = record_at(data, 6)
    assert record is not None
    assert (record.size, record.mark.is_known) == (len(data) - 6, True)
    assert tuple(record) == (rank, kind, payload, Mark(number, 1.5))
    assert all(record_at(data[:end], 6) is None for end in range(6, len(data)))


@pytest.mark.parametrize("head", [(0, 15, 0, 0, 0.0), (0, 0, MAX_PAYLOAD + 1, 0, 0.0)])
def test_a_record_that_cannot_be_is_refused(head: tuple[int, int, int, int, float]) -> None:
    with pytest.raises(DamagedError):
        record_at(HEAD.pack(*head), 0)


@given(st.lists(EVENTS, max_size=4), st.lists(st.text()).map(tuple), st.booleans())
def test_typed_events_are_read_as_they_were_written(
    events: list[object], faults: tuple[str, ...], lost: bool
) -> None:
    batch = EventBatch(1.5, events, 3, faults, lost)  # type: ignore[arg-type]
    assert msgspec.to_builtins(typed_batch(typed_payload(batch)), enc_hook=list) == (
        msgspec.to_builtins(batch, enc_hook=list)
    )


@given(st.binary())
def test_payloads_that_are_none_are_refused(payload: bytes) -> None:
    for read in (typed_batch, status_in, beginning_in):
        with pytest.raises(DamagedError):
            read(payload)


def test_a_rank_without_batches_has_no_mark() -> None:
    record = record_at(encoded(Kind.FORGET), 0)
    assert record is not None
    assert record.mark == NO_MARK == Mark(0, -math.inf)
    assert not record.mark.is_known
