"""What a router needs of tracing, whatever records the spans."""

from typing import Protocol

from extproc.observing.course import Course, Trace
from extproc.picking.decision import Decision


class Traces(Protocol):
    """Records decisions as spans."""

    def record(self, decision: Decision, course: Course) -> Trace:
        """Records a decision that was made, if its trace is sampled; the trace it belongs to.

        It never fails: what goes wrong with a span is no matter of the request's.
        """
