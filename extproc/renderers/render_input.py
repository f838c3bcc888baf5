"""What a renderer in code is given of a conversation, by the rules of the engine's release.

Source: vLLM 0.24.0 to 0.32.0. It converts requests alike for templates and for code (entrypoints
and their parsing of messages), but merges developers' turns for templates only (renderers/hf.py).
"""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple

from extproc.base.errors import RequestError
from extproc.requests.chat_request import Messages, without_billing_line
from extproc.requests.dialect import Dialect, Effort, InlineSystem
from extproc.requests.prompt import (
    BILLING,
    DEVELOPER,
    DISABLED,
    EFFORT,
    INLINE_SYSTEM,
    ITEMS,
    NO_TOOLS,
    PARTS,
    REASONING,
    Chat,
)
from extproc.templates.conversions import merged_systems, with_reasoning

_REASONING = frozenset(("reasoning", "reasoning_content"))


class RenderInput(NamedTuple):
    """A conversation for a renderer.

    messages: by the dialect's rules. variables: besides them, `reasoning_effort` and
    `enable_thinking` included as the dialect sets them. forms: those that the dialect decided.
    """

    messages: Messages
    variables: Mapping[str, Any]
    forms: int


def dialect_of(chat: Chat) -> Dialect:
    """Returns the dialect of a chat.

    Raises:
        RequestError: it has none, or that of an engine whose own code is not known here
            (unsupported_by_engine).
    """
    if chat.dialect is None or not chat.dialect.is_vllms:
        raise RequestError("unsupported_by_engine")
    return chat.dialect


def render_input(
    chat: Chat,
    messages: Messages,
    off_effort: str = "none",
    keeps_later_systems: Callable[[], bool] = lambda: False,
    *,
    drops_billing_lines: bool = True,
) -> RenderInput:
    """Returns what a renderer is given of a chat.

    messages: `chat.messages`, or `chat.sent` where the engine's code reads these. off_effort: the
    effort by which the model's thinking is switched off. keeps_later_systems: returns whether
    vLLM 0.31 and later find that the model renders a system turn that is not the first.
    drops_billing_lines: whether the engine's code reads messages without them, by its release.

    Raises:
        RequestError: the chat has no dialect, or its dialect refuses it.
    """
    dialect = dialect_of(chat)
    forms = chat.forms & (INLINE_SYSTEM | BILLING | ITEMS | NO_TOOLS)
    if forms & INLINE_SYSTEM:
        messages = _with_systems(messages, dialect.inline_system, keeps_later_systems)
    if not drops_billing_lines:
        forms &= ~BILLING
    elif forms & BILLING and dialect.drops_billing_line:
        messages = [without_billing_line(message) for message in messages]
    if not _REASONING.isdisjoint(chain.from_iterable(messages)):
        forms |= REASONING
        messages = [with_reasoning(message, dialect.reasoning) for message in messages]
    if "developer" in [message.get("role") for message in messages]:
        forms |= DEVELOPER
    if list in [type(message.get("content")) for message in messages]:
        forms |= PARTS
    variables: Mapping[str, Any] = chat.variables
    if chat.effort:
        forms |= EFFORT
        variables = _with_effort(chat, off_effort)
    return RenderInput(messages, variables, forms)


def _with_systems(
    messages: Messages, rule: InlineSystem, keeps_later_systems: Callable[[], bool]
) -> Messages:
    if rule is InlineSystem.REFUSED:
        raise RequestError("bad_request")
    keeps = rule is InlineSystem.PROBED and keeps_later_systems()
    return messages if keeps else merged_systems(messages)


def _with_effort(chat: Chat, off_effort: str) -> Mapping[str, Any]:
    rule = chat.effort_rule
    if rule is None or rule is Effort.IGNORED:
        return chat.variables
    effort = off_effort if chat.effort == DISABLED else chat.effort
    variables = {**chat.variables, "reasoning_effort": effort}
    if rule is Effort.SWITCHES:
        variables.setdefault("enable_thinking", effort != "none")
    return variables
