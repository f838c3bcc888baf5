"""Chat templates: a model's own Jinja file turns a conversation into its prompt text.

Templates are code from the model's files: they run in Jinja's immutable sandbox with what the
transformers library offers them (its `apply_chat_template`). A client's template is never run.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from extproc.errors import RequestError

# What a model thought before an answer, under the names that clients send back.
_REASONING = frozenset(("reasoning", "reasoning_content"))


class ChatTemplate:
    """One compiled template.

    special_tokens: by the names templates know them (bos_token, eos_token, ...).

    Raises:
        ValueError: the source is no template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"not a Jinja template: {error}") from None
        self._wants_parts = _iterates_over_content(tree)
        self._reads_reasoning = "reasoning" in source
        self._reads_effort = "reasoning_effort" in source or "enable_thinking" in source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        variables: Mapping[str, Any],
        *,
        has_reasoning_effort: bool = False,
    ) -> str:
        """The prompt text of a conversation.

        has_reasoning_effort: whether the request sets it beside the variables.

        Raises:
            RequestError: the template refuses the conversation, as an engine would; or it reads
                what engines, and their versions, hand it differently.
        """
        if has_reasoning_effort and self._reads_effort:
            raise RequestError("unsupported_reasoning_effort")
        if self._reads_reasoning and any(_REASONING & message.keys() for message in messages):
            raise RequestError("unsupported_reasoning")
        shape = _in_parts if self._wants_parts else _flat
        shaped = [shape(message) for message in messages]
        context = {**self._special_tokens, "tools": None, "documents": None, **variables}
        try:
            text = self._template.render(**{**context, "messages": shaped})
        except Exception:  # noqa: BLE001 - whatever a template does, the request must go on
            raise RequestError("template_failed") from None
        if variables.get("continue_final_message"):
            return _up_to_final_content(text, messages[-1])
        return text


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """{% generation %} blocks mark what a model wrote; for a prompt they are their contents."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - the signature templates call
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 - local time, as transformers does


def _iterates_over_content(tree: jinja2.nodes.Template) -> bool:
    """Whether a template takes message contents apart itself; engines then leave parts as parts."""
    loops = tree.find_all(jinja2.nodes.For)
    return any(_names_content(loop.iter) for loop in loops)


def _names_content(node: jinja2.nodes.Node) -> bool:
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, jinja2.nodes.Getitem):
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
    return isinstance(node, jinja2.nodes.Name) and node.name == "content"


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    """Text parts joined by line ends, as vLLM does for templates that expect a string."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Text as one part, as vLLM does for templates that take parts; what a tool said stays text."""
    content = message.get("content")
    if message.get("role") == "tool":
        return _flat(message)
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _up_to_final_content(text: str, message: Mapping[str, Any]) -> str:
    content = message.get("content")
    final = content.strip() if isinstance(content, str) else ""
    if not final or final not in text:
        raise RequestError("template_failed")
    return text[: text.rindex(final) + len(final)]
