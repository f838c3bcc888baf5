"""What the formats of DeepSeek's models since V3.2 share: control texts, and calls of tools (DSML).

Written from the behaviour of vLLM 0.32.0 (tokenizers/deepseek_v32, deepseek_v4, deepseek_v41).
Control texts in a client's text become special tokens as well: the engine tokenizes one text.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from extproc.base.errors import RequestError
from extproc.requests.chat_request import Messages

BOS, EOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
SYSTEM, USER, ASSISTANT = "<\uff5cSystem\uff5c>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"
REMINDER = "<\uff5clatest_reminder\uff5c>"
THINK, END_THINK = "<think>", "</think>"
_DSML = "\uff5cDSML\uff5c"

# The roles of a turn that the model answers.
ASKING = ("user", "developer")


class Tags(NamedTuple):
    """The names of the elements in which calls are written; V4.1 begins them with a space."""

    calls: str = "tool_calls"
    call: str = "invoke"
    argument: str = "parameter"


def opened(tag: str, attributes: str = "") -> str:
    """Returns the beginning of an element."""
    return f"<{_DSML}{tag}{attributes}>"


def closed(tag: str) -> str:
    """Returns the end of an element."""
    return f"</{_DSML}{tag}>"


def calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the functions that a turn calls, each with its name and its arguments."""
    return [call["function"] for call in message.get("tool_calls") or ()]


def written_calls(functions: Iterable[Mapping[str, Any]], tags: Tags) -> str:
    """Returns calls as the model writes them."""
    lines = [opened(tags.calls)]
    for function in functions:
        lines.append(opened(tags.call, f' name="{function["name"]}"'))
        lines.append("\n".join(_arguments(function["arguments"], tags)))
        lines.append(closed(tags.call))
    return "\n".join([*lines, closed(tags.calls)])


def _arguments(arguments: Mapping[str, Any], tags: Tags) -> Iterable[str]:
    for name, value in arguments.items():
        is_text = isinstance(value, str)
        kind = ' string="true"' if is_text else ' string="false"'
        text = value if is_text else in_json(value)
        yield opened(tags.argument, f' name="{name}"{kind}') + text + closed(tags.argument)


def in_json(value: object) -> str:
    """Returns JSON as DeepSeek's code writes it."""
    return json.dumps(value, ensure_ascii=False)


def schemas(tools: Iterable[Mapping[str, Any]]) -> str:
    """Returns the functions of tools, one a line."""
    return "\n".join(in_json(tool["function"]) for tool in tools)


def last_asking(messages: Messages) -> int:
    """Returns the place of the last turn that the model answers, -1 if there is none."""
    return next(
        (place for place in reversed(range(len(messages))) if messages[place]["role"] in ASKING),
        -1,
    )


def refusal() -> RequestError:
    """Returns the error for a conversation that the engine's code refuses as well."""
    return RequestError("template_failed")
