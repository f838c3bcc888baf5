"""A tree of JSON whose shape is not trusted: what is looked for in it, or nothing."""

from collections.abc import Iterator, Mapping
from typing import Any

Node = Mapping[str, Any]

_MAX_DIGITS = 19


def typed(tree: object, suffix: str) -> Iterator[Node]:
    """All mappings in a tree whose `@type` ends so."""
    return (one for one in nodes(tree) if type_of(one).endswith(suffix))


def nodes(tree: object) -> Iterator[Node]:
    """All mappings in a tree, itself included."""
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            yield one
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def type_of(node: object) -> str:
    """Its `@type`, "" if it has none."""
    return str(mapping(node).get("@type", ""))


def mapping(value: object) -> Node:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def listing(value: object) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def number(value: object, default: int) -> int:
    """A number that is none below zero, as such or as text."""
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else default


def seconds(value: object, default: float) -> float:
    """A duration such as "0.5s"."""
    try:
        return float(str(value).removesuffix("s"))
    except ValueError:
        return default
