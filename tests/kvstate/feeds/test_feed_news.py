import logging

import pytest

from kvstate.errors import WireError
from kvstate.events import Batch, BatchResult
from kvstate.feeds.feed import Feed, FeedState
from kvstate.feeds.feed_news import UNSEQUENCED, UNSEQUENCED_MESSAGES, FeedNews
from kvstate.feeds.feed_sources import Recovery
from kvstate.feeds.transport import RankName


@pytest.fixture
def feed() -> Feed:
    feed = Feed(Recovery.REPLAY)
    feed.connect()
    feed.end_replay()
    assert feed.state is FeedState.LIVE
    return feed


@pytest.fixture
def news(feed: Feed) -> FeedNews:
    return FeedNews(RankName("w", 2), feed, lambda _: None, lambda: None)


def restart(feed: Feed) -> None:
    feed.receive(Batch(0, b"", 1.0 + feed.restarts))
    feed.receive(Batch(0, b"", 2.0 + feed.restarts))


def test_change_of_state_is_logged_once_with_its_reason(
    feed: Feed, news: FeedNews, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvsteer.feed")
    news.tell_change()
    assert caplog.messages == []
    feed.disconnect("hung up")
    news.tell_change()
    news.tell_change()
    assert caplog.messages == ["feed of w rank 2: stale (hung up)"]


def test_lost_feed_is_logged_as_a_warning_once_and_its_return_as_info(
    feed: Feed, news: FeedNews, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvsteer.feed")
    for reason in ("hung up", "connection lost"):
        feed.disconnect(reason)
        news.tell_change()
    feed.connect()
    feed.end_replay()
    news.tell_change()
    assert [(one.levelname, one.message) for one in caplog.records] == [
        ("WARNING", "feed of w rank 2: stale (hung up)"),
        ("INFO", "feed of w rank 2: stale (connection lost)"),
        ("INFO", "feed of w rank 2: live"),
    ]


def test_unreachable_publisher_is_logged_as_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    feed = Feed(Recovery.REPLAY)
    news = FeedNews(RankName("w", 0), feed, lambda _: None, lambda: None)
    caplog.set_level(logging.INFO, "kvsteer.feed")
    for reason in ("Connection refused", "Connection refused", "No route to host"):
        feed.disconnect(f"cannot connect: {reason}")
        news.tell_change()
    told = "feed of w rank 0: connecting (cannot connect: Connection refused)"
    assert [(one.levelname, one.message) for one in caplog.records] == [("WARNING", told)]


def test_reason_of_a_live_feed_names_its_replay_fault(feed: Feed, news: FeedNews) -> None:
    news.tell_replay("replay failed: silent")
    assert news.reason == "replay failed: silent"
    feed.disconnect("hung up")
    assert news.reason == "hung up"


def test_restart_and_cleared_cache_are_reported_once_each(feed: Feed) -> None:
    told: list[int] = []
    news = FeedNews(RankName("w", 2), feed, lambda _: told.append(feed.restarts), lambda: None)
    for _ in range(2):
        restart(feed)
        news.tell_restart()
        news.tell_restart()
        feed.end_replay()
    news.count_result(BatchResult())
    assert told == [1, 2]
    news.count_result(BatchResult(clears=True))
    assert told == [1, 2, 2]


def test_undecodable_batches_are_logged_at_powers_of_two(
    news: FeedNews, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        news.tell_undecodable(WireError("payload is not msgpack"))
    assert news.counts["undecodable_batch"] == 5
    assert caplog.messages == [
        f"w rank 2: payload is not msgpack ({count} so far)" for count in (1, 2, 4)
    ]


def test_skipped_events_of_a_batch_are_counted(feed: Feed) -> None:
    news = FeedNews(RankName("w", 2), feed, lambda _: None, lambda: None)
    news.count_result(BatchResult(faults=("bad_tokens", "bad_tokens")))
    assert news.counts["bad_tokens"] == 2


def test_messages_without_sequence_numbers_are_the_reason_until_a_batch_comes(
    news: FeedNews, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(UNSEQUENCED_MESSAGES):
        assert (news.is_unsequenced, news.reason) == (False, ""), number
        news.note_malformed(is_load=False)
    assert (news.is_unsequenced, news.reason) == (True, UNSEQUENCED)
    news.tell_change()
    assert caplog.messages == [f"feed of w rank 2: live ({UNSEQUENCED})"]
    assert news.counts["malformed_message"] == UNSEQUENCED_MESSAGES
    news.note_batch()
    assert (news.is_unsequenced, news.reason) == (False, "")


def test_messages_that_are_no_load_reports_are_only_counted(news: FeedNews) -> None:
    for _ in range(UNSEQUENCED_MESSAGES):
        news.note_malformed(is_load=True)
    assert (news.is_unsequenced, news.counts["malformed_message"]) == (False, UNSEQUENCED_MESSAGES)


def test_replay_that_fails_is_logged_once_until_one_succeeds(
    news: FeedNews, caplog: pytest.LogCaptureFixture
) -> None:
    for fault in ("replay failed: connection refused", "replay failed: connection lost", ""):
        news.tell_replay(fault)
    news.tell_replay("replay failed: connection lost")
    assert [(one.levelname, one.message) for one in caplog.records] == [
        ("WARNING", "feed of w rank 2: replay failed: connection refused"),
        ("WARNING", "feed of w rank 2: replay failed: connection lost"),
    ]
