"""The prompts of DeepSeek V4 and V4.1.

Source: behaviour of vLLM 0.32.0 (tokenizers/deepseek_v4.py, deepseek_v4_encoding.py, and the same
for v41), and of 0.33.0 where they differ. Results of tools are part of the user's turn, in the
order of their calls. Thinking is on unless `thinking`, `enable_thinking` or the effort `none` says
otherwise. Without tools, what the model thought before the last question is left out, so a prompt
need not begin with the one before.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from extproc.base.errors import RequestError
from extproc.renderers.deepseek import (
    ASKING,
    ASSISTANT,
    BOS,
    END_THINK,
    EOS,
    REMINDER,
    SYSTEM,
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
from extproc.renderers.render_input import RenderInput, render_input
from extproc.renderers.rust_input import as_asked, is_rust, rust_input
from extproc.renderers.segments import ControlMarks
from extproc.requests.chat_request import TOOL_REFERENCE, Messages, arguments_in, in_parts
from extproc.requests.dialect import Dialect
from extproc.requests.prompt import Chat

_V4_EFFORTS = {
    "low": "",
    "high": """\
Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve \
the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and \
adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, \
considered alternative, and rejected hypothesis to ensure absolutely no assumption is left \
unchecked.

""",
    "max": """\
Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: \
exhaustively decompose the problem into its most fundamental components, trace every causal chain \
to its root, \
and resolve the underlying cause rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and \
are certain that no assumption remains unchecked and no error remains undiscovered.

""",
}
_V4_LOW_EFFORTS = ("low", "minimal", "medium")

_V41_EFFORTS = {"low": 50, "high": 75, "xhigh": 75, "max": 100}
_V41_MOST_EFFORT = 100

_TEXT_PARTS = ("text", "input_text", "output_text")

# Whether a turn of the user has nothing but results of tools.
_ONLY_RESULTS = "only_results"

# Fields of a message by which a client would change more than its text.
_V41_FIELDS = ("content_blocks", "mask", "prefix", "response_format", "task", "tools", "wo_eos")


def _tools_text(tags: Tags) -> str:
    """Returns the text before and after the functions, %s between."""
    return f"""\
## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a "{opened(tags.calls)}" block like the following:

{opened(tags.calls)}
{opened(tags.call, ' name="$TOOL_NAME"')}
{opened(tags.argument, ' name="$PARAMETER_NAME" string="true|false"')}$PARAMETER_VALUE\
{closed(tags.argument)}
...
{closed(tags.call)}
{opened(tags.call, ' name="$TOOL_NAME2"')}
...
{closed(tags.call)}
{closed(tags.calls)}

