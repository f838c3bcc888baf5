"""`kvsteer traffic`: simulated chats, to try a fleet before real clients use it."""

import argparse
import asyncio
import contextlib
import json
import math
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp

from kvtools.simulator.settings import Settings

CHAT = "/v1/chat/completions"
ANSWER_SECONDS = 60.0
TOLD_SECONDS = 5.0
SYSTEM_PROMPTS = 4
MAX_CHATS = 1_000
MAX_TURNS = 1_000
MAX_WORDS = 1_000_000

_TEXT = (
    "the a of to and is in that it for was on are as with they be at one have this from had not "
    "but what all were when we there can an your which their said if do will each about how up "
    "out them then she many some so these would other into has more two like him see time could "
    "no make than first been its who now people my made over did down only way find use may water "
    "long little very after words called just where most know "
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvsteer traffic` to its parser."""
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:10000", help="Envoy's address")
    add("--model", default=Settings().model, help="the name requests use")
    add("--chats", type=_whole_number(MAX_CHATS), default=12, help="number of chats at a time")
    add("--turns", type=_whole_number(MAX_TURNS), default=5, help="number of turns of each chat")
    add(
        "--words",
        type=_whole_number(MAX_WORDS),
        default=800,
        help="number of words in a chat's first question",
    )
    add("--think", type=_duration, default=1.0, help="seconds between turns")
    add(
        "--answer-tokens",
        type=_whole_number(MAX_WORDS),
        default=32,
        help="tokens of each answer",
    )
    add("--seconds", type=_duration, default=60.0, help="how long to run")
    add("--session-header", metavar="NAME", help="send each chat's number in this header")


def _whole_number(most: int) -> Callable[[str], int]:
    """Returns what reads a whole number from 1 to `most`."""

    def read(text: str) -> int:
        number = int(text) if text.isdecimal() and len(text) <= len(str(most)) else 0
        if not 1 <= number <= most:
            raise argparse.ArgumentTypeError(f"must be a number from 1 to {most}, is {text!r}")
        return number

    return read


def _duration(text: str) -> float:
    """Reads a number of seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 0 on, is {text!r}")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """Sends chats until the time is over or Ctrl-C; returns 1 if no request was answered."""
    tally = asyncio.run(_hold_all(arguments))
    return 0 if tally.times else 1


@dataclass
class Tally:
    """The results of all requests. times: to the first byte of each answer, in seconds."""

    times: list[float] = field(default_factory=list)
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    fault: str = ""

    def count(self, seconds: float, usage: dict[str, Any]) -> None:
        """Counts an answer and its usage, if reported."""
        self.times.append(seconds)
        details = usage.get("prompt_tokens_details") or {}
        self.prompt_tokens += usage.get("prompt_tokens") or 0
        self.cached_tokens += details.get("cached_tokens") or 0

    def fail(self, fault: str) -> None:
        """Counts a failed request."""
        self.failed += 1
        self.fault = fault

    def __str__(self) -> str:
        parts = [f"{len(self.times):6,} answered, {self.failed} failed"]
        if self.prompt_tokens:
            parts.append(f"{self.cached_tokens / self.prompt_tokens:4.0%} of prompt tokens cached")
        if self.times:
            times = sorted(self.times)
            p50, p90 = times[len(times) // 2], times[len(times) * 9 // 10]
            parts.append(f"first byte p50 {p50:.3f} s, p90 {p90:.3f} s")
        if self.fault:
            parts.append(f"last failure: {self.fault:.100}")
        return ", ".join(parts)


class ChatTraffic:
    """One chat after the other, each with one of a few system prompts and its own words."""

    def __init__(self, session: aiohttp.ClientSession, arguments: argparse.Namespace) -> None:
        self._session = session
        self._arguments = arguments
        self._rng = random.Random()
        self._headers: dict[str, str] = {}

    async def hold_on(self, tally: Tally) -> None:
        """Sends chats until it is cancelled."""
        while True:
            place = self._rng.randrange(SYSTEM_PROMPTS)
            rules = _words(random.Random(place), self._arguments.words // 2)
            messages = [{"role": "system", "content": rules}]
            if self._arguments.session_header:
                self._headers = {self._arguments.session_header: f"{self._rng.getrandbits(64):x}"}
            for turn in range(self._arguments.turns):
                count = self._arguments.words if turn == 0 else 20
                messages.append({"role": "user", "content": _words(self._rng, count)})
                messages.append(await self._ask(messages, tally))
                await asyncio.sleep(self._rng.expovariate(1 / max(1e-3, self._arguments.think)))

    async def _ask(self, messages: list[dict[str, str]], tally: Tally) -> dict[str, str]:
        body = {
            "model": self._arguments.model,
            "messages": messages,
            "max_tokens": self._arguments.answer_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.monotonic()
        text = ""
        usage: dict[str, Any] = {}
        try:
            asked = self._session.post(self._arguments.url + CHAT, json=body, headers=self._headers)
            async with asked as answer:
                first = await answer.content.readline()
                seconds = time.monotonic() - began
                if answer.status != HTTPStatus.OK:
                    tally.fail(f"{answer.status} {first.decode(errors='replace').strip()}")
                    return {"role": "assistant", "content": ""}
                async for line in answer.content:
                    said = _line_content(line)
                    text += "".join(one["delta"].get("content") or "" for one in said["choices"])
                    usage = said.get("usage") or usage
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            tally.fail(str(error) or type(error).__name__)
        else:
            tally.count(seconds, usage)
        return {"role": "assistant", "content": text}


def _line_content(line: bytes) -> dict[str, Any]:
    """Returns the content of one line of a stream; no choices if it is not a data line."""
    text = line.removeprefix(b"data:").strip()
    if text in (b"", b"[DONE]") or not line.startswith(b"data:"):
        return {"choices": []}
    said: dict[str, Any] = json.loads(text)
    return said


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(_TEXT.split(), k=count))


async def _hold_all(arguments: argparse.Namespace) -> Tally:
    tally, stop = Tally(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        chats = [
            asyncio.create_task(ChatTraffic(session, arguments).hold_on(tally))
            for _ in range(arguments.chats)
        ]
        until = time.monotonic() + arguments.seconds
        while (left := until - time.monotonic()) > 0 and not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), min(left, TOLD_SECONDS))
            print(tally, flush=True, file=sys.stderr)
        for chat in chats:
            chat.cancel()
        await asyncio.gather(*chats, return_exceptions=True)
    return tally
