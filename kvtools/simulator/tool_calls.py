"""Which of a client's tools an answer calls: its shell, if the user asks to list the files.

A simulated model knows nothing, but an agent's turn is more than one request only if it calls a
tool and sends back the result.
"""

import re
from collections.abc import Mapping
from typing import Any

from kvtools.simulator.answers import ToolCall
from kvtools.simulator.requests import ChatRequest

# The shells of agents by their names, and the arguments that each takes.
SHELLS: Mapping[str, Mapping[str, Any]] = {
    "Bash": {"command": "ls -la", "description": "List files"},
    "bash": {"command": "ls -la", "description": "List files"},
    "exec_command": {"cmd": "ls -la"},
    "shell": {"command": ["bash", "-lc", "ls -la"]},
    "run_shell_command": {"command": "ls -la", "is_background": False, "description": "List"},
}

_ASKS = re.compile(r"\blist the files\b", re.IGNORECASE)


def call_for(chat: ChatRequest) -> ToolCall | None:
    """Returns the call that answers a chat; None for an answer in words."""
    # some clients put a system turn behind what the user writes
    turns = [turn for turn in chat.messages if turn.get("role") != "system"]
    last = turns[-1] if turns else {}
    if last.get("role") != "user" or not any(map(_ASKS.search, _texts(last.get("content")))):
        return None
    functions = (tool.get("function") for tool in chat.tools or ())
    names = {str(one.get("name")) for one in functions if isinstance(one, dict)}
    return next((ToolCall(name, SHELLS[name]) for name in SHELLS if name in names), None)


def _texts(content: object) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [str(part.get("text", "")) for part in parts if isinstance(part, dict)]
