"""Accounts for requests: compares what a response reports with what was decided.

If a prediction was wrong, the likeliest cause is the first of these that fits:

- `unknown_media`: more was reported, and the prompt has media whose tokens are not known.
- `token_mismatch`: the engine counted the prompt tokens differently, or its tokens are refuted
  (`extproc.proof.state`), so it looked for other blocks.
- `feed_not_live`: its feed is not live, so the index may be out of date.
- `block_size`: the difference is less than a block, or the reported tokens are no whole number of
  KVSteer's blocks, so the engine uses another block size.
- `uncertain`: more was reported, and what the worker held at the pick, certain or not, covers it:
  the prediction counts only what was certain. `uncertain_because` in GET /workers says why it was
  not, by the worker's present state: `form` (not proved there), `draft`, `groups` (of attention),
  `rank` (none was named), or `blocks` (stored before a hole, or where removals are not announced).
- `evicted`: less was reported, and according to its feed the worker now holds less than was
  predicted.
- `stored_meanwhile`: more was reported, and the worker's feed announced it afterwards: requests
  ahead of this one in the queue stored the blocks.
- `feed_of_another`: another worker's feed announced this prompt's blocks since the pick, and the
  feed of the worker that answered did not: feeds are swapped.
- `rank_ignored`: less was reported though the request named the rank that holds the blocks, and
  another worker did not answer: the engine computed it on another rank.
- `other_rank`: a worker with several ranks reported less; a rank other than the one that holds the
  blocks may have answered.
- `draft_drop`: less was reported, by exactly one unit, as by most recent requests of this worker: a
  draft model makes its engine compute the last block that it holds again.
- `group_missing`: the worker has several kinds of attention, and its engine reused less than the
  groups that its feed announced suggest, or its feed does not show what they hold.
- `evicted` again: less was reported, and according to its feed the worker now holds the whole
  prompt: it removed some between pick and prefill, and stored it again.
- `unknown`: nothing in the worker's feed explains it.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.config.policies import POLICIES
from extproc.observing.buckets import Buckets, histogram_family
from extproc.observing.deliveries import DELIVERED, ELSEWHERE, UNTOLD, Answers
from extproc.observing.usage import UNKNOWN, Usage, UsageScanner
from extproc.routing.cost.fetch import Fetch
from extproc.routing.decision import Decision
from extproc.routing.health.statuses import FIRST_FAILURE
from extproc.routing.inputs.query import Media
from kvstate.overlap import Overlap, Prompt


class Outcome(NamedTuple):
    """One ended request for which a worker was picked.

    model: the configured model, "" if unknown. worker: the configured name of the worker that
    answered; the picked one's if unknown; "" if the server is not a known worker. is_moved: whether
    a worker other than the pick answered. status: the HTTP status; None without a response.
    ttft_seconds: from the request's headers to the first byte of the response's body, or to the
    response's headers if the body is not read; None without a response. prompt_tokens: the router's
    count, 0 if unknown. predicted_tokens: how many of them the worker certainly held at the pick.
    is_comparable: whether the report is about `prompt` alone. is_whole: whether the response was
    read to its end. overlaps: what every worker held of the prompt at the pick, by name.
    is_steered: whether the proxy got the pick; if not, the request was decided and noted, but the
    proxy chose. delivery: whether a steered request reached the picked worker, one of
    `deliveries.DELIVERIES`; unknown for unsteered ones. is_cache_aware: whether the policy that
    placed it considers what workers hold. is_streamed: whether the answer came in events. forms:
    the forms of the request. media: that of the request, None without any. names_rank: whether the
    request named a rank. of_class: the name of its class, "" without classes. fetch: what the
    worker could fetch of the prompt. handed_tokens: how many ids of the prompt went with it, which
    its engine need not make then.
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
    overlaps: Mapping[str, Overlap] = {}
    is_steered: bool = True
    delivery: str = UNTOLD
    is_cache_aware: bool = True
    is_streamed: bool = False
    forms: int = 0
    media: Media | None = None
    names_rank: bool = False
    of_class: str = ""
    fetch: Fetch | None = None
    handed_tokens: int = 0

    @property
    def loaded_tokens(self) -> int | None:
        """How many of the tokens that its store offered the worker loaded; None if unknown."""
        fetch, cached = self.fetch, self.reported.cached_tokens
        is_known = self.is_comparable and self.is_whole and not self.is_moved
        if fetch is None or fetch.peer is not None or cached is None or not is_known:
            return None
        return min(max(0, cached - fetch.held), fetch.tokens)

    @property
    def counted_tokens(self) -> int | None:
        """Prompt tokens that the engine counted; None if they are not comparable to ours.

        /v1/messages reports parts, and releases disagree on whether they overlap. Tokens of media
        are compared apart (`extproc.media`).
        """
        reported = self.reported
        if not self.is_comparable or reported.form == "messages" or self.media is not None:
            return None
        return reported.prompt_tokens

    @property
    def error_tokens(self) -> int | None:
        """Predicted minus reported tokens; None if either is unknown or implausible."""
        cached = self.reported.cached_tokens
        if not self.is_comparable or cached is None:
            return None
        if cached > self.prompt_tokens and (self.media is None or self.media.is_whole):
            return None
        return self.predicted_tokens - cached


