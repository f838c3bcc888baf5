"""What the feeds of each worker show: their state, their counts, and the engine's reported load."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvstate.events import EngineLoad
from kvstate.feeds.feed import FeedState, Restoration
from kvstate.feeds.feed_news import UNSEQUENCED
from kvstate.feeds.subscriber import Subscriber
from kvstate.following.rank_table import FollowedRank, RankTable
from kvstate.relay.relayed import RelayedRank

# From the worst state to the best; a worker's state is that of its worst rank.
_STATES_WORST_FIRST = (
    FeedState.UNSUPPORTED,
    FeedState.CONNECTING,
    FeedState.STALE,
    FeedState.REPLAYING,
    FeedState.DEGRADED,
    FeedState.LIVE,
)

_RESTORATIONS_WORST_FIRST = (
    Restoration.LOST,
    Restoration.UNPROVEN,
    Restoration.NONE,
    Restoration.PROVEN,
)


@dataclass(frozen=True, slots=True)
class ReportedLoad:
    """An engine's load report, and its age."""

    load: EngineLoad
    age_seconds: float


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """One rank's feed, for display and metrics."""

    # The number of the rank, from 0.
    rank: int
    state: FeedState
    # Why it is in this state, "" if there is nothing to say.
    reason: str
    # The number of the last batch that the feed accepted, None before the first.
    last_sequence: int | None
    # Block hashes held, over all media, certain or not.
    blocks: int
    # Those of them that earn uncertain credit now: all, while the rank is not trusted.
    uncertain_blocks: int
    # Stored blocks that wait for their parent, and earn no credit.
    orphans: int
    # How often something was missing, was requested again, and how often the publisher restarted.
    gaps: int
    replays: int
    restarts: int
    # How long before it came the last batch was stamped, in seconds.
    lag_seconds: float
    # The last load report, None if there was none.
    load: ReportedLoad | None
    # Further counters, by name.
    counts: Mapping[str, int]
    # Effects of batches that came and are not carried out yet.
    unapplied: int


class WorkerFeeds:
    """The feeds of each worker, one for each of its ranks.

    ranks: those that are followed. clock: seconds since the epoch.
    """

    def __init__(self, ranks: RankTable, clock: Callable[[], float]) -> None:
        self._ranks = ranks
        self._by_worker = ranks.by_worker
        self._clock = clock

    def state(self, worker: str) -> FeedState:
        """Returns a worker's worst feed state; unsupported if it has no feeds."""
        ranks = self._by_worker.get(worker, ())
        if len(ranks) == 1:  # the usual case; this is called at every pick
            return ranks[0].subscriber.feed.state
        states = {each.subscriber.feed.state for each in ranks}
        return next(
            (state for state in _STATES_WORST_FIRST if state in states), FeedState.UNSUPPORTED
        )

    def is_certain(self, worker: str) -> bool:
        """Returns whether what all ranks of a worker have stored of late counts as certain now.

        While a replay runs, none of it does.
        """
        return all(each.owner.trusted for each in self._ranks.of(worker))

    def restoration(self, worker: str) -> Restoration:
        """Returns whether what was restored of a worker is proven; of its ranks, the worst."""
        found = {each.subscriber.restoration for each in self._ranks.of(worker)}
        return next((one for one in _RESTORATIONS_WORST_FIRST if one in found), Restoration.NONE)

    def is_unsequenced(self, worker: str) -> bool:
        """Returns whether the messages of any of a worker's feeds have no sequence numbers."""
        ranks = self._ranks.of(worker)
        return any(each.subscriber.reason.startswith(UNSEQUENCED) for each in ranks)

    def ranks(self, worker: str) -> int:
        """Returns how many ranks of a worker are followed; 0 if it has no feeds."""
        return len(self._ranks.of(worker))

    def batches(self, worker: str) -> int:
        """Returns how many batches a worker has sent so far, on all its feeds."""
        return sum([each.subscriber.counts.get("batches", 0) for each in self._ranks.of(worker)])

    def live_batches(self, worker: str) -> int:
        """Returns how many of its batches came live, not in a replay."""
        counts = [each.subscriber.counts for each in self._ranks.of(worker)]
        return sum([one.get("batches", 0) - one.get("replayed_batch", 0) for one in counts])

    def lag_seconds(self, worker: str) -> float:
        """Returns how long before they came a worker's last batches were stamped, at most."""
        return max([each.subscriber.lag_seconds for each in self._ranks.of(worker)], default=0.0)

    def loads(self, worker: str) -> list[ReportedLoad | None]:
        """Returns each rank's last load report, in order of rank; None without one."""
        return [self._load(each.subscriber) for each in self._ranks.of(worker)]

    def statuses(self, worker: str) -> list[FeedStatus]:
        """Returns the status of a worker's feeds, in order of rank."""
        return [self._status(each) for each in self._ranks.of(worker)]

    def _load(self, subscriber: Subscriber | RelayedRank) -> ReportedLoad | None:
        if subscriber.load is None:
            return None
        return ReportedLoad(subscriber.load, max(0.0, self._clock() - subscriber.load_at))

    def _status(self, rank: FollowedRank) -> FeedStatus:
        subscriber, owner = rank.subscriber, rank.owner
        feed = subscriber.feed
        dropped = {"dropped_batch": feed.dropped} if feed.dropped else {}
        return FeedStatus(
            rank=owner.rank,
            state=feed.state,
            reason=subscriber.reason,
            last_sequence=feed.last_sequence,
            blocks=owner.blocks,
            uncertain_blocks=owner.uncertain_blocks + owner.doubted_blocks
            if owner.trusted
            else owner.blocks,
            orphans=len(owner.orphans),
            gaps=feed.gaps,
            replays=feed.replays,
            restarts=feed.restarts,
            lag_seconds=subscriber.lag_seconds,
            load=self._load(subscriber),
            counts={**subscriber.counts, **owner.counts, **dropped},
            unapplied=subscriber.unapplied,
        )
