"""A model that has every agent list its files three times, and then say that it is done.

`answer_to` returns what an engine would send for a request, in its API: the events of a stream, or
one object. Each answer thinks first, as reasoning models do, so that later turns send it back.
Which tools an answer calls is a plan's choice.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tests.clients.sessions import LAST_WORDS

Body = dict[str, Any]

# The tools that an answer calls, with their arguments; none for an answer in words.
Calls = Sequence[tuple[str, Body]]
Plan = Callable[[Body], Calls]

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"

CALLS = 3
_THOUGHT = "I look at the files first."

# The tools by which agents run commands, and the arguments that each may take.
_SHELLS: dict[str, Body] = {
    "Bash": {"command": "ls -la", "description": "List files"},
    "bash": {"command": "ls -la", "description": "List files"},
    "exec_command": {"cmd": "ls -la"},
    "shell": {"command": ["bash", "-lc", "ls -la"]},
    "run_commands": {"commands": ["ls -la"]},
    "run_shell_command": {"command": "ls -la", "is_background": False, "description": "List"},
}
# The tools by which some agents have to be told that the work is done.
_ENDS: dict[str, Body] = {
    "submit_and_exit": {"summary": LAST_WORDS, "verified": True},
    "final_answer": {"answer": LAST_WORDS},
}
_RESULTS = frozenset(("tool", "function_call_output", "custom_tool_call_output", "tool_result"))


class Event(NamedTuple):
    """One event of a stream; name: "" for none."""

    name: str
    data: Body


class Usage(NamedTuple):
    """Tokens of a prompt, and how many of them were cached."""

    prompt: int
    cached: int


def turns_of(body: Body) -> list[Body]:
    """Returns the turns or items of a request."""
    turns = body.get("messages") or body.get("input") or []
    return [one for one in turns if isinstance(one, dict)]


def _results(body: Body) -> int:
    """Counts the results of tools in a request."""
    found = 0
    for turn in turns_of(body):
        content = turn.get("content")
        parts = content if isinstance(content, list) else []
        kinds = [turn.get("role"), turn.get("type"), *(one.get("type") for one in parts)]
        found += sum(kind in _RESULTS for kind in kinds)
    return found


def schemas_of(body: Body) -> dict[str, Body]:
    """Returns the schema of each tool's arguments, by its name."""
    functions = [one.get("function", one) for one in body.get("tools") or []]
    return {
        str(one.get("name")): one.get("parameters") or one.get("input_schema") or {}
        for one in functions
    }


def _call_of(tools: dict[str, Body], body: Body) -> Calls:
    """Returns a call of the first of some tools that a request has, with what it may take."""
    for name, schema in schemas_of(body).items():
        if name in tools:
            known = schema.get("properties") or {}
            return [(name, {key: value for key, value in tools[name].items() if key in known})]
    return []


def _shell(body: Body) -> Calls:
    return _call_of(_SHELLS, body)


def _end(body: Body) -> Calls:
    return _call_of(_ENDS, body)


def lists_files(body: Body) -> Calls:
    """Lists the files three times."""
    return _end(body) if _results(body) >= CALLS else _shell(body)


def lists_twice_at_once(body: Body) -> Calls:
    """Lists the files once, and then twice in one answer."""
    done = _results(body)
    return _end(body) if done >= CALLS else [*_shell(body)] * (2 if done else 1)


def searches_tools(body: Body) -> Calls:
    """Searches for tools that the client has not sent yet, and lists the files once."""
    if _results(body) or "ToolSearch" not in schemas_of(body):
        return _end(body) if _results(body) >= CALLS else _shell(body)
    return [("ToolSearch", {"query": "select:WebFetch,NotebookEdit", "max_results": 5})]


def answer_to(
    path: str, body: Body, number: int, usage: Usage, plan: Plan = lists_files
) -> tuple[Sequence[Event], Body]:
    """Returns a stream's events and the same answer as one object. number: of the request."""
    make = {CHAT: _chat, MESSAGES: _messages, RESPONSES: _responses}[path]
    return make(plan(body), number, usage, str(body.get("model")))


