"""The judge's prompts are those of vLLM's own renderer, planted causes and all."""

import itertools
from pathlib import Path

import pytest

from tests.clients.rendering import RefusedError, rendering
from tests.clients.tools_model import write_tools_model
from tests.engines import vllm_engine
from tests.extproc.template_shapes import QWEN_TOOLS
from tests.misses.engine_prompts import EnginePrompts, first_difference
from tests.misses.plays import Play, plays, plays_of_effort
from tests.misses.recordings import CLIENTS, Asked, recorded
from tests.misses.stage import SHOWS_EFFORT

# Plays of each cause and client: a play has three or four requests.
PLAYS = 2


@pytest.mark.engine
@pytest.mark.parametrize("template", [QWEN_TOOLS, SHOWS_EFFORT], ids=["usual", "shows effort"])
async def test_prompts_are_those_of_the_engines_renderer(template: str, tmp_path: Path) -> None:
    if why := vllm_engine.missing():
        pytest.skip(f"no renderer to compare with: {why}")
    model = write_tools_model(tmp_path / "model", template)
    ours = EnginePrompts(model)
    async with rendering(vllm_engine.PYTHON, model) as renderer:
        for asked in asked_of([*plays(PLAYS), *plays_of_effort(PLAYS)]):
            theirs = await renderer.ids_of(asked.path, asked.body)
            assert ours.prompt(asked.path, asked.body) == theirs


def asked_of(played: list[Play]) -> list[Asked]:
    """All requests of plays, and all that were recorded."""
    whole = [one for client in CLIENTS for one in recorded(client).values()]
    return [
        *(asked for conversation in whole for asked in conversation.asked),
        *(asked for play in played for asked in play.asked),
    ]


async def test_request_that_no_engine_takes_is_refused(tmp_path: Path) -> None:
    prompts = EnginePrompts(write_tools_model(tmp_path / "model"))
    with pytest.raises(RefusedError):
        await prompts.ids_of("/v1/messages", {})


def test_recorded_conversations_go_on_from_turn_to_turn(tmp_path: Path) -> None:
    prompts = EnginePrompts(write_tools_model(tmp_path / "model"))
    for client in CLIENTS:
        turns = [prompts.prompt(one.path, one.body) for one in recorded(client)["goes on"].turns]
        assert len(turns) == 12
        assert 5_000 < len(turns[0]) < len(turns[-1]) < 30_000
        for before, after in itertools.pairwise(turns):
            assert first_difference(before, after) == len(before)
