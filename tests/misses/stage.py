"""Plays conversations around a planted cause through a real router, and fetches its verdicts.

Workers are simulated engines behind fronts that render each request as an engine does; Envoy and
the router are real processes. Nothing else is sent meanwhile, so every event between two turns is
one that the play makes.
"""

import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tests.clients.front import Front, fronted
from tests.clients.scripted_model import CHAT
from tests.clients.starts import CONTEXT_TOKENS, MODEL
from tests.clients.tools_model import write_tools_model
from tests.extproc.template_shapes import QWEN_TOOLS
from tests.misses.engine_prompts import EnginePrompts
from tests.misses.judging import Judged, adds_up, judged
from tests.misses.plays import Happening, Play
from tests.misses.recordings import Asked
from tests.misses.truth import Truth, truth_of
from tests.system.system import System
from tests.waiting import until

BLOCK_TOKENS = 16

# Of each worker: three to four of the conversations.
BLOCKS = 4_000

# As gpt-oss's template does, this one prints the effort at the head of the prompt.
SHOWS_EFFORT = (
    "{{- '<|im_start|>system\\nReasoning: ' ~ (reasoning_effort or 'medium') ~ '<|im_end|>\\n' }}"
    + QWEN_TOOLS
)

_FILLER_TOKENS = 12_000
_FILLERS = 200

_KEY = {"authorization": "Bearer my-token"}


class Answered(NamedTuple):
    """A request that a worker answered. cached: of the tokens, how many its engine reused."""

    asked: Asked
    worker: str
    request_id: str
    ids: list[int]
    cached: int


class Played(NamedTuple):
    """A request of a conversation that was answered, and judged.

    number: in its play. truth: None for what goes on from nothing that was sent.
    """

    number: int
    answered: Answered
    verdict: Mapping[str, Any]
    truth: Truth | None
    judged: Judged | None

    @property
    def adds_up(self) -> bool:
        """Whether the causes' tokens are those of the prompt that the worker got."""
        is_whole = self.verdict["prompt_tokens"] == len(self.answered.ids)
        return is_whole and adds_up(self.verdict)


