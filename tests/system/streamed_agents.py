"""Agents that work as Claude Code and Codex do: streamed turns with tools, whose results they send.

They talk to simulated workers, which answer "list the files" with a call of the agent's shell.
"""

import json
from typing import Any

import aiohttp

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
Body = dict[str, Any]

_SCHEMA = {"type": "object", "properties": {}}


class Turn:
    """One answer. cached: the tokens of its prompt that the worker had. given: blocks or items."""

    def __init__(self, worker: str, cached: int, given: list[Body]) -> None:
        self.worker = worker
        self.cached = cached
        self.given = given

    @property
    def kind(self) -> str:
        """The type of its block or item."""
        return str(self.given[0]["type"])


class Agent:
    """One conversation by one API. rules: its system prompt. asks: its first words."""

    def __init__(self, path: str, rules: str, asks: str = "List the files.") -> None:
        self.path = path
        self._rules = rules
        self._turns: list[Body] = [{"role": "user", "content": asks}]

    @property
    def body(self) -> Body:
        """The next request."""
        common = {"model": "tiny", "stream": True}
        if self.path == RESPONSES:
            tool = {"type": "function", "name": "exec_command", "parameters": _SCHEMA}
            return {
                **common,
                "instructions": self._rules,
                "input": list(self._turns),
                "tools": [tool],
            }
        return {
            **common,
            "max_tokens": 32_000,
            "system": self._rules,
            "messages": list(self._turns),
            "tools": [{"name": "Bash", "input_schema": _SCHEMA}],
        }

    async def turn(
        self, session: aiohttp.ClientSession, url: str, then: str = "And then?", result: str = "a b"
    ) -> Turn:
        """Sends the next request, and keeps its answer for the one after it.

        then: what is asked after a text. result: of a call.
        """
        async with session.post(f"{url}{self.path}", json=self.body) as answer:
            assert answer.status == 200, await answer.text()
            lines = (await answer.text()).splitlines()
        told = [json.loads(one.removeprefix("data: ")) for one in lines if one.startswith("data: ")]
        read = _response if self.path == RESPONSES else _message
        turn = Turn(answer.headers["x-worker"], *read(told))
        self._turns += self._reply(turn, then, result)
        return turn

    def _reply(self, turn: Turn, then: str, result: str) -> list[Body]:
        call = turn.given[0]
        if self.path == RESPONSES:
            output = {"type": "function_call_output", "call_id": call.get("call_id")}
            is_call = turn.kind == "function_call"
            said = {"role": "user", "content": then}
            return [*turn.given, output | {"output": result} if is_call else said]
        block = {"type": "tool_result", "tool_use_id": call.get("id"), "content": result}
        content = [block] if turn.kind == "tool_use" else then
        own = {"role": "assistant", "content": turn.given}
        return [own, {"role": "user", "content": content}]


def _response(told: list[Body]) -> tuple[int, list[Body]]:
    response = told[-1]["response"]
    return response["usage"]["input_tokens_details"]["cached_tokens"], response["output"]


def _message(told: list[Body]) -> tuple[int, list[Body]]:
    by_kind: dict[str, list[Body]] = {}
    for one in told:
        by_kind.setdefault(one["type"], []).append(one)
    (opened,), (ended,) = by_kind["content_block_start"], by_kind["message_delta"]
    block: Body = opened["content_block"]
    deltas = [one["delta"] for one in by_kind["content_block_delta"]]
    if block["type"] == "text":
        block["text"] = "".join(one["text"] for one in deltas)
    else:
        block["input"] = json.loads("".join(one["partial_json"] for one in deltas))
    return ended["usage"]["cache_read_input_tokens"], [block]
