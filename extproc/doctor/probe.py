"""Provokes an event: a tiny completion of a prompt that nobody else sends."""

import asyncio
import json
import random
from collections.abc import Sequence
from typing import NamedTuple

from extproc.config import Worker
from extproc.doctor.http_visit import Visited
from extproc.doctor.listening import Listener
from extproc.doctor.means import Means
from extproc.doctor.token_visit import engine_tokens
from extproc.errors import RequestError
from extproc.requests.prompt import Text
from kvstate.events import Tokens

PATH = "/v1/completions"
RANK_HEADER = "X-data-parallel-rank"

# Some five hundred tokens: more than one block, whatever the engine.
WORDS = 96

# A subscription may have come too late for the first event, so the wait is divided among some.
TRIES = 3


class Probed(NamedTuple):
    """What became of a probe.

    refused: why the engine did not take it, "" if it did. heard: its blocks, or any batch where its
    tokens are not known. by_engine: whether its tokens are the engine's word, and not only ours.
    elsewhere: batches came instead with other tokens.
    """

    refused: str = ""
    heard: bool = False
    by_engine: bool = True
    elsewhere: bool = False


async def probe(
    means: Means,
    worker: Worker,
    visited: Visited,
    listeners: Sequence[Listener],
    rank: int | None,
) -> Probed:
    """Sends prompts to a worker until one of them is heard of, up to `TRIES`.

    rank: the one that is to compute it; None where there is one only.
    """
    probed = Probed()
    for _ in range(TRIES):
        text = " ".join(f"{random.getrandbits(32):08x}" for _ in range(WORDS))
        tokens, by_engine = await _tokens(means, worker, visited, text)
        before = sum(one.heard.batches for one in listeners)
        last = [one.heard.last_sequence for one in listeners]
        refused = await _send(means, worker, visited, text, rank)
        if refused:
            return Probed(refused=refused)
        heard = await _any_holds(listeners, tokens, before, means.seconds / TRIES)
        elsewhere = sum(one.heard.batches for one in listeners) > before
        probed = Probed("", heard, by_engine, elsewhere)
        if heard:
            _note(listeners, tokens, last)
            break
    return probed


def _note(listeners: Sequence[Listener], tokens: Tokens | None, last: Sequence[int | None]) -> None:
    """Notes with the feed that announced a prompt where it did.

    last: of each feed, the last batch before the prompt was sent.
    """
    for one, before in zip(listeners, last, strict=True):
        heard = one.heard
        if tokens is not None and heard.holds(tokens):
            since = heard.first_sequence if before is None else before + 1
            heard.provoked = (tokens, since or 0)


async def _send(means: Means, worker: Worker, visited: Visited, text: str, rank: int | None) -> str:
    """Asks for the completion; why it is refused, "" if it is not."""
    body = {"model": visited.model_name, "prompt": text, "max_tokens": 1, "temperature": 0}
    headers = {} if rank is None else {RANK_HEADER: str(rank)}
    answer = await means.web.post(
        f"http://{worker.endpoint}{PATH}", json.dumps(body).encode(), headers
    )
    return "" if answer.is_ok else f"{PATH}: {answer.reason or f'status {answer.status}'}"


async def _tokens(
    means: Means, worker: Worker, visited: Visited, text: str
) -> tuple[Tokens | None, bool]:
    """The ids of a prompt, None if they are not to be had; whether they are the engine's word."""
    theirs = await engine_tokens(means, worker, visited, Text(text))
    if not isinstance(theirs, str):
        return theirs, True
    tokenizer = means.tokenizers.get(visited.model.name) if visited.model else None
    if tokenizer is None:
        return None, True
    try:
        return await asyncio.to_thread(tokenizer.encode, Text(text)), False
    except RequestError:
        return None, True


async def _any_holds(
    listeners: Sequence[Listener], tokens: Tokens | None, before: int, seconds: float
) -> bool:
    """Whether any listener hears of a prompt in time."""

    def is_heard() -> bool:
        if tokens is None:
            return sum(one.heard.batches for one in listeners) > before
        return any(one.heard.holds(tokens) for one in listeners)

    waits = [asyncio.ensure_future(one.until(lambda _: is_heard(), seconds)) for one in listeners]
    if not waits:
        return False
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    return is_heard()
