"""Conversations that more than one worker answered, and why the router sent each turn there."""

import json
from typing import Any

from tests.clients.front import Turn
from tests.clients.turns import Conversations
from tests.system.system import System


def strays(found: Conversations) -> dict[tuple[str, int], list[str]]:
    """The conversations that more than one worker answered, and their workers."""
    workers = {key: [one.worker for one in turns] for key, turns in found.items()}
    return {key: each for key, each in workers.items() if len(set(each)) > 1}


async def bypassed(system: System) -> str:
    """How many requests Envoy sent on without the router's answer, in words."""
    url = f"{system.envoy_admin}/stats?filter=failure_mode_allowed"
    async with system.session.get(url) as answer:
        lines = (await answer.text()).split("\n")
    return f"{sum(int(one.rpartition(' ')[2]) for one in lines if one)} requests had no answer"


async def decided(system: System, found: Conversations) -> str:
    """The decisions on the turns of conversations that strayed, with all candidates."""
    lines = [await bypassed(system)]
    for key in strays(found):
        lines += [await _turn(system, one) for one in found[key]]
    return "\n".join(lines)


async def _turn(system: System, turn: Turn) -> str:
    name = f"{turn.client}-{turn.number}, {turn.length} long, answered by {turn.worker}"
    url = f"{system.admin}/decisions"
    async with system.session.get(url, params={"request_id": turn.request_id}) as answer:
        listed = (await answer.json())["decisions"]
    if not listed:
        return f"{name}: no decision"
    one = listed[-1]
    async with system.session.get(f"{url}/{one['id']}") as answer:
        candidates = (await answer.json())["candidates"]
    shown = [f"    {_candidate(each)}" for each in candidates]
    return "\n".join([f"{name}, at {one['at']}: {one['why']}", *shown])


def _candidate(told: dict[str, Any]) -> str:
    kinds = ("overlap", "uncertain", "speculative", "approximate")
    held = {kind: told[f"{kind}_tokens"] for kind in kinds}
    out = f", left out: {told['excluded']}" if told["excluded"] else ""
    terms = json.dumps(told["cost_terms"])
    return f"{told['endpoint']} {told['state']}: {held}, cost {told['cost']} = {terms}{out}"