String parameters should be specified as is and set `string="true"`. For all other types (numbers, \
booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside \
{THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

%s

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


class _Thinking(NamedTuple):
    """How a prompt treats thoughts.

    is_on: whether the model thinks. keeps: whether what it thought before the last question is
    rendered. last: the place of that question.
    """

    is_on: bool
    keeps: bool
    last: int

    def begins_after(self, place: int) -> bool:
        """Returns whether the answer to the turn at a place begins with a thought."""
        return self.is_on and (self.keeps or place >= self.last)

    def is_shown_in(self, place: int) -> bool:
        """Returns whether the thought of the answer at a place is rendered."""
        return self.is_on and (self.keeps or place > self.last)


class DeepSeekV4:
    """Renders conversations for DeepSeek V4 (`extproc.renderers.renderer.Renderer`)."""

    marks: ControlMarks | None = None
    is_shown_by_tokenize = True
    drops_media = False
    _tags = Tags()
    _tools = _tools_text(_tags)
    _later_system = ""
    _separator = ""  # between the texts of a content, for the Rust front end

    def render(self, chat: Chat, *, budget_seconds: float) -> tuple[str, int]:
        """Returns the prompt of a conversation, as `Renderer.render`."""
        del budget_seconds  # it takes microseconds a message
        inputs = rust_input(chat, self._separator) if is_rust(chat) else self._render_input(chat)
        variables = inputs.variables
        is_on, effort = self._effort(variables)
        messages, tools = inputs.messages, variables.get("tools")
        keeps = bool(tools) or not variables.get("drop_thinking", True)
        if tools and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": ""}, *messages]
        turns = _merged(messages)
        rules = chat.dialect
        assert rules is not None
        if is_on and not keeps:
            turns = self._without_developers(turns, rules)
        thinking = _Thinking(is_on, keeps, self._last_asking(turns, rules))
        pieces = self._pieces(turns, thinking, tools)
        beginning = self._beginning(turns, effort if is_on else "")
        text = "".join([BOS, beginning, *pieces])
        return as_asked(text, chat) if rules.is_rust else text, inputs.forms

    def _render_input(self, chat: Chat) -> RenderInput:
        """Returns what the engine's code is given, each content as a text."""
        inputs = render_input(chat, chat.messages)
        if any("task" in message for message in inputs.messages):
            raise RequestError("unsupported_task")  # a token for each task, and an end of its own
        return inputs._replace(messages=[_flat(message) for message in inputs.messages])

    def _effort(self, variables: Mapping[str, Any]) -> tuple[bool, str]:
        """Returns whether the model thinks, and the text about its effort."""
        is_on, effort = _is_on(variables), variables.get("reasoning_effort")
        if not isinstance(effort, str):
            effort = "high"
        elif effort == "none":
            is_on = False
        elif effort in _V4_LOW_EFFORTS:
            effort = "low"
        return is_on, _V4_EFFORTS.get(effort, _V4_EFFORTS["high"])

    def _beginning(self, turns: Messages, effort: str) -> str:
        """Returns what precedes the first turn."""
        return effort if turns else ""

    def _last_asking(self, turns: Messages, rules: Dialect) -> int:
        del rules  # all releases do the same
        return last_asking(turns)

    def _without_developers(self, turns: Messages, rules: Dialect) -> list[dict[str, Any]]:
        """Returns the turns without developers' ones before the last question."""
        last = self._last_asking(turns, rules)
        return [
            turn for place, turn in enumerate(turns) if place >= last or turn["role"] != "developer"
        ]

    def _pieces(
        self, turns: Messages, thinking: _Thinking, tools: list[dict[str, Any]] | None
    ) -> Iterator[str]:
        shown = f"\n\n{self._tools % schemas(tools)}" if tools else ""
        roles = [*[turn["role"] for turn in turns], ""]
        for place, (turn, role) in enumerate(zip(turns, roles, strict=False)):
            yield self._turn(turn, place, thinking)
            if role == "assistant":
                continue
            if role == "system":
                yield shown
                shown = ""  # after the first system turn alone
            if roles[place + 1] in ("", "assistant", "latest_reminder") and (
                role in ASKING or self._is_answered(turns, place)
            ):
                yield ASSISTANT + (THINK if thinking.begins_after(place) else END_THINK)

    def _turn(self, turn: dict[str, Any], place: int, thinking: _Thinking) -> str:
        role, content = turn["role"], turn["content"]
        if role == "assistant":
            return self._answer(turn, is_shown=thinking.is_shown_in(place))
        if role == "system":
            return f"{self._later_system if place else ''}{content}"
        if role == "latest_reminder":
            return f"{REMINDER}{content}"
        if role not in ASKING or (role == "developer" and not content):
            raise refusal()
        return f"{USER}{content}"

    def _is_answered(self, turns: Messages, place: int) -> bool:
        """Returns whether the turn at a place is a system turn that the model answers."""
        following = [turn["role"] for turn in turns[place + 1 : place + 2]]
        return turns[place]["role"] == "system" and following in ([], ["assistant"])

    def _answer(self, turn: dict[str, Any], *, is_shown: bool) -> str:
        thought = f"{turn.get('reasoning') or ''}{END_THINK}" if is_shown else ""
        functions = [self._function(function) for function in calls_of(turn)]
        calls = f"\n\n{written_calls(functions, self._tags)}" if functions else ""
        return f"{thought}{turn['content']}{calls}{EOS}"

    def _function(self, function: dict[str, Any]) -> dict[str, Any]:
        """Returns a function that a turn calls, with its arguments as an object."""
        return function


class DeepSeekV41(DeepSeekV4):
    """Renders conversations for DeepSeek V4.1 (`extproc.renderers.renderer.Renderer`).

    Its code reads the messages as the client sent them. Later system turns are questions.
    """

    _tags = Tags(" calls", " invoke", " parameter")
    _tools = _tools_text(_tags)
    _later_system = SYSTEM
    _separator = "\n\n"

    def _render_input(self, chat: Chat) -> RenderInput:
        inputs = render_input(chat, chat.sent, drops_billing_lines=False)
        if any(field in message for message in inputs.messages for field in _V41_FIELDS):
            raise RequestError("unsupported_content")
        return inputs._replace(messages=[_with_text(message) for message in inputs.messages])

    def _effort(self, variables: Mapping[str, Any]) -> tuple[bool, str]:
        is_on, effort = _is_on(variables), variables.get("reasoning_effort")
        if effort == "none":
            is_on, effort = False, None
        if effort is None:
            effort = "high"
        share = _V41_EFFORTS.get(effort, 0) if isinstance(effort, str) else effort
        if type(share) is not int or not 1 <= share <= _V41_MOST_EFFORT:
            raise refusal()
        about = "(range 1-100, the higher the value, the more thorough the reasoning)"
        return is_on, f"Reasoning Effort: {share} {about}\n\n"

    def _beginning(self, turns: Messages, effort: str) -> str:
        opens = bool(turns) and (bool(effort) or turns[0]["role"] == "system")
        return (SYSTEM if opens else "") + super()._beginning(turns, effort)

    def _last_asking(self, turns: Messages, rules: Dialect) -> int:
        places = (
            place
            for place in reversed(range(len(turns)))
            if turns[place]["role"] in ASKING or (place and turns[place]["role"] == "system")
            if rules.results_are_questions or not turns[place].get(_ONLY_RESULTS)
        )
        return next(places, -1)

    def _is_answered(self, turns: Messages, place: int) -> bool:
        return place > 0 and turns[place]["role"] == "system"

    def _function(self, function: dict[str, Any]) -> dict[str, Any]:
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = arguments_in(arguments)
        return {**function, "arguments": arguments}


def _is_on(variables: Mapping[str, Any]) -> bool:
    switches = [
        switch
        for key in ("thinking", "enable_thinking")
        if (switch := variables.get(key)) is not None
    ]
    return not switches or any(switches)


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with its content as a text, with a blank line between its parts."""
    if isinstance(message.get("content"), str):
        return message
    content = in_parts(message)["content"]
    if isinstance(content, str):
        return {**message, "content": content}
    is_result = message["role"] == "tool"
    return {**message, "content": "\n\n".join(_text_of(part, is_result) for part in content)}


def _text_of(part: Mapping[str, Any], is_result: bool) -> str:
    """Returns the text of a part, with a remark for one of another kind in a tool's result."""
    kind = part["type"]
    if kind == "text":
        return str(part["text"])
    if not is_result:
        raise refusal()
    return f"[Unsupported {kind}]"


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with its content as a text, as V4.1 reads it."""
    content = message.get("content")
    if isinstance(content, list):
        is_result = message.get("role") == "tool"
        content = "\n\n".join(_v41_text_of(part, is_result) for part in content)
    return {**message, "content": content or ""}


def _v41_text_of(part: Mapping[str, Any], is_result: bool) -> str:
    kind = part.get("type")
    if kind == TOOL_REFERENCE and is_result:
        return f"[Unsupported {kind}]"
    if kind not in _TEXT_PARTS:
        raise refusal()
    return str(part.get("text", ""))


class _Block(NamedTuple):
    """A part of a user's turn. call: of whose result it is; None if it is the user's text."""

    text: str
    call: str | None = None


def _merged(messages: Messages) -> list[dict[str, Any]]:
    """Returns the turns: what the user and tools say between two other turns is one."""
    turns: list[dict[str, Any]] = []
    blocks: list[_Block] = []
    order: dict[str, int] = {}
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            name = message.get("tool_call_id") or ""
            blocks.append(_Block(f"<tool_result>{content}</tool_result>", str(name)))
        elif role == "user":
            blocks.append(_Block(content))
        else:
            _end_turn(turns, blocks, order)
            turns.append(message)
            if message.get("tool_calls"):
                order = _order_of(message["tool_calls"])
    _end_turn(turns, blocks, order)
    return turns


def _order_of(calls: list[dict[str, Any]]) -> dict[str, int]:
    """Returns the places of calls by their ids."""
    names = ((call.get("id") or call["function"].get("id"), at) for at, call in enumerate(calls))
    return {str(name): place for name, place in names if name}


def _end_turn(turns: list[dict[str, Any]], blocks: list[_Block], order: dict[str, int]) -> None:
    """Adds the user's turn, if there is one, with the results in the order of their calls."""
    if not blocks:
        return
    if len(blocks) > 1:
        results = [block for block in blocks if block.call is not None]
        results.sort(key=lambda block: order.get(block.call or "", 0))
        ordered = iter(results)
        blocks[:] = [block if block.call is None else next(ordered) for block in blocks]
    text = "\n\n".join([block.text for block in blocks])
    only_results = all(block.call is not None for block in blocks)
    turns.append({"role": "user", "content": text, _ONLY_RESULTS: only_results})
    blocks.clear()
