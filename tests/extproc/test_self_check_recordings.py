"""The self-check, with what vLLM 0.32.0 really stored for recorded requests."""

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from extproc.checking.evidence import Asked
from extproc.checking.self_check import GRACE_SECONDS, Result, WorkerCheck
from kvstate.overlap import Prompt, Tokens
from kvstate.wire.zmq_wire import decode_batch

WIRE = Path(__file__).parent.parent / "wire"
RECORDINGS = ["vllm_0.32.0_w1", "vllm_0.32.0_cached_tokens"]

# The pause between requests, so that each may be watched.
PAUSE_SECONDS = 10.0


def requests(name: str) -> Iterator[dict[str, Any]]:
    for line in (WIRE / f"{name}.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry.get("prompt_token_ids"):
            yield entry


def checked(name: str, tokenized: Callable[[list[int]], list[int]]) -> Result:
    """Watches every request of a recording; returns the result of the check.

    tokenized: turns the engine's token ids of a prompt into ours.
    """
    check = WorkerCheck()
    seen: list[Tokens] = []
    for number, entry in enumerate(requests(name)):
        tokens = Tokens("I", tokenized(entry["prompt_token_ids"]))
        prompt = Prompt("m", tokens, salt=entry["body"].get("cache_salt"))
        now = PAUSE_SECONDS * number
        watched = check.watch(Asked(prompt, 0, tuple(seen[-8:])), now)
        assert watched is not None
        seen.append(tokens)
        for frame in entry["frames"]:
            check.stored(0, decode_batch(base64.b64decode(frame["payload_b64"])).events)
        watched.ended_at = now
        for due in check.due(now + GRACE_SECONDS):
            check.conclude(due, is_held=False)
    return check.result


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_engines_own_tokens_match(name: str) -> None:
    result = checked(name, lambda ids: ids)
    assert result.matched >= 3
    assert (result.mismatched, result.difference) == (0, None)


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_token_too_many_at_the_beginning_is_found(name: str) -> None:
    result = checked(name, lambda ids: [7, *ids])
    assert result.is_distrusted
    assert result.difference is not None
    assert result.difference[:2] == (0, 7)
    assert result.matched == 0


def test_a_missing_token_behind_every_turn_is_found() -> None:
    """Token 2 ends a turn and 201, a line's end, follows it."""

    def without(ids: list[int]) -> list[int]:
        return [
            one for one, before in zip(ids, [0, *ids], strict=False) if (before, one) != (2, 201)
        ]

    result = checked("vllm_0.32.0_cached_tokens", without)
    assert result.mismatched >= 40  # single turns differ in their last tokens only
    assert result.difference is not None
    assert result.difference.engines in (201, None)