class Stage:
    """A running system with conversations to be played, one after the other."""

    def __init__(self, system: System, fronts: Sequence[Front]) -> None:
        self.system = system
        self._fronts = fronts
        self._rng = Random(60)
        self._played = itertools.count()

    async def play(self, play: Play) -> list[Played]:
        """Sends the requests of a play, and returns them with their verdicts, judged."""
        found: list[Played] = []
        before: Answered | None = None
        for number, asked in enumerate(play.asked):
            if number == play.at and before is not None:
                await self._happens(play, before)
            answered = await self.send(asked)
            verdict = await self.verdict(answered.request_id)
            if before is None or not asked.is_agent:
                found.append(Played(number, answered, verdict, None, None))
            else:
                found.append(self._judged(play, number, before, answered, verdict))
            before = answered if asked.is_agent else before
        await self._undrain()
        return found

    def _judged(
        self,
        play: Play,
        number: int,
        before: Answered,
        answered: Answered,
        verdict: Mapping[str, Any],
    ) -> Played:
        happening = play.happening if number == play.at else Happening.NOTHING
        left = before.worker != answered.worker
        truth = truth_of(
            before.ids,
            answered.ids,
            block=BLOCK_TOKENS,
            cached=answered.cached,
            left_behind=self._held(before.worker, answered.ids) if left else 0,
            lost_by=happening.value or "unknown",
        )
        change = play.change if number >= play.at and truth.is_changed else None
        return Played(number, answered, verdict, truth, judged(verdict, truth, change))

    def _held(self, endpoint: str, ids: Sequence[int]) -> int:
        worker = self._front_at(endpoint).worker
        assert worker is not None
        return worker.held_prefix_tokens(ids)

    async def send(self, asked: Asked) -> Answered:
        """Sends a request, and waits until the router knows what its worker holds of it."""
        url = f"{self.system.envoy}{asked.path}"
        request_id = f"played-{next(self._played)}"
        headers = {**asked.headers, **_KEY, "x-request-id": request_id}
        async with self.system.session.post(url, json=asked.body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
            worker = answer.headers["x-worker"]
        computed = self._front_at(worker).computed
        _, ids, usage = next(one for one in computed if one.request_id == request_id)
        answered = Answered(asked, worker, request_id, ids, usage.cached)
        await self._until_holds(answered, (len(ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        return answered

    async def verdict(self, request_id: str) -> Mapping[str, Any]:
        """Waits for the verdict on a request, and returns it."""
        found: list[Mapping[str, Any]] = []

        async def is_told() -> bool:
            params = {"request_id": request_id}
            async with self.system.session.get(
                f"{self.system.admin}/misses", params=params
            ) as answer:
                assert answer.status == 200, await answer.text()
                found[:] = (await answer.json())["turns"]
                return bool(found)

        await until(is_told, f"a verdict on {request_id}", seconds=10)
        return found[-1]

    def _front_at(self, endpoint: str) -> Front:
        return next(front for front in self._fronts if front.endpoint == endpoint)

    async def prove(self, plays: Iterable[Play]) -> None:
        """Has each worker compute such turns until the router trusts its tokens."""
        for front in self._fronts:
            for other in self._fronts:
                await self._drain(other, draining=other is not front)
            for play in plays:
                for asked in play.asked[play.at :]:
                    turn = await self.send(asked)
                    if await self._is_proved(turn):
                        break
        await self._undrain()

    async def _is_proved(self, turn: Answered) -> bool:
        return bool((await self._candidate(turn))["state"] == "live")

    async def _candidate(self, turn: Answered) -> dict[str, Any]:
        told = await self.system.explain(turn.asked.body, turn.asked.path)
        assert told["prompt_tokens"] == len(turn.ids), "the router makes another prompt"
        return next(one for one in told["candidates"] if one["endpoint"] == turn.worker)

    async def _until_holds(self, turn: Answered, tokens: int) -> None:
        async def is_known() -> bool:
            one = await self._candidate(turn)
            return bool(one["overlap_tokens"] + one["uncertain_tokens"] == tokens)

        await until(is_known, f"{tokens} tokens of {turn.asked.path} are known to be held")

    async def _happens(self, play: Play, turn: Answered) -> None:
        """Makes what a play says happen to the worker of a turn."""
        front = self._front_at(turn.worker)
        assert front.worker is not None
        match play.happening:
            case Happening.NOTHING:
                return
            case Happening.DRAINED:
                await self._drain(front, draining=True)
                return
            case Happening.EVICTED:
                await self._fill(front, turn, play.kept)
                held = front.worker.held_prefix_tokens(turn.ids)
                await self._until_holds(turn, held)
                return
            case Happening.RESTARTED:
                front.worker.faults.restart()
            case Happening.CLEARED:
                assert front.worker.reset_prefix_cache()
        if not play.is_late:  # its engine tells of it with its next step
            await self._compute(front, self._random_ids(BLOCK_TOKENS * 4))
            await self._until_holds(turn, 0)

    async def _drain(self, front: Front, *, draining: bool) -> None:
        told = {"endpoint": front.endpoint, "draining": draining}
        async with self.system.session.post(f"{self.system.admin}/draining", json=told) as answer:
            assert answer.status == 200, await answer.text()

    async def _undrain(self) -> None:
        for front in self._fronts:
            await self._drain(front, draining=False)

    async def _fill(self, front: Front, turn: Answered, kept: float) -> None:
        """Has others' prompts fill a worker until it holds only a share of a turn's."""
        assert front.worker is not None
        for number in range(_FILLERS):
            if front.worker.held_prefix_tokens(turn.ids) <= kept * len(turn.ids):
                return
            ids = self._random_ids(_FILLER_TOKENS if kept == 0.0 else _FILLER_TOKENS // 8)
            await (self._ask() if number % 2 else self._compute(front, ids))
        raise AssertionError(f"{front.endpoint} keeps what it has")

    def _random_ids(self, count: int) -> list[int]:
        return self._rng.choices(range(300, 3_000), k=count)

    async def _ask(self) -> None:
        """Sends a long chat of somebody else through Envoy."""
        words = " ".join(f"word{number}" for number in self._rng.choices(range(10_000), k=3_000))
        body = {"model": MODEL, "messages": [{"role": "user", "content": words}], "max_tokens": 1}
        async with self.system.session.post(f"{self.system.envoy}{CHAT}", json=body) as answer:
            assert answer.status == 200, await answer.text()

    async def _compute(self, front: Front, ids: Sequence[int]) -> None:
        """Sends a prompt to a worker, as another router would."""
        assert front.worker is not None
        body = {"model": MODEL, "prompt": list(ids), "max_tokens": 1}
        url = f"{front.worker.url}/v1/completions"
        async with self.system.session.post(url, json=body) as answer:
            assert answer.status == 200, await answer.text()


@contextlib.asynccontextmanager
async def staged(
    folder: Path, template: str = QWEN_TOOLS, blocks: int = BLOCKS
) -> AsyncIterator[Stage]:
    """Runs a stage whose model has a template. folder: for the model, not there yet."""
    model = write_tools_model(folder, template)
    changes = {
        "models": [{"name": MODEL, "tokenizer": str(model)}],
        "accounting": {"responses": "usage"},
        "misses": {"enabled": True},
    }
    async with fronted(
        changes,
        0.0,
        EnginePrompts(model),
        names_engine=True,
        blocks=blocks,
        block_size_tokens=BLOCK_TOKENS,
        max_model_len_tokens=CONTEXT_TOKENS,
    ) as (system, fronts):
        yield Stage(system, fronts)
