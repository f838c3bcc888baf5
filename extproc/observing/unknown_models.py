"""Requests for models that the configuration does not name: only load places them."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from extproc.base.fault import ROUTER, Fault

UNKNOWN_MODEL = "unknown_model"

# There is a fault if more than this share of a minute's requests name no known model; fewer than
# LEAST requests are not judged.
SHARE = 0.2
LEAST = 20
MINUTE_SECONDS = 60.0
_STEP_SECONDS = 5.0
_STEPS = int(MINUTE_SECONDS / _STEP_SECONDS)


class _Step(NamedTuple):
    """How many requests there were so far, and how many of them named no known model."""

    at: float
    calls: int
    unknown: int


class UnknownModels:
    """Watches their share.

    calls: returns how many requests called a model so far. unknown: returns how many of them named
    no known one. monotonic: seconds.
    """

    def __init__(
        self,
        calls: Callable[[], int],
        unknown: Callable[[], int],
        monotonic: Callable[[], float],
    ) -> None:
        self._calls = calls
        self._unknown = unknown
        self._monotonic = monotonic
        self._steps: deque[_Step] = deque(maxlen=_STEPS + 1)

    def faults(self) -> Iterator[Fault]:
        """Yields a fault while their share is too high; it has to be called every few seconds."""
        now = _Step(self._monotonic(), self._calls(), self._unknown())
        if not self._steps or now.at - self._steps[-1].at >= _STEP_SECONDS:
            self._steps.append(now)
        first = next(
            (one for one in self._steps if now.at - one.at <= MINUTE_SECONDS + _STEP_SECONDS), now
        )
        calls, unknown = now.calls - first.calls, now.unknown - first.unknown
        if calls >= LEAST and unknown > SHARE * calls:
            says = f"{unknown} of the last {calls} requests name a model that is not configured"
            yield Fault("model-unknown", ROUTER, f"{says}: only load places them")
