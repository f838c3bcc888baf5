"""What is counted of outcomes, in plain numbers; extproc.observing.outcome_families shows them."""

from collections import defaultdict
from collections.abc import Collection

from extproc.accounting.outcome import Outcome
from extproc.observing.buckets import Buckets

# Statuses that have a label of their own: busy, and away.
_NAMED = (429, 503)

# Seconds until the first byte: long prompts on busy workers take minutes.
FIRST_BYTE_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

# Tokens by which a prediction was wrong, in blocks of common sizes.
ERROR_BOUNDS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)


class OutcomeCounts:
    """The outcomes of one router.

    responses: by worker and status. moved, reported_tokens: by model. first_byte_seconds: by model.
    error_tokens: by model, and by whether `over`, `under` or `exact` was predicted.
    """

    def __init__(self) -> None:
        self.responses: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.moved: defaultdict[str, int] = defaultdict(int)
        self.reported_tokens: defaultdict[str, int] = defaultdict(int)
        self.first_byte_seconds: defaultdict[str, Buckets] = defaultdict(
            lambda: Buckets(FIRST_BYTE_BOUNDS)
        )
        self.error_tokens: defaultdict[tuple[str, str], Buckets] = defaultdict(
            lambda: Buckets(ERROR_BOUNDS)
        )

    def count(self, outcome: Outcome) -> None:
        """Counts a request that is over."""
        model = outcome.model
        self.responses[outcome.worker, status_label(outcome.status)] += 1
        if outcome.is_moved:
            self.moved[model] += 1
        if outcome.ttft_seconds is not None:
            self.first_byte_seconds[model].observe(outcome.ttft_seconds)
        error, cached = outcome.error_tokens, outcome.reported.cached_tokens
        if error is not None and cached is not None:
            self.reported_tokens[model] += cached
            sign = "over" if error > 0 else "under" if error < 0 else "exact"
            self.error_tokens[model, sign].observe(abs(error))

    def keep(self, workers: Collection[str]) -> None:
        """Forgets the workers that are not among these."""
        for key in [key for key in self.responses if key[0] and key[0] not in workers]:
            del self.responses[key]


def status_label(status: int | None) -> str:
    """The label of a status: its class, but for 429 and 503; bounded whatever a worker says."""
    if status is None:
        return "none"
    if status in _NAMED:
        return str(status)
    return f"{status // 100}xx" if 100 <= status < 600 else "other"  # noqa: PLR2004 - RFC 9110
