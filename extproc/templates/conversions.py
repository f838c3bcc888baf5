"""Changes that engines make to a conversation before its template gets it, by release.

Source: vLLM 0.24.0 to 0.32.0, renderers/hf.py (developers), anthropic/serving.py (system turns),
and its parsing of messages (reasoning) from 0.10.2 on.
"""

from typing import Any

from extproc.base.errors import RequestError
from extproc.requests.chat_request import Messages
from extproc.requests.dialect import Reasoning

_KEYS = ("reasoning", "reasoning_content")


def merged_systems(messages: Messages) -> Messages:
    """Returns the messages with the texts of all system turns in one, at the beginning."""
    texts = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "".join(texts)}, *others]


def merged_developers(messages: Messages) -> Messages:
    """Returns the messages with developers' turns as system turns.

    If one of these is not the first message, all are merged, with a blank line between.
    """
    turned = [_as_system(message) for message in messages]
    if not any(message["role"] == "system" for message in turned[1:]):
        return turned
    texts = [_text_of(message["content"]) for message in turned if message["role"] == "system"]
    merged = {"role": "system", "content": "\n\n".join(filter(None, texts))}
    return [merged, *(message for message in turned if message["role"] != "system")]


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "developer":
        return message
    return {**{key: value for key, value in message.items() if key != "tools"}, "role": "system"}


def _text_of(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if "text" in part)
    return content or ""


def with_reasoning(message: dict[str, Any], rule: Reasoning) -> dict[str, Any]:
    """Returns a turn with its reasoning under both keys, or under none if the engine ignores it."""
    if message["role"] != "assistant":
        return message
    reasoning = _reasoning(message.get("reasoning"), message.get("reasoning_content"), rule)
    others = {key: value for key, value in message.items() if key not in _KEYS}
    return others if reasoning is None else {**others, **dict.fromkeys(_KEYS, reasoning)}


def _reasoning(reasoning: object, content: object, rule: Reasoning) -> object:
    if rule is Reasoning.IGNORED:
        return None
    if rule is Reasoning.ONLY_REASONING:
        return reasoning
    if rule is Reasoning.EITHER:
        return reasoning or content
    return content if reasoning is None else reasoning


def with_sorted_keys(value: Any) -> Any:
    """Returns a value of JSON with the keys of all its objects in order.

    Raises:
        RequestError: it is nested too deeply.
    """
    try:
        return _with_sorted_keys(value)
    except RecursionError:
        raise RequestError("template_failed") from None


def _with_sorted_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_sorted_keys(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_with_sorted_keys(item) for item in value]
    return value
