"""What is counted of decisions, in plain numbers: a request must not pay for being counted."""

from collections import defaultdict

from extproc.observing.buckets import Buckets, Seen
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


class DecisionCounts:
    """The decisions of one router, counted by the event loop that makes them.

    by_reason: by model and reason. prompt_tokens, predicted_tokens, match_percent: by model, of
    the requests that could be keyed. seconds: of whole decisions; phases: of each phase.
    """

    def __init__(self) -> None:
        self.by_reason: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.prompt_tokens: defaultdict[str, int] = defaultdict(int)
        self.predicted_tokens: defaultdict[str, int] = defaultdict(int)
        self.match_percent: defaultdict[str, Buckets] = defaultdict(lambda: Buckets(MATCH_BOUNDS))
        self.seconds = Buckets(DECISION_BOUNDS)
        self.phases = {phase: Buckets(PHASE_BOUNDS) for phase in PHASES}
        self._parse, self._tokens, self._lookup, self._pick = self.phases.values()

    def expect(self, model: str) -> None:
        """Begins a model's figures at nothing: a rate needs to see a counter before it rises."""
        self.prompt_tokens[model] += 0
        self.predicted_tokens[model] += 0
        _ = self.match_percent[model]

    def count(self, decision: Decision, seconds: float) -> int:
        """Counts a decision that took so long; the bucket of that time."""
        model = decision.model or ""
        self.by_reason[model, decision.reason] += 1
        prompt_tokens = decision.prompt_tokens
        if prompt_tokens:
            held = decision.certain_tokens
            self.prompt_tokens[model] += prompt_tokens
            self.predicted_tokens[model] += held
            self.match_percent[model].observe(100.0 * held / prompt_tokens)
        return self.seconds.observe(seconds)

    def count_phases(self, course: Course) -> None:
        """Counts the time of each phase of a decision."""
        last = course.started_at
        if course.parsed_at:
            self._parse.observe(course.parsed_at - last)
            last = course.parsed_at
        if course.tokenized_at:
            self._tokens.observe(course.tokenized_at - last)
            last = course.tokenized_at
        if course.lookup_seconds:
            self._lookup.observe(course.lookup_seconds)
            last += course.lookup_seconds
        self._pick.observe(course.picked_at - last)

    def show(self, bucket: int, seen: Seen) -> None:
        """Has the bucket of a decision's time point at its trace."""
        self.seconds.seen[bucket] = seen
