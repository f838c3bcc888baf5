from array import array

import pytest

from extproc.config.schema import Config, Policy, WorkerEngine
from extproc.config.schema import WorkerSettings as Configured
from extproc.fleet.discovery.view import FleetMember, Sighting
from extproc.fleet.rank_pins import RankPins
from extproc.fleet.record import Table
from extproc.routing.load import Booking, EndpointLoad
from extproc.routing.pins import NO_CHOICE, Pin, PinnedRank
from kvstate.feeds.transport import MemoryTransport
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Overlap, Prompt

NAME, CHAT = "10.0.0.1:80", "/v1/chat/completions"
PROMPT = Prompt("m", array("I", range(40)))
SGLANG = WorkerEngine("sglang", "0.5.23")


def table(engine: WorkerEngine | None = SGLANG) -> Table:
    return Table({NAME: FleetMember(Sighting(Configured(NAME, engine=engine)), "workers")})


def booked(rank: int | None) -> Booking:
    named = None if rank is None else PinnedRank(rank, Pin("x-rank"), CHAT)
    return Booking(NAME, 40.0, EndpointLoad(), rank=named)


def test_choice_of_a_field_needs_a_body_that_may_be_changed() -> None:
    pins = RankPins(Config(), table(), FollowedWorkers(0, lambda: 0.0))
    assert pins.choice(NAME, "/generate", writes_body=True).pin == Pin("routed_dp_rank", True)
    assert pins.choice(NAME, "/generate", writes_body=False) == NO_CHOICE
    assert pins.choice("unknown", "/generate", writes_body=True) == NO_CHOICE


def test_computed_requests_show_whether_the_worker_obeys(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = table()
    pins = RankPins(Config(), worker, FollowedWorkers(0, lambda: 0.0))
    (record,) = worker
    for rank in (None, 0, 1, 1, 1):
        pins.note_computed(record, booked(rank), PROMPT, Overlap(16, (2, 0, 0, 0), rank=0))
    assert pins.as_json(record) == [{"path": CHAT, "obeyed": 1, "ignored": 3, "named": False}]
    assert pins.choice(NAME, CHAT, writes_body=True) == NO_CHOICE
    assert [one.levelname for one in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(
    ("header", "engine", "names"),
    [("auto", SGLANG, True), ("auto", None, False), (None, SGLANG, False), ("x-rank", None, True)],
)
async def test_ranks_are_named_where_the_engine_is_known_or_a_header_configured(
    header: str | None, engine: WorkerEngine | None, *, names: bool
) -> None:
    fleet = FollowedWorkers(0, lambda: 0.0)
    pins = RankPins(Config(policy=Policy(rank_header=header)), table(engine), fleet)
    assert not fleet.names_ranks
    fleet.add(NAME, "m", [MemoryTransport(), MemoryTransport()])
    pins.note_change()
    assert fleet.names_ranks == names
    await fleet.close()
