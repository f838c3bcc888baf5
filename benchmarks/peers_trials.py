"""Trials of the peers: shares of cached tokens, and requests without an answer."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from extproc_contestants import Contestant
from extproc_load import MARK, conversations
from measure import CannotRunError
from peers_contestants import PeersArena
from peers_settings import SESSION

# A worker's cache has room for a third of all chats' blocks, so for those that it should have.
WORKER = ("--blocks", "900", "--max-model-len", "14000", "--prefill-tokens-per-second", "8000")
TRAFFIC = ("--chats", "15", "--turns", "6", "--words", "900", "--think", "0.3")
ASKING, PATIENCE_SECONDS, BREAKS_AFTER, LASTS = 8, 5.0, 2.0, 12.0
TOLD = re.compile(
    r"([\d,]+) answered, (\d+) failed, +(\d+)% of prompt tokens cached, "
    r"first byte p50 ([\d.]+) s, p90 ([\d.]+)"
)


@dataclass(frozen=True, slots=True)
class Hits:
    """The results of chats: requests answered, share of tokens cached, first bytes in seconds."""

    answered: int
    failed: int
    cached: float
    p50: float
    p90: float


def hits(name: str, seconds: int) -> Hits:
    """Runs chats over fresh workers and a fresh contestant."""
    with tempfile.TemporaryDirectory(prefix="kvsteer-bench-") as directory, ExitStack() as stack:
        contestant = _only(
            name, PeersArena(stack, Path(directory), [name], answering=True, worker=WORKER)
        )
        command = [sys.executable, "-m", "extproc", "traffic", "--url", contestant.url, *TRAFFIC]
        command += ["--seconds", str(seconds), "--answer-tokens", "16"]
        command += ["--session-header", SESSION]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        found = TOLD.findall(done.stderr)
        if not found:
            raise CannotRunError(f"nothing was answered: {done.stderr[-300:]}")
        answered, failed, cached, p50, p90 = found[-1]
        return Hits(
            int(answered.replace(",", "")),
            int(failed),
            int(cached) / 100,
            float(p50),
            float(p90),
        )


@dataclass(slots=True)
class Losses:
    """Requests sent after a picker failed. worst: seconds to an answer."""

    answered: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    unanswered: int = 0
    worst: float = 0.0

    def __str__(self) -> str:
        refused = ", ".join(f"{count} x {what}" for what, count in sorted(self.refused.items()))
        parts = [f"{self.answered} answered"]
        parts += [refused] if refused else []
        parts += [f"{self.unanswered} without an answer in {PATIENCE_SECONDS:.0f} s"]
        return f"{', '.join(parts)}, slowest answer {self.worst:.2f} s"

    @property
    def lost(self) -> int:
        """Requests that were rejected or never answered."""
        return sum(self.refused.values()) + self.unanswered


def losses(name: str, signal_number: int) -> Losses:
    """Measures the effect on clients if the picker is killed (SIGKILL) or hangs (SIGSTOP)."""
    with tempfile.TemporaryDirectory(prefix="kvsteer-bench-") as directory, ExitStack() as stack:
        contestant = _only(name, PeersArena(stack, Path(directory), [name]))
        broken = contestant.decides
        if broken is None:
            raise CannotRunError("has no picker")
        body = json.dumps(conversations(2)[0]).replace(MARK, "12345678").encode()
        seen, began = Losses(), time.monotonic()
        threads = [
            threading.Thread(target=_ask, args=(contestant.url, body, began, seen))
            for _ in range(ASKING)
        ]
        for thread in threads:
            thread.start()
        time.sleep(BREAKS_AFTER)
        os.kill(broken.pid, signal_number)
        try:
            for thread in threads:
                thread.join()
        finally:
            if signal_number == signal.SIGSTOP:
                os.kill(broken.pid, signal.SIGCONT)
        return seen


_lock = threading.Lock()


def _ask(url: str, body: bytes, began: float, seen: Losses) -> None:
    """One client: sends the next request when the last one ends, until the time is over."""
    header = {"Content-Type": "application/json"}
    while (started := time.monotonic()) < began + LASTS - PATIENCE_SECONDS:
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, header)
        refused, answered = "", False
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
                response.read()
                answered = True
        except urllib.error.HTTPError as error:
            refused = str(error.code)
        except TimeoutError:
            pass
        except OSError as error:
            timed_out = isinstance(getattr(error, "reason", None), TimeoutError)
            refused = "" if timed_out else "connection error"
        ended = time.monotonic()
        if ended < began + BREAKS_AFTER:
            continue
        with _lock:
            seen.worst = max(seen.worst, ended - started) if answered else seen.worst
            seen.answered += answered
            seen.unanswered += not answered and not refused
            if refused:
                seen.refused[refused] = seen.refused.get(refused, 0) + 1
        time.sleep(0.01)


def _only(name: str, arena: PeersArena) -> Contestant:
    if name in arena.missing:
        raise CannotRunError(arena.missing[name])
    return arena.contestants[name]


def resident_mib(pid: int) -> float:
    """Returns the resident memory of a process in MiB, 0 if unknown."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def names_of(wanted: Sequence[str], arena: PeersArena) -> list[str]:
    """Returns the contestants that run here."""
    return [name for name in wanted if name not in arena.missing]
