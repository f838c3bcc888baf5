from array import array

import pytest

from extproc.base.engine import Engine, Release
from extproc.config.schema import Config, Policy
from extproc.config.schema import Worker as Configured
from extproc.config.schema import WorkerEngine
from extproc.fleet.discovery.view import Member, Sighting
from extproc.fleet.rank_pins import RankPins
from extproc.fleet.record import Table
from extproc.routing.load import Booking, EndpointLoad
from extproc.routing.pins import NO_CHOICE, Pin, PinnedRank
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Overlap, Prompt

NAME, CHAT = "10.0.0.1:80", "/v1/chat/completions"
PROMPT = Prompt("m", array("I", range(40)))
SGLANG = WorkerEngine("sglang", "0.5.23")


def pins_of(header: str | None = "auto", engine: WorkerEngine | None = SGLANG) -> RankPins:
    member = Member(Sighting(Configured(NAME, engine=engine)), "workers")
    config = Config(policy=Policy(rank_header=header))
    return RankPins(config, Table({NAME: member}), FollowedWorkers(0, lambda: 0.0))


def booked(rank: int | None) -> Booking:
    named = None if rank is None else PinnedRank(rank, Pin("x-rank"), CHAT)
    return Booking(NAME, 40.0, EndpointLoad(), rank=named)


def test_choice_of_a_field_needs_a_body_that_may_be_changed() -> None:
    pins = pins_of()
    assert pins.choice(NAME, "/generate", writes_body=True).pin == Pin("routed_dp_rank", True)
    assert pins.choice(NAME, "/generate", writes_body=False) == NO_CHOICE
    assert pins.choice("unknown", "/generate", writes_body=True) == NO_CHOICE
