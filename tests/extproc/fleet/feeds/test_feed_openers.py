import pytest

from extproc.config.feed_kinds import KINDS, kind_of
from extproc.fleet.feeds.feed_openers import OPENERS, open_feed
from kvstate.feeds.feed_sources import DrainSource, FeedSource, GrpcSource, ZmqSource

DRAINED = "another consumer drains this worker, or its event buffer overflowed"
SOURCES: list[tuple[FeedSource, str]] = [
    ((ZmqSource("tcp://a:1", None, ""), ZmqSource("tcp://a:2", None, "")), "no replay endpoint"),
    (GrpcSource("a:1", "vllm", 2), "the publisher skipped them"),
    (DrainSource("http://a:1", 2), DRAINED),
]


@pytest.mark.parametrize(("source", "why_lost"), SOURCES)
async def test_each_kind_of_feed_is_opened_rank_by_rank(source: FeedSource, why_lost: str) -> None:
    transports = open_feed(source)
    assert [one.why_lost for one in transports] == [why_lost] * 2
    for one in transports:
        await one.close()


def test_every_kind_of_feed_is_opened() -> None:
    keys = [kind.key for kind in KINDS]
    assert list(OPENERS) == [kind_of(source).key for source, _ in SOURCES] == keys
