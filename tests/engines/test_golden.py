"""Golden requests of a real vLLM: they prove or refute its forms before any client's request.

`test_vllm` says what is needed. One engine is started, with vLLM's renderers open.
"""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvtools.simulator.settings import TINY_MODEL
from tests.engines.test_vllm import MISSING, report, router_before
from tests.engines.vllm_engine import Engine, Model
from tests.extproc.template_shapes import QWEN_TOOLS
from tests.system.system import System
from tests.waiting import until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]

# Writes what a turn thought, and nothing that only one API can send.
TEMPLATE = QWEN_TOOLS.replace(
    "{%- if turn.content %}",
    "{%- if turn.reasoning_content %}{{ '\\n<think>' ~ turn.reasoning_content }}{% endif %}"
    "{%- if turn.content %}",
).replace("thinking_off is defined and thinking_off", "enable_thinking | default(true) is false")

# The forms that golden requests of the three APIs have with this template.
BY_RELEASE = {
    "messages with system turns among them",
    "conversations with reasoning",
    "conversations with an effort",
    "conversations with a developer's turn",
    "responses with tools or calls",
    "conversations whose tools must not be used",
}
AGREED = {
    "texts",
    "conversations",
    "conversations with tools",
    "conversations with template arguments",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a template for tools and thoughts."""
    directory = tmp_path_factory.mktemp("golden") / "model"
    shutil.copytree(TINY_MODEL, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[Engine]:
    options = {"--enable-scale-out": "", "--enable-auto-tool-choice": ""}
    options |= {"--tool-call-parser": "hermes", "--reasoning-parser": "qwen3"}
    served = Model(model, options=options)
    one = Engine(model.parent, blocks=200, buffer_batches=1_000, model=served)
    try:
        await one.start()
        yield one
    finally:
        await one.kill()


async def states(system: System) -> dict[str, str]:
    """The state of each form of the only worker."""
    (worker,) = await system.status()
    forms: dict[str, Any] = worker["tokens"]["forms"]
    return {name: form["state"] for name, form in forms.items()}


async def until_asked(system: System, state: str) -> dict[str, str]:
    """The states once a conversation with tools is in one."""

    async def is_asked() -> bool:
        return (await states(system))["conversations with tools"] == state

    await until(is_asked, f"golden requests were compared and are {state}")
    return await states(system)


async def test_forms_of_all_apis_are_proved_before_the_first_request(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    async with router_before([engine], tmp_path, model) as system:
        found = await until_asked(system, "proved")
        report("forms", found)
        assert {name for name in AGREED | BY_RELEASE if found[name] != "proved"} == set()
        assert "refuted" not in found.values()
        assert (await system.status())[0]["tokens"]["compared"] == 13


async def test_wrong_template_is_refuted_with_its_reason(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.jinja"
    other.write_text(TEMPLATE.replace("\\n</tools>", "</tools>").replace("\\n<tool_call>", ""))
    models = [{"name": "tiny", "tokenizer": str(model), "chat_template": str(other)}]
    async with router_before([engine], tmp_path, models=models) as system:
        found = await until_asked(system, "refuted")
        (worker,) = await system.status()
        report("why", worker["tokens"]["why"])
        assert (found["texts"], found["conversations"]) == ("proved", "proved")
        assert "a conversation with tools" in worker["tokens"]["why"]
        assert worker["tokens"]["state"] == "refuted"


async def test_tokenizer_that_the_engine_rebuilds_is_refuted_with_its_reason(
    model: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    settings = directory / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("TokenizersBackend", "CohereTokenizerFast"))
    one = Engine(tmp_path, blocks=200, buffer_batches=1_000, model=Model(directory))
    try:
        await one.start()
        async with router_before([one], tmp_path, directory) as system:
            cut = "texts that some releases cut otherwise than tokenizer.json says"

            async def is_refuted() -> bool:
                return (await states(system))[cut] == "refuted"

            await until(is_refuted, "the golden texts were compared")
            (worker,) = await system.status()
            report("why", worker["tokens"]["forms"][cut]["why"])
            assert "as tokenizer_class says" in worker["tokens"]["forms"][cut]["why"]
    finally:
        await one.kill()
