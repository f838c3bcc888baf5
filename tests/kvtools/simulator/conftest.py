import base64
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvtools.simulator.server import SimulatedWorker, running
from kvtools.simulator.settings import Settings
from kvtools.simulator.tokens import ModelTokens

WIRE = Path(__file__).parents[2] / "wire"


@pytest.fixture(scope="session")
def recording() -> Callable[[str], list[dict[str, Any]]]:
    """The requests of one recording, each with the `payloads` that it caused."""

    def read(name: str) -> list[dict[str, Any]]:
        lines = (WIRE / f"{name}.jsonl").read_text().splitlines()
        records = [record for line in lines if (record := json.loads(line))["kind"] == "request"]
        for record in records:
            frames = record["frames"]
            record["payloads"] = [base64.b64decode(frame["payload_b64"]) for frame in frames]
        return records

    return read


@pytest.fixture(scope="session")
def recorded(
    recording: Callable[[str], list[dict[str, Any]]],
) -> Callable[[str], list[dict[str, Any]]]:
    """The same for vLLM 0.32.0."""
    return lambda name: recording(f"vllm_0.32.0_{name}")


@pytest.fixture(scope="session")
def tokens() -> ModelTokens:
    return ModelTokens(Settings().model_dir)


@pytest.fixture
async def worker() -> AsyncIterator[SimulatedWorker]:
    settings = Settings(
        name="w", loras=("ad-a",), topic="kv", buffer_batches=4, max_model_len_tokens=512
    )
    async with running(settings) as worker:
        yield worker


@pytest.fixture
async def client(worker: SimulatedWorker) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(worker.url) as session:
        yield session
