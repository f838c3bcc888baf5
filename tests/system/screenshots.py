"""Screenshot conversations, as of agents that use a computer: an image in every turn."""

import base64
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tests.system.system import System

MODEL = Path(__file__).parents[1] / "extproc" / "media" / "recorded" / "qwen2vl"
SYSTEM = "You use a computer. Look at each screenshot, and say where to click next. " * 20

SEEING = {
    "models": [{"name": "tiny", "tokenizer": str(MODEL)}],
    "accounting": {"responses": "usage"},
}


class Turn(NamedTuple):
    """One answered turn: who answered, and the prompt's tokens that were cached."""

    worker: str
    cached: int


class Conversation:
    """A conversation with a screenshot in every turn."""

    def __init__(self, number: int) -> None:
        self._rng = Random(number)
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        self.turns: list[Turn] = []

    @property
    def body(self) -> dict[str, Any]:
        return {"model": "tiny", "messages": self.messages, "max_tokens": 16}

    async def go_on(self, system: System) -> None:
        """Sends the next turn, and keeps its answer."""
        data = base64.b64encode(self._rng.randbytes(self._rng.randrange(3_000, 30_000))).decode()
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        text = {"type": "text", "text": f"What now? {self._rng.random()}"}
        self.messages.append({"role": "user", "content": [text, image]})
        status, worker, answer = await system.send(self.body)
        assert status == 200, answer
        self.messages.append(answer["choices"][0]["message"])
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.turns.append(Turn(worker, cached))
