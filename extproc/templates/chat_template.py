"""Chat templates: a model's own Jinja file turns a conversation into its prompt text.

The text is the same as vLLM's: its parsing of messages, then transformers' apply_chat_template. If
releases differ, the prompt is not keyed. A client's template is never run.

To continue the final message of a conversation, the rendered text is cut at the message's end.
Source: transformers' continue_final_message: 4.57.1 and 5.23.0 append a tag and cut there, 4.55.4
searches for the message's text. They agree unless a template changes or repeats it.

Templates expect message contents as text or as parts. vLLM finds out which from the template's
syntax tree. Source: its detection in 0.10.2 to 0.19.1, 0.24.0 and 0.32.0.

Templates run in a sandbox with limits. It offers what the transformers library (4.55 to 5.23)
offers. A template is code from the model's files, and its input comes from clients: a loop that is
harmless for ten messages may not be for thousands. A rendering runs in a thread, which cannot be
stopped from outside, so every turn of a loop and every call of a macro checks the time left.
"""

import json
import operator
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

from extproc.errors import RequestError
from extproc.requests.chat_request import (
    MEDIA_MARK,
    Messages,
    flat,
    has_media,
    in_parts,
    marked,
    texts_before_media,
)

# The tag that transformers uses.
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def tagged(message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the text to be continued, and its message with the tag appended.

    Raises:
        RequestError: the message has no text; engines refuse that too.
    """
    content = message["content"]
    if isinstance(content, str):
        return content, {**message, "content": content + _TAG}
    if not content:
        raise RequestError("template_failed")
    *before, last = content
    tagged = {**last, "text": last["text"] + _TAG}
    return last["text"], {**message, "content": [*before, tagged]}


def up_to_tag(text: str, final: str) -> str:
    """Returns the text before the tag, as newer releases do.

    White space before the tag is dropped if the template dropped the space at the tag's end.

    Raises:
        RequestError: the template leaves the message out; engines refuse that too.
    """
    tag = _TAG.strip()
    if final.strip() not in text or tag not in text:
        raise RequestError("template_failed")
    place = text.rindex(tag)
    is_kept = text.startswith(_TAG, place)
    return text[:place] if is_kept else text[:place].rstrip()


def up_to_final(text: str, final: str) -> str:
    """Returns the text up to the end of the last occurrence of the continued text, as 4.55 does.

    Raises:
        RequestError: it does not occur.
    """
    stripped = final.strip()
    if stripped not in text:
        raise RequestError("unsupported_continuation")
    place = text.rindex(stripped)
    end = place + len(final.lstrip())
    return text[:end] if text[place:end] == final else text[: place + len(stripped)]


class _UntrackedError(Exception):
    """A name is bound in a way that the engine does not track; the engine then assumes text."""


def content_formats(tree: nodes.Template) -> frozenset[bool]:
    """Returns the formats that releases detect: True for parts, False for text."""
    return frozenset(_finds_parts(rule, tree) for rule in (_oldest, _newer, _newest))


def _finds_parts(rule: Callable[[nodes.Template, set[str]], bool], tree: nodes.Template) -> bool:
    try:
        return rule(tree, _loop_names(tree, _aliases(tree, "messages")))
    except _UntrackedError:
        return False


def _oldest(tree: nodes.Template, items: set[str]) -> bool:
    return any(_over_content(loop, items) for loop in tree.find_all(nodes.For))


def _newer(tree: nodes.Template, items: set[str]) -> bool:
    """From 0.24: a loop over any `content` counts too."""
    loops = tree.find_all(nodes.For)
    return any(_over_content(loop, items) or _over(loop, {"content"}) for loop in loops)


def _newest(tree: nodes.Template, items: set[str]) -> bool:
    """From 0.32: within macros only if the macro is called with the content of a message."""
    parameters: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        given = _given_content(tree, macro, items)
        for loop in macro.find_all(nodes.For):
            parameters[id(loop)] = given or parameters.get(id(loop), set())
    return any(
        _over_content(loop, items) or _over(loop, parameters.get(id(loop), {"content"}))
        for loop in tree.find_all(nodes.For)
    )


def _given_content(tree: nodes.Template, macro: nodes.Macro, items: set[str]) -> set[str]:
    """Returns the parameters of a macro to which any call passes the content of a message."""
    names = [argument.name for argument in macro.args]
    given = set()
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            by_place = zip(names, call.args, strict=False)
            by_name = ((pair.key, pair.value) for pair in call.kwargs if pair.key in names)
            for name, value in (*by_place, *by_name):
                if any(_reads(value, item, "content") for item in items):
                    given.add(name)
    return given


def _aliases(tree: nodes.Template, name: str) -> set[str]:
    """Returns a name and the names assigned from it, or from a slice or filtering of it."""
    known = {name}
    pending = [name]
    while pending:
        source = pending.pop()
        for assignment in tree.find_all(nodes.Assign):
            if _reads(assignment.node, source):
                target = _name(assignment.target)
                if target not in known:
                    known.add(target)
                    pending.append(target)
    return known


def _loop_names(tree: nodes.Template, sources: set[str]) -> set[str]:
    """Returns the names that loops over these sources give to an item."""
    return {
        _name(loop.target)
        for loop in tree.find_all(nodes.For)
        if any(_reads(loop.iter, source) for source in sources)
    }


def _over_content(loop: nodes.For, items: Iterable[str]) -> bool:
    return any(_reads(loop.iter, item, "content") for item in items) and bool(_name(loop.target))


def _over(loop: nodes.For, names: set[str]) -> bool:
    is_one = isinstance(loop.iter, nodes.Name) and loop.iter.name in names
    return is_one and bool(_name(loop.target))


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _UntrackedError
    return target.name


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Returns whether an expression is a variable or its key, maybe filtered, tested or sliced."""
    while True:
        match node:
            case nodes.Filter() | nodes.Test():
                node = node.node
            case nodes.Getitem(arg=nodes.Slice()):
                node = node.node
            case _:
                break
    if key is not None:
        match node:
            case nodes.Getitem(arg=nodes.Const(value=value)) if value == key:
                node = node.node
            case nodes.Getattr(attr=attr) if attr == key:
                node = node.node
            case _:
                return False
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


# Longer texts are not keyed; the largest body, printed with indented tools, is shorter.
MAX_CHARACTERS = 8 * 1024 * 1024

# How large a product may become: characters or items of what is repeated, bits of a number.
_MAX_PRODUCT = 1_000_000

# The name by which compiled templates check their time budget; no template uses it for itself.
_TICK = "kvsteer_tick_"


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with what transformers adds.

    now: returns the time that strftime_now formats; local time, as in transformers.
    """

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        self.filters["tojson"] = _tojson
        self.filters[_TICK] = operator.call
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: now().strftime(pattern)

    def call_binop(
        self,
        context: jinja2.runtime.Context,
        operator: str,
        left: Any,  # noqa: ANN401 - whatever a template multiplies
        right: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Multiplies, unless the result would be enormous."""
        if _product_size(operator, left, right) > _MAX_PRODUCT:
            raise jinja2.exceptions.SecurityError("too large a product")
        return super().call_binop(context, operator, left, right)

    def compiled(self, tree: nodes.Template) -> jinja2.Template:
        """Returns a template whose loops and macros check their time budget."""
        turns: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For)]
        turns += tree.find_all(nodes.Macro)
        for node in turns:
            # a filter, since the sandbox's checks of a call cost more than the rest of a turn
            asking = nodes.Filter(nodes.Name(_TICK, "load"), _TICK, [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(asking).set_lineno(node.lineno))
        return self.from_string(tree)


class _Generation(jinja2.ext.Extension):
    """{% generation %} blocks mark what a model wrote; in a prompt, only their contents appear."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        """Returns the block as a separate scope: names set in it end with it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def rendered(
    template: jinja2.Template,
    variables: Mapping[str, Any],
    monotonic: Callable[[], float],
    end: float,
) -> str:
    """Returns the text that a template makes of its variables.

    monotonic: returns seconds. end: when the rendering is given up, by the same clock.

    Raises:
        RequestError: the template fails (template_failed), takes too long
            (template_too_slow), or writes too much (too_many_characters).
    """

    def tick() -> None:
        if monotonic() > end:
            raise RequestError("template_too_slow")

    environment = template.environment
    # like template.generate at half the cost: that merges globals and finds errors' lines anew
    context = environment.context_class(
        environment,
        {**environment.globals, **variables, _TICK: tick},
        template.name,
        template.blocks,
    )
    pieces = []
    characters = 0
    try:
        for piece in template.root_render_func(context):
            characters += len(piece)
            if characters > MAX_CHARACTERS:
                raise RequestError("too_many_characters")
            pieces.append(piece)
    except RequestError:
        raise
    except Exception:  # noqa: BLE001 - whatever a template does, the request must go on
        raise RequestError("template_failed") from None
    return "".join(pieces)


def _product_size(operator: str, left: object, right: object) -> int:
    match left, right:
        case int(), int():
            bits = left.bit_length(), right.bit_length()
            return bits[0] * abs(right) if operator == "**" else sum(bits)
        case (str() | list() | tuple(), int()):
            return len(left) * right
        case (int(), str() | list() | tuple()):
            return len(right) * left
    return 0


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


# A rendering takes under a millisecond; one that takes this long is given up.
BUDGET_SECONDS = 0.25

# The keys under which clients send back what a model thought before an answer.
_REASONING = frozenset(("reasoning", "reasoning_content"))


class ChatTemplate:
    """One compiled template; safe to use from several threads.

    special_tokens: by the names that templates use for them (bos_token, eos_token, ...).
    monotonic: returns seconds, for the budget of a rendering.
    now: returns local time, for templates that print the date.

    Raises:
        ValueError: the source is no template.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = Sandbox(now)
        try:
            tree = environment.parse(source)
            self._formats = content_formats(tree)
            self._reads_reasoning = "reasoning" in source or _names(tree, "thinking")
            self._template = environment.compiled(tree)
        except (jinja2.TemplateError, SyntaxError) as error:
            raise ValueError(f"not a Jinja template: {error}") from None
        self._reads_effort = "reasoning_effort" in source or "enable_thinking" in source
        self._knows_developers = any(name in source for name in ('"developer"', "'developer'"))
        self._reads_content = "content" in source
        self._special_tokens = dict(special_tokens)
        self._monotonic = monotonic

    def render(
        self,
        messages: Messages,
        variables: Mapping[str, Any],
        *,
        has_reasoning_effort: bool = False,
        budget_seconds: float = BUDGET_SECONDS,
    ) -> str:
        """Returns the prompt text of a conversation.

        has_reasoning_effort: whether the request sets it beside the variables.
        budget_seconds: how long it may take, however often the template runs.

        Raises:
            RequestError: the template refuses the conversation, as an engine would, or takes too
                long; it reads values that engines or their versions pass differently; or the
                conversation has media.
        """
        self._refuse_what_differs(messages, has_reasoning_effort)
        plain = messages
        if not _are_texts(messages):
            if any(map(has_media, messages)):
                raise RequestError("unsupported_media")
            plain = [flat(message) for message in messages]
        end = self._monotonic() + budget_seconds
        text, *others = [
            self._text([in_parts(one) for one in messages] if parts else plain, variables, end)
            for parts in self._formats
        ]
        if any(other != text for other in others):
            raise RequestError("unsupported_content_format")
        return text

    def render_until_media(
        self,
        messages: Messages,
        variables: Mapping[str, Any],
        *,
        added_tokens: Collection[str],
        has_reasoning_effort: bool = False,
    ) -> str:
        """Returns the part of a conversation's prompt text that is certain before its first media.

        Up to there, the engine's text equals the text rendered with a mark for every media part.
        The engine's processor replaces the template's placeholders by media tokens, so the text
        before the first one is the engine's too, unless a client wrote a placeholder.

        added_tokens: the tokenizer's, which include the model's placeholders.

        Raises:
            RequestError: as in `render`; or the template expects texts, before which engines write
                their own placeholders; or a message contains the text of an added token.
        """
        self._refuse_what_differs(messages, has_reasoning_effort)
        if self._formats != {True} or variables.get("continue_final_message"):
            raise RequestError("unsupported_media")
        if any(token in text for text in texts_before_media(messages) for token in added_tokens):
            raise RequestError("unsupported_media")
        shaped = [in_parts(message) for message in messages]
        end = self._monotonic() + BUDGET_SECONDS
        theirs = self._rendered(shaped, variables, end)
        ours = self._rendered([marked(message) for message in shaped], variables, end)
        return _common_prefix(theirs, ours.partition(MEDIA_MARK)[0])

    def _refuse_what_differs(self, messages: Messages, has_reasoning_effort: bool) -> None:  # noqa: FBT001
        if has_reasoning_effort and self._reads_effort:
            raise RequestError("unsupported_reasoning_effort")
        if self._reads_reasoning and not all(map(_REASONING.isdisjoint, messages)):
            raise RequestError("unsupported_reasoning")
        if not self._knows_developers and "developer" in [one.get("role") for one in messages]:
            raise RequestError("unsupported_developer_role")

    def _text(self, shaped: Messages, variables: Mapping[str, Any], end: float) -> str:
        if not variables.get("continue_final_message"):
            return self._rendered(shaped, variables, end)
        return self._continued(shaped, variables, end)

    def _rendered(self, messages: Messages, variables: Mapping[str, Any], end: float) -> str:
        context = {**self._special_tokens, "tools": None, "documents": None, **variables}
        context["messages"] = messages
        return rendered(self._template, context, self._monotonic, end)

    def _continued(self, messages: Messages, variables: Mapping[str, Any], end: float) -> str:
        """Returns the text up to the end of the final message, by both of transformers' ways.

        Raises:
            RequestError: the two ways differ, or the template fails.
        """
        final, open_ended = tagged(messages[-1])
        if not self._reads_content:
            raise RequestError("template_failed")
        with_tag = self._rendered([*messages[:-1], open_ended], variables, end)
        plain = self._rendered(messages, variables, end)
        text = up_to_tag(with_tag, final)
        if text != up_to_final(plain, final):
            raise RequestError("unsupported_continuation")
        return text


def _are_texts(messages: Messages) -> bool:
    """Returns whether all contents are plain texts, as they nearly always are."""
    return {type(message.get("content")) for message in messages} <= {str}


def _names(tree: nodes.Template, key: str) -> bool:
    """Returns whether a template contains a key, as an attribute or as a constant."""
    attributes = (node.attr for node in tree.find_all(nodes.Getattr))
    texts = (node.value for node in tree.find_all(nodes.Const))
    return key in (*attributes, *texts)


def _common_prefix(one: str, other: str) -> str:
    shared, longest = 0, min(len(one), len(other))
    while shared < longest:
        middle = (shared + longest + 1) // 2
        if other.startswith(one[shared:middle], shared):
            shared = middle
        else:
            longest = middle - 1
    return one[:shared]
