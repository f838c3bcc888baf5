"""Finds where the keys of a YAML text stand, for messages about faults."""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import yaml

# An item of a list that the words of a fault name too, such as the first worker at an address.
_ITEM = re.compile(r"[a-z_.]*(?:\[\d+\])+")


class _Position(NamedTuple):
    """Where a key stands: characters before it, and its line, from 1."""

    before: int
    line: int


# After every key.
_NOWHERE = _Position(sys.maxsize, 0)


def in_order(text: str | bytes, faults: Iterable[str]) -> list[str]:
    """Returns faults in the order in which their keys stand in a text, each with its line.

    A key that is missing stands where that stands which should contain it; what nothing contains
    comes last, without a line. Items of lists that the words of a fault name get their lines, too.

    text: a YAML text; the faults of another have no lines. faults: as "key: what is wrong"; those
    that say a line already get none.
    """
    places = _places_in(text)
    placed = [(_place_of(fault.partition(": ")[0], places), fault) for fault in faults]
    placed.sort(key=lambda one: one[0] or _NOWHERE)
    return [_with_line(fault, place, places) for place, fault in placed]


def _places_in(text: str | bytes) -> Mapping[str, _Position]:
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        return {} if root is None else dict(_places(root, "", set()))
    except (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError):
        return {}


def _place_of(key: str, places: Mapping[str, _Position]) -> _Position | None:
    while key and key not in places:
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return places[key] if key else None


def _with_line(fault: str, place: _Position | None, places: Mapping[str, _Position]) -> str:
    if place is None or "in line " in fault:
        return fault
    words = fault.partition(": ")[2]
    others = [
        f"; {one} in line {places[one].line}" for one in _ITEM.findall(words) if one in places
    ]
    return f"{fault} (line {place.line}{''.join(others)})"


def _places(node: yaml.Node, path: str, seen: set[int]) -> Iterator[tuple[str, _Position]]:
    """Yields each key and item with its place.

    seen: the nodes visited before; an alias leads back to one, perhaps in a circle.
    """
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for position, one in enumerate(node.value):
            where = f"{path}[{position}]"
            yield where, _place(one)
            yield from _places(one, where, seen)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            where = f"{path}.{key.value}" if path else str(key.value)
            yield where, _place(key)
            yield from _places(value, where, seen)


def _place(node: yaml.Node) -> _Position:
    return _Position(node.start_mark.index, node.start_mark.line + 1)
