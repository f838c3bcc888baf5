"""How long a feed waits, and how often it asks."""

from dataclasses import dataclass

from kvstate.feeds.allowance import BEHIND_SECONDS, BURST_SECONDS


@dataclass(frozen=True, slots=True)
class FeedTimes:
    """The waits of one feed, the same for all feeds of a process.

    quiet_seconds, quiet_for_long_seconds: after this much silence a feed checks whether the last
    batch was lost, once and then seldom. retry_seconds: the first and the longest wait before a
    replay that failed is asked for again. max_replay_seconds: the most time for a whole replay;
    engines send it from the thread that publishes. replay_spacing_seconds, replays_at_once: two
    publishers on one endpoint seem to restart all the time, and are not asked for a replay each
    time. snapshot_seconds: a snapshot, with those begun before it ended, may take this long.
    patience_seconds, seconds_a_batch: the longest total wait for a publisher, and how much it
    grows with each batch that it has sent. burst_seconds, behind_seconds: of a worker's allowance.
    """

    quiet_seconds: float = 1.0
    quiet_for_long_seconds: float = 30.0
    retry_seconds: tuple[float, float] = (1.0, 60.0)
    max_replay_seconds: float = 60.0
    replay_spacing_seconds: float = 0.5
    replays_at_once: int = 20
    snapshot_seconds: float = 60.0
    patience_seconds: float = 5.0
    seconds_a_batch: float = 0.1
    burst_seconds: float = BURST_SECONDS
    behind_seconds: float = BEHIND_SECONDS


USUAL = FeedTimes()
