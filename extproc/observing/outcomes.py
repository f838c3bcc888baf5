"""The account of one request: what its response tells, set against what was decided.

Why a prediction did not come true: the likeliest cause, by what is known of the worker.

The causes, the first that fits:

- `token_mismatch`: the engine counted other prompt tokens than we did, or the self-check found its
  tokens to differ, so it looked for other blocks.
- `feed_not_live`: its feed is not live, so what we hold of it may be old.
- `block_size`: the difference is less than a block, or what was reported is no whole number of
  ours, so the engine counts in other blocks.
- `feed_of_another`: another worker's feed told that this prompt was stored since the pick, and the
  feed of the worker that answered did not: feeds are swapped.
- `other_rank`: less was reported by a worker with several ranks; another one than the one that
  holds the blocks may have answered.
- `evicted`: less was reported, and the worker's feed told that blocks left the cache, or stored the
  prompt again.
- `stored_meanwhile`: more was reported, and the worker's feed told of it since: requests before
  this one in the queue stored the blocks.
- `unknown`: the worker's feed told nothing that explains it.

Reads usage out of a response as it passes, in JSON or in server-sent events, split anywhere.

Nothing is parsed and nothing is kept but the last hundred bytes: usage is a few numbers, and their
names occur in a JSON text as keys only, since a quote inside a string is escaped. What was named
last counts, so that events which repeat it (SGLang's, Anthropic's) end with the final figures.

Where engines put it:

    usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens   chat and text completions
                                                                     (OpenAI, vLLM, SGLang)
    usage.input_tokens, usage.input_tokens_details.cached_tokens     /v1/responses
    usage.input_tokens, usage.cache_read_input_tokens,               /v1/messages (Anthropic)
        usage.cache_creation_input_tokens
    meta_info.prompt_tokens, meta_info.cached_tokens                 /generate (SGLang)

Of /v1/messages the prompt is the sum of the three: `input_tokens` leaves out what was read from the
cache, and what vLLM calls created in it.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.observing.buckets import Buckets, histogram_family
from extproc.observing.elsewhere import DELIVERED, ELSEWHERE, UNTOLD, Answers
from extproc.picking.decision import Decision
from extproc.picking.upstreams import FIRST_FAILURE
from kvstate.overlap import Overlap, Prompt


class Usage(NamedTuple):
    """What an engine says of a request; None for what it does not say.

    prompt_tokens: as it counted them, cached ones included. cached_tokens: of them, those it had in
    its cache. form: the name under which it counts the prompt, which tells the APIs apart; "" where
    it does not. output_tokens: of the answer.
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    form: str = ""
    output_tokens: int | None = None


UNKNOWN = Usage()


class Outcome(NamedTuple):
    """One request that a worker was picked for, when it is over.

    model: the configured model, "" if none is known. worker: the configured name of the worker that
    answered; that of the picked one where nobody says otherwise; "" where a stranger answered.
    is_moved: whether another one answered than was picked. status: of HTTP; None where no response
    came. ttft_seconds: from the request's headers to the first byte of its response's body, or to
    the response's headers where the body is not read; None where nothing came. prompt_tokens: as we
    counted them; 0 where they are not known. predicted_tokens: of them, those that the worker
    certainly held at the pick. is_comparable: whether the report is of this one prompt, which is
    `prompt`. is_whole: whether the response was read to its end. held: what every worker held of
    the prompt at the pick, by name.
    is_steered: whether the pick was named to the proxy; where it was not, the request was decided
    and noted, and the proxy chose. delivery: whether a steered request reached the picked worker,
    one of `elsewhere.DELIVERIES`; of one that was not steered it is unknown. picked_tokens: of the
    prompt, those that the picked worker certainly held at the pick, whoever answered.
    conversation: a hash of the conversation's beginning, 0 where it is not known.
    """

    model: str
    worker: str
    is_moved: bool
    status: int | None
    ttft_seconds: float | None
    prompt_tokens: int
    predicted_tokens: int
    reported: Usage
    is_comparable: bool
    is_whole: bool = True
    prompt: Prompt | None = None
    held: Mapping[str, Overlap] = {}
    is_steered: bool = True
    delivery: str = UNTOLD
    picked_tokens: int = 0
    conversation: int = 0

    @property
    def error_tokens(self) -> int | None:
        """Predicted minus reported; None where one of them is not known, or makes no sense."""
        cached = self.reported.cached_tokens
        if not self.is_comparable or cached is None or cached > self.prompt_tokens:
            return None
        return self.predicted_tokens - cached


