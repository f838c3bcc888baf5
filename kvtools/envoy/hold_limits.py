"""Which of Envoy's limits end a request that waits in the router (`policy.hold`).

Sources: `HttpConnectionManager` with its `HttpProtocolOptions`, and `RouteAction`. An idle timeout
runs while ext_proc awaits an answer, since nothing passes. `request_timeout` does not, since the
request has been received; nor does a route's `timeout`, which begins with the request to the worker
(tests/system/processes/test_holds.py runs them all).
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Node = Mapping[str, Any]

# The default of `HttpConnectionManager.stream_idle_timeout`.
DEFAULT_IDLE_SECONDS = 300.0

# The idle timeouts of a route, and of its connection manager.
IDLE, MANAGERS_IDLE = "idle_timeout", "stream_idle_timeout"

_DURATION = "max_stream_duration"


class HoldLimit(NamedTuple):
    """A limit that is too low; is_of_route: else it is the connection manager's."""

    key: str
    seconds: float
    is_of_route: bool = False


def low_limits(manager: Node, action: Node, needed: float) -> Iterator[HoldLimit]:
    """Yields what ends requests that wait as long as is needed, in seconds.

    manager: the connection manager. action: a route's `route`.
    """
    idle = HoldLimit(MANAGERS_IDLE, seconds(manager.get(MANAGERS_IDLE), DEFAULT_IDLE_SECONDS))
    if action.get(IDLE) is not None:
        idle = HoldLimit(IDLE, seconds(action[IDLE], 0.0), is_of_route=True)
    options = _part(manager, "common_http_protocol_options")
    whole = HoldLimit(_DURATION, seconds(options.get(_DURATION), 0.0))
    own = _part(action, _DURATION).get(_DURATION)
    if own is not None:
        whole = HoldLimit(_DURATION, seconds(own, 0.0), is_of_route=True)
    yield from (one for one in (idle, whole) if 0 < one.seconds < needed)


def _part(tree: Node, key: str) -> Node:
    part = tree.get(key)
    return part if isinstance(part, Mapping) else {}


def seconds(value: object, default: float) -> float:
    """Returns the seconds of a duration such as "0.5s"; the default if it is no duration."""
    try:
        return float(str(value).removesuffix("s"))
    except ValueError:
        return default
