"""What is counted of decisions, in plain numbers: a request must not pay for being counted."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import sub

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.observing.buckets import Buckets, Seen, histogram_family
from extproc.observing.course import PHASES, Course
from extproc.picking.decision import Decision

# Seconds, of a whole decision.
DECISION_BOUNDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
)  # fmt: skip

# Seconds, of one phase: a lookup takes microseconds, a first sight of a long prompt tens of
# milliseconds.
PHASE_BOUNDS = (
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
    0.1, 0.25,
)  # fmt: skip

# Percent of a prompt that its worker holds. A follow-up in a chat is mostly above 90.
MATCH_BOUNDS = (0, 10, 25, 50, 75, 90, 95, 99, 100)


# Decisions that are counted at once: a few hundred microseconds of work.
BATCH = 512


class DecisionCounts:
    """The decisions of one router, counted by the event loop that makes them.

    A request only has its figures noted; they are counted many at a time, and have to be settled
    before they are looked at.

    by_reason: by model and reason. by_split: by model and who computes the prompt, where workers
    take parts of requests. prompt_tokens, predicted_tokens, match_percent: by model, of the
    requests that could be keyed. seconds: of whole decisions; phases: of each phase.
    """

    def __init__(self) -> None:
        self.by_reason: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.by_split: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.prompt_tokens: defaultdict[str, int] = defaultdict(int)
        self.predicted_tokens: defaultdict[str, int] = defaultdict(int)
        self.match_percent: defaultdict[str, Buckets] = defaultdict(lambda: Buckets(MATCH_BOUNDS))
        self.seconds = Buckets(DECISION_BOUNDS)
        self.phases = {phase: Buckets(PHASE_BOUNDS) for phase in PHASES}
        # plain tuples: named ones, or the decisions themselves, cost a request more than its count
        self._noted: list[tuple[str | None, str, int, int, float, float, float, float, float]] = []

    def expect(self, model: str) -> None:
        """Begins a model's figures at nothing: a rate needs to see a counter before it rises."""
        self.prompt_tokens[model] += 0
        self.predicted_tokens[model] += 0
        _ = self.match_percent[model]

    def note(self, decision: Decision, course: Course) -> None:
        """Has a decision counted, with the time of each of its phases."""
        noted = self._noted
        if decision.split is not None:
            self.by_split[decision.model or "", decision.split.outcome] += 1
        noted.append(
            (
                decision.model,
                decision.reason,
                decision.prompt_tokens,
                decision.certain_tokens,
                course.started_at,
                course.parsed_at,
                course.tokenized_at,
                course.looked_at,
                course.picked_at,
            )
        )
        if len(noted) >= BATCH:
            self.settle()

    def settle(self) -> None:
        """Counts all that was noted."""
        if not self._noted:
            return
        noted, self._noted = self._noted, []
        models, reasons, prompts, held, *times = zip(*noted, strict=True)
        for (model, reason), count in Counter(zip(models, reasons, strict=True)).items():
            self.by_reason[model or "", reason] += count
        for model in set(models):
            own = [
                (prompt_tokens, tokens)
                for name, prompt_tokens, tokens in zip(models, prompts, held, strict=True)
                if name == model and prompt_tokens
            ]
            if own:
                self._count_tokens(model or "", own)
        self._count_times(*times)

    def _count_tokens(self, model: str, keyed: Sequence[tuple[int, int]]) -> None:
        """Of one model: tokens of each prompt, and how many of them its worker holds."""
        self.prompt_tokens[model] += sum([prompt_tokens for prompt_tokens, _ in keyed])
        self.predicted_tokens[model] += sum([held for _, held in keyed])
        percents = [100.0 * held / prompt_tokens for prompt_tokens, held in keyed]
        self.match_percent[model].observe_all(percents)

    def _count_times(self, started: Sequence[float], *ends: Sequence[float]) -> None:
        """The end of each phase, as `Course.phases` has them; 0 of what did not come to pass."""
        self.seconds.observe_all(_spans(started, ends[-1]))
        last = started
        for phase, end in zip(self.phases.values(), ends, strict=True):
            if all(end):
                phase.observe_all(_spans(last, end))
                last = end
            else:
                came = [(at, to) for at, to in zip(last, end, strict=True) if to]
                phase.observe_all([to - at for at, to in came])
                last = [to or at for at, to in zip(last, end, strict=True)]

    def show(self, seen: Seen) -> None:
        """Has the bucket of a decision's time point at its trace."""
        self.seconds.show(seen)


def _spans(starts: Sequence[float], ends: Sequence[float]) -> list[float]:
    return list(map(sub, ends, starts))


class DecisionCollector(Collector):
    """Shows the counts at every scrape."""

    def __init__(self, counts: DecisionCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """All families of decisions."""
        counts = self._counts
        counts.settle()
        yield _counter(
            "kvsteer_decisions",
            "Requests placed, by model (empty if none is known) and reason",
            ["model", "reason"],
            counts.by_reason.items(),
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


def _counter(
    name: str, what: str, labels: Sequence[str], counts: Iterable[tuple[Sequence[str], int]]
) -> CounterMetricFamily:
    """Returns a family of counters, each with the values of its labels."""
    family = CounterMetricFamily(name, what, labels=labels)
    for values, count in counts:
        family.add_metric(values, count)
    return family
