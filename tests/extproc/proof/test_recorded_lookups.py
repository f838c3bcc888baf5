"""Prompts are looked up in what vLLM 0.32.0 really stored for recorded requests."""

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from extproc.proof.lookups import SentRequest, is_stored, may_show
from extproc.requests.prompt import TEXT
from kvstate.index.index import Index
from kvstate.overlap import Prompt, Tokens
from kvstate.steps import finished

WIRE = Path(__file__).parents[2] / "wire"
RECORDINGS = ["vllm_0.32.0_w1", "vllm_0.32.0_cached_tokens"]


def requests(name: str) -> Iterator[dict[str, Any]]:
    for line in (WIRE / f"{name}.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry.get("prompt_token_ids"):
            yield entry


def looked_up(name: str, tokenized: Callable[[list[int]], list[int]]) -> list[bool]:
    """Looks up every request of a recording that may be; returns what was found.

    tokenized: turns the engine's token ids of a prompt into ours.
    """
    index, found = Index(12345678), []
    owner = index.add("w", 0, "m")
    owner.trusted = True
    for number, entry in enumerate(requests(name)):
        ours = Tokens("I", tokenized(entry["prompt_token_ids"]))
        prompt = Prompt("m", ours, salt=entry["body"].get("cache_salt"))
        held = index.overlaps(prompt).get("w")
        tokens = 0 if held is None else held.certain_tokens + held.uncertain_tokens
        sent = SentRequest(prompt, TEXT, tokens, number, 0.0)
        is_shown, size = may_show(prompt, held, owner.block_size), owner.block_size
        is_watched = size is not None and owner.watch(0, prompt, size)
        for frame in entry["frames"]:
            finished(owner.applying(base64.b64decode(frame["payload_b64"])))
        result = is_stored(
            sent,
            index.overlaps(prompt).get("w"),
            number + 1,
            owner.block_size,
            1.0,
            was_stored=is_watched and owner.was_stored(0),
        )
        if is_shown and entry["frames"] and result is not None:
            found.append(result)
    return found


@pytest.mark.parametrize("name", RECORDINGS)
def test_engines_own_tokens_are_stored(name: str) -> None:
    found = looked_up(name, lambda ids: ids)
    assert len(found) >= 3
    assert all(found)


@pytest.mark.parametrize("name", RECORDINGS)
def test_tokens_with_one_too_many_at_the_beginning_are_not_stored(name: str) -> None:
    found = looked_up(name, lambda ids: [7, *ids])
    assert len(found) >= 3
    assert not any(found)
