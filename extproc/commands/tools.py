"""Commands that other distributions bring, such as `kvsteer-tools`: found by their entry points.

An entry point of the group `kvsteer.commands` has the name of its command, and names a function
that adds the command's options to a parser, and sets its default `run`: what runs the command, and
returns the exit status. Finding them takes longer than a probe may: nobody looks for what the
router brings itself.
"""

import argparse
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import cast

GROUP = "kvsteer.commands"

# How to install the tools, in a clone.
INSTALL = "pip install . ./kvtools"

AddArguments = Callable[[argparse.ArgumentParser], None]


def installed_tools() -> dict[str, EntryPoint]:
    """Returns the commands that are installed beside the router's own, by name."""
    return {one.name: one for one in entry_points(group=GROUP)}


def load_tool(name: str) -> AddArguments | None:
    """Returns what adds a command's options to its parser, None if it is not installed."""
    found = installed_tools().get(name)
    return None if found is None else cast("AddArguments", found.load())


def missing(command: str) -> str:
    """Returns what to say if a command is used that is not installed."""
    return f"kvsteer: {command}: needs the tools, which are not installed: {INSTALL} in a clone"
