import logging

import pytest

from kvstate.errors import WireError
from kvstate.events import Batch
from kvstate.feeds.feed import Feed, Recovery, State
from kvstate.feeds.sink import FeedNews, Place


@pytest.fixture
def feed() -> Feed:
    feed = Feed(Recovery.REPLAY)
    feed.connected()
    feed.replay_ended()
    assert feed.state is State.LIVE
    return feed


@pytest.fixture
def news(feed: Feed) -> FeedNews:
    return FeedNews(Place("w", 2), feed)


def restart(feed: Feed) -> None:
    feed.received(Batch(0, b"", 1.0 + feed.restarts))
    feed.received(Batch(0, b"", 2.0 + feed.restarts))


def test_a_change_is_told_once_and_with_its_reason(
    feed: Feed, news: FeedNews, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvsteer.feed")
    news.tell_change()
    assert caplog.messages == []
    feed.disconnected("hung up")
    news.tell_change()
    news.tell_change()
    assert caplog.messages == ["feed of w rank 2: stale (hung up)"]


def test_a_feed_that_is_lost_is_a_warning_once_and_its_return_is_none(
    feed: Feed, news: FeedNews, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvsteer.feed")
    for reason in ("hung up", "connection lost"):
        feed.disconnected(reason)
        news.tell_change()
    feed.connected()
    feed.replay_ended()
    news.tell_change()
    assert [(one.levelname, one.message) for one in caplog.records] == [
        ("WARNING", "feed of w rank 2: stale (hung up)"),
        ("INFO", "feed of w rank 2: stale (connection lost)"),
        ("INFO", "feed of w rank 2: live"),
    ]


def test_a_publisher_that_cannot_be_reached_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    feed = Feed(Recovery.REPLAY)
    news = FeedNews(Place("w", 0), feed)
    caplog.set_level(logging.INFO, "kvsteer.feed")
    for reason in ("Connection refused", "Connection refused", "No route to host"):
        feed.disconnected(f"cannot connect: {reason}")
        news.tell_change()
    told = "feed of w rank 0: connecting (cannot connect: Connection refused)"
    assert [(one.levelname, one.message) for one in caplog.records] == [("WARNING", told)]


def test_a_live_feed_says_what_it_would_lack(feed: Feed, news: FeedNews) -> None:
    news.replay_fault = "replay failed: silent"
    assert news.reason == "replay failed: silent"
    feed.disconnected("hung up")
    assert news.reason == "hung up"


def test_each_restart_is_told_once(feed: Feed, news: FeedNews) -> None:
    told: list[int] = []
    restart(feed)
    news.tell_restart()  # to nobody
    news.emptied = lambda: told.append(feed.restarts)
    news.tell_restart()
    assert told == []
    feed.replay_ended()
    restart(feed)
    news.tell_restart()
    news.tell_restart()
    assert told == [2]


def test_a_publisher_whose_batches_are_all_broken_does_not_fill_the_log(
    news: FeedNews, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        news.tell_undecodable(WireError("payload is not msgpack"))
    assert news.counts["undecodable_batch"] == 5
    assert caplog.messages == [
        f"w rank 2: payload is not msgpack ({count} so far)" for count in (1, 2, 4)
    ]
