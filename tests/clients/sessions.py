"""Conversations of real coding agents: each has a home and a project of its own, and one task."""

import asyncio
import contextlib
import json
import os
import signal
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.clients.install import program

# What tests/clients and docs/coding-agents.md call the model.
MODEL = "tiny"

# The model's last words in every conversation.
LAST_WORDS = "Done: the tests pass now."

SECONDS = 900.0

_TASK = "Task {name}: why does add give wrong results? Fix calc.py."

# Nothing listens at this proxy: clients that ask their makers' servers get no answer. Qwen Code
# would use it for the model's address, too.
_OFFLINE = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}


class Start(NamedTuple):
    """How a client is started: words behind its program, variables, and files in its home.

    again: the words with which it goes on with its last conversation; the text comes last in both.
    """

    arguments: Sequence[str]
    again: Sequence[str]
    variables: Mapping[str, str]
    files: Mapping[str, str]


class Session(NamedTuple):
    """The result of one conversation: what the client printed."""

    name: str
    code: int
    printed: str

    @property
    def is_done(self) -> bool:
        """Whether the client ended well, with the model's last words."""
        return self.code == 0 and LAST_WORDS in self.printed


def _claude_code(url: str) -> Start:
    names = ("OPUS", "SONNET", "HAIKU")
    models = {f"ANTHROPIC_DEFAULT_{name}_MODEL": MODEL for name in names}
    variables = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "my-token",
        "ANTHROPIC_MODEL": MODEL,
        **models,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
        **_OFFLINE,
    }
    flags = ["-p", "--dangerously-skip-permissions"]
    return Start(flags, ["-c", *flags], variables, {})


def _codex(url: str) -> Start:
    config = f"""model = "{MODEL}"
model_provider = "mine"

[model_providers.mine]
name = "mine"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "MY_TOKEN"
"""
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    variables = {"MY_TOKEN": "my-token", **_OFFLINE}
    again = ["exec", *flags, "resume", "--last"]
    return Start(["exec", *flags], again, variables, {".codex/config.toml": config})


def _opencode(url: str) -> Start:
    options = {"baseURL": f"{url}/v1", "apiKey": "my-token"}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mine",
        "options": options,
        "models": {MODEL: {"name": MODEL}},
    }
    config = {"model": f"mine/{MODEL}", "autoupdate": False, "provider": {"mine": provider}}
    files = {".config/opencode/opencode.json": json.dumps(config)}
    return Start(["run"], ["run", "-c"], _OFFLINE, files)


def _qwen_code(url: str) -> Start:
    variables = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "my-token",
        "OPENAI_MODEL": MODEL,
    }
    silent = json.dumps({"privacy": {"usageStatisticsEnabled": False}})
    flags = ["--auth-type", "openai", "-y"]
    files = {".qwen/settings.json": silent}
    return Start([*flags, "-p"], [*flags, "-c", "-p"], variables, files)


STARTS: Mapping[str, Callable[[str], Start]] = {
    "claude-code": _claude_code,
    "codex": _codex,
    "opencode": _opencode,
    "qwen-code": _qwen_code,
}


async def converse(client: str, number: int, url: str, folder: Path) -> Session:
    """Runs one conversation of a client with the model at an address, of one task.

    Raises:
        MissingError: the client is not installed.
    """
    name = f"{client}-{number}"
    (session,) = await say(client, name, STARTS[client](url), folder, [_TASK.format(name=name)])
    return session


async def say(
    client: str, name: str, start: Start, folder: Path, texts: Sequence[str]
) -> list[Session]:
    """Runs a client once for each text, each time going on with one conversation.

    name: of the conversation, and of its home below the folder.

    Raises:
        MissingError: the client is not installed.
    """
    home = folder / name
    for path, content in {**start.files, **_project(name)}.items():
        file = home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    await _run(["git", "init", "-q", "."], home, {}, home / "git.log")
    sessions: list[Session] = []
    for text in texts:
        log = home / f"printed-{len(sessions)}"
        words = start.again if sessions else start.arguments
        code = await _run([str(program(client)), *words, text], home, start.variables, log)
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
        _end(process)


def _end(process: Process) -> None:
    """Ends a client and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
