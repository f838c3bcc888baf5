"""Finds the argument by which a chat template switches thinking, as SGLang does: from its words.

Source: SGLang 0.5.14 to 0.5.23, srt/parser/template_detection.py (its reasoning modes). The rules
are tried in their order; the first that holds counts.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from jinja2 import nodes


class SpecialTemplate(Enum):
    """A template that has no argument that switches thinking."""

    ALWAYS = "always"  # it cannot be switched off
    MISTRAL = "mistral"  # an effort does it
    HUNYUAN = "hunyuan"  # an effort does it, which is always set


class ThinkingMode(NamedTuple):
    """How a template switches thinking.

    argument: "" if a special case holds. low_effort: an argument that a low effort sets, or "".
    """

    argument: str = ""
    special: SpecialTemplate | None = None
    low_effort: str = ""


_OPEN_THINK = re.compile(r"<\|im_start\|>assistant\\n<think>\\n")

_GLM_5_3 = ("[gMASK]<sop>", "Reasoning Effort:", "<tool_call>", "<arg_key>", "<arg_value>")


def thinking_mode(source: str, tree: nodes.Template) -> ThinkingMode | None:
    """Returns how a template switches thinking, None if nothing shows it.

    tree: the template's syntax.
    """
    return next(filter(None, _modes_in(source, tree)), None)


def _modes_in(source: str, tree: nodes.Template) -> Iterator[ThinkingMode | None]:
    yield _special(source)
    first, second = "enable_thinking", "thinking"
    yield _off(source, tree, first)
    if "low_effort" in source and "truncate_history_thinking" in source:
        yield ThinkingMode(first, low_effort="low_effort")
    yield _on(source, tree, first)
    yield _off(source, tree, second)
    yield _on(source, tree, second)


def _off(source: str, tree: nodes.Template, name: str) -> ThinkingMode | None:
    """Returns the mode of a template that does not think by default."""
    is_off = _is_set_unless_defined(source, name, "false") or False in _defaults(tree, name)
    return ThinkingMode(name) if is_off else None


def _on(source: str, tree: nodes.Template, name: str) -> ThinkingMode | None:
    """Returns the mode of a template that thinks by default."""
    is_on = _is_on_by_default(source, name) or True in _defaults(tree, name)
    return ThinkingMode(name) if is_on else None


def _special(source: str) -> ThinkingMode | None:
    special = next((special for holds, special in _SPECIALS if holds(source)), None)
    return None if special is None else ThinkingMode(special=special)


def _thinks_in_steps(source: str) -> bool:
    return all(mark in source for mark in ("<ifm|think>", "<ifm|think_fast>", "reasoning_effort"))


def _opens_thinking(source: str) -> bool:
    return "thinking" not in source and _OPEN_THINK.search(source) is not None


def _is_glm_5_3(source: str) -> bool:
    return "enable_thinking" not in source and all(mark in source for mark in _GLM_5_3)


def _is_mistral(source: str) -> bool:
    return "reasoning_effort" in source and "[THINK]" in source


def _is_hunyuan(source: str) -> bool:
    return all(one in source for one in ("reasoning_effort", "reasoning_mode_token", "no_think"))


_SPECIALS: Sequence[tuple[Callable[[str], bool], SpecialTemplate]] = (
    (_thinks_in_steps, SpecialTemplate.ALWAYS),
    (lambda source: "<|channel|>" in source, SpecialTemplate.ALWAYS),
    (_opens_thinking, SpecialTemplate.ALWAYS),
    (_is_glm_5_3, SpecialTemplate.ALWAYS),
    (_is_mistral, SpecialTemplate.MISTRAL),
    (_is_hunyuan, SpecialTemplate.HUNYUAN),
)


def _is_set_unless_defined(source: str, name: str, value: str) -> bool:
    """Returns whether a template sets an argument to a value, behind a test that it is missing."""
    test = re.compile(rf"{{%\s*if\s+not\s+{name}\s+is\s+defined\s*%}}").search(source)
    setting = rf"{{%\s*set\s+{name}\s*=\s*(?:{value}|{value.title()})\s*%}}"
    return test is not None and re.compile(setting).search(source, test.end()) is not None


def _is_on_by_default(source: str, name: str) -> bool:
    patterns = (
        rf"set\s+{name}\s*=\s*{name}\s+if\s+{name}\s+is\s+defined\s+else\s+(?:true|True)",
        rf"{name}\s+is\s+defined\s+and\s+(?:{name}\s+is\s+false|not\s+{name})",
        rf"{name}\s+is\s+not\s+defined\s+or\s+{name}",
    )
    if _is_set_unless_defined(source, name, "true"):
        return True
    if any(re.search(pattern, source) for pattern in patterns):
        return True
    return any(_has_argument(call, name) for call in _namespaces(source))


def _namespaces(source: str) -> Iterator[str]:
    """Yields the arguments of calls of namespace, up to the first bracket that closes one."""
    place = source.find("namespace(")
    while place >= 0:
        begin = place + len("namespace(")
        end = source.find(")", begin)
        yield source[begin:end] if end >= 0 else source[begin:]
        place = source.find("namespace(", begin)


def _has_argument(call: str, name: str) -> bool:
    return re.search(rf"{name}\s*=\s*true", call) is not None


def _defaults(tree: nodes.Template, name: str) -> set[bool]:
    """Returns the values that the filter `default` gives to an argument."""
    found = set()
    for one in tree.find_all(nodes.Filter):
        is_default = one.name in ("default", "d") and not one.dyn_args and not one.dyn_kwargs
        if is_default and isinstance(one.node, nodes.Name) and one.node.name == name:
            value = _default(one)
            if value is not None:
                found.add(value)
    return found


def _default(one: nodes.Filter) -> bool | None:
    """Returns the value, None if it is none of the two, or replaces a given false as well."""
    match one.args:
        case [nodes.Const(value=bool(value)), *others]:
            pass
        case _:
            return None
    named = [pair.value for pair in one.kwargs if pair.key == "boolean"]
    match [*others[:1], *named]:
        case []:
            return value
        case [nodes.Const(value=replaces), *_]:
            return None if replaces and value else value
    return None