LIVE = "live"


class Circumstances(NamedTuple):
    """What is known of a worker when a request is over.

    state: of its feeds. tokens_differ: whether its tokens were found to differ from ours.
    block_size: in tokens. ranks: how many it has. held: what every worker holds of the request's
    prompt now, by name.
    """

    state: str = LIVE
    tokens_differ: bool = False
    block_size: int = 1
    ranks: int = 1
    held: Mapping[str, Overlap] = {}


def likely_cause(outcome: Outcome, circumstances: Circumstances) -> str:
    """Why predicted and reported tokens differ; "" if they do not, or cannot be compared."""
    error, cached = outcome.error_tokens, outcome.reported.cached_tokens
    if not error or cached is None:
        return ""
    counted = outcome.reported.prompt_tokens
    if circumstances.tokens_differ or counted not in (None, outcome.prompt_tokens):
        return "token_mismatch"
    if circumstances.state != LIVE:
        return "feed_not_live"
    if abs(error) < circumstances.block_size or cached % circumstances.block_size:
        return "block_size"
    return _cause_by_feeds(outcome, circumstances, cached)


def _cause_by_feeds(outcome: Outcome, circumstances: Circumstances, cached: int) -> str:
    """What the feeds told of the prompt since the pick.

    A worker that computes a prompt holds all its whole blocks when it answers.
    """
    worker, held = outcome.worker, circumstances.held
    before, now = _tokens(outcome.held, worker), _tokens(held, worker)
    whole = (outcome.prompt_tokens - 1) // circumstances.block_size * circumstances.block_size
    others = [name for name in held if name != worker and _tokens(held, name) >= whole]
    grown = [name for name in others if _tokens(outcome.held, name) < whole]
    is_over = outcome.predicted_tokens > cached
    if is_over and now < outcome.predicted_tokens:
        return "evicted"
    if not is_over and now >= cached:
        return "stored_meanwhile"
    if now <= before and not outcome.is_moved and (grown or (others and not is_over)):
        return "feed_of_another"
    if is_over and circumstances.ranks > 1:
        return "other_rank"
    return "evicted" if is_over and now >= whole else "unknown"


def _tokens(held: Mapping[str, Overlap], worker: str) -> int:
    overlap = held.get(worker)
    return overlap.certain_tokens + overlap.uncertain_tokens if overlap else 0


# Statuses that have a label of their own: busy, and away.
_NAMED = (429, 503)

# Seconds until the first byte: long prompts on busy workers take minutes.
FIRST_BYTE_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

# Tokens by which a prediction was wrong, in blocks of common sizes.
ERROR_BOUNDS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)


def status_label(status: int | None) -> str:
    """The label of a status: its class, but for 429 and 503; bounded whatever a worker says."""
    if status is None:
        return "none"
    if status in _NAMED:
        return str(status)
    return f"{status // 100}xx" if 100 <= status < 600 else "other"  # noqa: PLR2004 - RFC 9110


def _nothing_known(_: Outcome) -> Circumstances:
    return Circumstances()


