"""Real vLLM engines that see images, behind the router and a real Envoy; see test_vllm.py."""

import base64
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.engines import vllm_engine
from tests.engines.test_vllm import router_before
from tests.waiting import until

MISSING = vllm_engine.missing()
MODELS = Path(__file__).parents[1] / "extproc" / "media" / "recorded"

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]

CONVERSATIONS, REQUESTS = 4, 60


def png(rng: random.Random) -> str:
    """A picture of one colour, as a data URL."""
    width, height = rng.randrange(28, 120), rng.randrange(28, 120)
    row = b"\0" + bytes(rng.randrange(256) for _ in range(3)) * width

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(row * height)))
    whole = b"\x89PNG\r\n\x1a\n" + b"".join(chunks) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(whole).decode()


class Chats:
    """Conversations with an image in most turns, some of them seen before."""

    def __init__(self) -> None:
        self._rng = random.Random(36)
        self._seen = [png(self._rng) for _ in range(4)]
        self._all: list[list[dict[str, Any]]] = []

    def next(self) -> list[dict[str, Any]]:
        """Returns a conversation with its next turn."""
        rng = self._rng
        if len(self._all) < CONVERSATIONS or rng.random() < 0.1:
            system = " ".join(f"rule {n} of {len(self._all) % 2}" for n in range(20))
            self._all = [*self._all[-CONVERSATIONS + 1 :], [{"role": "system", "content": system}]]
        chat = rng.choice(self._all)
        parts = [{"type": "text", "text": f"look {rng.random()} " * rng.randrange(1, 9)}]
        if rng.random() < 0.8:
            url = png(rng) if rng.random() < 0.7 else rng.choice(self._seen)
            parts.append({"type": "image_url", "image_url": {"url": url}})  # type: ignore[dict-item]
        chat.append({"role": "user", "content": parts})
        return chat


@pytest.mark.parametrize("model", ["llava", "qwen2vl"])
async def test_predictions_of_requests_with_images_equal_the_report(
    model: str, tmp_path: Path
) -> None:
    chats, found = Chats(), []
    directory = MODELS / model
    running = vllm_engine.running(tmp_path, 400, buffer_batches=1_000, model=directory)
    async with running as engines, router_before(engines, tmp_path, directory) as system:
        for number in range(REQUESTS):
            chat = chats.next()
            body = {"model": "tiny", "messages": chat, "max_tokens": 4, "temperature": 0}
            status, _, answer = await system.send(body)
            assert status == 200, answer
            text = answer["choices"][0]["message"]["content"] or "ok"
            chat.append({"role": "assistant", "content": text})
            found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0)
            expected = number + 1

            async def is_told(count: int = expected) -> bool:
                (worker,) = await system.status()
                return bool(worker["predictions"]["requests"] >= count)

            await until(is_told, "the prediction is compared")
        async with system.session.get(f"{system.admin}/decisions") as told:
            decisions = sorted((await told.json())["decisions"], key=lambda one: one["id"])
    predicted = [one["predicted_tokens"] for one in decisions]
    equal = sum(one == other for one, other in zip(predicted, found, strict=True))
    print(f"{model}: {equal} of {REQUESTS} equal, {sum(predicted)} of {sum(found)} tokens")
    assert all(one <= other for one, other in zip(predicted, found, strict=True))
    assert equal >= 0.98 * REQUESTS
