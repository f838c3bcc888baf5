"""Models whose layers all slide: their feeds, as recorded, announce no full-attention block."""

import base64
import gzip
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import pytest

from extproc.config.reader import parse
from extproc.config.schema import Model
from extproc.fleet.asking.surroundings import Surroundings
from extproc.fleet.workers import Workers
from extproc.observing.metrics import Metrics
from extproc.proof.lookups import PAUSE_SECONDS, SILENCE_SECONDS
from extproc.proof.state import SILENT_PROMPTS
from extproc.requests.request import Head, RoutingRequest
from extproc.routing.decision import Decision
from extproc.serving.router import Router
from extproc.tokenizing.tokens import Tokenizer
from kvstate.events import Batch
from kvstate.feeds.feed import FeedState
from kvstate.feeds.feed_sources import FeedSource, ZmqSource
from kvstate.feeds.transport import Connected
from kvstate.fleet import FollowedWorkers
from kvtools.simulator.settings import TINY_MODEL
from tests.kvstate.publishing import payload
from tests.memory_transport import MemoryTransport
from tests.waiting import until

RECORDING = Path("tests/wire/vllm_0.33.0_mistralswa.jsonl.gz")
CONFIG = f"""
models: [{{name: tiny, tokenizer: "{TINY_MODEL}", verify: off}}]
workers:
- endpoint: 127.0.0.1:1
  events: {{zmq: "tcp://127.0.0.1:5557", replay: "tcp://127.0.0.1:5657"}}
- endpoint: 127.0.0.1:2
  events: {{zmq: "tcp://127.0.0.1:5558", replay: "tcp://127.0.0.1:5658"}}
"""
NAMES = ("127.0.0.1:1", "127.0.0.1:2")


def recorded() -> list[bytes]:
    """The payloads of the recorded batches."""
    lines = map(json.loads, gzip.decompress(RECORDING.read_bytes()).splitlines())
    frames = [frame for line in lines for frame in line.get("frames", [])]
    return [base64.b64decode(frame["payload_b64"]) for frame in frames]


def is_live(fleet: FollowedWorkers, name: str) -> bool:
    return fleet.feeds.state(name) is FeedState.LIVE


def words(seed: int) -> str:
    return " ".join(Random(seed).choices(["river", "stone", "winter", "garden"], k=60))


@dataclass
class Rig:
    """A router in front of two workers whose feeds send what was recorded."""

    workers: Workers
    fleet: FollowedWorkers
    router: Router
    transports: dict[str, MemoryTransport]
    now: float = 0.0
    sent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NAMES, 0))

    async def serve(self, *turns: str, batch: bytes | None = None) -> Decision:
        """Has the picked worker answer a conversation, and send a batch, or the next recorded."""
        roles = ("user", "assistant") * len(turns)
        messages = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)]
        body = json.dumps({"model": "tiny", "messages": messages, "max_tokens": 2}).encode()
        request = RoutingRequest(Head("POST", "/v1/chat/completions", None), body)
        decision, ticket = await self.router.route(request)
        assert ticket is not None
        worker = decision.worker
        number = self.sent[worker]
        self.transports[worker].put(Batch(number, batch or RECORDED[number]))
        self.router.note_answer(ticket, 200, worker)
        self.sent[worker] += 1
        await until(lambda: self.fleet.feeds.batches(worker) == self.sent[worker])
        self.router.release(ticket)
        self.now += SILENCE_SECONDS + PAUSE_SECONDS
        list(self.workers.states.statuses())  # looks up what is due
        return decision


RECORDED = recorded()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    tokenizer = Tokenizer.load(Model("tiny", tokenizer=str(TINY_MODEL)))
    assert tokenizer is not None
    transports = {name: MemoryTransport() for name in NAMES}
    by_port = dict(zip(("5557", "5558"), transports.values(), strict=True))

    def opened(source: FeedSource) -> Sequence[MemoryTransport]:
        assert isinstance(source, tuple)
        (one,) = source
        assert isinstance(one, ZmqSource)
        return [by_port[one.events[-4:]]]

    config, fleet = parse(CONFIG, "c"), FollowedWorkers(1, lambda: 0.0)
    workers = Workers(
        config,
        fleet,
        opened,
        encoders={"tiny": tokenizer},
        surroundings=Surroundings(monotonic=lambda: made.now),
    )
    router = Router(config, workers, {"tiny": tokenizer}, Metrics(workers.states), Random(0))
    made = Rig(workers, fleet, router, transports)
    await workers.start()
    try:
        for name, transport in transports.items():
            transport.put(Connected())
            await until(partial(is_live, fleet, name))
        yield made
    finally:
        router.close()
        await workers.close()


async def test_feed_without_full_attention_is_not_believed_after_its_first_batch(rig: Rig) -> None:
    decision = await rig.serve(words(1))
    (fault,) = rig.workers.proofs.faults()
    assert (fault.code, fault.subject) == ("no-full-attention", f"worker {decision.worker}")
    shown = {one["name"]: one for one in rig.workers.states.statuses()}[decision.worker]
    assert shown["state"] == "silent"
    assert shown["feeds"][0]["reason"] == "this model announces no full-attention blocks"


async def test_turns_of_conversations_stay_on_their_workers(rig: Rig) -> None:
    for seed in range(4):
        await rig.serve(words(seed))
    for seed in range(4, 8):
        turns = [words(seed)]
        picked = [(await rig.serve(*turns)).worker]
        for number in range(3):
            turns += [f"answer {number}", words(100 * seed + number)]
            decision = await rig.serve(*turns)
            picked.append(decision.worker)
            assert decision.reason == "approximate_overlap"
        assert len(set(picked)) == 1
    assert all(rig.sent.values())  # both of them were picked


async def test_nothing_recorded_can_be_used_for_prefixes(rig: Rig) -> None:
    name = NAMES[0]
    for number, recorded_batch in enumerate(RECORDED):
        rig.transports[name].put(Batch(number, recorded_batch))
    await until(lambda: rig.fleet.feeds.batches(name) == len(RECORDED))
    assert rig.fleet.blocks.block_size(name) is None
    assert rig.fleet.blocks.other_groups(name).are_there


async def test_feed_that_tells_only_what_cannot_be_used_is_silent(rig: Rig) -> None:
    for seed in range(3 * SILENT_PROMPTS):
        await rig.serve(words(seed), batch=payload(seed, ["BlockRemoved", [1]]))
    found = [fault.says for fault in rig.workers.proofs.faults() if fault.code == "feed-silent"]
    assert found
    assert found[0].startswith("nothing that the feed told of 6 of the last 8 prompts")
