"""The record of a worker, with everything known about it.

All state about workers is in their records, or in weak references to a part of them. So it
disappears with the worker, and nothing else needs to be notified. `table.py` owns the records.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from extproc.base import address
from extproc.base.engine import Engine
from extproc.config.schema import WorkerEvents
from extproc.fleet.asking.polling import Poll
from extproc.fleet.discovery.view import FleetMember, Sighting
from extproc.fleet.records.engine_identity import EngineAnswer, EngineRecord, identity_of
from extproc.observing.outcomes import WorkerOutcomes
from extproc.observing.saved_tokens import SavedTokens
from extproc.proof.lookups import Lookups
from extproc.proof.reuse import ReuseFindings
from extproc.proof.state import GoldenVerdict, TokenProof
from extproc.requests.dialect import Dialect, Printed
from extproc.routing.candidates.pins import PinFindings
from extproc.routing.claims.claim_table import Holdings
from extproc.routing.health.upstreams import Upstream
from extproc.routing.store_share import StoreShare
from extproc.tokenizing.remote_tokenizer import Failures
from kvstate.feeds.backoff import Backoff
from kvstate.feeds.feed_sources import ZmqSource


class SelfReport(NamedTuple):
    """What a worker reported about itself; None for unknown.

    model: the configured model that it serves. adapters: those that it lists, by name.
    """

    model: str | None = None
    adapters: frozenset[str] | None = None
    block_size: int | None = None


class FeedPlan(NamedTuple):
    """A feed to follow; if any of this changes, it is restarted.

    identity: the engine's, since another engine may get its address. address: the worker's, if it
    is configured by a host name.
    """

    model: str
    events: WorkerEvents | str
    identity: str = ""
    adapters: tuple[tuple[int, str], ...] = ()
    address: str = ""


# What no two workers may share: the kind of socket, its host and port, and the topic.
Place = tuple[str, str, int, str]


@dataclass(eq=False, slots=True)
class PlannedFeed:
    """How one worker's feed is followed.

    plan: as it is followed now, None if it is not. sources: the sources that the worker reported.
    places: of its publishers. reason: why it has no feed, "" if no reason is known.
    """

    plan: FeedPlan | None = None
    sources: tuple[ZmqSource, ...] | None = None
    places: frozenset[Place] = frozenset()
    reason: str = ""


@dataclass(eq=False, slots=True)
class GoldenQuestions:
    """When a worker was asked for the tokens of golden requests, and how long to wait after a
    failure. Seconds of one monotonic clock.

    by_release: the verdicts on forms that releases read differently. dialect: in which they were
    asked.
    """

    at: float = -math.inf
    retries: Backoff | None = None
    by_release: dict[int, GoldenVerdict] = field(default_factory=dict)
    dialect: Dialect | None = None


@dataclass(eq=False, slots=True)
class EngineQuestions:
    """How a worker is asked for its engine.

    at: when it was asked, in seconds of one monotonic clock. noted: what was known when others were
    last notified, None before. was_down: whether it was ejected at the last check.
    """

    at: float = -math.inf
    retries: Backoff | None = None
    noted: EngineRecord | None = None
    was_down: bool = False


class Worker:
    """One worker. name: its configured host:port. member: as it was configured or found."""

    __slots__ = (
        "asleep",
        "batches_seen",
        "checks_due",
        "did_answer",
        "engine_answer",
        "engine_questions",
        "feed",
        "golden_questions",
        "holdings",
        "identity",
        "is_drained",
        "lookups",
        "member",
        "name",
        "other_endpoints",
        "outcomes",
        "pin_findings",
        "place",
        "polls",
        "printed",
        "proof",
        "retries",
        "reuse",
        "saved",
        "self_report",
        "sleep_asked_at",
        "store_share",
        "tokenizer",
        "upstream",
        "void_at",
    )

    def __init__(self, name: str, member: FleetMember) -> None:
        self.name = name
        self.member = member
        # Its name, parsed.
        self.place = address.parse(name)

        # The record of its endpoint, which other workers may share; None until its host name is
        # resolved. And further endpoints, to which its host name leads as well.
        self.upstream: Upstream | None = None
        self.other_endpoints: tuple[str, ...] = ()

        # What was sent there.
        self.holdings = Holdings(name)
        # Whether the operator drained it.
        self.is_drained = False

        # How its engine sleeps, "" while it does not.
        self.asleep = ""
        # When it was last asked for that because it was in doubt, in seconds of one monotonic
        # clock.
        self.sleep_asked_at = -math.inf
        # How many batches its feed had sent when its sleeping engine dropped its cache; None if
        # none is dropped, or that is announced.
        self.void_at: int | None = None

        # What it reported about itself.
        self.self_report = SelfReport()
        # Pauses before it is asked for that again, and whether it answered the last time.
        self.retries: Backoff | None = None
        self.did_answer = False

        # How its feed is followed.
        self.feed = PlannedFeed()

        # The state of its tokens, and its requests that will be looked up for that.
        self.proof = TokenProof(name)
        self.lookups = Lookups()
        # When it was asked for the tokens of golden requests.
        self.golden_questions = GoldenQuestions()
        # How it prints the tools of responses, None as long as it shows nothing.
        self.printed: Printed | None = None

        # The outcomes of its requests; whether it computes requests on the ranks that they name;
        # what it reuses of what it holds; the tokens that its cache saved lately.
        self.outcomes = WorkerOutcomes()
        self.pin_findings = PinFindings()
        self.reuse = ReuseFindings()
        self.saved = SavedTokens()
        # What it loads of what stores offer, None before that is known.
        self.store_share: StoreShare | None = None
        # Its failures to tokenize.
        self.tokenizer = Failures()

        # What it said about its engine, what is known of that, and how it is asked for it.
        self.engine_answer = EngineAnswer()
        self.identity: EngineRecord
        self.identify()
        self.engine_questions = EngineQuestions()

        # Its regular questions, by name.
        self.polls: dict[str, Poll] = {}
        # Its feed's batches at the last check for computed prompts, and how many more checks these
        # batches need.
        self.batches_seen = self.checks_due = 0

    @property
    def sighting(self) -> Sighting:
        """The worker as it was configured or found."""
        return self.member.sighting

    def identify(self, answer: EngineAnswer | None = None) -> None:
        """Works out anew what is known of its engine. answer: what it said, if that is new."""
        if answer is not None:
            self.engine_answer = answer
        found = self.sighting
        self.identity = identity_of(found.worker.engine, found.engine_source, self.engine_answer)
        self.holdings.capacity_tokens = self.engine_answer.cache_tokens
        self.holdings.is_blind = found.worker.events is None

    @property
    def engine(self) -> Engine | None:
        """Its engine, None if that is unknown."""
        return self.identity.engine

    @property
    def must_tell(self) -> bool:
        """Whether its feed has to tell of what it computes: it answers, and caches prefixes."""
        is_down = self.upstream is not None and self.upstream.is_down
        return self.engine_answer.caches is not False and not is_down

    @property
    def endpoint(self) -> str:
        """Its ip:port now; its name until that is resolved."""
        return self.name if self.upstream is None else self.upstream.endpoint

    @property
    def is_draining(self) -> bool:
        """Whether it gets no new requests: the operator drained it, or it was found draining."""
        return self.is_drained or self.sighting.worker.draining

    def stop_asking(self, question: str) -> None:
        """Stops asking a question."""
        poll = self.polls.pop(question, None)
        if poll is not None:
            poll.cancel()
