"""Why prompts are computed again, through a real Envoy to simulated engines."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

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
    async with running(workers, ("tiny",), MISSES) as system:
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
        assert (worst["client"], worst["at_token"], worst["turns"]) == ("claude-cli", at, 1)
        assert (await one.turn())["cause"] == ""
