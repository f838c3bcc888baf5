"""Observes decisions: the end of each phase, the trace, and the counts of all decisions.

The counts are plain numbers, so that counting costs a request almost nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple, Protocol

import msgspec
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.observing.buckets import Buckets, TracedValue, histogram_family
from extproc.observing.keyed import KeyedCounts
from extproc.observing.recent_counts import MINUTE_SECONDS, RecentCounts
from extproc.routing.decision import Decision
from extproc.routing.recomputed import EVICTED, MOVED, recomputed_tokens

# In chronological order.
PHASES = ("parse", "tokens", "lookup", "pick")


class TraceContext(NamedTuple):
    """The trace that a request belongs to, "" if none. is_sampled: whether it is recorded."""

    trace_id: str = ""
    is_sampled: bool = False


NO_TRACE = TraceContext()


class Timeline(msgspec.Struct, eq=False):
    """When each phase of a request's decision ended, in seconds of a monotonic clock.

    clock: returns the time. started_at: when the decision began. traceparent: the trace that the
    request belongs to, as the proxy or the client wrote it, "" if none. path: the request's, "" if
    the proxy sent none. whose: the client whose request it is, None where nobody asks. trace: the
    request's trace, if it is traced.

    Whoever ends a phase writes its end: to call a method would take longer than to read the clock.
    A phase that did not happen has 0.0: a request without a prompt is not parsed, and nothing is
    looked up for it.
    """

    clock: Callable[[], float]
    started_at: float
    traceparent: str = ""
    path: str = ""
    whose: bytes | None = None
    trace: TraceContext = NO_TRACE
    parsed_at: float = 0.0
    tokenized_at: float = 0.0
    looked_at: float = 0.0
    picked_at: float = 0.0

    @classmethod
    def begin(cls, clock: Callable[[], float], traceparent: str = "") -> "Timeline":
        """Returns the timeline of a decision that begins now."""
        return cls(clock, clock(), traceparent)

    def pause(self, seconds: float) -> None:
        """Leaves out a time in which the decision was not worked on: all before it is later."""
        self.started_at += seconds
        self.parsed_at += seconds if self.parsed_at else 0.0
        self.tokenized_at += seconds if self.tokenized_at else 0.0
        self.looked_at += seconds if self.looked_at else 0.0

    def phases(self) -> Iterator[tuple[str, float, float]]:
        """Yields each phase that happened: its name, its start, its end."""
        ends = (self.parsed_at, self.tokenized_at, self.looked_at, self.picked_at)
        last = self.started_at
        for phase, end in zip(PHASES, ends, strict=True):
            if end:
                yield phase, last, end
                last = end


class Traces(Protocol):
    """Records decisions as spans."""

    def record(self, decision: Decision, timeline: Timeline) -> TraceContext:
        """Records a decision if its trace is sampled; returns the trace that it belongs to.

        It never fails: an error in a span must not affect the request.
        """


# Bounds in seconds, for a whole decision.
DECISION_BOUNDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
)  # fmt: skip

# Bounds in seconds, for one phase: a lookup takes microseconds, a new long prompt tens of
# milliseconds.
PHASE_BOUNDS = (
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
    0.1, 0.25,
)  # fmt: skip

# Bounds in percent of a prompt that its worker holds; a chat's follow-up is usually above 90.
MATCH_BOUNDS = (0, 10, 25, 50, 75, 90, 95, 99, 100)


# Of what tokens are counted for 15 minutes.
PROMPTS, RECOMPUTED = "prompts", "recomputed"

# Decisions that are counted together: a few hundred microseconds of work.
BATCH = 512


# Model, reason, tokens of the prompt and certain ones, path, and the times of a timeline.
_Noted = tuple[str | None, str, int, int, str, float, float, float, float, float]


class DecisionCounts:
    """The decisions of one router, counted by the event loop that makes them.

    A request's figures are only noted at first; `settle` counts many at a time, and must be called
    before the counts are read.

    by_reason: by model and reason. by_split: by model and who computes the prompt, if workers take
    parts of requests. prompt_tokens, predicted_tokens, match_percent: by model, for the requests
    that could be keyed. recomputed_tokens: by model and why. keyed: which could be, by
    API. seconds: times of whole decisions; phases: times of each phase.
    """

    def __init__(self) -> None:
        self.by_reason: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.by_split: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.prompt_tokens: defaultdict[str, int] = defaultdict(int)
        self.predicted_tokens: defaultdict[str, int] = defaultdict(int)
        self.recomputed_tokens: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._recent = RecentCounts[tuple[str, str]]()  # tokens, by model and of what
        self.match_percent: defaultdict[str, Buckets] = defaultdict(lambda: Buckets(MATCH_BOUNDS))
        self.seconds = Buckets(DECISION_BOUNDS)
        self.keyed = KeyedCounts()
        self.phases = {phase: Buckets(PHASE_BOUNDS) for phase in PHASES}
        # plain tuples, since named tuples, or keeping the decisions, would cost more than counting
        self._noted: list[_Noted] = []

    def expect(self, model: str) -> None:
        """Starts a model's counters at zero: a rate needs a counter before its first increase."""
        self.prompt_tokens[model] += 0
        self.predicted_tokens[model] += 0
        for why in (EVICTED, MOVED):
            self.recomputed_tokens[model, why] += 0
        _ = self.match_percent[model]

    def note(self, decision: Decision, timeline: Timeline) -> None:
        """Notes a decision to be counted, with the time of each of its phases."""
        noted, basis = self._noted, decision.basis
        if decision.split is not None:
            self.by_split[decision.model or "", decision.split.outcome] += 1
        if basis.belonging.counted is not None:
            self.note_recomputed(decision, timeline.picked_at)
        noted.append(
            (
                decision.model,
                decision.reason,
                basis.prompt_tokens,
                basis.certain_tokens,
                timeline.path,
                timeline.started_at,
                timeline.parsed_at,
                timeline.tokenized_at,
                timeline.looked_at,
                timeline.picked_at,
            )
        )
        if len(noted) >= BATCH:
            self.settle()

    def note_recomputed(self, decision: Decision, at: float) -> None:
        """Counts what is computed again of a live conversation. at: seconds of the timelines."""
        why, tokens = recomputed_tokens(decision)
        if why:
            model = decision.model or ""
            self.recomputed_tokens[model, why] += tokens
            self._recent.add({(model, RECOMPUTED): round(tokens)}, at)

    def recomputed_share(self, model: str, now: float) -> float | None:
        """Returns the share of a model's prompt tokens of 15 minutes that were computed again.

        None if there were none.
        """
        found = self._recent.total(now)
        prompts = found[model, PROMPTS]
        return min(1.0, found[model, RECOMPUTED] / prompts) if prompts else None

    def settle(self) -> None:
        """Counts all noted decisions."""
        if not self._noted:
            return
        noted, self._noted = self._noted, []
        models, reasons, prompts, held, paths, *times = zip(*noted, strict=True)
        minutes = _minutes(times[-1])
        alike = Counter(zip(models, reasons, paths, map(bool, prompts), minutes, strict=True))
        for (model, reason, path, is_keyed, minute), count in alike.items():
            self.by_reason[model or "", reason] += count
            self.keyed.count(path, reason, minute * MINUTE_SECONDS, count, is_keyed=is_keyed)
        for model in {name for name, *_, is_keyed, _ in alike if is_keyed}:
            own = [
                (prompt_tokens, tokens)
                for name, prompt_tokens, tokens in zip(models, prompts, held, strict=True)
                if name == model and prompt_tokens
            ]
            self._count_tokens(model or "", own, times[-1][-1])
        self._count_times(*times)

    def _count_tokens(self, model: str, keyed: Sequence[tuple[int, int]], at: float) -> None:
        """Counts one model's prompts: tokens, and how many of them the worker holds."""
        prompt_tokens = sum([prompt_tokens for prompt_tokens, _ in keyed])
        self.prompt_tokens[model] += prompt_tokens
        self._recent.add({(model, PROMPTS): prompt_tokens}, at)
        self.predicted_tokens[model] += sum([held for _, held in keyed])
        percents = [100.0 * held / prompt_tokens for prompt_tokens, held in keyed]
        self.match_percent[model].observe_all(percents)

    def _count_times(self, started: tuple[float, ...], *ends: tuple[float, ...]) -> None:
        """Counts the times of phases, from their ends as in `Timeline`; 0 if one did not happen."""
        self.seconds.observe_spans(started, ends[-1])
        last = started
        for phase, end in zip(self.phases.values(), ends, strict=True):
            if all(end):
                phase.observe_spans(last, end)
                last = end
            else:
                phase.observe_all([to - at for at, to in zip(last, end, strict=True) if to])
                last = tuple([to or at for at, to in zip(last, end, strict=True)])

    def total(self) -> int:
        """Returns how many requests were decided."""
        self.settle()
        return sum(self.by_reason.values())

    def calls(self) -> int:
        """Returns how many requests were taken for a model's call."""
        self.settle()
        return self.keyed.total.total()

    def for_reason(self, reason: str) -> int:
        """Returns how many requests were placed for a reason."""
        self.settle()
        return sum([count for (_, why), count in self.by_reason.items() if why == reason])

    def show(self, seen: TracedValue) -> None:
        """Makes a decision's trace the exemplar of its time's bucket."""
        self.seconds.show(seen)


