"""Why prompts are computed again, through a real Envoy to simulated engines."""

import contextlib
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.system.system import CHAT, System, running
from tests.waiting import until

MISSES: dict[str, Any] = {
    "accounting": {"responses": "usage"},
    "misses": {"enabled": True, "response_headers": True},
}
AGENT = {"user-agent": "claude-cli/2.1.0 (external, cli)"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The tool {name} does what its name says, and does it well.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("Read", "Write", "Search", "Run")
]


class Conversation:
    """A conversation of one agent, that sends its turns itself."""

    def __init__(self, system: System, seed: str, session: str = "") -> None:
        self._system = system
        self.tools = list(TOOLS)
        self.system_text = f"You help with {seed}. It is {{clock}} now. " + "Rules apply. " * 30
        self.clock = "2026-11-30 12:00:01"
        self.messages = [{"role": "user", "content": f"Please look at {seed}: {seed} fails."}]
        self.session = session
        self.count = 0
        self.headers: dict[str, str] = {}

    async def turn(self) -> dict[str, Any]:
        """Sends a turn; returns its verdict."""
        self.count += 1
        system = {"role": "system", "content": self.system_text.format(clock=self.clock)}
        body = {
            "model": "tiny",
            "messages": [system, *self.messages],
            "tools": self.tools,
            "max_tokens": 4,
        }
        if self.session:
            body["prompt_cache_key"] = self.session
        name = f"{id(self)}-{self.count}"
        url, headers = f"{self._system.envoy}{CHAT}", {**AGENT, "x-request-id": name}
        async with self._system.session.post(url, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            self.headers = {key.lower(): value for key, value in response.headers.items()}
            await response.json()
        self.messages.append({"role": "assistant", "content": f"Answer {self.count}. " * 20})
        self.messages.append({"role": "user", "content": f"Go on with step {self.count}. " * 20})
        found: list[dict[str, Any]] = []

        async def is_judged() -> bool:
            found[:] = (await misses(self._system, f"?request_id={name}"))["turns"]
            return bool(found)

        await until(is_judged, "the turn is judged")
        assert sum(found[0]["tokens"].values()) == found[0]["prompt_tokens"]
        return found[0]


async def misses(system: System, query: str = "") -> dict[str, Any]:
    async with system.session.get(f"{system.admin}/misses{query}") as response:
        assert response.status == 200, await response.text()
        found: dict[str, Any] = await response.json()
        return found


@contextlib.asynccontextmanager
async def judging(workers: int = 2) -> AsyncIterator[System]:
    # slow enough that a prompt is examined before its response begins
    async with running(workers, ("tiny",), MISSES, prefill_tokens_per_second=10_000) as system:
        yield system


async def test_conversation_that_goes_on_changes_nothing() -> None:
    async with judging() as system:
        one = Conversation(system, "parsers")
        first = await one.turn()
        for number in range(2, 5):
            verdict = await one.turn()
            assert verdict["cause"] == ""
            assert (verdict["conversation"], verdict["turn"]) == (first["conversation"], number)


async def test_time_in_the_system_is_named_and_the_client_is_told() -> None:
    async with judging() as system:
        one = Conversation(system, "parsers")
        await one.turn()
        one.clock = "2026-11-30 12:04:37"
        verdict = await one.turn()
        assert verdict["cause"] == "changed"
        assert (verdict["change"]["part"], verdict["change"]["kind"]) == ("system", "time")
        assert verdict["kept_tokens"] == verdict["change"]["at_token"] < 30
        at = verdict["change"]["at_token"]
        assert f"at={at}; part=system; index=0; kind=time" in one.headers["x-kvsteer-miss"]
        (worst,) = (await misses(system))["breaks"]
        async with system.session.get(f"{system.admin}/report?format=text") as response:
            assert f"Note: {worst['says']}" in await response.text()
        assert (worst["client"], worst["at_token"], worst["turns"]) == ("claude-cli", at, 1)
        assert (await one.turn())["cause"] == ""


async def test_other_worker_evictions_and_losses_are_named() -> None:
    async with judging() as system:
        one = Conversation(system, "parsers")
        first = await one.turn()
        await one.turn()
        drained = {"endpoint": first["worker"], "draining": True}
        await system.session.post(f"{system.admin}/draining", json=drained)
        moved = await one.turn()
        assert moved["cause"] == "elsewhere"
        assert "draining" in moved["because"]
        here = next(worker for worker in system.workers if worker.endpoint == moved["worker"])
        await until(lambda: _clears(system, here.url), "no request runs there")
        cleared = await one.turn()
        assert cleared["cause"] == "cleared"
        assert cleared["tokens"]["cleared"] >= moved["prompt_tokens"] - 2 * 16
        await system.kill_worker(here.endpoint)
        await system.start_worker(here.endpoint)
        await until(lambda: _holds_nothing(system, here.endpoint), "the restart has been seen")
        assert (await one.turn())["cause"] == "restarted"


@pytest.mark.parametrize("responses", ["none", "usage"])
async def test_worker_that_the_proxy_chose_counts_and_its_client_is_told_nothing(
    responses: str,
) -> None:
    changes = MISSES | {"steering": {"percent": 0}, "accounting": {"responses": responses}}
    if responses == "none":
        changes["misses"] = {"enabled": True}
    async with running(2, ("tiny",), changes) as system:
        one = Conversation(system, "parsers")
        verdicts = [await one.turn()]

        async def is_elsewhere() -> bool:
            verdicts.append(await one.turn())
            return bool(verdicts[-1]["worker"] != verdicts[0]["worker"])

        await until(is_elsewhere, "the proxy chose the other worker")
        *_, before, here = verdicts
        assert here["cause"] == "elsewhere"
        assert here["tokens"]["elsewhere"] >= before["prompt_tokens"] - 2 * 16
        assert "reused" not in here["tokens"]
        assert here["because"].startswith(f"the proxy sent it to {here['worker']}; the pick was ")
        assert not [name for name in one.headers if name.startswith("x-kvsteer-")]


async def _clears(system: System, worker: str) -> bool:
    async with system.session.post(f"{worker}/reset_prefix_cache") as response:
        return bool((await response.json())["success"])


async def _holds_nothing(system: System, endpoint: str) -> bool:
    (status,) = [one for one in await system.status() if one["endpoint"] == endpoint]
    return status["state"] == "live" and not any(status["blocks_by_tier"].values())


async def test_eviction_is_named_with_who_grew_and_when() -> None:
    async with running(1, ("tiny",), MISSES, blocks=100) as system:
        one, other = Conversation(system, "parsers"), Conversation(system, "lexers")
        await one.turn()
        before = await one.turn()
        for _ in range(6):
            await other.turn()
        evicted = await one.turn()
        assert evicted["cause"] == "evicted"
        assert evicted["tokens"]["evicted"] >= before["prompt_tokens"] / 2
        assert "UTC" in evicted["because"]
        assert "from claude-cli" in evicted["because"]


async def test_router_that_has_just_started_says_that_it_does_not_know() -> None:
    async with judging() as system:
        one = Conversation(system, "parsers", session="a session")
        await one.turn()
        await system.stop_router(signal.SIGTERM)
        await system.start_router()
        verdict = await one.turn()
        assert verdict["cause"] == "unknown"
        assert verdict["last_tokens"] is None
        assert (await one.turn())["cause"] == ""
        assert (await Conversation(system, "lexers").turn())["cause"] == ""


async def test_compaction_is_known_by_the_session() -> None:
    async with judging() as system:
        one = Conversation(system, "parsers", session="a session")
        for _ in range(4):
            await one.turn()
        one.messages[:-1] = [{"role": "user", "content": "In short: nothing was found. " * 3}]
        verdict = await one.turn()
        assert verdict["change"]["kind"] == "compaction"
        assert (verdict["change"]["part"], verdict["change"]["index"]) == ("turn", 0)
        assert verdict["conversation"] == 1
        assert (await one.turn())["cause"] == ""


async def test_sub_agents_that_go_on_from_one_prompt_change_nothing() -> None:
    async with judging() as system:
        one, other = Conversation(system, "parsers"), Conversation(system, "parsers")
        await one.turn()
        other.messages = one.messages[:-1]
        other.messages.append({"role": "user", "content": "You are a sub-agent now. " * 20})
        one.messages = list(one.messages)
        await one.turn()
        forked = await other.turn()
        assert forked["cause"] == ""
        assert forked["conversation"] == 2
        assert forked["tokens"]["reused"] >= forked["last_tokens"] - 32


async def test_conversations_of_two_sessions_are_never_one() -> None:
    async with judging() as system:
        one, other = (Conversation(system, "parsers", name) for name in ("one", "other"))
        for _ in range(3):
            first = await one.turn()
        other.messages = [{"role": "user", "content": "Please look at lexers."}, *one.messages[1:]]
        verdict = await other.turn()
        assert verdict["conversation"] != first["conversation"]
        assert verdict["change"] is None
