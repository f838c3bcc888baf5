"""An agent of each library of Python; runs where the library is installed, not where KVSteer is.

    PYTHON library_programs.py LIBRARY API URL MODEL TEXT

Gives the library one tool that runs commands, has it work on the text, and asks it once more. API:
chat, messages or responses.
"""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

INSTRUCTIONS = "You mend programs with your tools.\nAnswer in a few words."
AGAIN = "Show calc.py once more."
TOKEN = "my-token"
STEPS = 20


def bash(command: str) -> str:
    """Runs a command.

    Args:
        command: The line for the shell.
    """
    shell = ["bash", "-c", command]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


async def openai_agents(api: str, url: str, model: str, text: str) -> str:
    """Two runs of the OpenAI Agents SDK, the second with what the first one said."""
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    kinds = {
        "chat": agents.OpenAIChatCompletionsModel,
        "responses": agents.OpenAIResponsesModel,
    }
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=TOKEN)
    agent: Any = agents.Agent(
        name="mender",
        instructions=INSTRUCTIONS,
        tools=[agents.function_tool(bash)],
        model=kinds[api](model=model, openai_client=client),
    )
    said = await agents.Runner.run(agent, text, max_turns=STEPS)
    asked = [*said.to_input_list(), {"role": "user", "content": AGAIN}]
    return str((await agents.Runner.run(agent, asked, max_turns=STEPS)).final_output)


async def pydantic_ai(api: str, url: str, model: str, text: str) -> str:
    """Two runs of Pydantic AI, the second with what the first one said."""
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    chosen: Any
    if api == "messages":
        chosen = AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key=TOKEN))
    else:
        kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
        chosen = kind(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=TOKEN))
    agent: Any = Agent(chosen, instructions=INSTRUCTIONS, tools=[bash])
    said = await agent.run(text)
    return str((await agent.run(AGAIN, message_history=said.all_messages())).output)


async def langchain(api: str, url: str, model: str, text: str) -> str:
    """Two runs of LangChain's agent, the second with what the first one said."""
    from langchain.agents import create_agent
    from langchain_core.tools import tool

    chosen: Any
    if api == "messages":
        from langchain_anthropic import ChatAnthropic

        chosen = ChatAnthropic(model=model, base_url=url, api_key=TOKEN)
    else:
        from langchain_openai import ChatOpenAI

        is_response = api == "responses"
        base = f"{url}/v1"
        chosen = ChatOpenAI(
            model=model, base_url=base, api_key=TOKEN, use_responses_api=is_response
        )
    agent = create_agent(chosen, [tool(bash)], system_prompt=INSTRUCTIONS)
    limit = {"recursion_limit": 3 * STEPS}
    said = await agent.ainvoke({"messages": [{"role": "user", "content": text}]}, limit)
    asked = [*said["messages"], {"role": "user", "content": AGAIN}]
    return str((await agent.ainvoke({"messages": asked}, limit))["messages"][-1].content)


async def smolagents(_: str, url: str, model: str, text: str) -> str:
    """Two runs of an agent of smolagents that calls tools."""
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    chosen = OpenAIModel(model_id=model, api_base=f"{url}/v1", api_key=TOKEN)
    agent = ToolCallingAgent(tools=[tool(bash)], model=chosen, max_steps=6)
    await asyncio.to_thread(agent.run, text)
    return str(await asyncio.to_thread(agent.run, AGAIN, reset=False))


PROGRAMS: dict[str, Callable[..., Any]] = {
    "openai-agents": openai_agents,
    "pydantic-ai": pydantic_ai,
    "langchain": langchain,
    "smolagents": smolagents,
}

if __name__ == "__main__":
    library, *arguments = sys.argv[1:]
    sys.stdout.write(asyncio.run(PROGRAMS[library](*arguments)) + "\n")