LIVE = "live"

# The cause where the engine's tokens are others.
TOKEN_MISMATCH = "token_mismatch"  # noqa: S105 - no password

UNCERTAIN = "uncertain"

# Why a prediction was uncertain.
FORM, DRAFT, GROUPS, RANK, BLOCKS = "form", "draft", "groups", "rank", "blocks"
UNCERTAIN_BECAUSE = (FORM, DRAFT, GROUPS, RANK, BLOCKS)


class Circumstances(NamedTuple):
    """What is known about a worker when a request has ended.

    state: of its feeds. tokens_differ: whether its tokens were found to differ from KVSteer's.
    block_size: in tokens. ranks: how many it has. overlaps: what every worker now holds of the
    request's prompt, by name. reuse_cause: why by the rules of its engine it reuses less than it
    holds, if that explains the outcome, else "". uncertain_because: why its credit for such a
    request is uncertain, one of `UNCERTAIN_BECAUSE`.
    """

    state: str = LIVE
    tokens_differ: bool = False
    block_size: int = 1
    ranks: int = 1
    overlaps: Mapping[str, Overlap] = {}
    reuse_cause: str = ""
    uncertain_because: str = BLOCKS


def likely_cause(outcome: Outcome, circumstances: Circumstances) -> str:
    """Returns why predicted and reported tokens differ; "" if they do not, or are unknown."""
    error, cached = outcome.error_tokens, outcome.reported.cached_tokens
    if not error or cached is None:
        return ""
    counted = outcome.reported.prompt_tokens
    if outcome.media is not None and not outcome.media.is_whole and error < 0:
        return "unknown_media"
    if circumstances.tokens_differ or counted not in (None, outcome.prompt_tokens):
        return TOKEN_MISMATCH
    if circumstances.state != LIVE:
        return "feed_not_live"
    if abs(error) < circumstances.block_size or cached % circumstances.block_size:
        return "block_size"
    return _cause_by_feeds(outcome, circumstances, cached)


def _cause_by_feeds(outcome: Outcome, circumstances: Circumstances, cached: int) -> str:
    """Returns the cause that the feeds' events about the prompt since the pick suggest.

    A worker that computes a prompt holds all its whole blocks when it answers.
    """
    if outcome.predicted_tokens > cached:
        return _cause_of_less(outcome, circumstances)
    if _tokens(outcome.overlaps, outcome.worker) >= cached:
        return UNCERTAIN
    if _tokens(circumstances.overlaps, outcome.worker) >= cached:
        return "stored_meanwhile"
    return "feed_of_another" if _is_of_another(outcome, circumstances, is_over=False) else "unknown"


def _cause_of_less(outcome: Outcome, circumstances: Circumstances) -> str:
    """Returns why less was reported than was predicted."""
    now = _tokens(circumstances.overlaps, outcome.worker)
    if now < outcome.predicted_tokens:
        return "evicted"
    if _is_of_another(outcome, circumstances, is_over=True):
        return "feed_of_another"
    if circumstances.ranks > 1:
        if outcome.names_rank and not outcome.is_moved:
            return "rank_ignored"
        return "other_rank"
    if circumstances.reuse_cause:
        return circumstances.reuse_cause
    return "evicted" if now >= _whole(outcome, circumstances) else "unknown"


