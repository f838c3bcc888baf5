"""Renders a conversation as SGLang does: its parsing of messages, then the model's template.

Source: SGLang 0.5.9 to 0.5.23, srt/entrypoints/openai/serving_chat.py and
srt/parser/jinja_template_utils.py, template_detection.py and hunyuan_reasoning.py.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import msgspec
from jinja2 import nodes

from extproc.base.errors import RequestError
from extproc.base.template_arguments import RESERVED_ARGUMENTS
from extproc.requests.chat_request import Messages
from extproc.requests.prompt import CONVERTED, Chat, Conversion
from extproc.requests.sglang_media import has_media
from extproc.requests.sglang_rules import SglangRules
from extproc.templates import minimax_m3
from extproc.templates.bounds import Tick
from extproc.templates.thinking_mode import SpecialTemplate, ThinkingMode, thinking_mode

# Words of a template that is taken to expect parts, whatever its syntax.
_MEDIA_WORDS = ("image", "audio", "video", "vision")

# Names that loops over messages give to one; others are not recognized.
_MESSAGE_NAMES = ("message", "msg", "m")

# A mark of templates of MiniMax-M3, whose conversations this engine changes in code of its own.
_MINIMAX_M3 = "<mm:think>"

# Arguments for templates that are more to the engine.
_MEANT_OTHERWISE = RESERVED_ARGUMENTS | {"reasoning_effort"}

_SENTINEL = "__sglang_inline_system_sentinel__"

Render = Callable[[Messages, Mapping[str, Any], Tick], str]


class SglangTemplate:
    """A chat template as SGLang uses it.

    tree: its syntax. render: renders messages with variables. probe: does so without what
    transformers adds, and returns None if the template fails. model_type: of the model's
    config.json, "" if that is unknown. keywords: the configured arguments for templates.
    """

    def __init__(
        self,
        source: str,
        tree: nodes.Template,
        render: Render,
        probe: Callable[[Messages], str | None],
        model_type: str = "",
        keywords: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._source = source
        self._keywords = keywords
        self._is_minimax_m3 = model_type == minimax_m3.MODEL_TYPE
        self._may_be_minimax_m3 = not model_type and _MINIMAX_M3 in source
        self._tree = tree
        self._render = render
        self._probe = probe
        self._reads_effort = "reasoning_effort" in source
        # some models' texts are tokenized once more and begin with two (`sglang_multimodal`)
        self._writes_first_token = "bos_token" in source

    def render(self, chat: Chat, rules: SglangRules, tick: Tick) -> tuple[str, int]:
        """Returns the prompt text of a conversation, and the forms that the rules decided.

        Raises:
            RequestError: as `template_input`.
        """
        messages, variables, forms = self.template_input(chat, rules)
        return self.rendered(messages, variables, tick), forms

    def template_input(
        self, chat: Chat, rules: SglangRules
    ) -> tuple[Messages, Mapping[str, Any], int]:
        """Returns the messages and variables that the template gets, and the forms.

        Raises:
            RequestError: the template or the engine refuses the conversation, or it is not known
                how the engine changes it.
        """
        conversion, keywords = chat.conversion or Conversion(), self._keywords_of(rules)
        forms = chat.forms
        if keywords or rules.reasoning_parser == "hunyuan":
            forms |= CONVERTED
        if rules.default_effort and self._reads_effort:
            forms |= CONVERTED
        is_changed = rules.changes_minimax_m3 and self._is_minimax_m3
        if conversion.thinking_config is not None and is_changed:
            forms |= CONVERTED
        if forms & CONVERTED and rules.changes_minimax_m3 and self._may_be_minimax_m3:
            raise RequestError("unsupported_by_engine")
        if self._writes_first_token:
            forms |= CONVERTED
        messages: Messages = chat.messages
        if conversion.merged is not None and not self.renders_later_systems:
            messages = conversion.merged
        if is_changed and forms & CONVERTED:
            if conversion.checks_calls:
                minimax_m3.check_pairs(messages, is_continued=bool(conversion.continued))
            messages = minimax_m3.in_call_order(messages)
        shaped = _ended([self._shaped(one, rules) for one in messages])
        if not shaped:
            raise RequestError("empty_prompt")
        return shaped, {**keywords, **self._variables(chat, conversion, rules)}, forms

    def _keywords_of(self, rules: SglangRules) -> Mapping[str, Any]:
        """Returns a worker's own arguments for templates.

        Raises:
            RequestError: the engine does more with them than to pass them on.
        """
        own = rules.keywords
        found = self._keywords if own is None else msgspec.json.decode(own, type=dict[str, Any])
        if not _MEANT_OTHERWISE.isdisjoint(found):
            raise RequestError("unsupported_engine_arguments")
        return found

    def rendered(self, messages: Messages, variables: Mapping[str, Any], tick: Tick) -> str:
        """Renders, and once more with bare functions as tools if the template fails."""
        try:
            return self._render(messages, variables, tick)
        except RequestError as error:
            tools = variables.get("tools")
            if error.reason != "template_failed" or not tools:
                raise
        bare = [tool["function"] for tool in tools]
        return self._render(messages, {**variables, "tools": bare}, tick)

    @cached_property
    def renders_later_systems(self) -> bool:
        """Whether the template writes a system turn that is not the first."""
        texts = ("t", "t", _SENTINEL, "t")
        roles = ("system", "user") * 2
        turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        return _SENTINEL in (self._probe(turns) or "")

    @cached_property
    def takes_parts(self) -> bool:
        """Whether templates get contents in parts, by the engine's own rule."""
        if any(word in self._source for word in _MEDIA_WORDS):
            return True
        return any(_is_over_content(loop.iter) for loop in self._tree.find_all(nodes.For))

    @cached_property
    def mode(self) -> ThinkingMode | None:
        """How the template switches thinking, None if nothing shows it."""
        return thinking_mode(self._source, self._tree)

    def _shaped(self, message: dict[str, Any], rules: SglangRules) -> dict[str, Any]:
        content = message["content"]
        if isinstance(content, str):
            return message
        is_media = has_media(message)
        if is_media and not self.takes_parts:
            raise RequestError("unsupported_media")
        texts = [part["text"] for part in content if part["type"] == "text"]
        is_result = rules.joins_tool_texts and message["role"] == "tool"
        if not self.takes_parts:
            return {**message, "content": " ".join(texts)}
        if is_result and len(texts) == len(content):
            content = " ".join(texts)
        others = {key: value for key, value in message.items() if key != "content"}
        return {**others, "content": content}  # the engine puts parts last

    def _variables(
        self, chat: Chat, conversion: Conversion, rules: SglangRules
    ) -> Mapping[str, Any]:
        variables = dict(chat.variables)
        if conversion.thinking is not None:
            self._switch(variables, is_on=conversion.thinking, rules=rules)
        if conversion.effort:
            variables["reasoning_effort"] = chat.variables["reasoning_effort"]
        if rules.default_effort:
            variables.setdefault("reasoning_effort", rules.default_effort)
        if rules.changes_minimax_m3 and self._is_minimax_m3:
            variables = minimax_m3.with_thinking(variables, conversion)
        mode = self.mode
        if mode is not None and mode.low_effort and variables.get("reasoning_effort") == "low":
            variables.setdefault(mode.low_effort, True)
        is_hunyuan = mode is not None and mode.special is SpecialTemplate.HUNYUAN
        if rules.reasoning_parser == "hunyuan" and is_hunyuan:
            variables["reasoning_effort"] = _hunyuan(variables.get("reasoning_effort"))
        return variables

    def _switch(self, variables: dict[str, Any], *, is_on: bool, rules: SglangRules) -> None:
        """Sets what switches thinking on or off.

        Raises:
            RequestError: the engine refuses to.
        """
        by_parser = rules.wrapping.mode if rules.wrapping is not None else ""
        mode = self.mode
        special = mode.special if mode is not None else None
        if rules.reasoning_parser == "hunyuan":
            on = "high" if special is SpecialTemplate.HUNYUAN else "medium"
            variables["reasoning_effort"] = on if is_on else "no_think"
        elif special is SpecialTemplate.MISTRAL or (mode is None and by_parser == "mistral"):
            variables["reasoning_effort"] = "medium" if is_on else "none"
        elif special is SpecialTemplate.ALWAYS or (mode is None and by_parser == "always"):
            if not is_on:
                raise RequestError("bad_request")
        else:
            argument = mode.argument if mode is not None else by_parser
            if argument:
                variables[argument] = is_on
            elif is_on:
                raise RequestError("bad_request")


def _is_over_content(node: nodes.Node | None) -> bool:
    """Returns whether a loop goes over the content of a message, maybe filtered or sliced."""
    while True:
        match node:
            case nodes.Filter() | nodes.Test() | nodes.Getitem(arg=nodes.Slice()):
                node = node.node
            case nodes.Getitem(arg=nodes.Const(value="content")) | nodes.Getattr(attr="content"):
                name = node.node
                return isinstance(name, nodes.Name) and name.name in _MESSAGE_NAMES
            case _:
                return False


def _ended(messages: Messages) -> Messages:
    """Returns the messages with a last text of the model as the user's."""
    if not messages or messages[-1]["role"] != "assistant":
        return messages
    content = messages[-1]["content"]
    if not isinstance(content, str):
        return messages
    return [*messages[:-1], {"role": "user", "content": content}]


def _hunyuan(effort: object) -> str:
    if effort in ("none", "no_think"):
        return "no_think"
    return "low" if effort in ("minimal", "low") else "high"
