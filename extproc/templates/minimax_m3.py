"""What SGLang changes in conversations of MiniMax-M3 before the template gets them.

Source: SGLang 0.5.23, srt/entrypoints/openai/serving_chat.py (its rules for `minimax_m3_vl`). No
earlier release has any.
"""

from collections.abc import Mapping
from typing import Any

from extproc.base.errors import RequestError
from extproc.requests.chat_request import Messages
from extproc.requests.prompt import Conversion

# The type of model in config.json to which this applies.
MODEL_TYPE = "minimax_m3_vl"

_MODES = ("adaptive", "enabled", "disabled")
_EFFORTS = frozenset(("low", "medium", "high", "xhigh", "max"))
_NO_EFFORT = frozenset(("none", "minimal"))


def check_pairs(messages: Messages, *, is_continued: bool) -> None:
    """Checks that every tool call has one result, and every result a call.

    The calls of the last turn need none. Calls without ids are not compared.

    is_continued: another turn of the model follows, which it goes on with.

    Raises:
        RequestError: the engine refuses the messages.
    """
    unanswered: set[str] | None = None
    has_ids = True
    for message in messages:
        if message["role"] != "tool":
            if unanswered:
                raise RequestError("bad_request")
            unanswered, has_ids = _calls_of(message)
        elif has_ids:
            unanswered = _without(unanswered, message.get("tool_call_id"))
    if unanswered and (is_continued or messages[-1]["role"] == "tool"):
        raise RequestError("bad_request")


def _calls_of(message: dict[str, Any]) -> tuple[set[str] | None, bool]:
    """Returns the ids of a turn's calls, None if none can be answered, and whether all have one."""
    calls = message.get("tool_calls")
    if message["role"] != "assistant" or not calls:
        return None, True
    ids = [call["id"] for call in calls]
    return (None, False) if None in ids else (set(ids), True)


def _without(unanswered: set[str] | None, call_id: str | None) -> set[str]:
    if unanswered is None or call_id not in unanswered:
        raise RequestError("bad_request")
    return unanswered - {call_id}


def in_call_order(messages: Messages) -> Messages:
    """Returns the messages with the results of a turn's calls in the order of these.

    Results stay as they are if one of them or of the calls has no id, or one that occurs twice, or
    if one answers no call.
    """
    ordered: list[dict[str, Any]] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        end = place = place + 1
        ordered.append(message)
        calls = message.get("tool_calls")
        if message["role"] != "assistant" or not calls:
            continue
        while end < len(messages) and messages[end]["role"] in ("tool", "function"):
            end += 1
        ordered += _in_order(messages[place:end], [call["id"] for call in calls])
        place = end
    return ordered


def _in_order(results: Messages, call_ids: list[str | None]) -> Messages:
    ids = [result.get("tool_call_id") for result in results]
    has_doubles = len(set(call_ids)) < len(call_ids) or len(set(ids)) < len(ids)
    if None in call_ids or has_doubles or not set(ids) <= set(call_ids):
        return results
    order = {call_id: rank for rank, call_id in enumerate(call_ids)}
    return sorted(results, key=lambda result: order[result["tool_call_id"]])


def with_thinking(variables: Mapping[str, Any], conversion: Conversion) -> dict[str, Any]:
    """Returns a template's variables with how much the model thinks, as this template reads it.

    Raises:
        RequestError: the engine refuses the request, or which of its two efforts counts depends on
            the API.
    """
    others = dict(variables)
    effort = others.pop("reasoning_effort", None)
    if conversion.effort and effort != conversion.effort:
        raise RequestError("unsupported_reasoning_effort")
    if conversion.thinking_config is not None:
        others.setdefault("thinking_mode", _mode_in(conversion.thinking_config))
    if effort in _NO_EFFORT:
        others.setdefault("thinking_mode", "disabled")
    if others.get("thinking_mode") != "disabled" and effort in _EFFORTS:
        others["reasoning_effort"] = effort
    return others


def _mode_in(config: object) -> str:
    match config:
        case {"type": str(mode)} if mode in _MODES:
            return mode
    raise RequestError("bad_request")
