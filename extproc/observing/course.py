"""The course of one request through the router: when each phase of its decision was over."""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from extproc.picking.decision import Decision

# In the order in which they follow one another.
PHASES = ("parse", "tokens", "lookup", "pick")


class Trace(NamedTuple):
    """The trace that a request belongs to; "" if there is none. is_sampled: it is recorded."""

    trace_id: str = ""
    is_sampled: bool = False


NO_TRACE = Trace()


class Course:
    """When the phases of a request's decision were over, in seconds of a monotonic clock.

    traceparent: of the trace that the request belongs to, as the proxy or the client wrote it, ""
    if there is none. 0.0 stands for what did not come to pass: a request without a prompt is not
    parsed, and nothing is looked up for it. trace: where the request is traced, its trace.
    """

    __slots__ = (
        "_clock",
        "looked_at",
        "parsed_at",
        "picked_at",
        "started_at",
        "tokenized_at",
        "trace",
        "traceparent",
    )

    def __init__(self, clock: Callable[[], float], traceparent: str = "") -> None:
        self._clock = clock
        self.traceparent = traceparent
        self.trace = NO_TRACE
        self.parsed_at = self.tokenized_at = self.looked_at = self.picked_at = 0.0
        self.started_at = clock()

    def now(self) -> float:
        """The time."""
        return self._clock()

    def parsed(self) -> None:
        """The body was read."""
        self.parsed_at = self._clock()

    def tokenized(self) -> None:
        """The prompt's tokens are known, or will not be."""
        self.tokenized_at = self._clock()

    def looked(self) -> float:
        """The index told who holds what; the time."""
        self.looked_at = now = self._clock()
        return now

    def picked(self) -> float:
        """The decision is made; the time."""
        self.picked_at = now = self._clock()
        return now

    def phases(self) -> Iterator[tuple[str, float, float]]:
        """Each phase that came to pass: its name, its start, its end."""
        ends = (self.parsed_at, self.tokenized_at, self.looked_at, self.picked_at)
        last = self.started_at
        for phase, end in zip(PHASES, ends, strict=True):
            if end:
                yield phase, last, end
                last = end


class Traces(Protocol):
    """Records decisions as spans."""

    def record(self, decision: Decision, course: Course) -> Trace:
        """Records a decision that was made, if its trace is sampled; the trace it belongs to.

        It never fails: what goes wrong with a span is no matter of the request's.
        """


NAME = "traceparent"

# Section 3.2.2: lower-case hexadecimal digits; of a later version, what follows is not read.
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Parent(NamedTuple):
    """The span that a request comes from.

    is_sampled: whoever sent it may record it.
    """

    trace_id: int
    span_id: int
    is_sampled: bool


def parse(text: str) -> Parent | None:
    """The span that a header names; None if it is none, as if there were no header (4.3)."""
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    version, trace, span, flags, rest = found.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    is_known_form = version != "ff" and (version != "00" or rest is None)
    if not (is_known_form and trace_id and span_id):
        return None
    return Parent(trace_id, span_id, bool(int(flags, 16) & 1))
