"""The load: wrk, and the conversations that it continues."""

import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import CannotRunError
from prose import ANSWER, KIB, Prose

SCRIPT = Path(__file__).with_name("extproc_load.lua")
CONVERSATIONS = 8
MARK = "@@@@"
QUESTION = f"Question {MARK}: what of all this follows for the case that we began with?"

_runs = itertools.count()


@dataclass(frozen=True, slots=True)
class Sample:
    """The results of one run of wrk. Latencies in milliseconds."""

    requests: int
    per_second: float
    p50: float
    p99: float
    errors: int


def found_wrk() -> str:
    """Returns wrk's path.

    Raises:
        CannotRunError: it is not installed.
    """
    path = shutil.which("wrk")
    if path is None:
        raise CannotRunError("wrk is missing: apt-get install wrk")
    return path


def conversation(prose: Prose, size: int) -> dict[str, Any]:
    """Returns a chat request of this many bytes, whose short last question contains a mark."""
    question = {"role": "user", "content": QUESTION}
    messages: list[dict[str, str]] = [{"role": "user", "content": ""}]
    request = {"model": "tiny", "max_tokens": 1, "messages": [*messages, question]}
    room = size - len(json.dumps(request))
    while room > 0:
        role = "assistant" if len(messages) % 2 else "user"
        text = prose.text(min(room, ANSWER)).encode("ascii", "replace").decode()
        messages.append({"role": role, "content": text})
        request["messages"] = [*messages, question]
        room = size - len(json.dumps(request))
    # Escapes made it longer than planned: the last message is cut to fit.
    last = messages[-1]
    last["content"] = last["content"][: len(last["content"]) + min(0, room)]
    return request


def conversations(size: int) -> list[dict[str, Any]]:
    """Returns the conversations of this size, the same for all contestants."""
    prose = Prose(size)
    return [conversation(prose, size * KIB) for _ in range(CONVERSATIONS)]


def write(requests: Sequence[dict[str, Any]], directory: Path) -> None:
    """Writes the parts before and after each mark, for wrk."""
    directory.mkdir()
    for number, request in enumerate(requests):
        head, tail = json.dumps(request).split(MARK)
        (directory / f"{number}.head").write_text(head)
        (directory / f"{number}.tail").write_text(tail)


def load(wrk: str, url: str, directory: Path, connections: int, seconds: int) -> Sample:
    """Runs wrk for this long, with one thread."""
    command = [wrk, "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "20s"]
    command += ["-s", str(SCRIPT), url, "--", str(directory), str(CONVERSATIONS)]
    run_id = f"{time.time_ns()}-{next(_runs)}"
    done = subprocess.run([*command, run_id], check=True, capture_output=True, text=True)
    told = json.loads(done.stdout.splitlines()[-1])
    return Sample(
        told["requests"],
        told["requests"] / told["microseconds"] * 1e6,
        told["p50"] / 1e3,
        told["p99"] / 1e3,
        told["errors"],
    )
