"""Tries the newest release of each agent against the newest vLLM, and prints one table.

    python -m tests.clients.newest [--client NAME ...] [--installed] [MODEL_DIRECTORY ...]

For maintainers, before each release. Installs the agents of `tests.clients.install` in their newest
releases from npm and PyPI (several gigabytes; --installed takes those that are there), runs the
conversations of each without a network, has vLLM's own front ends render what it sent, and compares
the router's prompts with theirs: with a tiny model that has tools, or with the models that are
named.

KVSTEER_VLLM_PYTHON names an interpreter with vLLM; its Rust front end is taken from the same
package. KVSTEER_SGLANG_PYTHON names one with SGLang, whose own code judges as well.
The exit status is 1 if a client is missing or said nothing, if a prompt is wrong, or if of those
that the Python front end makes at least 0.5 % are not keyed. What is recorded stays in memory.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from extproc.base.engine import RUST, SGLANG, VLLM, Engine, PromptArguments, Release
from tests.clients.install import MissingError, newest
from tests.clients.judging import FrontEnd, Router, Verdict, judged
from tests.clients.recording import MOST_REQUESTS, Sent, recording
from tests.clients.rendering import (
    NO_SUCH_API,
    UnreadyError,
    rendering,
    rendering_in_rust,
    rendering_in_sglang,
)
from tests.clients.scripted_model import (
    CHAT,
    MESSAGES,
    RESPONSES,
    Plan,
    lists_twice_at_once,
    searches_tools,
)
from tests.clients.sessions import say
from tests.clients.starts import OTHER_STARTS, STARTS, Client, Start, Starting
from tests.clients.tools_model import write_tools_model
from tests.engines import vllm_engine

# Of the prompts that the Python front end makes, so many may go without a key.
MOST_UNKEYED = 0.005

# With which SGLang is started: agents' thinking needs one.
REASONING_PARSER = "qwen3"

# Conversations that run at once.
AT_ONCE = 6

_TASK = "Task: why does add give wrong results? Fix calc.py."
_AGAIN = "Show calc.py once more."
_TEXTS = (_TASK, _AGAIN)

_APIS = {CHAT: "chat completions", MESSAGES: "messages", RESPONSES: "responses"}

_ALONE = ("unshare", "--net", "--map-root-user", "sh", "-c")
_IN_NAMESPACE = "KVSTEER_CLIENTS_ALONE"


class Conversation(NamedTuple):
    """One conversation of a client. texts: what it is asked, one after the other."""

    client: Client
    texts: Sequence[str] = _TEXTS
    plan: Plan = lists_twice_at_once


class Ran(NamedTuple):
    """What a client sent. failure: why it sent nothing, "" if it did."""

    name: str
    version: str
    sent: Sequence[Sent]
    failure: str = ""

    @property
    def apis(self) -> str:
        """The APIs that it used."""
        return ", ".join(sorted({_APIS[one.path] for one in self.sent}))


class Row(NamedTuple):
    """A client at a front end."""

    ran: Ran
    front_end: str
    verdict: Verdict


def _without_search(start: Starting) -> Starting:
    def started(url: str) -> Start:
        usual = start(url)
        return usual._replace(variables={**usual.variables, "ENABLE_TOOL_SEARCH": "false"})

    return started


def conversations() -> Mapping[str, Conversation]:
    """All conversations, by the names that the table has."""
    claude_code = STARTS["claude-code"]
    usual = {name: Conversation(Client(name, start)) for name, start in STARTS.items()}
    usual |= {
        "claude-code, compacting": Conversation(
            Client("claude-code", claude_code), (_TASK, "/compact", _AGAIN)
        ),
        "claude-code, ToolSearch": Conversation(
            Client("claude-code", claude_code), plan=searches_tools
        ),
        "claude-code, no ToolSearch": Conversation(
            Client("claude-code", _without_search(claude_code)), plan=searches_tools
        ),
    }
    return usual | {name: Conversation(client) for name, client in OTHER_STARTS.items()}


async def run_client(name: str, one: Conversation, folder: Path) -> Ran:
    """Runs a conversation and returns what the client sent."""
    installed = newest()
    texts = one.texts if one.client.goes_on else one.texts[:1]
    home = "".join(letter if letter.isalnum() else "-" for letter in name)
    try:
        version = installed.version(one.client.package)
        async with recording(one.plan) as recorder:
            start = one.client.start(recorder.url)
            said = await say(one.client.package, home, start, folder, texts, installed)
    except MissingError as error:
        return Ran(name, "", (), str(error))
    failed = "" if recorder.sent else f"it sent nothing: {said[-1].printed.strip()[-300:]}"
    if len(recorder.sent) == MOST_REQUESTS:
        failed = "it asked again and again"
    return Ran(name, version, recorder.sent, failed)


@contextlib.asynccontextmanager
async def front_ends(model: Path) -> AsyncIterator[list[tuple[str, FrontEnd, Router]]]:
    """Starts the front ends of a model, each with the router that knows it."""
    python = vllm_engine.PYTHON
    async with contextlib.AsyncExitStack() as stack:
        known = await stack.enter_async_context(rendering(python, model))
        release = _release(known.release)
        found: list[tuple[str, FrontEnd, Router]] = [
            (f"vLLM {release} Python", known, Router(model, Engine(VLLM, release)))
        ]
        binary = _rust_binary(python)
        if binary is not None:
            with contextlib.suppress(UnreadyError):
                started = rendering_in_rust(binary, model, known.release)
                rust = await stack.enter_async_context(started)
                engine = Engine(VLLM, release, RUST)
                found.append((f"vLLM {release} Rust", rust, Router(model, engine)))
        sglang = os.environ.get("KVSTEER_SGLANG_PYTHON")
        if sglang:
            parser = PromptArguments(reasoning_parser=REASONING_PARSER)
            started_sglang = rendering_in_sglang(sglang, model, REASONING_PARSER)
            other = await stack.enter_async_context(started_sglang)
            engine = Engine(SGLANG, _release(other.release))
            found.append((f"SGLang {engine.release}", other, Router(model, engine, parser)))
        yield found


def _release(text: str) -> Release:
    return Release(*(int(one) for one in text.partition("+")[0].split(".")[:3]))


def _rust_binary(python: str) -> Path | None:
    """vllm-rs beside an interpreter's vLLM, None if there is none."""
    asked = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    done = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True)
    binary = Path(done.stdout.strip()) / "vllm-rs"
    return binary if binary.exists() else None


