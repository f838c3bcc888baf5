from typing import Any

import pytest

from kvtools.envoy.hold_limits import HoldLimit, low_limits, seconds


def low(needed: float, manager: Any = None, action: Any = None) -> list[HoldLimit]:
    return list(low_limits(manager or {}, action or {}, needed))


def of_manager(seconds: str) -> dict[str, Any]:
    return {"common_http_protocol_options": {"max_stream_duration": seconds}}


def of_route(seconds: str) -> dict[str, Any]:
    return {"max_stream_duration": {"max_stream_duration": seconds}}


def test_default_idle_timeout_of_five_minutes_counts() -> None:
    assert low(130.0) == low(300.0) == []
    assert low(301.0) == [HoldLimit("stream_idle_timeout", 300.0)]
    assert low(301.0, {"stream_idle_timeout": "0s"}) == []


def test_idle_timeout_of_a_route_counts_instead_of_the_managers() -> None:
    manager = {"stream_idle_timeout": "60s"}
    assert low(130.0, manager) == [HoldLimit("stream_idle_timeout", 60.0)]
    assert low(130.0, manager, {"idle_timeout": "0s"}) == []
    own = low(130.0, manager, {"idle_timeout": "0.5s"})
    assert own == [HoldLimit("idle_timeout", 0.5, is_of_route=True)]


def test_limit_of_whole_streams_counts_and_those_of_their_parts_do_not() -> None:
    assert low(130.0, of_manager("9s")) == [HoldLimit("max_stream_duration", 9.0)]
    own = low(130.0, of_manager("9s"), of_route("8s"))
    assert own == [HoldLimit("max_stream_duration", 8.0, is_of_route=True)]
    assert low(130.0, of_manager("9s"), of_route("0s")) == []
    assert low(130.0, {"request_timeout": "9s"}, {"timeout": "1s"}) == []


@pytest.mark.parametrize("odd", [None, "soon", [], {"a": 1}])
def test_setting_that_is_no_duration_is_no_limit(odd: Any) -> None:
    assert low(130.0, {"stream_idle_timeout": odd}) == []
    assert low(130.0, {"common_http_protocol_options": odd}, {"max_stream_duration": odd}) == []


def test_seconds_reads_durations_or_returns_the_default() -> None:
    assert (seconds("0.5s", 7.0), seconds(None, 7.0)) == (0.5, 7.0)
