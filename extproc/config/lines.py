"""Finds the lines of a YAML text in which its keys stand, for messages about faults."""

import re
from collections.abc import Iterable, Iterator, Mapping

import yaml

# An item of a list that the words of a fault name too, such as the first worker at an address.
_ITEM = re.compile(r"[a-z_.]+(?:\[\d+\])+")


def with_lines(text: str | bytes, name: str, faults: Iterable[str]) -> list[str]:
    """Returns the faults, each with the line of its key, or of what contains it.

    Items of lists that its words name get their lines, too.

    text: a YAML text. faults: as "name: key: what is wrong"; those that say a line already, and
    those of a text that is not YAML, stay as they are.
    """
    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError):
        root = None
    lines = {} if root is None else dict(_lines(root, "", set()))
    return [_with_line(fault, name, lines) for fault in faults]


def _with_line(fault: str, name: str, lines: Mapping[str, int]) -> str:
    key, _, words = fault.removeprefix(f"{name}: ").partition(": ")
    if "in line " in fault or fault.startswith(f"{name}: not YAML: "):
        return fault
    while key and key not in lines:
        at = max(key.rfind("."), key.rfind("["))
        key = key[: max(at, 0)]
    if not key:
        return fault
    others = [f"; {one} in line {lines[one]}" for one in _ITEM.findall(words) if one in lines]
    return f"{fault} (line {lines[key]}{''.join(others)})"


def _lines(node: yaml.Node, path: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    """Yields each key and item with its line.

    seen: the nodes visited before; an alias leads back to one, perhaps in a circle.
    """
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for position, one in enumerate(node.value):
            where = f"{path}[{position}]"
            yield where, one.start_mark.line + 1
            yield from _lines(one, where, seen)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            where = f"{path}.{key.value}" if path else str(key.value)
            yield where, key.start_mark.line + 1
            yield from _lines(value, where, seen)
