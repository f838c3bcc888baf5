"""Decisions as spans of OpenTelemetry.

A decision has one span, and one for each of its phases, made after they end. Their times are
measured in any case, so a request that is not sampled costs only the sampling. Spans carry counts
and reasons, never any part of a prompt.
"""

import logging
import time
from collections.abc import (
    Callable,
)

from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    TraceFlags,
    Tracer,
    format_trace_id,
    set_span_in_context,
)

from extproc.base.trace_context import parse
from extproc.observing.decisions import Timeline, TraceContext
from extproc.routing.decision import Decision

log = logging.getLogger("kvsteer.tracing")

_NO_PARENT = Context()
_NANOSECONDS = 1_000_000_000


class SpanRecorder:
    """Records decisions with a tracer, whose sampler chooses which.

    clock_ns: returns nanoseconds since 1970.
    """

    def __init__(self, tracer: Tracer, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._tracer = tracer
        self._clock_ns = clock_ns

    def record(self, decision: Decision, timeline: Timeline) -> TraceContext:
        """Records a decision that was just made, if its trace is sampled; returns its trace.

        It never raises, whatever a sampler or an exporter of the environment does.
        """
        try:
            return self._record(decision, timeline)
        except Exception as error:  # noqa: BLE001 - a span is no matter of the request's
            log.error("a span could not be recorded: %s", type(error).__name__)
            return TraceContext()

    def _record(self, decision: Decision, timeline: Timeline) -> TraceContext:
        now = self._clock_ns()

        def at(moment: float) -> int:
            return now - int((timeline.picked_at - moment) * _NANOSECONDS)

        span = self._tracer.start_span(
            "kvsteer decision",
            _context_of(timeline.traceparent),
            kind=SpanKind.SERVER,  # its parent is the proxy's call to us
            start_time=at(timeline.started_at),
        )
        if span.is_recording():
            _describe(span, decision)
            around = set_span_in_context(span, _NO_PARENT)
            for phase, began, ended in timeline.phases():
                one = self._tracer.start_span(phase, around, start_time=at(began))
                one.end(at(ended))
            span.end(now)
        context = span.get_span_context()
        if not context.is_valid:
            return TraceContext()
        return TraceContext(format_trace_id(context.trace_id), context.trace_flags.sampled)


def _context_of(traceparent: str) -> Context:
    parent = parse(traceparent)
    if parent is None:
        return _NO_PARENT
    flags = TraceFlags(TraceFlags.SAMPLED if parent.is_sampled else TraceFlags.DEFAULT)
    context = SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags)
    return set_span_in_context(NonRecordingSpan(context), _NO_PARENT)


def _describe(span: Span, decision: Decision) -> None:
    basis = decision.basis
    span.set_attributes(
        {
            "gen_ai.request.model": decision.model or "",
            "kvsteer.reason": decision.reason,
            "kvsteer.policy": basis.policy,
            "kvsteer.verdict": decision.verdict.value,
            "kvsteer.worker": decision.worker,
            "kvsteer.pick": decision.pick,
            "kvsteer.prompt_tokens": basis.prompt_tokens,
            "kvsteer.predicted_cached_tokens": basis.certain_tokens,
            "kvsteer.uncertain_tokens": basis.uncertain_tokens,
        }
    )
