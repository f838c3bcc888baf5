"""A router that starts beside a publisher that has long been at work, at vLLM's own limits."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvstate.feeds.feed import FeedState
from kvstate.feeds.feed_sources import ZmqSource
from kvstate.feeds.zmq_transport import ZmqTransport
from kvstate.fleet import FollowedWorkers
from tests.waiting import until

PUBLISHER = Path(__file__).parents[2] / "benchmarks" / "warm_publisher.py"
BATCHES, BLOCKS_A_BATCH, SEND_LIMIT = 10_000, 64, 1_000
PATIENCE_SECONDS = 60.0


def is_live(fleet: FollowedWorkers) -> bool:
    """Whether the worker's feed is live."""
    return fleet.feeds.state("w") is FeedState.LIVE


@pytest.fixture
def source() -> Iterator[ZmqSource]:
    """A publisher in a process of its own."""
    command = [sys.executable, str(PUBLISHER), str(BATCHES), str(SEND_LIMIT)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:  # its pipes are closed with it
        events, replay = json.loads(process.stdout.readline())
        yield ZmqSource(events, replay, "")
        process.kill()


@pytest.mark.slow
async def test_full_buffer_becomes_certain_without_a_failed_replay(source: ZmqSource) -> None:
    for _ in range(3):
        fleet = FollowedWorkers(1, time.time)
        fleet.add("w", "m", [ZmqTransport(source)])
        await until(partial(is_live, fleet), "the feed is live", seconds=PATIENCE_SECONDS)
        (feed,) = fleet.feeds.statuses("w")
        assert feed.counts.get("failed_replay", 0) == 0
        assert feed.replays <= 2  # a second one where a second of silence ended just then
        assert (feed.blocks, feed.uncertain_blocks) == (BATCHES * BLOCKS_A_BATCH, 0)
        await fleet.close()
