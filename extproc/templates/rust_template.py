"""Renders a conversation as vLLM's Rust front end does: its own shapes, then the model's template.

Source: vLLM 0.33.0, rust/src/chat/src/renderer/hf (mod.rs, format.rs, template.rs).
"""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes

from extproc.requests.chat_request import Messages
from extproc.requests.prompt import DEVELOPER, EFFORT, PARTS, REASONING, Chat
from extproc.templates.bounds import Tick
from extproc.templates.chat_template import rendered, tagged, up_to_tag
from extproc.templates.rust_sandbox import RustSandbox

# The special tokens that templates get by name; others are not passed.
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def of_file(source: str) -> str:
    r"""Returns the template in a .jinja file: without white space around it, `\n` as a newline."""
    return source.strip().replace("\\n", "\n")


class RustTemplate:
    """A chat template as the Rust front end uses it; safe to use from several threads.

    source: of the template. special_tokens: by the names that templates use for them. now: returns
    local time, for templates that print the date.

    Raises:
        ValueError: it is no template for minijinja.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = RustSandbox(now)
        try:
            tree = environment.parse(source)
            self.takes_parts = takes_parts(tree)
            self._template = environment.compiled(tree)
        except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
            raise ValueError(f"not a Jinja template: {error}") from None
        self._special = {
            name: special_tokens[name] for name in SPECIAL_NAMES if name in special_tokens
        }
        self._reads_effort = "reasoning_effort" in source or "enable_thinking" in source
        self._reads_reasoning = "reasoning" in source

    def render(self, chat: Chat, tick: Tick) -> tuple[str, int]:
        """Returns the prompt text of a conversation, and the forms that it comes under.

        Raises:
            RequestError: the template refuses the conversation, or takes too long.
        """
        variables = self._variables(chat)
        messages: Messages = chat.messages
        if not chat.variables["continue_final_message"]:
            return self._rendered(messages, variables, tick), self._forms_of(chat)
        final, open_ended = tagged(messages[-1])
        text = self._rendered([*messages[:-1], open_ended], variables, tick)
        return up_to_tag(text, final), self._forms_of(chat)

    def _forms_of(self, chat: Chat) -> int:
        """Returns the forms under which a chat comes with this template."""
        forms = chat.forms
        if chat.effort and self._reads_effort:
            forms |= EFFORT
        if self._reads_reasoning and any("reasoning" in one for one in chat.messages):
            forms |= REASONING
        if any(one["role"] == "developer" for one in chat.messages):
            forms |= DEVELOPER
        if any(isinstance(one["content"], list) for one in chat.messages):
            forms |= PARTS
        return forms

    def _variables(self, chat: Chat) -> Mapping[str, Any]:
        if not chat.effort:
            return chat.variables
        variables = {**chat.variables, "reasoning_effort": chat.effort}
        variables.setdefault("enable_thinking", chat.effort != "none")
        return variables

    def _rendered(self, messages: Messages, variables: Mapping[str, Any], tick: Tick) -> str:
        shaped = [self._shaped(one) for one in messages]
        context = {**self._special, **variables, "messages": shaped}
        return rendered(self._template, context, tick)

    def _shaped(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns a message with its content in parts, or as a text joined by nothing."""
        content = message["content"]
        if isinstance(content, str):
            if not self.takes_parts:
                return message
            return {**message, "content": [{"type": "text", "text": content}]}
        if self.takes_parts:
            return message
        return {**message, "content": "".join(part["text"] for part in content)}


def takes_parts(tree: nodes.Template) -> bool:
    """Returns whether a template gets contents in parts: the front end's own rule.

    It does if a loop goes over a variable named `content`, or over the content of what a loop over
    the messages, or over a name that was assigned from them, calls a message.
    """
    sources = _aliases(tree)
    loops = [one for one in tree.find_all(nodes.For) if isinstance(one.target, nodes.Name)]
    items = {_name(one.target) for one in loops if any(_is(one.iter, name) for name in sources)}
    return any(
        _is_variable(one.iter, "content") or any(_is(one.iter, item, "content") for item in items)
        for one in loops
    )


def _aliases(tree: nodes.Template) -> set[str]:
    """Returns the names of the messages, or of what is assigned from them."""
    known, pending = {"messages"}, ["messages"]
    assignments = [*_assignments(tree)]
    while pending:
        source = pending.pop()
        found = {name for name, value in assignments if _is(value, source)} - known
        known |= found
        pending += found
    return known


def _assignments(tree: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    for one in tree.find_all(nodes.Assign):
        if isinstance(one.target, nodes.Name):
            yield one.target.name, one.node


def _name(node: nodes.Node) -> str:
    assert isinstance(node, nodes.Name)
    return node.name


def _is_variable(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def _is(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Returns whether an expression is a variable or its key, maybe filtered, tested or sliced."""
    match node:
        case nodes.Filter() | nodes.Test():
            return _is(node.node, name, key)
        case nodes.Getitem(arg=nodes.Slice()):
            return _is(node.node, name, key)
        case nodes.Name() if key is None:
            return node.name == name
        case nodes.Getitem(arg=nodes.Const(value=value)) if key is not None:
            return value == key and _is_variable(node.node, name)
        case nodes.Getattr() if key is not None:
            return node.attr == key and _is_variable(node.node, name)
    return False
