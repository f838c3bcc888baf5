"""Conversations with images reach their workers, and their tokens are predicted."""

import asyncio
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.system.screenshots import MODEL, SEEING, Conversation
from tests.system.system import System, running
from tests.waiting import until

CONVERSATIONS, TURNS, WORKERS = 8, 20, 4


@pytest.mark.slow
async def test_every_turn_reaches_its_worker_and_is_predicted() -> None:
    chats = [Conversation(number) for number in range(CONVERSATIONS)]
    async with running(
        workers=WORKERS,
        changes=SEEING,
        model_dir=MODEL,
        blocks=20_000,
        max_model_len_tokens=40_000,
    ) as system:
        for _ in range(TURNS):
            await asyncio.gather(*[chat.go_on(system) for chat in chats])
            await until(lambda: system.in_flight(0), "no request in flight")
        async with system.session.get(f"{system.admin}/decisions") as answer:
            decisions = (await answer.json())["decisions"]
        keyed = await system.metric(
            'kvsteer_media_items_total{keyed="yes",kind="image",model="tiny"}'
        )
    predicted = sum(one["predicted_tokens"] for one in decisions)
    cached = sum(turn.cached for chat in chats for turn in chat.turns)
    pairs = [pair for chat in chats for pair in zip(chat.turns, chat.turns[1:], strict=False)]
    reached = sum(before.worker == after.worker for before, after in pairs) / len(pairs)
    print(f"turns that reach their worker {reached:.1%}, predicted {predicted / cached:.1%}")
    assert len({chat.turns[0].worker for chat in chats}) > 1
    assert reached >= 0.95
    assert 0.95 <= predicted / cached <= 1.0
    assert keyed > 0


async def knows_image(system: System, chat: Conversation) -> bool:
    media = (await system.explain(chat.body))["media"]
    return (media["count"], media["known"], media["keyed"]) == (1, 1, True)


@pytest.mark.slow
async def test_image_that_was_known_is_known_after_a_restart(tmp_path: Path) -> None:
    chat = Conversation(1)
    changes = {**SEEING, "state": {"file": str(tmp_path / "state"), "interval_ms": 60_000}}
    async with running(workers=1, changes=changes, model_dir=MODEL) as system:
        await chat.go_on(system)
        await until(partial(knows_image, system, chat), "the image is known")
        before = await system.explain(chat.body)
        await system.stop_router(signal.SIGTERM)
        await system.start_router()
        after = await system.explain(chat.body)
        assert after["media"] == before["media"]
        tokens = [one["candidates"][0]["overlap_tokens"] for one in (before, after)]
        assert tokens[0] == tokens[1] > 0
