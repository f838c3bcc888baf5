"""Batches for a feed, what is to become of them, and a feed that took some."""

from kvstate.feeds.feed import Feed
from kvstate.feeds.feed_choice import make_feed
from kvstate.feeds.feed_terms import Apply, Effect, Numbered, Recovery, State

Effects = list[Effect[str]]


def batch(number: int, life: str = "old") -> Numbered[str]:
    """A batch of the publisher before (old) or after (new) its restart, or of later lives."""
    lives = ("old", "new", *(f"life {each}" for each in range(9)))
    return Numbered(number, number + 1000.0 * lives.index(life), f"{life} {number}")


def undecodable(number: int) -> Numbered[str]:
    return Numbered(number, float("-inf"), None)


def applied(*numbers: int, life: str = "old") -> Effects:
    return [Apply(f"{life} {number}") for number in numbers]


def live(last: int, recovery: Recovery = Recovery.REPLAY) -> Feed[str]:
    """A feed that took the batches 0 to last."""
    feed: Feed[str] = make_feed(recovery)
    replays = recovery is Recovery.REPLAY
    feed.connected()
    for number in range(last):
        feed.replayed(batch(number)) if replays else feed.received(batch(number))
    if replays:
        feed.replay_ended()
    feed.received(batch(last))
    assert (feed.state, feed.reason, feed.last_sequence) == (State.LIVE, "", last)
    return feed
