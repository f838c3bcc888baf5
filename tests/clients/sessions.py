"""Conversations of real coding agents: each has a home and a project of its own, and one task."""

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tests.clients.install import Installed, pinned
from tests.clients.starts import STARTS, Start

# The model's last words in every conversation.
LAST_WORDS = "Done: the tests pass now."

SECONDS = 900.0

_TASK = "Task {name}: why does add give wrong results? Fix calc.py."


class Session(NamedTuple):
    """The result of one conversation: what the client printed."""

    name: str
    code: int
    printed: str

    @property
    def is_done(self) -> bool:
        """Whether the client ended well, with the model's last words."""
        return self.code == 0 and LAST_WORDS in self.printed


async def converse(
    client: str,
    number: int,
    url: str,
    folder: Path,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Session:
    """Runs one conversation of a client with the model at an address, of one task.

    variables: of its environment, besides those that all its conversations have.

    Raises:
        MissingError: the client is not installed.
    """
    name, usual = f"{client}-{number}", STARTS[client](url)
    start = usual._replace(variables={**usual.variables, **variables})
    (session,) = await say(client, name, start, folder, [_TASK.format(name=name)])
    return session


async def say(
    client: str,
    name: str,
    start: Start,
    folder: Path,
    texts: Sequence[str],
    installed: Installed | None = None,
) -> list[Session]:
    """Runs a client once for each text, each time going on with one conversation.

    name: of the conversation, and of its home below the folder. installed: which clients, the
    pinned ones by default.

    Raises:
        MissingError: the client is not installed.
    """
    installed = installed or pinned()
    program = str(installed.program(client))
    variables = {"PATH": installed.search_path(), **start.variables}
    home = folder / name
    for path, content in {**start.files, **_project(name)}.items():
        file = home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    await _run(["git", "init", "-q", "."], home, {}, home / "git.log")
    if start.first:
        await _run([program, *start.first], home, variables, home / "first.log")
    sessions: list[Session] = []
    for text in texts:
        log = home / f"printed-{len(sessions)}"
        words = start.again if sessions else start.arguments
        code = await _run([program, *words, text], home, variables, log)
        sessions.append(Session(name, code, log.read_text(errors="replace")))
    return sessions


def _project(name: str) -> dict[str, str]:
    """Returns a project's files, which differ from those of all other conversations."""
    return {
        "project/calc.py": f"def add(a, b):\n    return a - b  # {name}\n",
        "project/README.md": f"# Calc {name}\nA calculator.\n",
    }


async def _run(command: list[str], home: Path, variables: Mapping[str, str], log: Path) -> int:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        **variables,
    }
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=home / "project",
            env=environment,
            stdin=DEVNULL,
            stdout=out,
            stderr=STDOUT,
            start_new_session=True,
        )
    try:
        return await asyncio.wait_for(process.wait(), SECONDS)
    finally:
        await _end(process)


async def _end(process: Process) -> None:
    """Ends a client and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
