from array import array

import pytest

from extproc.config.schema import Config, Policy, WorkerEngine
from extproc.config.schema import WorkerSettings as Configured
from extproc.fleet.discovery.view import FleetMember, Sighting
from extproc.fleet.feeds.rank_pins import WATCH_SECONDS, RankPins
from extproc.fleet.records.table import Table
from extproc.routing.candidates.pins import NO_CHOICE, Pin, PinnedRank
from extproc.routing.load.endpoint_load import EndpointLoad, Ticket
from kvstate.fleet import FollowedWorkers
from kvstate.following.rank_table import RankTable
from kvstate.following.worker_blocks import WorkerBlocks
from kvstate.index.index import Index
from kvstate.overlap import Overlap, Prompt
from tests.memory_transport import MemoryTransport

NAME, CHAT = "10.0.0.1:80", "/v1/chat/completions"
PROMPT = Prompt("m", array("I", range(40)))
SGLANG = WorkerEngine("sglang", "0.5.23")


def zero() -> float:
    return 0.0


def table(engine: WorkerEngine | None = SGLANG) -> Table:
    return Table({NAME: FleetMember(Sighting(Configured(NAME, engine=engine)), "workers")})


def booked(rank: int | None) -> Ticket:
    named = None if rank is None else PinnedRank(rank, Pin("x-rank"), CHAT)
    return Ticket(NAME, 40.0, EndpointLoad(), rank=named)


def test_choice_of_a_field_needs_a_body_that_may_be_changed() -> None:
    pins = RankPins(Config(), table(), FollowedWorkers(0, zero), zero)
    assert pins.choice(NAME, "/generate", writes_body=True).pin == Pin("routed_dp_rank", True)
    assert pins.choice(NAME, "/generate", writes_body=False) == NO_CHOICE
    assert pins.choice("unknown", "/generate", writes_body=True) == NO_CHOICE


class Blocks(WorkerBlocks):
    """What each rank holds of the only prompt, in blocks, as a test says."""

    def __init__(self) -> None:
        super().__init__(Index(0), RankTable())
        self.held: dict[int, int] = {}

    def overlaps(self, _: Prompt) -> dict[str, Overlap]:
        found = [Overlap(16, (blocks, 0, 0, 0), rank=rank) for rank, blocks in self.held.items()]
        return {NAME: max(found, key=lambda one: one.rank_order)} if found else {}

    def overlap_of_rank(self, _: str, rank: int, __: Prompt) -> Overlap | None:
        return Overlap(16, (self.held[rank], 0, 0, 0), rank=rank) if rank in self.held else None


class Ranks(FollowedWorkers):
    """A fleet with such blocks."""

    def __init__(self) -> None:
        super().__init__(0, zero)
        self.blocks: Blocks = Blocks()


@pytest.mark.parametrize(
    ("held", "rank", "obeyed", "ignored"),
    [
        ({0: 2}, 0, 1, 0),
        ({0: 2}, 1, 0, 1),
        ({0: 2, 1: 1}, 1, 0, 1),
        ({0: 2, 1: 2}, 1, 1, 0),
        ({0: 1}, 0, 0, 0),
        ({}, 0, 0, 0),
        ({0: 2}, None, 0, 0),
    ],
)
def test_watched_request_shows_which_rank_computed_it(
    held: dict[int, int], rank: int | None, obeyed: int, ignored: int
) -> None:
    workers, fleet = table(), Ranks()
    pins = RankPins(Config(), workers, fleet, zero)
    pins.watch(NAME, booked(rank), PROMPT)
    fleet.blocks.held = held
    pins.check.run()
    (record,) = workers
    found = record.pin_findings
    assert (found.obeyed.get(CHAT, 0), found.ignored.get(CHAT, 0)) == (obeyed, ignored)


def test_watch_ends_when_another_worker_answers_or_time_is_up() -> None:
    now = [0.0]
    workers, fleet = table(), Ranks()
    pins = RankPins(Config(), workers, fleet, lambda: now[0])
    moved, late = booked(0), booked(0)
    pins.watch(NAME, moved, PROMPT)
    pins.watch(NAME, late, PROMPT)
    moved.endpoint = "10.0.0.2:80"
    pins.check.run()
    now[0] = WATCH_SECONDS + 1.0
    fleet.blocks.held = {0: 2}
    pins.check.run()
    (record,) = workers
    assert pins.as_json(record) == []


def test_worker_that_ignores_pins_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    workers, fleet = table(), Ranks()
    pins = RankPins(Config(), workers, fleet, zero)
    fleet.blocks.held = {0: 2}
    for _ in range(4):
        pins.watch(NAME, booked(1), PROMPT)
    pins.check.run()
    (record,) = workers
    assert pins.as_json(record) == [{"path": CHAT, "obeyed": 0, "ignored": 4, "named": False}]
    assert pins.choice(NAME, CHAT, writes_body=True) == NO_CHOICE
    assert [one.levelname for one in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(
    ("header", "engine", "names"),
    [("auto", SGLANG, True), ("auto", None, False), (None, SGLANG, False), ("x-rank", None, True)],
)
async def test_ranks_are_named_where_the_engine_is_known_or_a_header_configured(
    header: str | None, engine: WorkerEngine | None, *, names: bool
) -> None:
    fleet = FollowedWorkers(0, zero)
    pins = RankPins(Config(policy=Policy(rank_header=header)), table(engine), fleet, zero)
    assert not fleet.blocks.names_ranks
    fleet.add(NAME, "m", [MemoryTransport(), MemoryTransport()])
    pins.note_change()
    assert fleet.blocks.names_ranks == names
    await fleet.close()
