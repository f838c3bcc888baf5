"""The prompts of DeepSeek V3.2.

Source: behaviour of vLLM 0.32.0 (tokenizers/deepseek_v32.py, deepseek_v32_encoding.py). Thinking is
off unless `thinking` or `enable_thinking` says otherwise. What the model thought before the last
question is left out.
"""

from collections.abc import Iterator
from typing import Any

from extproc.renderers.deepseek import (
    ASKING,
    ASSISTANT,
    BOS,
    END_THINK,
    EOS,
    THINK,
    USER,
    Tags,
    calls_of,
    closed,
    last_asking,
    opened,
    refusal,
    schemas,
    written_calls,
)
from extproc.renderers.render_input import render_input
from extproc.renderers.rust_input import as_asked, in_call_order, is_rust, rust_input
from extproc.renderers.segments import ControlMarks
from extproc.requests.chat_request import Messages, flat
from extproc.requests.prompt import Chat

_TAGS = Tags(calls="function_calls")
_RESULTS = "function_results"

_SECTIONS = (
    "## Tools",
    f"""\
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "{opened(_TAGS.calls)}" block like the following as part of \
your reply to the user:
{opened(_TAGS.calls)}
{opened(_TAGS.call, ' name="$FUNCTION_NAME"')}
{opened(_TAGS.argument, ' name="$PARAMETER_NAME" string="true|false"')}$PARAMETER_VALUE\
{closed(_TAGS.argument)}
...
{closed(_TAGS.call)}
{opened(_TAGS.call, ' name="$FUNCTION_NAME2"')}
...
{closed(_TAGS.call)}
{closed(_TAGS.calls)}""",
    """\
String and scalar parameters should be specified as is without any escaping or quotes, while lists \
and objects should use JSON format. The "string" attribute should be set to "true" for string type \
parameters and "false" for other types (numbers, booleans, arrays, objects).""",
    """\
If the thinking_mode is enabled, then after function results you should strongly consider \
outputting a thinking block. Here is an example:""",
    f"{opened(_TAGS.calls)}\n...\n{closed(_TAGS.calls)}",
    f"<{_RESULTS}>\n...\n</{_RESULTS}>",
    f"{THINK}...thinking about results{END_THINK}",
    """\
Here are the functions available in JSONSchema format:
<functions>
%s
</functions>
""",
)
_TOOLS = "\n".join(_SECTIONS)
_TOOLS_OF_RUST = "\n\n".join(_SECTIONS)


class DeepSeekV32:
    """Renders conversations for DeepSeek V3.2 (`extproc.renderers.renderer.Renderer`)."""

    marks: ControlMarks | None = None
    is_shown_by_tokenize = True
    drops_media = False

    def render(self, chat: Chat, *, budget_seconds: float) -> tuple[str, int]:
        """Returns the prompt of a conversation, as `Renderer.render`."""
        del budget_seconds  # it takes microseconds a message
        if is_rust(chat):
            return _of_rust(chat)
        turns, variables, forms = render_input(chat, chat.messages)
        messages = [flat(message) for message in turns]
        thinks = bool(variables.get("thinking") or variables.get("enable_thinking"))
        if thinks and messages[-1]["role"] == "user":
            _refuse_earlier_developers(messages)
        tools = variables.get("tools")
        beginning = f"{BOS}\n\n{_TOOLS % schemas(tools)}" if tools else BOS
        return "".join([beginning, *_pieces(messages, thinks=thinks)]), forms


def _of_rust(chat: Chat) -> tuple[str, int]:
    """Returns the prompt of a conversation, as vLLM's Rust front end renders it."""
    turns, variables, forms = rust_input(chat, "")
    messages = in_call_order(turns)
    continued = messages.pop() if variables["continue_final_message"] else None
    if continued is not None and continued.get("tool_calls"):
        messages.append(continued)
        continued = None
    tools = variables.get("tools")
    beginning = f"{BOS}\n\n{_TOOLS_OF_RUST % schemas(tools)}" if tools else BOS
    pieces = _pieces(messages, thinks=bool(variables["thinking"]))
    if continued is not None:
        return "".join([beginning, *pieces, continued["content"]]), forms
    return as_asked("".join([beginning, *pieces]), chat), forms


def _refuse_earlier_developers(messages: Messages) -> None:
    """Refuses developers' turns before the last one that is answered.

    The engine leaves them out, and then fails to find as many messages as before.
    """
    earlier = messages[: max(0, last_asking(messages))]
    if any(message["role"] == "developer" for message in earlier):
        raise refusal()


def _pieces(messages: Messages, *, thinks: bool) -> Iterator[str]:
    last = last_asking(messages)
    results = _CallResults()
    for place, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "tool":
            yield from results.add(content)
            if results.are_all:
                yield f"\n\n{THINK if thinks and place >= last else END_THINK}"
            continue
        results = _CallResults(len(calls_of(message)))
        if role == "system":
            yield content
        elif role == "assistant":
            yield _answer(message, is_shown=thinks and place > last)
        elif role in ASKING:
            yield _question(role, content)
            yield THINK if thinks and place == last else END_THINK
        else:
            raise refusal()


class _CallResults:
    """The results of the calls of one turn. calls: how many there are."""

    def __init__(self, calls: int = 0) -> None:
        self._calls = calls
        self._results = 0

    @property
    def are_all(self) -> bool:
        """Whether each call has its result."""
        return self._results == self._calls

    def add(self, content: str) -> Iterator[str]:
        """Yields the next result.

        Raises:
            RequestError: it is of no call.
        """
        self._results += 1
        if self._results > self._calls:
            raise refusal()
        if self._results == 1:
            yield f"\n\n<{_RESULTS}>"
        yield f"\n<result>{content}</result>"
        if self.are_all:
            yield f"\n</{_RESULTS}>"


def _question(role: str, content: str) -> str:
    if role == "user":
        return f"{USER}{content}{ASSISTANT}"
    if not content:
        raise refusal()
    return f"{USER}\n\n# The user's message is: {content}{ASSISTANT}"


def _answer(message: dict[str, Any], *, is_shown: bool) -> str:
    """Returns a turn of the model. is_shown: whether it begins with what the model thought."""
    thought = _thinking_of(message) + END_THINK if is_shown else ""
    functions = calls_of(message)
    calls = f"\n\n{written_calls(functions, _TAGS)}" if functions else ""
    return f"{thought}{message['content']}{calls}{EOS}"


def _thinking_of(message: dict[str, Any]) -> str:
    """Returns what the model thought before an answer.

    Raises:
        RequestError: an answer to the last question has neither thoughts nor calls.
    """
    reasoning = message.get("reasoning")
    if not reasoning and not message.get("tool_calls"):
        raise refusal()
    return str(reasoning or "")