class Drift:
    """One worker's predictions, and how it reports.

    requests: those whose prediction could be compared. predicted_tokens, reported_tokens: of them.
    causes: requests whose prediction was wrong, by the likeliest cause. is_told: whether it reports
    anything of prompts.
    """

    __slots__ = (
        *("causes", "is_told", "predicted_tokens", "reported_tokens", "requests"),
        *("_forms_with_hits", "_forms_with_zeros"),
    )

    def __init__(self) -> None:
        self.requests = self.predicted_tokens = self.reported_tokens = 0
        self.causes: Counter[str] = Counter()
        self.is_told = False
        self._forms_with_hits: set[str] = set()
        self._forms_with_zeros: set[str] = set()

    def complete(self, outcome: Outcome) -> Outcome:
        """The outcome, with 0 cached tokens where the worker leaves that out.

        SGLang does, and older releases of vLLM: they name cached tokens only where there are some.
        Of a worker that never named any, silence says nothing.
        """
        usage = outcome.reported
        if not usage.form:
            return outcome
        self.is_told = True
        if usage.cached_tokens is not None:
            (self._forms_with_hits if usage.cached_tokens else self._forms_with_zeros).add(
                usage.form
            )
            return outcome
        is_zero = usage.form in self._forms_with_hits - self._forms_with_zeros
        if is_zero and outcome.is_whole and outcome.is_comparable:
            return outcome._replace(reported=usage._replace(cached_tokens=0))
        return outcome

    def count(
        self, outcome: Outcome, circumstances: Callable[[Outcome], Circumstances] = _nothing_known
    ) -> None:
        """Counts a request that is over, if it says something about a prediction.

        circumstances: of the worker, as it is now.
        """
        error, cached = outcome.error_tokens, outcome.reported.cached_tokens
        if error is None or cached is None:
            return
        self.is_told = True
        self.requests += 1
        self.predicted_tokens += outcome.predicted_tokens
        self.reported_tokens += cached
        if error:
            self.causes[likely_cause(outcome, circumstances(outcome))] += 1

    def shown(self) -> dict[str, Any]:
        """As GET /workers shows it."""
        return {
            "requests": self.requests,
            "predicted_tokens": self.predicted_tokens,
            "reported_tokens": self.reported_tokens,
            "causes": dict(self.causes),
        }


@dataclass(eq=False, slots=True)
class WorkerOutcomes:
    """What came of one worker's requests; part of its record.

    responses: by the label of their status.
    """

    responses: Counter[str] = field(default_factory=Counter)
    answers: Answers = field(default_factory=Answers)
    drift: Drift = field(default_factory=Drift)


class HasOutcomes(Protocol):
    """The record of a worker."""

    @property
    def outcomes(self) -> WorkerOutcomes:
        """What came of its requests."""


Records = Mapping[str, HasOutcomes]


class OutcomeCounts:
    """The outcomes of one router.

    records: of the workers, by name, each of which keeps its own counts. circumstances: of the
    worker that answered, as it is now.
    strangers: responses of workers that are none of ours, by status. moved, reported_tokens: by
    model. first_byte_seconds: by model. error_tokens: by model, and by whether `over`, `under` or
    `exact` was predicted.
    """

    def __init__(
        self,
        records: Records,
        circumstances: Callable[[Outcome], Circumstances] = _nothing_known,
    ) -> None:
        self.records = records
        self._circumstances = circumstances
        self.strangers: Counter[str] = Counter()
        self.moved: defaultdict[str, int] = defaultdict(int)
        self.reported_tokens: defaultdict[str, int] = defaultdict(int)
        self.first_byte_seconds: defaultdict[str, Buckets] = defaultdict(
            lambda: Buckets(FIRST_BYTE_BOUNDS)
        )
        self.error_tokens: defaultdict[tuple[str, str], Buckets] = defaultdict(
            lambda: Buckets(ERROR_BOUNDS)
        )

    def count(self, outcome: Outcome) -> Outcome:
        """Counts a request that is over, and returns it with what its worker leaves out.

        Of a worker that is gone, only what is its model's is counted.
        """
        worker = self.records.get(outcome.worker)
        if worker is not None:
            outcome = worker.outcomes.drift.complete(outcome)
            worker.outcomes.responses[status_label(outcome.status)] += 1
            worker.outcomes.drift.count(outcome, self._circumstances)
        elif not outcome.worker:
            self.strangers[status_label(outcome.status)] += 1
        self._count_model(outcome)
        return outcome

    def _count_model(self, outcome: Outcome) -> None:
        model = outcome.model
        if outcome.is_moved:
            self.moved[model] += 1
        if outcome.ttft_seconds is not None:
            self.first_byte_seconds[model].observe(outcome.ttft_seconds)
        error, cached = outcome.error_tokens, outcome.reported.cached_tokens
        if error is not None and cached is not None:
            self.reported_tokens[model] += cached
            sign = "over" if error > 0 else "under" if error < 0 else "exact"
            self.error_tokens[model, sign].observe(abs(error))


