import logging

import pytest

from kvstate.errors import WireError
from kvstate.events import AllCleared, Batch, Body, EventBatch, Taken
from kvstate.feeds.feed import Feed, State
from kvstate.feeds.feed_sources import Recovery
from kvstate.feeds.subscriber import FeedNews
from kvstate.feeds.transport import Place


@pytest.fixture
def feed() -> Feed:
    feed = Feed(Recovery.REPLAY)
    feed.connected()
    feed.replay_ended()
    assert feed.state is State.LIVE
    return feed


@pytest.fixture
def news(feed: Feed) -> FeedNews:
    return FeedNews(Place("w", 2), feed, lambda: None, lambda: None)


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
    news = FeedNews(Place("w", 0), feed, lambda: None, lambda: None)
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


def test_each_restart_and_each_cleared_cache_is_told_once(feed: Feed) -> None:
    told: list[int] = []
    news = FeedNews(Place("w", 2), feed, lambda: told.append(feed.restarts), lambda: None)
    for _ in range(2):
        restart(feed)
        news.tell_restart()
        news.tell_restart()
        feed.replay_ended()
    news.tell_taken(b"", Taken())
    assert told == [1, 2]
    news.tell_taken(b"", Taken(clears=True))
    assert told == [1, 2, 2]


def test_a_listener_is_shown_what_was_applied_unless_it_is_large(news: FeedNews) -> None:
    shown: list[Body] = []
    news.listener = shown.append
    few, many = EventBatch(1.0, [AllCleared()]), EventBatch(1.0, [AllCleared()] * 1_025)
    for body in (b"small", b"l" * 128 * 1024 + b"arge", few, many):
        news.tell_taken(body, Taken())
    assert shown == [b"small", few]


def test_a_listener_that_fails_disturbs_nothing_and_is_not_called_again(
    news: FeedNews, caplog: pytest.LogCaptureFixture
) -> None:
    shown: list[Body] = []

    def failing(body: Body) -> None:
        shown.append(body)
        raise ValueError(body)

    news.listener = failing
    news.tell_taken(b"1", Taken())
    news.tell_taken(b"2", Taken())
    assert shown == [b"1"]
    assert caplog.messages == ["w: a listener failed: ValueError"]


def test_a_publisher_whose_batches_are_all_broken_does_not_fill_the_log(
    news: FeedNews, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        news.tell_undecodable(WireError("payload is not msgpack"))
    assert news.counts["undecodable_batch"] == 5
    assert caplog.messages == [
        f"w rank 2: payload is not msgpack ({count} so far)" for count in (1, 2, 4)
    ]
