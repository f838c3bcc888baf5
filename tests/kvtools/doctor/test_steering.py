"""The doctor's words about steering, from what it saw of the router and of Envoy."""

import json
from typing import Any

import pytest

from kvtools.doctor.findings import Subject
from kvtools.doctor.steering import (
    SteeredListener,
    SteeringCounters,
    SteeringState,
    counters_in,
    judge_steering,
    listeners_in,
)

UP, DOWN = {"127.0.0.1:9002": ""}, {"127.0.0.1:9002": "Connection refused"}
TWO = {"10.0.0.1:9002": "", "10.0.0.2:9002": "Connection refused"}
DOOR = (SteeredListener("127.0.0.1:10000", speaks_tls=False),)
GONE, PASSED, SOME = SteeringCounters(0, 0, 0), SteeringCounters(2, 0, 2), SteeringCounters(3, 4, 1)
FINE = SteeringCounters(2, 4, 0)
ASKED = "a router answered Envoy about 2 requests"


NOT_READY = "127.0.0.1:9002: Connection refused"
ONE_DOWN = "these routers are not ready: 10.0.0.2:9002: Connection refused"
UNKNOWN = "it is not known whether requests are steered now: the router is ready, but"
PASSED_ALL = "requests are not steered now: Envoy let 2 of 2 pass without the router"
PASSED_ONE = "some requests are not steered now: Envoy let 1 of 3 pass without the router"


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        (SteeringState(UP, "", DOOR, FINE), f"requests are steered now: {ASKED}"),
        (SteeringState(UP, "", DOOR, FINE, percent=100.0), f"requests are steered now: {ASKED}"),
        (
            SteeringState(UP, "", DOOR, FINE, percent=0.0),
            f"requests are observed now, and none of them is steered: {ASKED}",
        ),
        (
            SteeringState(UP, "", DOOR, FINE, percent=2.5),
            f"requests are observed now, and only 2.5 % of them are steered: {ASKED}",
        ),
        (
            SteeringState(TWO, "", DOOR, FINE),
            f"requests are steered now: {ASKED}; from here, {ONE_DOWN}",
        ),
        (SteeringState(UP, "nobody answers"), f"{UNKNOWN} nobody answers"),
        (
            SteeringState(UP, "", DOOR, GONE, "it says 401"),
            f"{UNKNOWN} Envoy did not ask it; it says 401",
        ),
        (
            SteeringState(UP),
            "requests are not steered now: the router is ready, but Envoy has no ext_proc filter",
        ),
    ],
)
def test_steering_is_no_fault_where_a_router_is_ready(seen: SteeringState, says: str) -> None:
    found = judge_steering(Subject("steering"), seen)
    assert (found.code, found.says) == ("", says)


@pytest.mark.parametrize(
    ("seen", "code", "says"),
    [
        (
            SteeringState(UP, "", DOOR, FINE, percent=100.0, fault="3 of 9 went elsewhere"),
            "steered-elsewhere",
            "requests are steered now, but 3 of 9 went elsewhere",
        ),
        (
            SteeringState(DOWN, "", DOOR, PASSED),
            "router-down",
            f"{PASSED_ALL}; no router is ready: {NOT_READY}",
        ),
        (
            SteeringState(UP, "", DOOR, PASSED),
            "router-bypassed",
            f"{PASSED_ALL}, though a router is ready",
        ),
        (
            SteeringState(TWO, "", DOOR, SOME),
            "router-bypassed",
            f"{PASSED_ONE}, though a router is ready; {ONE_DOWN}",
        ),
        (
            SteeringState(DOWN, "", DOOR, GONE),
            "router-down",
            f"requests are not steered now: no router is ready: {NOT_READY}",
        ),
        (
            SteeringState(DOWN, "nobody answers"),
            "router-down",
            f"requests are not steered now: no router is ready: {NOT_READY}; nobody answers",
        ),
    ],
)
def test_requests_that_pass_without_a_router_are_a_fault(
    seen: SteeringState, code: str, says: str
) -> None:
    found = judge_steering(Subject("steering"), seen)
    assert (found.code, found.says) == (code, says)


def stats(**values: Any) -> bytes:
    scope = "http.clients.ext_proc"
    named = [{"name": f"{scope}.{name}", "value": value} for name, value in values.items()]
    return json.dumps({"stats": [*named, {"histograms": {}}, 3]}).encode()


def test_counters_of_all_filters_are_added() -> None:
    answer = stats(streams_started=2, stream_msgs_received=5, failure_mode_allowed=1, other=9)
    assert counters_in(answer) == SteeringCounters(2, 5, 1)
    assert counters_in(answer.replace(b"ext_proc", b"ext_authz")) == SteeringCounters()
    for unreadable in (b"", b"[]", b"{}", b"\xff", b'{"stats": 1}'):
        assert counters_in(unreadable) is None


def test_counters_of_a_restarted_envoy_begin_anew() -> None:
    assert SteeringCounters(5, 9, 2).since(SteeringCounters(3, 5, 2)) == SteeringCounters(2, 4, 0)
    assert SteeringCounters(1, 2, 0).since(SteeringCounters(3, 5, 2)) == SteeringCounters(1, 2, 0)


FILTER = {
    "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"
}


def listener(port: int, *, tls: bool = False, filters: Any = FILTER) -> dict[str, Any]:
    chain: dict[str, Any] = {"filters": [filters]} | ({"transport_socket": {}} if tls else {})
    place = {"socket_address": {"address": "0.0.0.0", "port_value": port}}
    return {"address": place, "filter_chains": [chain]}


def test_doors_are_the_listeners_with_the_filter() -> None:
    listeners = [listener(1), listener(2, tls=True), listener(3, filters={})]
    bootstrap = {"@type": "type.googleapis.com/envoy.admin.v3.BootstrapConfigDump"}
    dump = {"configs": [bootstrap | {"a": listener(4)}, {"b": listeners}]}
    found = listeners_in(json.dumps(dump).encode())
    assert set(found or ()) == {
        SteeredListener("0.0.0.0:2", speaks_tls=True),
        SteeredListener("0.0.0.0:1", speaks_tls=False),
    }
    for unreadable in (b"", b"[]", b'{"configs": 1}'):
        assert listeners_in(unreadable) is None
