"""How long a feed waits, and how often it asks."""

from dataclasses import dataclass

from kvstate.feeds.allowance import BEHIND_SECONDS, BURST_SECONDS


@dataclass(frozen=True, slots=True)
class FeedTimes:
    """The waits of one feed, the same for all feeds of a process."""

    # After this much silence a feed checks whether the last batch was lost: once, and then seldom.
    quiet_seconds: float = 1.0
    quiet_for_long_seconds: float = 30.0
    # The first and the longest wait before a replay that failed is asked for again.
    retry_seconds: tuple[float, float] = (1.0, 60.0)
    # The most time for a whole replay; engines send it from the thread that publishes.
    max_replay_seconds: float = 60.0
    # The least time between two replays, and how many may begin without it: two publishers on one
    # endpoint seem to restart all the time, and are not asked for a replay each time.
    replay_spacing_seconds: float = 0.5
    replays_at_once: int = 20
    # A snapshot, with those begun before it ended, may take this long.
    snapshot_seconds: float = 60.0
    # The longest total wait for a publisher, and how much it grows with each batch that it has
    # sent.
    patience_seconds: float = 5.0
    seconds_a_batch: float = 0.1
    # Of a worker's allowance; see `kvstate.feeds.allowance`.
    burst_seconds: float = BURST_SECONDS
    behind_seconds: float = BEHIND_SECONDS


USUAL = FeedTimes()
