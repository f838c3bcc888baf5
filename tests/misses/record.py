"""Records conversations of real coding agents with a scripted model, for the judge of misses.

    python -m tests.misses.record [CLIENT ...]

Needs the clients of `python -m tests.clients.install`. Each client converses four times, of which
once it compacts what was said. Whatever names this machine or its user is replaced by neutral
words, the same ones everywhere, and whatever names a conversation by made-up ids. The words of
what clients say by themselves are made up as well (`wording`).
"""

import asyncio
import itertools
import json
import re
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.clients.recording import Sent, recording
from tests.clients.scripted_model import Body, Calls, Plan, Usage, schemas_of
from tests.clients.sessions import say
from tests.clients.starts import CONTEXT_TOKENS, MODEL, STARTS, Start
from tests.misses.recordings import CLIENTS, Asked, Conversation, write
from tests.misses.wording import reworded

# What the home and the machine are called in recordings.
HOME = "/home/dev"

# Reported once, so that a client that compacts by itself does so; below every client's context.
_MUCH = Usage(CONTEXT_TOKENS - 12_000, 0)
_COMPACTS_AT = 200_000

# Headers of the connection, of the machine, and with keys.
_LEFT_OUT = re.compile(
    "authorization|host|connection|content-length|content-type|accept.*|x-stainless.*"
)

# What one command prints is the same on every machine, and some print much.
_CASES = "for n in $(seq 60); do echo case $n: add\\($n, 2\\) must be $((n + 2)); done"
_COMMANDS = {
    "fixes": (
        "ls",
        "cat calc.py",
        "cat README.md",
        "grep -n add calc.py",
        _CASES,
        "sed -i s/a-b/a+b/ calc.py",
        "cat calc.py",
    ),
    "is asked again": ("cat README.md", "cat calc.py", _CASES, "", "git status --short", "ls", ""),
    "goes on": (
        "ls",
        _CASES,
        "cat calc.py",
        "cat README.md",
        "wc -c calc.py",
        "head -2 calc.py",
        "grep -c return calc.py",
        "tail -1 README.md",
        "git status --short",
        _CASES,
        "ls",
    ),
    "compacts": ("ls", "cat calc.py", _CASES, "", "", "cat README.md", "ls", "cat calc.py", ""),
}
_TASK = "Task {name}: why does add give wrong results? Fix calc.py."
_AGAIN = "Now show calc.py once more, and say what README.md lacks."


class Script(NamedTuple):
    """One conversation: what the client is asked, one after the other, and the model's commands.

    An empty command is an answer in words. much_at: the number of the answer with much usage, -1
    for none.
    """

    texts: Sequence[str]
    commands: Sequence[str]
    much_at: int = -1


def scripts(client: str) -> Mapping[str, Script]:
    """A client's conversations by their names."""
    compacts = _COMMANDS["compacts"]
    if client == "claude-code":  # it is asked to
        compacting = Script((_TASK, "/compact", _AGAIN), compacts)
    else:
        compacting = Script((_TASK, _AGAIN), compacts, much_at=2)
    return {
        "fixes": Script((_TASK,), _COMMANDS["fixes"]),
        "is asked again": Script((_TASK, _AGAIN), _COMMANDS["is asked again"]),
        "goes on": Script((_TASK,), _COMMANDS["goes on"]),
        "compacts": compacting,
    }


def _shell_call(body: Body, command: str) -> Calls:
    """Returns a call of the first tool that runs commands."""
    for name, schema in schemas_of(body).items():
        known = schema.get("properties") or {}
        key = next((one for one in ("command", "cmd") if one in known), "")
        if key and "session_id" not in known:
            return [(name, {key: command, **_described(known)})]
    return []


def _described(known: Body) -> Body:
    return {"description": "Look at the project"} if "description" in known else {}


def _plan(commands: Iterator[str]) -> Plan:
    """Runs one command after the other, then answers in words."""

    def plan(body: Body) -> Calls:
        command = next(commands, "") if body.get("tools") else ""
        return _shell_call(body, command) if command else []

    return plan