def _chat(calls: Calls, number: int, usage: Usage, model: str) -> tuple[Sequence[Event], Body]:
    about = {"id": f"chatcmpl-{number}", "created": 1, "model": model}
    counted = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": 5,
        "total_tokens": usage.prompt + 5,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
    reply: Body = {"role": "assistant", "content": LAST_WORDS}
    if calls:
        told = [
            {
                "index": at,
                "id": f"call_{number}_{at}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for at, (name, arguments) in enumerate(calls)
        ]
        reply = {
            "role": "assistant",
            "content": None,
            "reasoning_content": _THOUGHT,
            "tool_calls": told,
        }
    why = "tool_calls" if calls else "stop"
    choice = {"index": 0, "finish_reason": why}
    whole = {**about, "object": "chat.completion", "usage": counted}
    whole["choices"] = [{**choice, "message": reply}]
    chunk = {**about, "object": "chat.completion.chunk"}
    deltas = [{**choice, "finish_reason": None, "delta": reply}, {**choice, "delta": {}}]
    events = [Event("", {**chunk, "choices": [one]}) for one in deltas]
    return [*events, Event("", {**chunk, "choices": [], "usage": counted})], whole


def _messages(calls: Calls, number: int, usage: Usage, model: str) -> tuple[Sequence[Event], Body]:
    thought = {"type": "thinking", "thinking": _THOUGHT, "signature": "abc"}
    said: list[Body] = [
        {"type": "tool_use", "id": f"toolu_{number}_{at}", "name": name, "input": arguments}
        for at, (name, arguments) in enumerate(calls)
    ] or [{"type": "text", "text": LAST_WORDS}]
    counted = {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": 5,
    }
    whole = {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [thought, *said],
        "stop_reason": "tool_use" if calls else "end_turn",
        "stop_sequence": None,
        "usage": counted,
    }
    began = {**whole, "content": [], "stop_reason": None}
    empty: Body = {"input": {}} if calls else {"text": ""}
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    events = [
        {"type": "message_start", "message": began},
        *_block(0, {**thought, "thinking": "", "signature": ""}, _deltas_of(thought)),
        *(
            event
            for at, one in enumerate(said, 1)
            for event in _block(at, {**one, **empty}, _deltas_of(one))
        ),
        {"type": "message_delta", "delta": ended, "usage": counted},
        {"type": "message_stop"},
    ]
    return [Event(one["type"], one) for one in events], whole


def _deltas_of(block: Body) -> list[Body]:
    if block["type"] == "thinking":
        return [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    if block["type"] == "text":
        return [{"type": "text_delta", "text": block["text"]}]
    return [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]


def _block(at: int, empty: Body, deltas: Sequence[Body]) -> list[Body]:
    return [
        {"type": "content_block_start", "index": at, "content_block": empty},
        *({"type": "content_block_delta", "index": at, "delta": one} for one in deltas),
        {"type": "content_block_stop", "index": at},
    ]


def _responses(calls: Calls, number: int, usage: Usage, model: str) -> tuple[Sequence[Event], Body]:
    thought: Body = {
        "type": "reasoning",
        "id": f"rs_{number}",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": _THOUGHT}],
        "encrypted_content": None,
        "status": "completed",
    }
    words = {"type": "output_text", "text": LAST_WORDS, "annotations": []}
    said: list[Body] = [
        {
            "type": "function_call",
            "id": f"fc_{number}_{at}",
            "call_id": f"call_{number}_{at}",
            "name": name,
            "arguments": json.dumps(arguments),
        }
        for at, (name, arguments) in enumerate(calls)
    ] or [{"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [words]}]
    items = [thought, *(one | {"status": "completed"} for one in said)]
    whole: Body = {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": model,
        "output": items,
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + 5,
        },
    }
    began = {**whole, "status": "in_progress", "output": [], "usage": None}
    events: list[Body] = [{"type": "response.created", "response": began}]
    for at, item in enumerate(items):
        events.append({"type": "response.output_item.added", "output_index": at, "item": item})
        if item["type"] == "message":
            delta = {"item_id": item["id"], "output_index": at, "content_index": 0}
            events.append({"type": "response.output_text.delta", **delta, "delta": LAST_WORDS})
        events.append({"type": "response.output_item.done", "output_index": at, "item": item})
    events.append({"type": "response.completed", "response": whole})
    return [Event(one["type"], one | {"sequence_number": at}) for at, one in enumerate(events)], (
        whole
    )
