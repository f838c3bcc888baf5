"""Which state machine follows a feed: by how what was missed can be had."""

from kvstate.feeds.asking_feed import AskingFeed
from kvstate.feeds.feed import Feed
from kvstate.feeds.feed_terms import Body, Recovery
from kvstate.feeds.resuming_feed import ResumingFeed


def make_feed(recovery: Recovery) -> Feed[Body]:
    """A feed that was not connected yet."""
    return AskingFeed() if recovery is Recovery.REPLAY else ResumingFeed(recovery)
