"""Conversations that more than one worker answered, and why the router sent each turn there."""

import json
from itertools import pairwise
from typing import Any

from tests.clients.front import Turn
from tests.clients.turns import Conversations
from tests.system.system import System


def strays(found: Conversations) -> dict[tuple[str, int], list[str]]:
    """The conversations that more than one worker answered, and their workers."""
    workers = {key: [one.worker for one in turns] for key, turns in found.items()}
    return {key: each for key, each in workers.items() if len(set(each)) > 1}


async def unexplained(system: System, found: Conversations) -> list[str]:
    """The turns that left their conversation's worker for another reason than its load."""
    pairs = [pair for key in strays(found) for pair in pairwise(found[key])]
    return [
        _name(after)
        for before, after in pairs
        if before.worker != after.worker and not await _left_for_load(system, before, after)
    ]


async def _left_for_load(system: System, before: Turn, after: Turn) -> bool:
    """Whether a turn's decision shows that its worker had the most of it, and yet more to do."""
    decision = await _decision(system, after)
    if decision is None or decision["pick"][0] != after.worker:
        return False
    candidates = {one["endpoint"]: one for one in decision["candidates"]}
    home, pick = candidates[before.worker], candidates[after.worker]
    has_most = _held(home) == max(map(_held, candidates.values()))
    return bool(not home["excluded"] and has_most and home["cost"] > pick["cost"])


def _held(candidate: dict[str, Any]) -> int:
    sent = candidate["speculative_tokens"] + candidate["approximate_tokens"]
    held: int = candidate["overlap_tokens"] + max(candidate["uncertain_tokens"], sent)
    return held


async def bypassed(system: System) -> str:
    """How many requests Envoy sent on without the router's answer, in words."""
    url = f"{system.envoy_admin}/stats?filter=failure_mode_allowed"
    async with system.session.get(url) as answer:
        lines = (await answer.text()).split("\n")
    return f"{sum(int(one.rpartition(' ')[2]) for one in lines if one)} requests had no answer"


async def decided(system: System, found: Conversations) -> str:
    """The decisions on the turns of conversations that strayed, with all candidates."""
    lines = [await bypassed(system)]
    for turn in [turn for key in strays(found) for turn in found[key]]:
        decision = await _decision(system, turn)
        lines.append(f"{_name(turn)}: {'no decision' if decision is None else decision['why']}")
        lines += [f"    {_candidate(one)}" for one in (decision or {}).get("candidates", ())]
    return "\n".join(lines)


def _name(turn: Turn) -> str:
    return f"{turn.client}-{turn.number}, {turn.length} long, answered by {turn.worker}"


async def _decision(system: System, turn: Turn) -> dict[str, Any] | None:
    """What GET /decisions/ID shows of a turn, None if the router did not decide it."""
    url = f"{system.admin}/decisions"
    async with system.session.get(url, params={"request_id": turn.request_id}) as answer:
        listed = (await answer.json())["decisions"]
    if not listed:
        return None
    async with system.session.get(f"{url}/{listed[-1]['id']}") as answer:
        decision: dict[str, Any] = await answer.json()
        return decision


def _candidate(told: dict[str, Any]) -> str:
    kinds = ("overlap", "uncertain", "speculative", "approximate")
    held = {kind: told[f"{kind}_tokens"] for kind in kinds}
    out = f", left out: {told['excluded']}" if told["excluded"] else ""
    terms = json.dumps(told["cost_terms"])
    return f"{told['endpoint']} {told['state']}: {held}, cost {told['cost']} = {terms}{out}"