def _is_of_another(outcome: Outcome, circumstances: Circumstances, *, is_over: bool) -> bool:
    """Whether another worker's feed announced the prompt instead of this one's."""
    worker, held, whole = outcome.worker, circumstances.overlaps, _whole(outcome, circumstances)
    others = [name for name in held if name != worker and _tokens(held, name) >= whole]
    grown = [name for name in others if _tokens(outcome.overlaps, name) < whole]
    is_unchanged = _tokens(held, worker) <= _tokens(outcome.overlaps, worker)
    return is_unchanged and not outcome.is_moved and bool(grown or (others and not is_over))


def _whole(outcome: Outcome, circumstances: Circumstances) -> int:
    """Returns how many tokens of its prompt a worker can reuse, if it holds all."""
    size = circumstances.block_size
    return (outcome.prompt_tokens - 1) // size * size


def _tokens(held: Mapping[str, Overlap], worker: str) -> int:
    overlap = held.get(worker)
    return overlap.certain_tokens + overlap.uncertain_tokens if overlap else 0


# Statuses with their own label: busy, and unavailable.
_NAMED = (429, 503)

# Bounds in seconds until the first byte: long prompts on busy workers take minutes.
FIRST_BYTE_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

# Bounds of a prediction's error in tokens: blocks of common sizes.
ERROR_BOUNDS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)


def status_label(status: int | None) -> str:
    """Returns the label of a status: its class, but 429 and 503 themselves; a bounded set."""
    if status is None:
        return "none"
    if status in _NAMED:
        return str(status)
    return f"{status // 100}xx" if 100 <= status < 600 else "other"


def _noted_by_nobody(_: Outcome, __: Callable[[], Circumstances]) -> None:
    pass


def _nothing_known(_: Outcome) -> Circumstances:
    return Circumstances()


class Drift:
    """One worker's predictions, and how it reports.

    requests: those whose prediction could be compared. predicted_tokens, reported_tokens: theirs.
    unusable_tokens: what the worker held of their prompts, and could not reuse by its events.
    causes: requests whose prediction was wrong, by the likeliest cause. uncertain_because: those
    whose prediction was uncertain, by the reason. is_logged: whether the worker reports prompt
    tokens.
    """

    __slots__ = (
        "_forms_with_hits",
        "_forms_with_zeros",
        "causes",
        "is_logged",
        "predicted_tokens",
        "reported_tokens",
        "requests",
        "uncertain_because",
        "unusable_tokens",
    )

    def __init__(self) -> None:
        self.requests = self.predicted_tokens = self.reported_tokens = self.unusable_tokens = 0
        self.causes: Counter[str] = Counter()
        self.uncertain_because: Counter[str] = Counter()
        self.is_logged = False
        self._forms_with_hits: set[str] = set()
        self._forms_with_zeros: set[str] = set()

    def complete(self, outcome: Outcome) -> Outcome:
        """Returns the outcome, with 0 cached tokens if the worker leaves them out.

        SGLang and older releases of vLLM report cached tokens only if there are some. If a worker
        never reported any, a missing figure means nothing.
        """
        usage = outcome.reported
        if not usage.form:
            return outcome
        self.is_logged = True
        if usage.cached_tokens is not None:
            (self._forms_with_hits if usage.cached_tokens else self._forms_with_zeros).add(
                usage.form
            )
            return outcome
        is_zero = usage.form in self._forms_with_hits - self._forms_with_zeros
        is_alone = outcome.is_comparable or not outcome.prompt_tokens
        if is_zero and outcome.is_whole and is_alone:
            return outcome._replace(reported=usage._replace(cached_tokens=0))
        return outcome

    def count(
        self, outcome: Outcome, circumstances: Callable[[], Circumstances] = Circumstances
    ) -> None:
        """Counts an ended request, if its prediction can be compared.

        circumstances: returns those of the outcome.
        """
        error, cached = outcome.error_tokens, outcome.reported.cached_tokens
        if error is None or cached is None:
            return
        self.is_logged = True
        self.requests += 1
        self.predicted_tokens += outcome.predicted_tokens
        self.reported_tokens += cached
        overlap = outcome.overlaps.get(outcome.worker)
        self.unusable_tokens += 0 if overlap is None else overlap.unusable_tokens
        if error:
            known = circumstances()
            cause = likely_cause(outcome, known)
            self.causes[cause] += 1
            if cause == UNCERTAIN:
                self.uncertain_because[known.uncertain_because] += 1

    def as_json(self) -> dict[str, Any]:
        """Returns its entry in GET /workers."""
        return {
            "requests": self.requests,
            "predicted_tokens": self.predicted_tokens,
            "reported_tokens": self.reported_tokens,
            "unusable_tokens": self.unusable_tokens,
            "causes": dict(self.causes),
            "uncertain_because": dict(self.uncertain_because),
        }


