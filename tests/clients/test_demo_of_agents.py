"""The demo as README starts it, and real coding agents that work with it for three turns."""

import asyncio
import contextlib
import json
import re
import shlex
import sys
import urllib.request
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.install import MissingError, pinned
from tests.clients.sessions import say
from tests.clients.starts import STARTS, Start
from tests.ports import free_port

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

KVSTEER = [sys.executable, "-m", "extproc"]
TEXTS = ("List the files.", "What next?", "And then?")


@contextlib.asynccontextmanager
async def demo() -> AsyncIterator[str]:
    """Runs `kvsteer demo`; yields what it prints until it says that decisions follow."""
    command = [*KVSTEER, "demo", "--port", str(free_port())]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT)
    assert process.stdout is not None
    try:
        raw = await asyncio.wait_for(process.stdout.readuntil(b"Decisions appear below"), 120)
        yield raw.decode()
    finally:
        process.terminate()
        await process.communicate()


def printed_start(client: str, printed: str) -> Start:
    """How the demo says to start a client, with the flags that a test without a terminal needs."""
    name = {"claude-code": "claude", "codex": "codex"}[client]
    joined = printed.replace("\\\n", " ")
    (line,) = re.findall(rf"^  (\S.*\b{name}|{name} -c .*)$", joined, re.MULTILINE)
    words = shlex.split(line)
    at = words.index(name)
    variables = dict(word.split("=", 1) for word in words[:at])
    usual = STARTS[client]("http://127.0.0.1:1")
    ours = ("IS_SANDBOX", "HTTPS_PROXY", "NO_PROXY")
    variables |= {key: usual.variables[key] for key in ours if key in usual.variables}
    options = words[at + 1 :]
    return Start([*options, *usual.arguments], [*options, *usual.again], variables, {})


def start_of(client: str, printed: str) -> Start:
    if client in ("claude-code", "codex"):
        return printed_start(client, printed)
    (envoy,) = re.findall(r"^Envoy: +(\S+)$", printed, re.MULTILINE)
    return STARTS[client](envoy)


def decisions(admin: str) -> list[dict[str, Any]]:
    """The last decisions of the demo's router, the oldest first."""
    with urllib.request.urlopen(f"{admin}/decisions") as answer:
        told: list[dict[str, Any]] = json.load(answer)["decisions"]
        return told


async def output_of(*words: str) -> str:
    """What a command of kvsteer prints."""
    process = await asyncio.create_subprocess_exec(*KVSTEER, *words, stdout=PIPE)
    told, _ = await process.communicate()
    assert process.returncode == 0
    return told.decode()


@pytest.mark.parametrize("client", list(STARTS))
async def test_agent_works_with_the_demo_and_its_turns_stay(client: str, tmp_path: Path) -> None:
    try:
        pinned().program(client)
    except MissingError as error:
        pytest.skip(str(error))
    async with demo() as printed:
        (admin,) = re.findall(r"^page: +(\S+?)/ ", printed, re.MULTILINE)
        before = decisions(admin)[-1]["id"]
        said = await say(client, client, start_of(client, printed), tmp_path, TEXTS)
        assert [(one.code, one.printed[-2_000:]) for one in said if one.code] == []
        told = [one for one in decisions(admin) if one["id"] > before]
        # titles and memories are asked for besides, in shorter requests
        whole = max(one["prompt_tokens"] for one in told)
        turns = [one for one in told if one["prompt_tokens"] > 0.8 * whole]
        # the first text is answered by a call, whose result is a turn of its own
        assert len(turns) == len(TEXTS) + 1
        assert len({one["worker"] for one in turns}) == 1
        for turn in turns[1:]:
            held = turn["predicted_tokens"] + turn["uncertain_tokens"]
            assert held > 0.8 * turn["prompt_tokens"]
            assert turn["decided_by"] == "cache"
        last = turns[-1]
        (words,) = re.findall(r"^`kvsteer top(.*)` shows", printed, re.MULTILINE)
        top = await output_of("top", "--once", *words.split())
        assert last["why"].partition(" is expected to ")[2][:60] in top
        why = await output_of("explain", "--admin", admin, "--request-id", last["request_id"])
        assert why.startswith(f"It went to {last['worker']}: it ")
        assert f" of the {last['prompt_tokens']} prompt tokens; its cost is " in why