async def compare(ran: Sequence[Ran], models: Sequence[Path]) -> list[Row]:
    """Judges what all clients sent with each front end, over all models."""
    found: dict[tuple[str, str], Verdict] = {}
    for model in models:
        async with front_ends(model) as judges:
            for label, front_end, router in judges:
                for one in ran:
                    verdict = await judged(one.sent, front_end, router)
                    found.setdefault((one.name, label), Verdict()).add_all(verdict)
        sys.stdout.write(f"{model.name}: done\n")
        sys.stdout.flush()
    by_name = {one.name: one for one in ran}
    return [Row(by_name[name], label, verdict) for (name, label), verdict in found.items()]


def table(rows: Sequence[Row]) -> str:
    """One line for each client and front end, and the reasons for refusals below."""
    head = ("client", "version", "API", "front end", "accepted", "exact", "wrong", "unkeyed")
    lines = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(head))]
    shown = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    refused = [
        f"  {row.ran.name}, {row.front_end}: {count} refused: {words}"
        for row in rows
        for words, count in row.verdict.refusals.most_common(2)
        if NO_SUCH_API not in words
    ]
    return "\n".join([*shown, "", *refused])


def _cells(row: Row) -> tuple[str, ...]:
    verdict = row.verdict
    reasons = ", ".join(f"{count} {why}" for why, count in verdict.unkeyed.most_common())
    counts = (str(verdict.exact), str(verdict.wrong), reasons or "0")
    return (
        row.ran.name,
        row.ran.version,
        row.ran.apis,
        row.front_end,
        f"{verdict.accepted} of {verdict.requests}",
        *counts,
    )


