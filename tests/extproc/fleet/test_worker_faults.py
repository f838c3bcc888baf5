"""What is wrong with workers, as faults."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.fault import WORKERS_AT_ONCE
from extproc.config import schema
from extproc.fleet.discovery.view import FleetMember, Sighting
from extproc.fleet.records.table import Table
from extproc.fleet.records.worker import Worker
from extproc.fleet.worker_faults import (
    MAX_LAG_SECONDS,
    PATIENCE_SECONDS,
    WorkerFaults,
    discovery_faults,
)
from kvstate.feeds.feed import FeedState
from kvstate.following.worker_feeds import FeedStatus
from tests.faults import found

NAME = "10.0.0.1:8000"


class Fleet:
    """The feeds of the only worker, as they are said to be."""

    def __init__(self) -> None:
        self.states: list[FeedState] = [FeedState.LIVE]
        self.size: int | None = None
        self.lag, self.why = 0.0, "why"
        self.feeds = self.blocks = self

    def state(self, _: str) -> FeedState:
        others = [one for one in self.states if one is not FeedState.LIVE]
        return others[0] if others else self.states[0] if self.states else FeedState.UNSUPPORTED

    def lag_seconds(self, _: str) -> float:
        return self.lag

    def block_size(self, _: str) -> int | None:
        return self.size

    def statuses(self, _: str) -> Sequence[FeedStatus]:
        return [
            FeedStatus(rank, state, self.why, None, 0, 0, 0, 0, 0, 0, 0.0, None, {}, 0)
            for rank, state in enumerate(self.states)
        ]


class Feeds:
    """Says why the worker has no feed."""

    enabled = True

    def reason(self, _: Worker) -> str:
        return "it has not been asked yet"


class Case:
    """One worker that is looked at."""

    def __init__(self, **sighted: Any) -> None:
        events = schema.WorkerEvents("tcp://10.0.0.1:5557")
        given = schema.WorkerSettings(NAME, "m", events=events, block_size=16)
        self.table = Table({NAME: FleetMember(Sighting(given, **sighted), "file")})
        self.worker = self.table.by_name[NAME]
        self.fleet, self.feeds, self.down, self.now = Fleet(), Feeds(), "", 0.0
        fleet: Any = self.fleet
        self.faulty = WorkerFaults(
            self.table, fleet, self.feeds, lambda _: self.down, lambda: self.now
        )

    def codes(self) -> list[str]:
        present = found(self.faulty)
        assert {one.subject for one in present} <= {f"worker {NAME}"}
        return [one.code for one in present]

    def said(self, after_seconds: float = PATIENCE_SECONDS) -> str:
        self.codes()
        self.now += after_seconds
        return "\n".join(one.says for one in found(self.faulty))


def test_worker_that_is_well_has_no_fault() -> None:
    assert not Case().said()


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (FeedState.CONNECTING, "feed-not-live"),
        (FeedState.REPLAYING, "feed-not-live"),
        (FeedState.STALE, "feed-not-live"),
        (FeedState.UNSUPPORTED, "feed-not-live"),
        (FeedState.DEGRADED, "feed-degraded"),
    ],
)
def test_feed_that_is_not_live_is_a_fault_after_a_while(state: FeedState, code: str) -> None:
    case = Case()
    case.fleet.states = [state]
    assert case.said(PATIENCE_SECONDS - 1) == ""
    case.now += 1
    assert case.codes() == [code]
    assert case.said() == f"its feed is {state.value}: why"
    case.fleet.states = [FeedState.LIVE]
    assert case.codes() == []
    case.fleet.states = [state]
    assert case.codes() == []  # it has just begun


def test_rank_that_is_not_live_is_named() -> None:
    case = Case()
    case.fleet.states, case.fleet.why = [FeedState.LIVE, FeedState.CONNECTING], ""
    assert case.said() == "its feed of rank 1 is connecting: not connected yet"


def test_missing_feed_is_a_fault_with_its_reason() -> None:
    case = Case()
    case.fleet.states = []
    assert case.said() == "it has no feed: it has not been asked yet"


def test_feeds_are_no_fault_where_none_are_followed() -> None:
    case = Case()
    case.fleet.states, case.feeds.enabled = [FeedState.STALE], False
    assert not case.said()


def test_worker_that_does_not_answer_has_one_fault() -> None:
    case = Case()
    case.fleet.states, case.down = [FeedState.STALE], "does not answer"
    assert case.said() == "it gets no requests: does not answer"
    assert case.codes() == ["worker-down"]


def test_worker_that_takes_no_requests_has_none() -> None:
    case = Case()
    case.down, case.worker.is_drained = "does not answer", True
    assert case.codes() == []
    other = Case(excluded="not ready")
    other.down = "does not answer"
    assert other.codes() == []


def test_several_addresses_of_one_name_are_a_fault() -> None:
    case = Case()
    case.worker.other_endpoints = ("10.0.0.2:8000",)
    assert case.codes() == ["worker-several-addresses"]
    assert case.said() == (
        "its name leads to 10.0.0.2:8000 as well, which get nothing: all its requests go to"
        " 10.0.0.1:8000"
    )


def test_late_events_and_other_blocks_are_faults() -> None:
    case = Case()
    case.fleet.lag, case.fleet.size = MAX_LAG_SECONDS + 1, 32
    assert case.codes() == ["clock-differs", "block-size-differs"]
    case.fleet.lag, case.fleet.size = MAX_LAG_SECONDS, 16
    assert case.codes() == []


def test_source_of_workers_that_fails_is_a_fault() -> None:
    status = [{"source": "static", "fault": ""}, {"source": "file", "fault": "cannot be read"}]
    (found,) = discovery_faults(status)
    assert (found.code, found.subject) == ("discovery-fault", "discovery file")
    assert found.says == "cannot be read; its last list of workers is used"


@given(st.integers(0, 100))
def test_few_workers_are_looked_at_without_a_pause(count: int) -> None:
    names = [f"10.0.0.{number}:1" for number in range(count)]
    table = Table({name: FleetMember(Sighting(schema.WorkerSettings(name)), "") for name in names})
    fleet: Any = Fleet()
    faulty = WorkerFaults(table, fleet, Feeds(), lambda _: "it is down", lambda: 0.0)
    at_once = [0]
    for one in faulty.faults():
        at_once = [*at_once, 0] if one is None else [*at_once[:-1], at_once[-1] + 1]
    assert sum(at_once) == count
    assert max(at_once) <= WORKERS_AT_ONCE
