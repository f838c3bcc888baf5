"""The prompts that vLLM 0.32.0 itself rendered, recorded with its own request models.

Recorded with VLLM_SYSTEM_START_DATE=2026-11-24; control tokens are written by their names. None
stands for a request that the engine refuses; some of these are keyed here, which harms nothing.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from extproc.base.engine import VLLM, Engine, Release
from extproc.base.errors import RequestError
from extproc.renderers.deepseek_v4 import DeepSeekV4, DeepSeekV41
from extproc.renderers.deepseek_v32 import DeepSeekV32
from extproc.renderers.harmony import Harmony
from extproc.renderers.harmony_format import CONTROLS
from extproc.renderers.renderer import Renderer
from extproc.requests.dialect import NEWEST, Dialect, dialect_of
from extproc.requests.prompt import Chat
from extproc.requests.request import parse

RECORDING = Path(__file__).with_name("vllm_0.32.0_rendered_in_code.jsonl")
LINES = [json.loads(line) for line in RECORDING.read_text().splitlines()]
RECORDED = dialect_of(Engine(VLLM, Release(0, 32)))
NAMES = {number: name for name, number in CONTROLS.items()}

RENDERERS: Mapping[str, Renderer] = {
    "gpt-oss": Harmony(lambda: datetime(2026, 11, 24, 12, tzinfo=UTC)),
    "deepseek-v3.2": DeepSeekV32(),
    "deepseek-v4": DeepSeekV4(),
    "deepseek-v4.1": DeepSeekV41(),
}

# Of what the engine renders, this is not keyed: names of functions that could be misread in a
# header, arguments of calls that are no object, parts of a kind that only one release reads.
UNKEYED = {"unsupported_tools", "unsupported_tool_arguments", "unsupported_items"}


def chat_of(path: str, body: dict[str, Any], dialect: Dialect | None = NEWEST) -> Chat:
    (prompt,) = parse(path, json.dumps(body).encode(), lambda _: dialect).prompts
    assert isinstance(prompt, Chat)
    return prompt


def text_of(renderer: Renderer, chat: Chat) -> str:
    """A prompt with its control tokens by name."""
    joined, _ = renderer.render(chat, budget_seconds=1.0)
    if renderer.marks is None:
        return joined
    segments = renderer.marks.split(joined)
    return "".join(NAMES[one] if isinstance(one, int) else one for one in segments)


@pytest.mark.parametrize("model", RENDERERS)
def test_prompts_are_those_of_the_engine(model: str) -> None:
    unkeyed = []
    compared = 0
    for line in LINES:
        expected = line["prompts"][model]
        if expected is None:
            continue
        try:
            found = text_of(RENDERERS[model], chat_of(line["path"], line["body"], RECORDED))
        except RequestError as error:
            unkeyed.append(error.reason)
            continue
        compared += 1
        assert found == expected, json.dumps(line["body"])
    assert compared >= 60
    assert set(unkeyed) <= UNKEYED, unkeyed
