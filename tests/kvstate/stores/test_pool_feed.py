"""A pool's feed over ZMQ, as Mooncake's master publishes it."""

import base64
import json
from collections.abc import Iterator

import pytest
import zmq

from kvstate.events import Batch
from kvstate.feeds.feed_sources import ZmqSource
from kvstate.feeds.transport import Connected
from kvstate.feeds.zmq_transport import ZmqTransport
from kvstate.fleet import FollowedWorkers
from kvstate.stores.stores import StoreRules
from tests.kvstate.stores.test_pools import HERE
from tests.kvstate.zmq_publisher import Publisher
from tests.memory_transport import MemoryTransport
from tests.waiting import until

LINES = (HERE / "vllm_0.32.0_mooncake.jsonl").read_text().splitlines()
FRAMES = [json.loads(line) for line in LINES[1:]]


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher()
    yield made
    made.close()


async def test_recorded_messages_of_a_pool_are_followed_over_zmq(publisher: Publisher) -> None:
    socket, endpoint = publisher.bind(zmq.XPUB)
    fleet = FollowedWorkers(12345678, lambda: 0.0, stores=[StoreRules("s", frozenset("a"))])
    worker = MemoryTransport()
    fleet.add("a", "m", [worker])
    fleet.pools.follow("s", ZmqTransport(ZmqSource(endpoint, None, "")))
    with pytest.raises(ValueError, match="followed already"):
        fleet.pools.follow("s", MemoryTransport())
    assert await socket.recv() == b"\x01"
    worker.put(Connected())
    worker.put(Batch(FRAMES[0]["seq"], base64.b64decode(FRAMES[0]["payload_b64"])))
    await until(lambda: sum(one.blocks for one in fleet.feeds.statuses("a")) == 6)
    for frame in FRAMES:
        if frame["worker"] == "pool":
            number = frame["seq"].to_bytes(8, "big")
            await socket.send_multipart([b"", number, base64.b64decode(frame["payload_b64"])])
    # the last message has these alone
    await until(lambda: dict(fleet.pools.events()).get("s", {}).get("unknown_key") == 3)
    counts = dict(fleet.pools.events())["s"]
    # a's six blocks of two ranks each; none of b's, which is not followed
    assert (counts["stored"], counts["removed"], counts["gap"]) == (12, 1, 0)
    assert list(fleet.stores.blocks()) == [("s", 5)]
    await fleet.close()
    assert list(fleet.pools.events()) == []
