"""Recordings of real hybrid and drafting engines: what is predicted is what they reported.

Each has 120 requests under eviction. What was predicted before KVSteer followed other groups and
drafts, all of it as certain, is what is held.
"""

import base64
import gzip
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest

from kvstate.events import Batch, Body
from kvstate.feeds.feed import FeedState, Restoration
from kvstate.feeds.feed_times import FeedTimes
from kvstate.feeds.transport import Connected, Signal
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Overlap, Prompt, Tokens
from kvstate.reuse import ReuseRules
from kvstate.rows.format import SavedRows
from tests.kvstate.recordings import WIRE
from tests.memory_transport import MemoryTransport
from tests.waiting import until

GEMMA, QWEN, EAGLE = "gemma3", "qwen3next", "eagle"

# After a silence, as on a busy machine, a feed asks for the last batches again, and counts them.
NEVER_QUIET = FeedTimes(quiet_seconds=1_000.0)


class Publisher(MemoryTransport):
    """Knows whether all that it published was taken: then it is asked for more."""

    is_asked = False

    async def receive(self) -> list[Signal]:
        self.is_asked = True
        signals = await super().receive()
        self.is_asked = False
        return signals


class Predicted(NamedTuple):
    overlap: Overlap
    reported: int

    @property
    def error(self) -> int:
        return self.overlap.certain_tokens - self.reported


def records(name: str) -> list[dict[str, Any]]:
    path = WIRE / f"vllm_0.32.0_{name}.jsonl.gz"
    found = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    return [record for record in found if record["kind"] == "request"]


async def begun(
    publisher: Publisher, rules: ReuseRules, saved: list[SavedRows]
) -> tuple[FollowedWorkers, Publisher]:
    """Workers that begin with what was saved of one, once all of it is certain."""
    fleet = FollowedWorkers(12345678, clock=lambda: 0.0, times=NEVER_QUIET)
    fleet.subscriptions.take_saved = lambda *_: dict(enumerate(saved))
    publisher.put(Connected())
    fleet.add("w", "m", [publisher])
    fleet.blocks.note_rules("w", rules)
    await until(lambda: fleet.feeds.state("w") is FeedState.LIVE)
    assert fleet.feeds.restoration("w") is (Restoration.PROVEN if saved else Restoration.NONE)
    return fleet, publisher


async def predictions(
    name: str, rules: ReuseRules, *, is_exact: bool = True, restarts: int = 0
) -> AsyncIterator[Predicted]:
    """Sends a worker's feed through decoder, feed and index, as far as before each request.

    restarts: requests after which another router begins with what the last one saved.
    """
    history: dict[int, Body] = {}
    fleet, publisher = await begun(Publisher(history), rules, [])
    sent: list[int] = []

    def is_behind() -> bool:
        return fleet.feeds.batches("w") != len(sent) or not publisher.is_asked

    for number, record in enumerate(records(name)):
        await until(lambda: not is_behind())
        if restarts and number % restarts == 1:
            saved = [one async for one in fleet.rows.saved_ranks(lambda _: "")]
            await fleet.close()
            sent.clear()
            last = {max(history): history[max(history)]}  # the buffer is short
            fleet, publisher = await begun(Publisher(last), rules, saved)
            sent.append(max(history))
            await until(lambda: not is_behind())
        details = record["response"]["usage"]["prompt_tokens_details"]
        found = fleet.blocks.overlaps(Prompt("m", Tokens("I", record["prompt_token_ids"])))
        yield Predicted(found.get("w", Overlap(1)), details["cached_tokens"] or 0)
        for frame in record["frames"]:
            history[frame["seq"]] = body = base64.b64decode(frame["payload_b64"])
            publisher.put(Batch(frame["seq"], body))
            sent.append(frame["seq"])
    assert not is_exact or fleet.feeds.statuses("w")[0].counts.keys() <= {
        "batches",
        "bytes",
        "other_attention_group",
        "replayed_batch",
    }
    await fleet.close()


@pytest.mark.parametrize(
    ("name", "draft_drop", "equal_before"), [(GEMMA, 0, 66), (QWEN, 0, 82), (EAGLE, 1, 9)]
)
async def test_predictions_equal_what_the_engine_reported(
    name: str, draft_drop: int, equal_before: int
) -> None:
    counts: Counter[str] = Counter()
    async for one in predictions(name, ReuseRules(announces_copies=True, draft_drop=draft_drop)):
        counts["equal"] += one.error == 0 and one.overlap.uncertain == 0
        counts["equal before"] += one.overlap.held_tokens == one.reported
    assert counts == {"equal": 120, "equal before": equal_before}


@pytest.mark.parametrize(("name", "draft_drop"), [(GEMMA, 0), (QWEN, 0), (EAGLE, 1)])
async def test_predictions_are_the_same_with_restarts_of_the_router(
    name: str, draft_drop: int
) -> None:
    rules = ReuseRules(announces_copies=True, draft_drop=draft_drop)
    found = [one async for one in predictions(name, rules, restarts=9)]
    assert [one.error for one in found] == [0] * 120
    assert {one.overlap.uncertain for one in found} == {0}


@pytest.mark.parametrize(("name", "at_least"), [(GEMMA, 78), (QWEN, 120), (EAGLE, 0)])
async def test_predictions_without_rules_are_lower_or_too_high_by_a_draft(
    name: str, at_least: int
) -> None:
    """Copies of which one was removed are uncertain then, and so is what follows them."""
    errors = [one.error async for one in predictions(name, ReuseRules(), is_exact=False)]
    assert sum(error == 0 for error in errors) >= at_least
    assert max(errors) <= (32 if name == EAGLE else 0)
