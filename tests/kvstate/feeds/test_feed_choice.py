import pytest

from kvstate.feeds.asking_feed import AskingFeed
from kvstate.feeds.feed import Feed
from kvstate.feeds.feed_choice import make_feed
from kvstate.feeds.feed_terms import Recovery
from kvstate.feeds.resuming_feed import ResumingFeed


@pytest.mark.parametrize("recovery", Recovery)
def test_a_feed_asks_for_replays_where_there_are_any(recovery: Recovery) -> None:
    feed: Feed[str] = make_feed(recovery)
    asks = recovery is Recovery.REPLAY
    assert isinstance(feed, AskingFeed if asks else ResumingFeed)
