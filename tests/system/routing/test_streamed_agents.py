"""Agents' streamed conversations by messages and responses, with tools, on simulated workers."""

from tests.system.streamed_agents import MESSAGES, RESPONSES, Agent, Turn
from tests.system.system import System, running
from tests.waiting import until

TURNS = 3
RULES = "Read the files before you change one, and run the tests. " * 30
KINDS = {
    MESSAGES: ["tool_use", "text", "text"],
    RESPONSES: ["function_call", "message", "message"],
}


async def test_turns_of_a_streaming_agent_stay_and_are_cached_as_predicted() -> None:
    async with running(workers=3, blocks=8_192, max_model_len_tokens=65_536) as system:
        for path, kinds in KINDS.items():
            turns = await played(system, path)
            assert len({turn.worker for turn in turns}) == 1, path
            assert [turn.kind for turn in turns] == kinds


async def played(system: System, path: str) -> list[Turn]:
    """The turns of an agent, each with as many cached tokens as the router has predicted."""
    agent, turns, predicted = Agent(path, f"{path}: {RULES}"), list[Turn](), 0
    for _ in range(TURNS):
        body = agent.body
        turn = await agent.turn(system.session, system.envoy)
        assert turn.cached >= predicted
        turns.append(turn)

        async def held(body: dict[str, object] = body, worker: str = turn.worker) -> int:
            told = await system.explain(body, path)
            (one,) = [each for each in told["candidates"] if each["endpoint"] == worker]
            known = int(one["overlap_tokens"] + one["uncertain_tokens"])
            return known if known >= told["prompt_tokens"] - 16 else 0

        await until(held, "the worker is known to hold the prompt")
        predicted = await held()
    return turns