def _minutes(times: Sequence[float]) -> Iterator[float]:
    """Returns the minute of each time; one that all have in common is computed once."""
    first, last = min(times) // MINUTE_SECONDS, max(times) // MINUTE_SECONDS
    if first == last:
        return repeat(first, len(times))
    return map(MINUTE_SECONDS.__rfloordiv__, times)


class DecisionCollector(Collector):
    """Shows the counts at every scrape."""

    def __init__(self, counts: DecisionCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families of decisions."""
        counts = self._counts
        counts.settle()
        yield _counter(
            "kvsteer_decisions",
            "Requests placed, by model (empty if none is known) and reason",
            ["model", "reason"],
            counts.by_reason.items(),
        )
        yield _counter(
            "kvsteer_api_requests",
            "Requests by API, and keyed or why their tokens are not known",
            ["api", "outcome"],
            counts.keyed.total.items(),
        )
        yield _counter(
            "kvsteer_disaggregation",
            "Requests among workers that take parts of them, by who computes the prompt and why",
            ["model", "outcome"],
            counts.by_split.items(),
        )
        yield histogram_family(
            "kvsteer_decision_seconds",
            "Time from the whole request to the pick",
            [],
            [((), counts.seconds)],
        )
        yield histogram_family(
            "kvsteer_phase_seconds",
            "Time of one phase of a decision",
            ["phase"],
            [((phase,), buckets) for phase, buckets in counts.phases.items()],
        )
        yield histogram_family(
            "kvsteer_match_percent",
            "Percent of a prompt that the picked worker certainly held, by model",
            ["model"],
            [((model,), buckets) for model, buckets in counts.match_percent.items()],
        )
        yield _counter(
            "kvsteer_prompt_tokens",
            "Prompt tokens of the requests that could be keyed",
            ["model"],
            [((model,), tokens) for model, tokens in counts.prompt_tokens.items()],
        )
        yield _counter(
            "kvsteer_predicted_cached_tokens",
            "Prompt tokens that the picked worker certainly held",
            ["model"],
            [((model,), tokens) for model, tokens in counts.predicted_tokens.items()],
        )
        yield _counter(
            "kvsteer_recomputed_tokens",
            "Prompt tokens of live conversations that are computed again, by model and why",
            ["model", "cause"],
            counts.recomputed_tokens.items(),
        )


def _counter(
    name: str, what: str, labels: Sequence[str], counts: Iterable[tuple[Sequence[str], float]]
) -> CounterMetricFamily:
    """Returns a family of counters, each with the values of its labels."""
    family = CounterMetricFamily(name, what, labels=labels)
    for values, count in counts:
        family.add_metric(values, count)
    return family
