"""Six ways in which clients ask: how many requests a router keys, and how many turns it keeps.

24 conversations of five turns of each kind, eight at a time, about 1,000 tokens to begin with, over
three simulated workers of vLLM 0.32 that answer at once and hold them all.
"""

import asyncio
import random
import re
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import ClientError, ClientSession
from extproc_contestants import OURS_LEAN, SMG, Contestant
from measure import CannotRunError, or_reason
from peers_contestants import RING, VLLM_ROUTER, PeersArena
from peers_settings import SESSION
from prose import Prose

WORKER = ("--blocks", "4000", "--max-model-len", "14000")
CONTESTANTS = (OURS_LEAN, VLLM_ROUTER, SMG, RING)
TURNS, AT_ONCE, BEGINS_CHARACTERS, ASKS_CHARACTERS = 5, 8, 3_500, 200
THINKS_SECONDS = 0.3
TOOL = {
    "name": "read_file",
    "description": "Reads a file of the project.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}

Turns = Sequence[Mapping[str, str]]
"""Roles and texts, of which the first is the user's."""
Body = dict[str, Any]


class Kind(NamedTuple):
    """A way to ask: where, with which body, and where the answer's text is in the response."""

    path: str
    body: Callable[[Turns], Body]
    text: Callable[[Any], str]


def _chat(turns: Turns) -> Body:
    return {"model": "tiny", "max_tokens": 8, "messages": list(turns)}


def _chat_in_parts(turns: Turns) -> Body:
    parts = [
        one | {"content": [{"type": "text", "text": line} for line in one["content"].split("\n")]}
        for one in map(dict, turns)
    ]
    return _chat([]) | {"messages": parts}


def _chat_with_tools(turns: Turns) -> Body:
    return _chat(turns) | {"tools": [{"type": "function", "function": TOOL}]}


def _chat_with_an_effort(turns: Turns) -> Body:
    return _chat(turns) | {"reasoning_effort": "low"}


def _responses(turns: Turns) -> Body:
    return {"model": "tiny", "max_output_tokens": 8, "input": list(turns)}


def _text_of_a_chat(told: Any) -> str:
    return told["choices"][0]["message"]["content"] or "none"


def _text_of_a_message(told: Any) -> str:
    return "".join(one.get("text", "") for one in told["content"]) or "none"


def _text_of_a_response(told: Any) -> str:
    items = (item for item in told["output"] if item["type"] == "message")
    return "".join(part["text"] for item in items for part in item["content"]) or "none"


CHAT = "/v1/chat/completions"
KINDS = {
    "chat, plain texts": Kind(CHAT, _chat, _text_of_a_chat),
    "chat, texts in parts": Kind(CHAT, _chat_in_parts, _text_of_a_chat),
    "chat with tools": Kind(CHAT, _chat_with_tools, _text_of_a_chat),
    "chat with an effort": Kind(CHAT, _chat_with_an_effort, _text_of_a_chat),
    "/v1/messages": Kind("/v1/messages", _chat, _text_of_a_message),
    "/v1/responses": Kind("/v1/responses", _responses, _text_of_a_response),
}


@dataclass(slots=True)
class Kept:
    """Of one kind: later turns, and those that reached the worker of the turn before."""

    later: int = 0
    kept: int = 0
    failed: int = 0


class Found(NamedTuple):
    """What came of all kinds. keyed: requests whose tokens were known, None if it does not tell."""

    by_kind: Mapping[str, Kept]
    requests: int
    keyed: int | None


def kept_turns(conversations: int) -> str:
    """Returns a table of all contestants."""
    found = {name: or_reason(partial(_measured, name, conversations)) for name in CONTESTANTS}
    return "\n".join(_lines(found))


def _lines(found: Mapping[str, Found | str]) -> Iterator[str]:
    yield _line("later turns kept", list(found))
    for kind in KINDS:
        of_kind = partial(_of_kind, kind)
        yield _line(kind, [_cell(one, of_kind) for one in found.values()])
    yield _line("all", [_cell(one, _sum) for one in found.values()])
    yield _line("requests keyed", [_keyed(one) for one in found.values()])


def _line(what: str, cells: Sequence[str]) -> str:
    return f"{what:<22}" + "".join(f"{cell:>18}" for cell in cells)


def _cell(found: Found | str, of: Callable[[Found], Kept]) -> str:
    if isinstance(found, str):
        return "did not run"
    kept = of(found)
    failed = f", {kept.failed} failed" if kept.failed else ""
    return f"{kept.kept} of {kept.later}{failed}"


def _of_kind(kind: str, found: Found) -> Kept:
    return found.by_kind[kind]


def _sum(found: Found) -> Kept:
    every = found.by_kind.values()
    return Kept(
        sum(one.later for one in every),
        sum(one.kept for one in every),
        sum(one.failed for one in every),
    )


def _keyed(found: Found | str) -> str:
    if isinstance(found, str) or found.keyed is None:
        return "tells none"
    return f"{found.keyed} of {found.requests}"


def _measured(name: str, conversations: int) -> Found:
    with tempfile.TemporaryDirectory(prefix="kvsteer-bench-") as directory, ExitStack() as stack:
        arena = PeersArena(
            stack, Path(directory), [name], answering=True, worker=WORKER, vllm_router_log="debug"
        )
        if name in arena.missing:
            raise CannotRunError(arena.missing[name])
        contestant = arena.contestants[name]
        by_kind = {
            kind: asyncio.run(_conversations(contestant.url, KINDS[kind], conversations))
            for kind in KINDS
        }
        requests = len(KINDS) * conversations * TURNS
        return Found(by_kind, requests, _keyed_by(contestant, Path(directory)))


async def _conversations(url: str, kind: Kind, count: int) -> Kept:
    kept, at_once = Kept(), asyncio.Semaphore(AT_ONCE)
    async with ClientSession() as session:

        async def hold(number: int) -> None:
            async with at_once:
                await _conversation(session, url, kind, number, kept)

        await asyncio.gather(*map(hold, range(count)))
    return kept


async def _conversation(
    session: ClientSession, url: str, kind: Kind, number: int, kept: Kept
) -> None:
    prose, chance = Prose(number), random.Random(number)
    turns: list[Mapping[str, str]] = []
    before = None
    headers = {SESSION: f"{kind.path}-{kind.body.__name__}-{number}"}
    for turn in range(TURNS):
        text = prose.text(ASKS_CHARACTERS if turn else BEGINS_CHARACTERS)
        turns.append({"role": "user", "content": text})
        worker, said = None, "none"
        try:
            asked = session.post(url + kind.path, json=kind.body(turns), headers=headers)
            async with asked as answer:
                answer.raise_for_status()
                worker, said = answer.headers.get("x-worker"), kind.text(await answer.json())
        except (ClientError, TimeoutError):
            kept.failed += 1
        kept.later += turn > 0
        kept.kept += turn > 0 and worker is not None and worker == before
        before = worker or before
        turns.append({"role": "assistant", "content": said})
        await asyncio.sleep(chance.expovariate(1 / THINKS_SECONDS))


def _keyed_by(contestant: Contestant, directory: Path) -> int | None:
    """How many requests were keyed, as the router itself counts them."""
    if contestant.metrics is not None:
        with urllib.request.urlopen(contestant.metrics, timeout=10) as answer:
            told = answer.read().decode()
        counts = re.findall(r'kvsteer_api_requests_total\{[^}]*outcome="keyed"[^}]*\} (\d+)', told)
        return sum(map(int, counts))
    log = directory / "vllm-router.log"
    if not log.exists():
        return None
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))
    return Counter(re.findall(r'decision outcome="(\w+)"', plain))["prefix_cost"]
