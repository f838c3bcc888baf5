"""Batches for a feed, their expected results, and a feed that has some."""

from kvstate.events import Batch
from kvstate.feeds.feed import Effect, Feed, FeedState
from kvstate.feeds.feed_sources import Recovery
from kvstate.feeds.stamps import Stamps

Effects = list[Effect]


def batch(number: int, life: str = "old") -> Batch:
    """A batch of the publisher before (old) or after (new) its restart, or of later lives."""
    lives = ("old", "new", *(f"life {each}" for each in range(9)))
    body = f"{life} {number}".encode()
    return Batch(number, body, number + 1000.0 * lives.index(life))


def undecodable(number: int) -> Batch:
    return Batch(number, b"", fault="no batch")


def applied(*numbers: int, life: str = "old") -> Effects:
    return [batch(number, life) for number in numbers]


def live(
    last: int,
    recovery: Recovery = Recovery.REPLAY,
    stamps: Stamps | None = None,
    why_lost: str = "nothing brings them",
) -> Feed:
    """A feed that took the batches 0 to last."""
    feed = Feed(recovery, stamps=stamps, why_lost=why_lost)
    replays = recovery is Recovery.REPLAY
    feed.connect()
    for number in range(last):
        feed.receive_replayed(batch(number)) if replays else feed.receive(batch(number))
    if replays:
        feed.end_replay()
    feed.receive(batch(last))
    assert (feed.state, feed.reason, feed.last_sequence) == (FeedState.LIVE, "", last)
    return feed
