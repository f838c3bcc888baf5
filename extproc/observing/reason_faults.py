"""Faults that the reasons of decisions show: many requests were placed without their tokens."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from extproc.base.fault import ROUTER, Fault

# What a reason shows: the fault's code, and what is wrong with these requests.
_SHOWN = {
    "unknown_model": ("model-unknown", "name a model that is not configured"),
    "body_not_buffered": ("bodies-not-sent", "came without their bodies"),
    "unsupported_compression": ("bodies-compressed", "have compressed bodies"),
    "deadline": ("decisions-late", "were not tokenized in time"),
    "tokenizer_timeout": ("decisions-late", "were not tokenized in time"),
    "template_too_slow": ("decisions-late", "were not tokenized in time"),
}
CODES = tuple(dict.fromkeys(code for code, _ in _SHOWN.values()))

# There is a fault if more than this share of a minute's requests have such a reason; fewer than
# LEAST requests are not judged.
SHARE = 0.2
LEAST = 20
MINUTE_SECONDS = 60.0
_STEP_SECONDS = 5.0
_STEPS = int(MINUTE_SECONDS / _STEP_SECONDS)


class _Step(NamedTuple):
    """How many requests there were so far, and how many of them by the code of a fault."""

    at: float
    calls: int
    by_code: Mapping[str, int]


class ReasonFaults:
    """Watches the shares of these reasons.

    calls: returns how many requests called a model so far. decided_for: returns how many requests
    were decided for a reason so far. monotonic: seconds.
    """

    def __init__(
        self,
        calls: Callable[[], int],
        decided_for: Callable[[str], int],
        monotonic: Callable[[], float],
    ) -> None:
        self._calls = calls
        self._decided_for = decided_for
        self._monotonic = monotonic
        self._steps: deque[_Step] = deque(maxlen=_STEPS + 1)

    def _step(self) -> _Step:
        by_code = dict.fromkeys(CODES, 0)
        for reason, (code, _) in _SHOWN.items():
            by_code[code] += self._decided_for(reason)
        return _Step(self._monotonic(), self._calls(), by_code)

    def faults(self) -> Iterator[Fault]:
        """Yields a fault while a share is too high; it has to be called every few seconds."""
        now = self._step()
        if not self._steps or now.at - self._steps[-1].at >= _STEP_SECONDS:
            self._steps.append(now)
        first = next(
            (one for one in self._steps if now.at - one.at <= MINUTE_SECONDS + _STEP_SECONDS), now
        )
        calls = now.calls - first.calls
        if calls < LEAST:
            return
        for code, what in dict(_SHOWN.values()).items():
            count = now.by_code[code] - first.by_code[code]
            if count > SHARE * calls:
                says = f"{count} of the last {calls} requests {what}"
                yield Fault(code, ROUTER, f"{says}: no cache is looked up for them")
