"""Workers that publish no events: a conversation stays where it began, with a tokenizer or not."""

import json
from collections.abc import AsyncIterator
from random import Random

import pytest

from extproc.config.reader import parse
from extproc.metrics import Metrics
from extproc.picking.decision import Decision
from extproc.router import Router
from extproc.serving.stream import Ask, Head
from extproc.tokenizing.tokens import Tokenizer
from extproc.workers.workers import Workers
from kvstate.fleet import Fleet
from simulator.settings import TINY_MODEL
from tests.extproc.settled import settled

CHAT = Head("POST", "/v1/chat/completions", None)
WORKERS = ", ".join(
    f'{{endpoint: "127.0.0.1:{n}", model: {m}}}'
    for m in ("tiny", "bare")
    for n in (range(1, 9) if m == "tiny" else range(11, 19))
)
CONFIG = f"""
models: [{{name: tiny, tokenizer: "{TINY_MODEL}"}}, {{name: bare}}]
workers: [{WORKERS}]
"""


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    config = parse(CONFIG, "c")
    tokenizer = Tokenizer.load(config.models[0])
    assert tokenizer is not None
    workers = Workers(config, Fleet(12345678, lambda: 0.0), lambda _: [])
    await workers.start()
    one = Router(config, workers, {"tiny": tokenizer}, Metrics(), Random(0))
    yield one
    one.close()
    await workers.close()


async def turn(router: Router, model: str, *texts: str) -> Decision:
    """One turn of a conversation that is over before the next one."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    body = json.dumps({"model": model, "messages": messages}).encode()
    decision, booking = await settled(router.route(Ask(CHAT, body)))
    assert booking is not None
    router.release(booking)
    return decision


@pytest.mark.parametrize(
    ("model", "reason"), [("tiny", "approximate_overlap"), ("bare", "no_tokenizer")]
)
async def test_a_conversation_stays_where_it_began(router: Router, model: str, reason: str) -> None:
    for number in range(10):
        question, answer = f"{number} question " * 200, f"{number} answer " * 20
        first = await turn(router, model, question)
        second = await turn(router, model, question, answer, "and now?")
        assert (second.worker, second.reason) == (first.worker, reason)
        assert second.certain_tokens == 0
        assert second.claims[second.worker].approximate > 256


async def test_conversations_of_their_own_are_spread(router: Router) -> None:
    picked = {(await turn(router, "bare", f"{n} {n} question " * 200)).worker for n in range(40)}
    assert len(picked) == 8
