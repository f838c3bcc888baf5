"""What other routers tell of the load of workers: within which bounds it is read, and counted."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.load.endpoint_load import EndpointLoad
from extproc.routing.load.loads import Loads
from extproc.routing.load.reports import WorkerLoadReport

PLACES = {number: (f"10.0.0.{number}:1", None) for number in range(5)}  # the last has no record
LARGEST = [2**63 - 1, 1_000_000, *[2**50] * 4]


def decoded(row: list[Any]) -> WorkerLoadReport:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=WorkerLoadReport)


@pytest.mark.parametrize("field", range(6))
def test_figures_are_read_up_to_their_bounds(field: int) -> None:
    assert list(msgspec.structs.astuple(decoded([*LARGEST, "of a later version"]))) == LARGEST
    for wrong in (LARGEST[field] + 1, -1):
        with pytest.raises(msgspec.ValidationError):
            decoded([wrong if at == field else most for at, most in enumerate(LARGEST)])


FIGURES = st.builds(
    WorkerLoadReport, st.integers(0, 6), st.integers(0, 9), *[st.integers(0, 9_999)] * 4
)


@given(st.lists(st.lists(FIGURES, max_size=8), max_size=4))
def test_last_figures_of_a_router_count_and_unknown_workers_are_counted(
    messages: list[list[WorkerLoadReport]],
) -> None:
    loads = Loads({PLACES[number][0]: EndpointLoad() for number in range(4)}, 8_000)
    for now, told in enumerate(messages):
        unknown = loads.record_reports("one", told, PLACES, now, is_known=True)
        assert unknown == sum(one.worker > 3 for one in told)
    last = {one.worker: one for told in messages for one in told if one.worker < 4}
    assert loads.in_flight_of("one") == sum(one.in_flight for one in last.values())
    for number, one in last.items():
        numbers = loads.endpoints[PLACES[number][0]].numbers
        assert (numbers.shared, numbers.shared_tokens) == (one.in_flight, one.booked_tokens)