def _usage(much_at: int) -> Callable[[Body], Usage]:
    numbers = itertools.count()

    def usage(body: Body) -> Usage:
        is_much = bool(body.get("tools")) and next(numbers) == much_at
        return _MUCH if is_much else Usage(len(json.dumps(body)) // 4, 0)

    return usage


def _compacting(start: Start, client: str) -> Start:
    """Returns a start of a client that knows from which size on it is to compact."""
    files = dict(start.files)
    if client == "codex":
        limits = f"model_context_window = {CONTEXT_TOKENS}\n"
        limits += f"model_auto_compact_token_limit = {_COMPACTS_AT}\n"
        files[".codex/config.toml"] = limits + files[".codex/config.toml"]
    if client == "opencode":
        (path,) = files
        config = json.loads(files[path])
        model = config["provider"]["mine"]["models"][MODEL]
        model["limit"] = {"context": CONTEXT_TOKENS, "output": 32_000}
        files[path] = json.dumps(config)
    return start._replace(files=files)


async def recorded(client: str, name: str, script: Script, number: int) -> Conversation:
    """Runs one conversation.

    Raises:
        MissingError: the client is not installed.
    """
    session = f"{client}-{number}"
    with tempfile.TemporaryDirectory(prefix="kvsteer-record-") as folder:
        async with recording(_plan(iter(script.commands)), _usage(script.much_at)) as recorder:
            start = _compacting(STARTS[client](recorder.url), client)
            texts = [text.format(name=session) for text in script.texts]
            await say(client, session, start, Path(folder), texts)
        neutral = _Neutral(f"{folder}/{session}")
        return Conversation(client, name, tuple(map(neutral.of, recorder.sent)))


_UUID = re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b")
_DEVICE = re.compile(r"\b[0-9a-f]{64}\b")
_SESSION = re.compile(r"\bses_\w{20,}")
_SYSTEM = re.compile(r"\((?:Debian|Ubuntu|Linux)[^;)]*;")
_RELEASE = re.compile(r"(?<=OS Version: Linux )[\w.+-]+")


class _Neutral:
    """Replaces what names this machine, its user or a conversation, the same way every time."""

    def __init__(self, home: str) -> None:
        self._homes = {home: HOME, _as_name(home): _as_name(HOME)}
        self._made: dict[str, str] = {}

    def of(self, sent: Sent) -> Asked:
        """Returns a request as it is kept."""
        headers = {
            name.lower(): self._words(value)
            for name, value in sent.headers.items()
            if not _LEFT_OUT.fullmatch(name.lower())
        }
        body = json.loads(self._words(json.dumps(sent.body)))
        return Asked(sent.path, headers, reworded(body))

    def _words(self, text: str) -> str:
        for home, neutral in self._homes.items():
            text = text.replace(home, neutral)
        text = _UUID.sub(lambda found: self._named(found[0]), text)
        text = _SESSION.sub(lambda found: f"ses_{self._named(found[0])[:8]}", text)
        text = _DEVICE.sub("0" * 64, text)
        return _RELEASE.sub("6.1.0", _SYSTEM.sub("(Linux;", text))

    def _named(self, found: str) -> str:
        made = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{len(self._made)}"))
        return self._made.setdefault(found, made)


def _as_name(path: str) -> str:
    """A path as clients name folders after it."""
    return re.sub(r"[^a-zA-Z0-9]", "-", path)


async def _record(client: str) -> None:
    found = []
    for number, (name, script) in enumerate(scripts(client).items(), 1):
        one = await recorded(client, name, script, number)
        found.append(one)
        sizes = [len(json.dumps(asked.body)) for asked in one.turns]
        sys.stdout.write(f"{client}, {name}: {len(sizes)} turns, {max(sizes):,} bytes at most\n")
    write(client, found)


def main(clients: Sequence[str]) -> None:
    """Records the conversations of these clients, of all by default."""
    for client in clients or CLIENTS:
        asyncio.run(_record(client))


if __name__ == "__main__":
    main(sys.argv[1:])