def faults(ran: Sequence[Ran], rows: Sequence[Row]) -> list[str]:
    """What makes the exit status 1."""
    found = [f"{one.name}: {one.failure}" for one in ran if one.failure]
    found += [
        f"{row.ran.name}: {row.verdict.wrong} wrong at {row.front_end}"
        for row in rows
        if row.verdict.wrong
    ]
    python = [row.verdict for row in rows if row.front_end.endswith("Python")]
    accepted = sum(one.accepted for one in python)
    unkeyed = sum(one.unkeyed.total() for one in python)
    if unkeyed >= MOST_UNKEYED * accepted:
        found.append(f"{unkeyed} of {accepted} prompts of the Python front end are not keyed")
    return found


async def run_all(wanted: Mapping[str, Conversation], folder: Path) -> list[Ran]:
    """Runs some conversations at a time: offline, some clients mostly wait for their makers."""
    at_once = asyncio.Semaphore(AT_ONCE)

    async def run_one(name: str, one: Conversation) -> Ran:
        async with at_once:
            ran = await run_client(name, one, folder)
        told = ran.failure or f"{len(ran.sent)} requests"
        sys.stdout.write(f"{name} {ran.version}: {told}\n")
        sys.stdout.flush()
        return ran

    return await asyncio.gather(*(run_one(name, one) for name, one in wanted.items()))


async def run(wanted: Mapping[str, Conversation], models: Sequence[Path]) -> int:
    """Runs the conversations, judges what was sent, and prints what came of it."""
    with tempfile.TemporaryDirectory(prefix="kvsteer-newest-") as temporary:
        folder = Path(temporary)
        ran = await run_all(wanted, folder / "homes")
        rows = await compare(ran, models or [write_tools_model(folder / "model")])
    sys.stdout.write(f"\n{table(rows)}\n")
    found = faults(ran, rows)
    sys.stdout.write("".join(f"fault: {one}\n" for one in found))
    return 1 if found else 0


def _install(wanted: Mapping[str, Conversation]) -> None:
    """Installs the clients; those that cannot be installed are shown as missing later."""
    failed = newest().install(dict.fromkeys(one.client.package for one in wanted.values()))
    for name, words in failed.items():
        sys.stderr.write(f"{name}: {words}\n")


def _run_alone(arguments: Sequence[str]) -> int | None:
    """Runs this command in a network namespace of its own; None where the machine has none."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return None
    if subprocess.run([*_ALONE, "ip link set lo up"], check=False).returncode:
        return None
    line = 'ip link set lo up && exec "$@"'
    command = [sys.executable, "-m", "tests.clients.newest", "--installed", *arguments]
    environment = {**os.environ, _IN_NAMESPACE: "1"}
    return subprocess.run([*_ALONE, line, "sh", *command], env=environment, check=False).returncode


def main(arguments: Sequence[str]) -> int:
    """Installs the clients, and runs the rest without a network where that can be had."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.newest")
    parser.add_argument("--client", action="append", default=[], metavar="NAME")
    parser.add_argument("--installed", action="store_true", help="install nothing")
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL_DIRECTORY")
    asked = parser.parse_args(arguments)
    if why := vllm_engine.missing():
        sys.stderr.write(f"{why}\n")
        return 2
    packages = asked.client
    wanted = {
        name: one
        for name, one in conversations().items()
        if not packages or one.client.package in packages
    }
    if not asked.installed:
        _install(wanted)
    if _IN_NAMESPACE not in os.environ:
        passed = [one for one in arguments if one != "--installed"]
        code = _run_alone(passed)
        if code is not None:
            return code
        sys.stderr.write("no network namespace here: proxies keep the clients offline\n")
    return asyncio.run(run(wanted, asked.models))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
