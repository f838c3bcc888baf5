"""Tools that are added and removed in the middle of a conversation of Anthropic's API.

Templates get one list of tools, so the engine applies all changes to it first: an added tool comes
last, or is no longer deferred if it is among the tools, and a removed one is left out.

Source: the blocks `tool_addition` and `tool_removal` of system turns, in vLLM 0.32.0 and 0.33.0
(anthropic/protocol.py and serving.py).
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from extproc.base.errors import RequestError

_ADDITION, _REMOVAL = "tool_addition", "tool_removal"
TOOL_CHANGES = frozenset((_ADDITION, _REMOVAL))


class ToolChange(NamedTuple):
    """A change of a conversation's tools.

    name: of the tool. definition: of one that is added by it, None for one among the tools.
    """

    name: str
    removes: bool
    definition: dict[str, Any] | None = None

    @classmethod
    def read(cls, block: dict[str, Any]) -> "ToolChange":
        """Returns the change that a block makes.

        Raises:
            RequestError: the engine refuses it.
        """
        removes = block["type"] == _REMOVAL
        match block.get("tool"):
            case {"type": "tool_reference", "name": str(name)}:
                return cls(name, removes)
            case {"type": "tool_definition", "definition": {"name": str(name)} as tool}:
                if not removes:
                    return cls(name, removes, tool)
        raise RequestError("unsupported_tools")


def changed_tools(
    tools: Sequence[dict[str, Any]], changes: Iterable[ToolChange]
) -> list[dict[str, Any]]:
    """Returns the tools after all changes.

    Raises:
        RequestError: one names a tool that there is not.
    """
    named = {str(tool.get("name")): tool for tool in tools}
    removed: set[str] = set()
    for name, removes, definition in changes:
        if definition is not None:
            named[name] = definition
        elif name not in named:
            raise RequestError("unsupported_tools")
        elif not removes:
            named[name] = {**named[name], "defer_loading": None}
        if removes:
            removed.add(name)
        else:
            removed.discard(name)
    return [tool for name, tool in named.items() if name not in removed]
