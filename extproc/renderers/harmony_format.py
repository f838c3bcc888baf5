"""Messages of the harmony format, in which gpt-oss reads conversations, and how each begins.

Source: oss-harmony 0.0.11, and what vLLM 0.32.0 has it write. Every text is tokenized by itself,
and no text becomes a control token.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from extproc.base.errors import RequestError
from extproc.renderers.segments import ControlMarks
from extproc.renderers.typescript import namespace

# The control tokens of gpt-oss, which are the same in all of its models.
CONSTRAIN, CHANNEL, START, END, MESSAGE, CALL = 200003, 200005, 200006, 200007, 200008, 200012
CONTROLS = {
    "<|constrain|>": CONSTRAIN,
    "<|channel|>": CHANNEL,
    "<|start|>": START,
    "<|end|>": END,
    "<|message|>": MESSAGE,
    "<|call|>": CALL,
}

MARKS = ControlMarks(CONTROLS.values())
_CONSTRAIN, _CHANNEL, _START, _END, _MESSAGE, _CALL = map(MARKS.mark, CONTROLS.values())

# With this, a prompt asks for an answer.
ASKED = f"{_START}assistant"

EFFORTS = ("low", "medium", "high")

# Names of functions that need no care in the header of a message.
_NAME = re.compile(r"[\w.:-]*")


class HarmonyMessage(NamedTuple):
    """A message of the format.

    author: a role, or the name of a tool. texts: its content. is_constrained: whether a call names
    the type of its content with a control token, as vLLM's Rust front end writes it.
    """

    author: str
    texts: Sequence[str]
    channel: str = ""
    recipient: str = ""
    is_constrained: bool = False

    @property
    def is_models(self) -> bool:
        """Whether the model wrote it."""
        return self.author == "assistant"

    def joined(self) -> str:
        """Returns its joined segments.

        Raises:
            RequestError: a text has a lone surrogate (not_unicode).
        """
        text = MARKS.joined(self.texts)
        if not self.recipient:
            channel = _CHANNEL + self.channel if self.channel else ""
            return f"{_START}{self.author}{channel}{_MESSAGE}{text}{_END}"
        header = f"{self.author}{_CHANNEL}{self.channel} to={self.recipient}"
        if not self.is_models:
            return f"{_START}{header}{_MESSAGE}{text}{_END}"
        if self.is_constrained:
            return f"{_START}{header} {_CONSTRAIN}json{_MESSAGE}{text}{_CALL}"
        header = f"{self.author} to={self.recipient}{_CHANNEL}{self.channel} json"
        return f"{_START}{header}{_MESSAGE}{text}{_CALL}"


def thinking_message(text: str) -> HarmonyMessage:
    """Returns what the model thought."""
    return HarmonyMessage("assistant", [text], "analysis")


def call_message(name: object, arguments: str, *, is_constrained: bool = False) -> HarmonyMessage:
    """Returns a call of a function.

    Raises:
        RequestError: as `checked_name`.
    """
    recipient = f"functions.{checked_name(name)}"
    return HarmonyMessage("assistant", [arguments], "commentary", recipient, is_constrained)


def result_message(name: object, text: str) -> HarmonyMessage:
    """Returns the result of a function.

    Raises:
        RequestError: as `checked_name`.
    """
    return HarmonyMessage(f"functions.{checked_name(name)}", [text], "commentary", "assistant")


def checked_name(name: object) -> str:
    """Returns the name of a function, if a header cannot be misread with it.

    Raises:
        RequestError: it can.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError("unsupported_tools")
    return name


def system_message(now: datetime, effort: str | None, *, has_functions: bool) -> HarmonyMessage:
    """Returns the system turn of the format's own.

    has_functions: whether any developer's turn describes functions.

    Raises:
        RequestError: the format does not know the effort.
    """
    if effort is not None and effort not in EFFORTS:
        raise RequestError("template_failed")
    calls = "\nCalls to these tools must go to the commentary channel: 'functions'."
    text = (
        "You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\n"
        f"Current date: {now:%Y-%m-%d}\n\n"
        f"Reasoning: {effort or 'medium'}\n\n"
        "# Valid channels: analysis, commentary, final."
        f" Channel must be included for every message.{calls if has_functions else ''}"
    )
    return HarmonyMessage("system", [text])


def developer_message(
    instructions: str | None, functions: Sequence[Mapping[str, Any]] = ()
) -> HarmonyMessage:
    """Returns a developer's turn, which is empty without instructions (None) and functions.

    functions: as `namespace`.

    Raises:
        RequestError: as `checked_name` and `namespace`.
    """
    for function in functions:
        checked_name(function["name"])
    sections = [] if instructions is None else ["# Instructions", instructions]
    if functions:
        sections += ["# Tools", namespace(functions)]
    return HarmonyMessage("developer", ["\n\n".join(sections)])


def without_old_thoughts(messages: Sequence[HarmonyMessage]) -> list[HarmonyMessage]:
    """Returns the messages without the model's thoughts before its last answer."""
    answers = (
        place
        for place in reversed(range(len(messages)))
        if messages[place].is_models and messages[place].channel == "final"
    )
    last = next(answers, -1)
    return [
        message
        for place, message in enumerate(messages)
        if place >= last or message.channel != "analysis"
    ]