class OutcomeCollector(Collector):
    """Shows the counts at every scrape. The series of a worker that is gone go with it."""

    def __init__(self, counts: OutcomeCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """All families of outcomes."""
        counts = self._counts
        records = counts.records.items()
        responses = CounterMetricFamily(
            "kvsteer_responses",
            "Responses by the worker that answered and status; none where no response came",
            labels=["worker", "status"],
        )
        for status, count in counts.strangers.items():
            responses.add_metric(["", status], count)
        for worker, record in records:
            for status, count in record.outcomes.responses.items():
                responses.add_metric([worker, status], count)
        moved = CounterMetricFamily(
            "kvsteer_answered_elsewhere",
            "Requests that another worker answered than the first pick",
            labels=["model"],
        )
        reported = CounterMetricFamily(
            "kvsteer_reported_cached_tokens",
            "Prompt tokens that engines said they had cached",
            labels=["model"],
        )
        for family, by_model in ((moved, counts.moved), (reported, counts.reported_tokens)):
            for model, count in by_model.items():
                family.add_metric([model], count)
        yield from (responses, moved, reported)
        served = CounterMetricFamily(
            "kvsteer_served_known",
            "Answers of which the proxy told the server, by the worker that was picked",
            labels=["worker"],
        )
        astray = CounterMetricFamily(
            "kvsteer_served_elsewhere",
            "Those of them that another server sent, by the worker that was picked",
            labels=["worker"],
        )
        for worker, record in records:
            answers = record.outcomes.answers
            if answers.looked_at:
                served.add_metric([worker], answers.looked_at)
                astray.add_metric([worker], answers.elsewhere)
        yield from (served, astray)
        yield histogram_family(
            "kvsteer_first_byte_seconds",
            "Time from a request's headers to the first byte of its response",
            ["model"],
            [((model,), buckets) for model, buckets in counts.first_byte_seconds.items()],
        )
        yield histogram_family(
            "kvsteer_prediction_error_tokens",
            "Difference between predicted and reported cached tokens, by which was more",
            ["model", "sign"],
            list(counts.error_tokens.items()),
        )


class DriftCollector(Collector):
    """Shows what came of predictions. The series of a worker that is gone go with it."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def collect(self) -> Iterator[Metric]:
        """All families of drifts."""
        compared = CounterMetricFamily(
            "kvsteer_predictions_compared",
            "Requests whose predicted cached tokens could be compared with the engine's report",
            labels=["worker"],
        )
        tokens = CounterMetricFamily(
            "kvsteer_compared_cached_tokens",
            "Cached tokens of those requests, as predicted and as reported",
            labels=["worker", "source"],
        )
        causes = CounterMetricFamily(
            "kvsteer_prediction_drifts",
            "Of those, requests whose prediction was wrong, by the likeliest cause",
            labels=["worker", "cause"],
        )
        for worker, record in self._records.items():
            drift = record.outcomes.drift
            if not drift.is_told:
                continue
            compared.add_metric([worker], drift.requests)
            tokens.add_metric([worker, "predicted"], drift.predicted_tokens)
            tokens.add_metric([worker, "reported"], drift.reported_tokens)
            for cause, count in drift.causes.items():
                causes.add_metric([worker, cause], count)
        yield from (compared, tokens, causes)


_PROMPT, _INPUT, _CACHED = b"prompt_tokens", b"input_tokens", b"cached_tokens"
_READ, _CREATED = b"cache_read_input_tokens", b"cache_creation_input_tokens"
_COMPLETION, _OUTPUT = b"completion_tokens", b"output_tokens"
_KEYS = b"|".join((_CACHED, _READ, _CREATED, _PROMPT, _INPUT, _COMPLETION, _OUTPUT))

# No prompt has a number of tokens with more digits, and no writer of JSON puts in more space.
_MAX_DIGITS = 9
_MAX_SPACE = 4

# Longest possible match with the byte that must follow its digits; as much has to be kept.
_TAIL_BYTES = 2 + max(map(len, _KEYS.split(b"|"))) + 2 * _MAX_SPACE + 1 + _MAX_DIGITS + 1

# Most pieces of a stream hold no such name; this is three times as fast to find out.
_HINT = b"_tokens"

_FIGURE = re.compile(
    rb'"(%b)"[ \t\r\n]{0,%d}:[ \t\r\n]{0,%d}([0-9]{1,%d})(?=[,}\] \t\r\n])'
    % (_KEYS, _MAX_SPACE, _MAX_SPACE, _MAX_DIGITS)
)


class UsageScanner:
    """Reads one response; what is told does not depend on how it is split."""

    def __init__(self) -> None:
        self._tail = b""
        self._figures: dict[bytes, int] = {}

    def read(self, piece: bytes) -> None:
        """Takes the next piece of the response's body."""
        seen = self._tail + piece
        if _HINT in seen:
            for key, digits in _FIGURE.findall(seen):
                self._figures[key] = int(digits)
        self._tail = seen[-_TAIL_BYTES:]

    @property
    def usage(self) -> Usage:
        """What was told so far."""
        found = self._figures
        output = found.get(_COMPLETION, found.get(_OUTPUT))
        if _PROMPT in found or _INPUT not in found:
            form = "prompt" if _PROMPT in found else ""
            return Usage(found.get(_PROMPT), found.get(_CACHED), form, output)
        if _CACHED in found:
            return Usage(found[_INPUT], found[_CACHED], "responses", output)
        cached = found.get(_READ)
        whole = found[_INPUT] + (cached or 0) + found.get(_CREATED, 0)
        return Usage(whole, cached, "messages", output)


class Account:
    """One request on its way; a worker was picked for it.

    sole: its prompt, where an engine's report can be compared with what was predicted for it.
    began_at: when its headers came; times are seconds of one monotonic clock.
    """

    def __init__(self, decision: Decision, sole: Prompt | None, began_at: float) -> None:
        self._decision = decision
        self._sole = sole
        self._began_at = began_at
        # of a request that is not steered only the proxy knows
        self._worker = decision.worker if decision.is_steered else ""
        self._delivery = UNTOLD
        self._status: int | None = None
        self._headers_at: float | None = None
        self._first_byte_at: float | None = None
        self._scanner: UsageScanner | None = None
        self._is_whole = False

    @property
    def has_failed(self) -> bool:
        """Whether the response says that the prompt was not computed."""
        return self._status is not None and self._status >= FIRST_FAILURE

    def respond(self, status: int | None, served: str, now: float) -> str | None:
        """Takes the response's headers; the endpoint that answered, where it is not the picked one.

        served: that endpoint, "" if the proxy does not tell.
        """
        self._status = status
        self._headers_at = now
        if not served:
            return None
        is_picked = served == self._decision.pick[0]
        if self._decision.is_steered:
            self._delivery = DELIVERED if is_picked else ELSEWHERE
        self._worker = self.worker_at(served)
        return None if is_picked else served

    def left_to(self, endpoint: str) -> None:
        """Takes the endpoint that a request which is not steered was sent to all the same."""
        self._worker = self.worker_at(endpoint)

    def worker_at(self, endpoint: str) -> str:
        """The name of the worker at an endpoint; "" for one that is not ours."""
        names = [one.name for one in self._decision.workers if one.endpoint == endpoint]
        return names[0] if names else ""

    def read(self, piece: bytes, now: float, *, is_last: bool = False) -> None:
        """Takes a piece of the response's body."""
        self._is_whole = is_last
        if self._first_byte_at is None and piece:
            self._first_byte_at = now
        if self._scanner is None:
            self._scanner = UsageScanner()
        self._scanner.read(piece)

    def outcome(self) -> Outcome:
        """What is known when the stream is over."""
        decision, worker = self._decision, self._worker
        first = self._headers_at if self._first_byte_at is None else self._first_byte_at
        is_known = decision.is_steered or bool(worker)
        return Outcome(
            model=decision.model or "",
            worker=worker,
            is_moved=decision.is_steered and worker != decision.worker,
            status=self._status,
            ttft_seconds=None if first is None else first - self._began_at,
            prompt_tokens=decision.prompt_tokens,
            predicted_tokens=self._held_by(worker),
            reported=UNKNOWN if self._scanner is None else self._scanner.usage,
            is_comparable=self._sole is not None and not self.has_failed and is_known,
            is_whole=self._is_whole,
            prompt=self._sole,
            held=decision.held[0] if len(decision.held) == 1 else {},
            is_steered=decision.is_steered,
            delivery=self._delivery,
            picked_tokens=decision.certain_tokens,
            conversation=decision.conversation,
        )

    def _held_by(self, worker: str) -> int:
        """The prompt's tokens that a worker certainly held at the pick."""
        held = self._decision.held
        return sum([each[worker].certain_tokens for each in held if worker in each])