@dataclass(eq=False, slots=True)
class WorkerOutcomes:
    """The outcomes of one worker's requests; part of its record.

    responses: by the label of their status.
    """

    responses: Counter[str] = field(default_factory=Counter)
    answers: Answers = field(default_factory=Answers)
    drift: Drift = field(default_factory=Drift)


class HasOutcomes(Protocol):
    """The record of a worker."""

    @property
    def outcomes(self) -> WorkerOutcomes:
        """The outcomes of its requests."""


Records = Mapping[str, HasOutcomes]


class OutcomeCounts:
    """The outcomes of one router.

    records: the workers' records by name; each keeps its own counts. circumstances: returns the
    current ones of the worker that answered. noted: is called with each outcome of a known worker,
    and with what returns its circumstances.
    strangers: responses of unknown servers, by status. moved, reported_tokens: by model.
    first_byte_seconds: by model. error_tokens: by model, and by whether the prediction was `over`,
    `under` or `exact`.
    """

    def __init__(
        self,
        records: Records,
        circumstances: Callable[[Outcome], Circumstances] = _nothing_known,
        noted: Callable[[Outcome, Callable[[], Circumstances]], None] = _noted_by_nobody,
    ) -> None:
        self.records = records
        self._circumstances = circumstances
        self._noted = noted
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
        """Counts an ended request, and returns it with the figures that its worker leaves out.

        For a removed worker, only the figures by model are counted.
        """
        worker = self.records.get(outcome.worker)
        if worker is not None:
            outcome = worker.outcomes.drift.complete(outcome)
            worker.outcomes.responses[status_label(outcome.status)] += 1
            # the index is asked for them at most once, and only if one of these two needs them
            known = functools.cache(functools.partial(self._circumstances, outcome))
            self._noted(outcome, known)
            worker.outcomes.drift.count(outcome, known)
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
    """Shows the counts at every scrape. A removed worker's series disappear."""

    def __init__(self, counts: OutcomeCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families of outcomes."""
        counts = self._counts
        records = counts.records.items()
        responses = CounterMetricFamily(
            "kvsteer_responses",
            "Responses, by the worker that answered and status; none if no response came",
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
            "Prompt tokens that engines reported as cached",
            labels=["model"],
        )
        for family, by_model in ((moved, counts.moved), (reported, counts.reported_tokens)):
            for model, count in by_model.items():
                family.add_metric([model], count)
        yield from (responses, moved, reported)
        served = CounterMetricFamily(
            "kvsteer_served_known",
            "Answers for which the proxy reported the server, by the worker that was picked",
            labels=["worker"],
        )
        astray = CounterMetricFamily(
            "kvsteer_served_elsewhere",
            "The number of those that another server sent, by the worker that was picked",
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
    """Shows the results of predictions. A removed worker's series disappear."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families of drifts."""
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
            "The number of those whose prediction was wrong, by the likeliest cause",
            labels=["worker", "cause"],
        )
        for worker, record in self._records.items():
            drift = record.outcomes.drift
            if not drift.is_logged:
                continue
            compared.add_metric([worker], drift.requests)
            tokens.add_metric([worker, "predicted"], drift.predicted_tokens)
            tokens.add_metric([worker, "reported"], drift.reported_tokens)
            tokens.add_metric([worker, "unusable"], drift.unusable_tokens)
            for cause, count in drift.causes.items():
                causes.add_metric([worker, cause], count)
        yield from (compared, tokens, causes)


