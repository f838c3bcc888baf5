"""Rows of coding agents' requests: the same conversation by each API that agents use, keyed.

Each is a long system, tools with schemas, and turns that think, call a tool and get its result. The
reference is the same conversation as a chat completion, of about the same size.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from measure import Figure, Goal, Row
from prose import KIB, Prose
from tokens_side import KeyedPath, batches_of, figures_of, paths_of, round_of

from extproc.requests.messages_request import PATH as MESSAGES_PATH
from extproc.requests.request import CHAT_PATH
from extproc.requests.responses_request import PATH as RESPONSES_PATH

AGENT_GOAL = Goal(1.1, "<= 1.1x")

# A request, and how many of them make a round.
AGENT_BYTES = 100 * KIB
AGENTS = 6

SYSTEM_LETTERS, TOOLS, TOOL_LETTERS = 12 * KIB, 20, 1_000
THOUGHT_LETTERS, RESULT_LETTERS = 200, 1_800

TEMPLATE = """\
{%- if tools %}[INST]{% for tool in tools %}{{ tool | tojson }}
{% endfor %}[/INST]{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- if message.reasoning_content %}{{ message.reasoning_content + '\\n' }}{% endif %}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- call.function.name + call.function.arguments | tojson }}{% endfor %}</s>
{%- else %}[INST]{{ message.role + '\\n' + message.content }}[/INST]{% endif %}
{%- endfor %}"""

NAMES = {MESSAGES_PATH: "messages", RESPONSES_PATH: "responses"}

Body = dict[str, Any]


class Step(NamedTuple):
    """A turn of the model, and what its tool returned."""

    thought: str
    tool: str
    argument: str
    result: str


class Task(NamedTuple):
    """A conversation of an agent."""

    system: str
    tools: Sequence[Body]
    question: str
    steps: Sequence[Step]

    def by(self, path: str) -> bytes:
        """Returns the body of its last request."""
        body = {CHAT_PATH: _chat, MESSAGES_PATH: _messages, RESPONSES_PATH: _responses}[path](self)
        return json.dumps({"model": "tekken", "stream": True, **body}).encode()


def new_task(prose: Prose, rng: Random) -> Task:
    """Returns a conversation of about `AGENT_BYTES`."""
    schema = {
        "type": "object",
        "properties": {"path": {"type": "string", "description": prose.text(100)}},
        "required": ["path"],
    }
    tools = [
        {"name": f"tool_{at}", "description": prose.text(TOOL_LETTERS), "parameters": schema}
        for at in range(TOOLS)
    ]
    task = Task(prose.text(SYSTEM_LETTERS), tools, prose.text(400), ())
    while len(task.by(CHAT_PATH)) < AGENT_BYTES:
        task = task._replace(steps=[*task.steps, new_step(prose, rng)])
    return task


def new_step(prose: Prose, rng: Random) -> Step:
    """Returns one more turn."""
    tool = f"tool_{rng.randrange(TOOLS)}"
    return Step(prose.text(THOUGHT_LETTERS), tool, prose.text(60), prose.text(RESULT_LETTERS))


def _chat(task: Task) -> Body:
    turns: list[Body] = [
        {"role": "system", "content": task.system},
        {"role": "user", "content": task.question},
    ]
    for at, step in enumerate(task.steps):
        function = {"name": step.tool, "arguments": json.dumps({"path": step.argument})}
        call = {"id": f"call_{at}", "type": "function", "function": function}
        said = {"reasoning_content": step.thought, "content": "", "tool_calls": [call]}
        turns.append({"role": "assistant", **said})
        turns.append({"role": "tool", "tool_call_id": f"call_{at}", "content": step.result})
    tools = [{"type": "function", "function": one} for one in task.tools]
    return {"messages": turns, "tools": tools}


def _messages(task: Task) -> Body:
    turns: list[Body] = [{"role": "user", "content": [_text(task.question)]}]
    for at, step in enumerate(task.steps):
        thought = {"type": "thinking", "thinking": step.thought, "signature": "abc"}
        call = {"type": "tool_use", "id": f"call_{at}", "name": step.tool}
        result = {"type": "tool_result", "tool_use_id": f"call_{at}", "content": step.result}
        turns.append(
            {"role": "assistant", "content": [thought, {**call, "input": {"path": step.argument}}]}
        )
        turns.append({"role": "user", "content": [result]})
    turns[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    tools = [
        {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
        for one in task.tools
    ]
    return {"messages": turns, "system": [_text(task.system)], "tools": tools}


def _text(text: str) -> Body:
    return {"type": "text", "text": text}


def _responses(task: Task) -> Body:
    items: list[Body] = [
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": task.question}],
        }
    ]
    for at, step in enumerate(task.steps):
        thought = {"type": "reasoning_text", "text": step.thought}
        items.append({"type": "reasoning", "id": f"rs_{at}", "summary": [], "content": [thought]})
        call = {"call_id": f"call_{at}", "name": step.tool}
        arguments = json.dumps({"path": step.argument})
        items.append({"type": "function_call", **call, "arguments": arguments})
        output = {"call_id": f"call_{at}", "output": step.result}
        items.append({"type": "function_call_output", **output})
    tools = [{"type": "function", **one, "strict": False} for one in task.tools]
    return {"instructions": task.system, "input": items, "tools": tools, "store": False}


def keyed_agents(directory: Path, rounds: int) -> list[Row]:
    """Returns the rows of first sights and next turns, timed from body to pick."""
    model = directory / "agents"
    model.mkdir(exist_ok=True)
    (model / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return [row for ours in paths_of(model) for row in _rows_of(ours, rounds)]


def _rows_of(ours: KeyedPath, rounds: int) -> list[Row]:
    """Returns the rows of one library.

    At first sight each API gets conversations of its own. Next turns go on from the same ones by
    every API, each with a last turn of its own, so that conversations differ in nothing else.
    """
    prose, rng = Prose(5), Random(5)
    make = partial(new_task, prose, rng)
    tasks = {path: batches_of(make, rounds, AGENTS) for path in (CHAT_PATH, *NAMES)}
    rows = _compared(ours, "first sight", _measured(ours, tasks, rounds))
    known = tasks[CHAT_PATH]
    for path, task in ((path, one) for path in tasks for batch in known for one in batch):
        ours.store(ours.ids_of(path, task.by(path)))

    def longer(task: Task) -> Task:
        return task._replace(steps=[*task.steps, new_step(prose, rng)])

    later = {path: [[*map(longer, batch)] for batch in known] for path in tasks}
    return rows + _compared(ours, "next turn", _measured(ours, later, rounds))


def _measured(
    ours: KeyedPath, tasks: Mapping[str, Sequence[Sequence[Task]]], rounds: int
) -> dict[str, Figure]:
    contestants = {}
    for path, batches in tasks.items():
        bodies = [[one.by(path) for one in batch] for batch in batches]
        contestants[path] = round_of(partial(ours.pick_by, path), bodies)
    return figures_of(rounds, contestants, AGENTS)


def _compared(ours: KeyedPath, what: str, figures: dict[str, Figure]) -> list[Row]:
    size = AGENT_BYTES // KIB
    return [
        Row(
            f"{what} of an agent, body to pick, {size} KB, {name}, {ours.name} / as a chat (us)",
            figures[path],
            figures[CHAT_PATH],
            AGENT_GOAL,
        )
        for path, name in NAMES.items()
    ]
