"""The course of one request through the router: when each phase of its decision was over."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

Asked = TypeVar("Asked")
Found = TypeVar("Found")

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
    parsed.
    lookup_seconds: how long the index was asked, which is where the pick begins. trace: where the
    request is traced, its trace.
    """

    __slots__ = (
        "_clock",
        "lookup_seconds",
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
        self.parsed_at = self.tokenized_at = self.picked_at = self.lookup_seconds = 0.0
        self.started_at = clock()

    def parsed(self) -> None:
        """The body was read."""
        self.parsed_at = self._clock()

    def tokenized(self) -> None:
        """The prompt's tokens are known, or will not be."""
        self.tokenized_at = self._clock()

    def picked(self) -> float:
        """The decision is made; the seconds it took, of all phases."""
        self.picked_at = self._clock()
        return self.picked_at - self.started_at

    def timed(self, look: Callable[[Asked], Found]) -> Callable[[Asked], Found]:
        """The same look into the index, its time counted."""

        def counted(asked: Asked) -> Found:
            began = self._clock()
            found = look(asked)
            self.lookup_seconds += self._clock() - began
            return found

        return counted

    def phases(self) -> Iterator[tuple[str, float, float]]:
        """Each phase that came to pass: its name, its start, its end."""
        last = self.started_at
        if self.parsed_at:
            yield "parse", last, self.parsed_at
            last = self.parsed_at
        if self.tokenized_at:
            yield "tokens", last, self.tokenized_at
            last = self.tokenized_at
        if self.lookup_seconds:
            yield "lookup", last, last + self.lookup_seconds
            last += self.lookup_seconds
        yield "pick", last, self.picked_at
