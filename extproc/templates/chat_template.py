"""Chat templates: a model's own Jinja file turns a conversation into its prompt text.

This folder renders what `extproc.requests` has parsed, as an engine would: for vLLM here, for its
Rust front end in `rust_template`, for SGLang in `sglang_template`. It knows conversations and
dialects, but no token ids and no worker.

The rule: the text is the engine's to the last character, or there is none. It is vLLM's parsing of
messages, then transformers' apply_chat_template; if releases differ, the prompt is not keyed. A
client's template is never run.

To continue the final message of a conversation, the rendered text is cut at the message's end.
Source: transformers' continue_final_message: 4.57.1 and 5.23.0 append a tag and cut there, 4.55.4
searches for the message's text. They agree unless a template changes or repeats it.

Templates expect message contents as text or as parts. vLLM finds out which from the template's
syntax tree. Source: its detection in 0.10.2 to 0.19.1, 0.24.0, 0.32.0 and 0.33.0.

Templates run in a sandbox with limits. It offers what the transformers library (4.55 to 5.23)
offers. A template is code from the model's files, and its input comes from clients: a loop that is
harmless for ten messages may not be for thousands. A rendering runs in a thread, which cannot be
stopped from outside, so every turn of a loop and every call of a macro checks the time left, and
single operations are bounded, see `bounds`.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from itertools import islice
from json.encoder import c_make_encoder, encode_basestring  # type: ignore[attr-defined]
from types import MappingProxyType
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.runtime import Macro

from extproc.base.errors import RequestError
from extproc.requests.chat_request import (
    MEDIA_MARK,
    Messages,
    flat,
    has_media,
    has_part_fields,
    in_parts,
    marked,
    texts_before_media,
    without_billing_line,
    without_part_fields,
)
from extproc.requests.dialect import Dialect, Effort, Format, InlineSystem
from extproc.requests.known_tools import PrintedTool
from extproc.requests.prompt import (
    BILLING,
    DEVELOPER,
    DISABLED,
    EFFORT,
    INLINE_SYSTEM,
    PARTS,
    REASONING,
    Chat,
    refusal_of,
)
from extproc.templates.bounds import (
    MAX_CHARACTERS,
    TICK,
    Tick,
    bound_filters,
    bounded_pattern,
    check_call,
    check_product,
    guard,
    joined,
    lacking,
    refused,
)
from extproc.templates.content_flow import only_writes_contents
from extproc.templates.conversions import merged_developers, merged_systems, with_reasoning
from extproc.templates.sglang_template import Render, SglangTemplate
from extproc.templates.skeletons import Skeletons

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


def content_formats(tree: nodes.Template) -> dict[Format, bool]:
    """Returns the formats that releases detect: True for parts, False for text."""
    rules = {Format.OLDEST: _oldest, Format.NEWER: _newer, Format.RECENT: _newest}
    found = {name: _finds_parts(rule, tree, _aliases) for name, rule in rules.items()}
    return {**found, Format.NEWEST: _finds_parts(_newest, tree, _aliases_in_namespaces)}


def _finds_parts(
    rule: Callable[[nodes.Template, set[str]], bool],
    tree: nodes.Template,
    aliases: Callable[[nodes.Template, str], set[str]],
) -> bool:
    try:
        return rule(tree, _loop_names(tree, aliases(tree, "messages")))
    except _UntrackedError:
        return False


def _oldest(tree: nodes.Template, items: set[str]) -> bool:
    return any(_over_content(loop, items) for loop in tree.find_all(nodes.For))


def _newer(tree: nodes.Template, items: set[str]) -> bool:
    """From 0.24: a loop over any `content` counts too."""
    loops = tree.find_all(nodes.For)
    return any(_over_content(loop, items) or _over(loop, {"content"}) for loop in loops)


def _newest(tree: nodes.Template, items: set[str]) -> bool:
    """From 0.30: within macros only if the macro is called with the content of a message."""
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


def _aliases_in_namespaces(tree: nodes.Template, name: str) -> set[str]:
    """Does the same from 0.33 on, which tracks what is kept in a namespace, too.

    Such an alias is written as in the template, `namespace.attribute`.
    """
    known = {name}
    pending = [name]
    while pending:
        source = pending.pop()
        for assignment in tree.find_all(nodes.Assign):
            found = set(_targets(assignment.target, assignment.node, source)) - known
            known |= found
            pending += found
    return known


def _targets(target: nodes.Node, value: nodes.Node, source: str) -> Iterator[str]:
    """Yields the names that an assignment gives to a source."""
    match target, value:
        case nodes.Name(name=owner), nodes.Call(node=nodes.Name(name="namespace")):
            yield from (f"{owner}.{one.key}" for one in value.kwargs if _reads(one.value, source))
        case nodes.Name(name=name), _ if _reads(value, source):
            yield name
        case nodes.NSRef(name=owner, attr=attribute), _ if _reads(value, source):
            yield f"{owner}.{attribute}"


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
    owner, _, attribute = name.rpartition(".")
    if owner:  # it is kept in a namespace
        if not isinstance(node, nodes.Getattr) or node.attr != attribute:
            return False
        node, name = node.node, owner
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


# What every dictionary has, which is found before a key of that name.
_ATTRIBUTES = frozenset(dir(dict))


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with what transformers adds.

    now: returns the time that strftime_now formats; local time, as in transformers.
    is_bare: whether it lacks what transformers adds.
    """

    intercepted_binops = frozenset(("*", "**", "%"))
    concat = staticmethod(joined)

    def __init__(self, now: Callable[[], datetime], *, is_bare: bool = False) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, *([] if is_bare else [_Generation])],
            optimized=False,  # constants would be computed at the start, without a limit of time
        )
        bound_filters(self.filters, _tojson)
        self.globals["lipsum"] = refused
        if is_bare:
            return
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: now().strftime(bounded_pattern(pattern))

    def call_binop(
        self,
        context: jinja2.runtime.Context,
        operator: str,
        left: Any,
        right: Any,
    ) -> Any:
        """Multiplies, or formats a text, unless the result would be enormous."""
        if operator == "%" and left.__class__ is int:
            return left % right
        check_product(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(
        self,
        context: jinja2.runtime.Context,
        function: Any,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Calls a function or a method, unless the result would be enormous."""
        if function.__class__ is not Macro:  # a template's own, and safe
            if not self.is_safe_callable(function):
                raise jinja2.exceptions.SecurityError("not safely callable")
            check_call(function, args, kwargs)
        return context.call(function, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Returns what a value has under a name, as the sandbox does.

        Most values are dictionaries, and most names their keys: those cost no failed search here.
        """
        if type(obj) is dict and attribute not in _ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def compiled(self, tree: nodes.Template) -> jinja2.Template:
        """Returns a template that checks its time budget and the size of its values."""
        guard(tree)
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
    tick: Tick,
) -> str:
    """Returns the text that a template makes of its variables.

    tick: gives the rendering up in time.

    Raises:
        RequestError: the template fails (template_failed), takes too long
            (template_too_slow), writes too much (too_many_characters), or needs what is lacking or
            out of bounds here (unsupported_template).
    """

    environment = template.environment
    # like template.generate at half the cost: that merges globals and finds errors' lines anew
    context = environment.context_class(
        environment,
        {**environment.globals, **variables, TICK: tick},
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


# Made once: `json.dumps` makes one for each call. A bounded value contains itself nowhere.
_encoder = json.JSONEncoder(ensure_ascii=False, check_circular=False)


def writer_by(make: Callable[..., Any] | None) -> Callable[[object], str]:
    """Returns what writes JSON as `json.dumps` does.

    The library's own encoder makes its compiled part anew for each value, which costs more than
    to write a short one.

    make: makes the compiled part, None if there is none.
    """
    if make is None:
        return _encoder.encode
    write = make(None, _encoder.default, encode_basestring, None, ": ", ", ", False, False, True)
    return lambda value: "".join(write(value, 0))


_written = writer_by(c_make_encoder)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if not (ensure_ascii or sort_keys) and indent is None and separators is None:
        return value.json(_written) if type(value) is PrintedTool else _written(value)
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

# Words, marks and texts of a template: as many are compiled within two seconds, and take 200 MB.
# The longest of known models has 10,000.
MAX_WORDS = 32_768

# The keys under which clients send back what a model thought before an answer.
_REASONING = frozenset(("reasoning", "reasoning_content"))


# The efforts that are compared with "none", in their order.
_PROBED_EFFORTS = ("low", "medium", "high", "xhigh", "max")


class _TemplateInput(NamedTuple):
    """What a template is given of a chat, and the forms that its dialect decided."""

    messages: Messages
    variables: Mapping[str, Any]
    forms: int


class ChatTemplate:
    """One compiled template; safe to use from several threads.

    special_tokens: by the names that templates use for them (bos_token, eos_token, ...).
    tick: makes what gives a rendering up, from the seconds that it may take.
    now: returns local time, for templates that print the date.
    keywords: the engine's own arguments for templates, where a request sets no others.
    lacking: what it names and a rendering refuses, in words.

    Raises:
        ValueError: the source is no template, or too costly to compile.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str | list[str]],
        *,
        tick: Callable[[float], Tick] = Tick,
        now: Callable[[], datetime] = datetime.now,
        model_type: str = "",
        keywords: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        environment = Sandbox(now)
        try:
            _refuse_costly(source, environment)
            tree = environment.parse(source)
            self.lacking = lacking(tree)
            self._format_by_rule = content_formats(tree)
            self._formats = frozenset(self._format_by_rule.values())
            self._reads_reasoning = "reasoning" in source or _names(tree, "thinking")
            is_simple = self._formats == {False} and only_writes_contents(tree)
            self._skeletons = Skeletons() if is_simple else None
            self._template = environment.compiled(tree)
        except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
            raise ValueError(f"not a Jinja template: {error}") from None
        self._reads_effort = "reasoning_effort" in source or "enable_thinking" in source
        self._knows_developers = any(name in source for name in ('"developer"', "'developer'"))
        self._reads_content = "content" in source
        self._special_tokens = dict(special_tokens)
        self._tick = tick
        self._source, self._now = source, now
        self._model_type, self._keywords = model_type, keywords
        self._keeps_later_systems: bool | None = None
        self._off_effort = ""
        self._text_for_media: dict[str, str] = {}
        self._sglang: SglangTemplate | None = None

    def render(self, chat: Chat, *, budget_seconds: float = BUDGET_SECONDS) -> tuple[str, int]:
        """Returns the prompt text of a conversation, and the forms that its dialect decided.

        budget_seconds: how long its thread may work, however often the template runs.

        Raises:
            RequestError: the template refuses the conversation, as an engine would, or takes too
                long; it reads values that releases pass differently, and the chat has no dialect;
                or the conversation has media.
        """
        if self._skeletons is not None and chat.roles is not None and chat.is_usual:
            return self._by_skeleton(chat, chat.roles, self._skeletons, budget_seconds), 0
        tick = self._tick(budget_seconds)
        if chat.dialect is not None and chat.dialect.sglang is not None:
            return self._as_sglang().render(chat, chat.dialect.sglang, tick)
        inputs = self._template_input(chat)
        if _are_texts(inputs.messages):
            texts = {
                parts: self._shaped_text(inputs, inputs.messages, tick, parts=parts)
                for parts in self._formats
            }
        elif any(map(has_media, inputs.messages)):
            raise RequestError("unsupported_media")
        else:
            return self._of_parts(inputs, chat.dialect, tick)
        return self._chosen(texts, chat.dialect, inputs.forms)

    def of(self, chat: Chat) -> "ChatTemplate":
        """Returns the template for a conversation, whose API may take no arguments but its own."""
        return self if chat.takes_defaults or not self._keywords else self._without_keywords

    @cached_property
    def _without_keywords(self) -> "ChatTemplate":
        return ChatTemplate(
            self._source,
            self._special_tokens,
            tick=self._tick,
            now=self._now,
            model_type=self._model_type,
        )

    @property
    def skeletons(self) -> Skeletons | None:
        """Its skeletons, None if contents decide what it writes."""
        return self._skeletons

    def _by_skeleton(
        self, chat: Chat, roles: tuple[str, ...], skeletons: Skeletons, budget_seconds: float
    ) -> str:
        """Returns the text of a conversation whose roles alone decide what is around contents."""
        text = skeletons.text(roles, chat.messages)
        if text is not None:
            return text

        def render(messages: Messages) -> str:
            return self._rendered(messages, chat.variables, self._tick(budget_seconds))

        text = render(chat.messages)
        with suppress(RequestError):  # it is learned from another conversation
            skeletons.learn(roles, chat.messages, text, render)
        return text

    def _as_sglang(self) -> SglangTemplate:
        if self._sglang is None:
            tree = Sandbox(self._now).parse(self._source)
            self._sglang = SglangTemplate(
                self._source,
                tree,
                self._rendered_with_all,
                self._probed,
                self._model_type,
                self._keywords,
            )
        return self._sglang

    def _of_parts(
        self, inputs: "_TemplateInput", dialect: Dialect | None, tick: Tick
    ) -> tuple[str, int]:
        """Returns the same as `render`, for contents of which some are no texts."""
        messages, forms = inputs.messages, inputs.forms
        flats = [flat(message) for message in messages]
        texts = {
            parts: self._shaped_text(inputs, messages if parts else flats, tick, parts=parts)
            for parts in self._formats
        }
        if True in texts and any(map(has_part_fields, messages)):
            if dialect is None:
                raise RequestError("unsupported_content")
            bare = [without_part_fields(message) for message in messages]
            other = self._shaped_text(inputs, bare, tick, parts=True)
            if other != texts[True]:
                forms |= PARTS
                texts[True] = texts[True] if dialect.keeps_part_fields else other
        return self._chosen(texts, dialect, forms)

    def _chosen(
        self, texts: Mapping[bool, str], dialect: Dialect | None, forms: int
    ) -> tuple[str, int]:
        """Returns the text of the format that the dialect detects, if they differ."""
        text, *others = texts.values()
        if all(other == text for other in others):
            return text, forms
        if dialect is None:
            raise RequestError("unsupported_content_format")
        return texts[self._format_by_rule[dialect.format]], forms | PARTS

    def _shaped_text(
        self, inputs: "_TemplateInput", messages: Messages, tick: Tick, *, parts: bool
    ) -> str:
        shaped = [in_parts(one) for one in messages] if parts else messages
        if inputs.forms & DEVELOPER:
            shaped = merged_developers(shaped)
        return self._text(shaped, inputs.variables, tick)

    def _template_input(self, chat: Chat) -> "_TemplateInput":
        """Returns what the template is given of a chat, by the rules of its dialect.

        Raises:
            RequestError: releases differ, and it has no dialect, or its dialect refuses this.
        """
        dialect, forms = chat.dialect, self._forms_of(chat)
        messages: Messages = chat.messages
        variables: Mapping[str, Any] = chat.variables
        if not forms:
            return _TemplateInput(messages, variables, 0)
        if dialect is None:
            raise RequestError(refusal_of(forms))
        if forms & INLINE_SYSTEM:
            messages = self._with_systems(messages, dialect.inline_system)
        if forms & BILLING and dialect.drops_billing_line:
            messages = [without_billing_line(message) for message in messages]
        if forms & REASONING:
            messages = [with_reasoning(message, dialect.reasoning) for message in messages]
        if forms & EFFORT:
            variables = self._with_effort(chat)
        if forms & DEVELOPER and not dialect.merges_developers:
            raise RequestError("unsupported_developer_role")
        return _TemplateInput(messages, variables, forms)

    def _forms_of(self, chat: Chat) -> int:
        """Returns the forms under which a chat comes with this template."""
        messages, forms = chat.messages, chat.forms & (INLINE_SYSTEM | BILLING)
        if chat.effort and self._reads_effort:
            forms |= EFFORT
        if self._reads_reasoning and not all(map(_REASONING.isdisjoint, messages)):
            forms |= REASONING
        if not self._knows_developers and "developer" in [one.get("role") for one in messages]:
            forms |= DEVELOPER
        return forms

    def _with_systems(self, messages: Messages, rule: InlineSystem) -> Messages:
        if rule is InlineSystem.REFUSED:
            raise RequestError("bad_request")
        keeps = rule is InlineSystem.PROBED and self.keeps_later_systems
        return messages if keeps else merged_systems(messages)

    def _with_effort(self, chat: Chat) -> Mapping[str, Any]:
        rule = chat.effort_rule
        if rule is None or rule is Effort.IGNORED:
            return chat.variables
        effort = self.off_effort if chat.effort == DISABLED else chat.effort
        variables = {**chat.variables, "reasoning_effort": effort}
        if rule is Effort.SWITCHES:
            variables.setdefault("enable_thinking", effort != "none")
        return variables

    @property
    def keeps_later_systems(self) -> bool:
        """Whether the template renders a system turn that is not the first.

        Source: the probe of vLLM 0.31 and 0.32. It gives the template no special tokens and no
        tools, and nothing that transformers adds: a template that uses any of that fails.
        """
        if self._keeps_later_systems is None:
            self._keeps_later_systems = self._renders_probe()
        return self._keeps_later_systems

    def _renders_probe(self) -> bool:
        turns = [{"role": role, "content": "t"} for role in ("system", "user") * 2]
        return self._probed(turns) is not None

    def _probed(self, turns: Messages) -> str | None:
        """Returns what the template makes of turns without what transformers adds; None if it
        fails.
        """
        context = {"messages": turns, "add_generation_prompt": False}
        environment = Sandbox(self._now, is_bare=True)
        try:
            template = environment.compiled(environment.parse(self._source))
            return rendered(template, context, self._tick(BUDGET_SECONDS))
        except (jinja2.TemplateError, RequestError):
            return None

    @property
    def off_effort(self) -> str:
        """The effort by which thinking is switched off: "none", or "low" where that has no effect.

        Source: vLLM 0.31 and 0.32, which compare what the template makes of each effort.
        """
        if not self._off_effort:
            none = self._rendered_with("none")
            thinks = (self._rendered_with(effort) for effort in _PROBED_EFFORTS)
            self._off_effort = "low" if none is None or none in thinks else "none"
        return self._off_effort

    def _rendered_with(self, effort: str) -> str | None:
        variables = {
            "add_generation_prompt": True,
            "reasoning_effort": effort,
            "enable_thinking": effort != "none",
        }
        turn = {"role": "user", "content": "Hi"}
        shaped = in_parts(turn) if self._format_by_rule[Format.NEWEST] else turn
        try:
            return self._rendered([shaped], variables, self._tick(BUDGET_SECONDS))
        except RequestError:
            return None

    def render_until_media(self, chat: Chat, *, added_tokens: Collection[str]) -> tuple[str, int]:
        """Returns the part of a conversation's prompt text that is certain before its first media.

        Up to there, the engine's text equals the text rendered with a mark for every media part.
        The engine's processor replaces the template's placeholders by media tokens, so the text
        before the first one is the engine's too, unless a client wrote a placeholder.

        added_tokens: the tokenizer's, which include the model's placeholders.

        Raises:
            RequestError: as in `render`; or the template expects texts, before which engines write
                their own placeholders; or a message contains the text of an added token.
        """
        inputs = self._media_inputs(chat)
        texts = texts_before_media(inputs.messages)
        if any(token in text for text in texts for token in added_tokens):
            raise RequestError("unsupported_media")
        render, tick = self._media_renderer(chat), self._tick(BUDGET_SECONDS)
        theirs = render(inputs.messages, inputs.variables, tick)
        ours = [marked(message) for message in inputs.messages]
        before = render(ours, inputs.variables, tick).partition(MEDIA_MARK)[0]
        return _common_prefix(theirs, before), inputs.forms

    def render_with_media(self, chat: Chat) -> tuple[str, int]:
        """Returns the whole prompt text of a conversation, with what is written for its media.

        Raises:
            RequestError: as in `render`; or the template expects texts.
        """
        inputs = self._media_inputs(chat)
        tick = self._tick(BUDGET_SECONDS)
        return self._media_renderer(chat)(inputs.messages, inputs.variables, tick), inputs.forms

    @property
    def names_first_token(self) -> bool:
        """Whether the template writes a text's first token itself, if there is one."""
        return self.names("bos_token")

    def names(self, name: str) -> bool:
        """Returns whether the template may read a variable."""
        return name in self._source

    def _media_renderer(self, chat: Chat) -> Render:
        is_sglang = chat.dialect is not None and chat.dialect.sglang is not None
        return self._as_sglang().rendered if is_sglang else self._rendered

    def text_for_media(self, kind: str) -> str:
        """Returns what the template writes for an item of a kind in a user's turn, "" for nothing.

        Raises:
            RequestError: the template fails.
        """
        if kind not in self._text_for_media:
            mark = {"type": "text", "text": MEDIA_MARK}
            turn = {"role": "user", "content": [mark, {"type": kind}, mark]}
            variables = {"add_generation_prompt": False}
            text = self._rendered([turn], variables, self._tick(BUDGET_SECONDS))
            around = text.split(MEDIA_MARK)
            self._text_for_media[kind] = around[1] if len(around) == 3 else ""
        return self._text_for_media[kind]

    def _media_inputs(self, chat: Chat) -> "_TemplateInput":
        """Returns what the template is given of a conversation with media.

        Raises:
            RequestError: engines do not give it the parts as they are.
        """
        if chat.dialect is not None and chat.dialect.sglang is not None:
            return _TemplateInput(*self._as_sglang().template_input(chat, chat.dialect.sglang))
        messages, variables, forms = self._template_input(chat)
        if any(map(has_part_fields, messages)):
            raise RequestError("unsupported_content")
        if self._formats != {True}:
            takes_parts = chat.dialect is not None and self._format_by_rule[chat.dialect.format]
            if not takes_parts:
                raise RequestError("unsupported_media")
            forms |= PARTS
        if variables.get("continue_final_message") or forms & DEVELOPER:
            raise RequestError("unsupported_media")
        return _TemplateInput([in_parts(message) for message in messages], variables, forms)

    def _text(self, shaped: Messages, variables: Mapping[str, Any], tick: Tick) -> str:
        if not variables.get("continue_final_message"):
            return self._rendered(shaped, variables, tick)
        return self._continued(shaped, variables, tick)

    def _rendered(self, messages: Messages, variables: Mapping[str, Any], tick: Tick) -> str:
        return self._rendered_with_all(messages, {**self._keywords, **variables}, tick)

    def _rendered_with_all(
        self, messages: Messages, variables: Mapping[str, Any], tick: Tick
    ) -> str:
        """Renders with these variables alone, and what every template has."""
        context = {**self._special_tokens, "tools": None, "documents": None, **variables}
        context["messages"] = messages
        return rendered(self._template, context, tick)

    def _continued(self, messages: Messages, variables: Mapping[str, Any], tick: Tick) -> str:
        """Returns the text up to the end of the final message, by both of transformers' ways.

        Raises:
            RequestError: the two ways differ, or the template fails.
        """
        final, open_ended = tagged(messages[-1])
        if not self._reads_content:
            raise RequestError("template_failed")
        with_tag = self._rendered([*messages[:-1], open_ended], variables, tick)
        plain = self._rendered(messages, variables, tick)
        text = up_to_tag(with_tag, final)
        if text != up_to_final(plain, final):
            raise RequestError("unsupported_continuation")
        return text


def _refuse_costly(source: str, environment: jinja2.Environment) -> None:
    """Refuses a template that would take seconds and gigabytes to be compiled.

    Raises:
        ValueError: it has too many words.
    """
    if sum(1 for _ in islice(environment.lex(source), MAX_WORDS + 1)) > MAX_WORDS:
        raise ValueError(f"a template of more than {MAX_WORDS} words and marks")


def _are_texts(messages: Messages) -> bool:
    """Returns whether all contents are plain texts, the usual case."""
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