class Account:
    """One request in flight, for which a worker was picked.

    compared: its prompt and the forms of the request, if the engine's report can be compared with
    the prediction. began_at: when its headers arrived; times are seconds of one monotonic clock.
    """

    def __init__(
        self, decision: Decision, compared: tuple[Prompt, int] | None, began_at: float
    ) -> None:
        self._decision = decision
        self._sole = None if compared is None else compared[0]
        self._forms = 0 if compared is None else compared[1]
        self._began_at = began_at
        # for an unsteered request, only the proxy knows
        self._worker = decision.worker if decision.is_steered else ""
        self._delivery = UNTOLD
        self._status: int | None = None
        self._headers_at: float | None = None
        self._first_byte_at: float | None = None
        self._scanner: UsageScanner | None = None
        self._is_whole = False

    @property
    def has_failed(self) -> bool:
        """Whether the response means that the prompt was not computed."""
        return self._status is not None and self._status >= FIRST_FAILURE

    def respond(self, status: int | None, served: str, now: float) -> str | None:
        """Takes the response's headers; returns the endpoint that answered if it is not the pick.

        served: the endpoint that answered, "" if the proxy does not report it.
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

    def note_proxy_endpoint(self, endpoint: str) -> None:
        """Notes the endpoint to which an unsteered request was sent."""
        self._worker = self.worker_at(endpoint)

    def worker_at(self, endpoint: str) -> str:
        """Returns the name of the worker at an endpoint; "" for an unknown endpoint."""
        return self._decision.basis.worker_at(endpoint)

    def read(self, piece: bytes, now: float, *, is_last: bool = False) -> None:
        """Reads a piece of the response's body; now: when it arrived."""
        self._is_whole = is_last
        if self._first_byte_at is None and piece:
            self._first_byte_at = now
        if self._scanner is None:
            self._scanner = UsageScanner()
        self._scanner.read(piece)

    @property
    def response_id(self) -> str:
        """The id of the response, if it has one that a later request may continue."""
        if self._scanner is None or self.has_failed:
            return ""
        if self._is_whole:
            _ = self._scanner.usage  # reads a document, which is whole only now
        return self._scanner.response_id

    @property
    def worker(self) -> str:
        """The name of the worker that answers, as far as is known; "" if it is unknown."""
        return self._worker

    def outcome(self) -> Outcome:
        """Returns the outcome; call it when the stream has ended."""
        decision, basis, worker = self._decision, self._decision.basis, self._worker
        first = self._headers_at if self._first_byte_at is None else self._first_byte_at
        is_known = decision.is_steered or bool(worker)
        return Outcome(
            model=decision.model or "",
            worker=worker,
            is_moved=decision.is_steered and worker != decision.worker,
            status=self._status,
            ttft_seconds=None if first is None else first - self._began_at,
            prompt_tokens=basis.prompt_tokens,
            predicted_tokens=self._certain_tokens_of(worker),
            reported=UNKNOWN if self._scanner is None else self._scanner.usage,
            is_comparable=self._sole is not None and not self.has_failed and is_known,
            is_whole=self._is_whole,
            prompt=self._sole,
            overlaps=basis.overlaps[0] if len(basis.overlaps) == 1 else {},
            is_steered=decision.is_steered,
            delivery=self._delivery,
            is_cache_aware=POLICIES[basis.policy].reads_caches,
            is_streamed=self._scanner is not None and self._scanner.is_streamed,
            forms=self._forms,
            media=basis.media,
            names_rank=decision.rank is not None and decision.is_steered,
            of_class="" if decision.of_class is None else decision.of_class.name,
            fetch=basis.fetches.get(worker),
            handed_tokens=0 if decision.handing is None else decision.handing.handed_tokens,
        )

    def _certain_tokens_of(self, worker: str) -> int:
        """Returns how many prompt tokens a worker certainly held at the pick."""
        held = self._decision.basis.overlaps
        return sum([each[worker].certain_tokens for each in held if worker in each])
