"""YAML text to plain values; a key that a mapping has twice is a fault, where PyYAML is silent.

YAML 1.2.2, section 3.2.1.3: the keys of a mapping are unique.
"""

from collections.abc import Iterator
from typing import Any

import yaml

# An alias is a place to look up again, and mappings of aliases to mappings of aliases double with
# each: 700 bytes may stand for millions of values, which take half a minute to be made. What all
# aliases together stand for is bounded, by more than a fleet of thousands takes.
MAX_ALIASED = 200_000

# "<<" takes the keys of other mappings in; PyYAML takes several.
_MERGE = "tag:yaml.org,2002:merge"


def values_in(text: str | bytes) -> tuple[Any, list[str]]:
    """The values of a text, and its keys that are given twice, "key: what" each.

    Raises:
        ValueError: it is no YAML; with where and why.
    """
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None, []
        _refuse_many_aliased(root)
        doubles = list(_doubles(root, "", set()))
        return loader.construct_document(root), doubles
    except (LookupError, AttributeError):  # what PyYAML raises for such as "!!bool x"
        raise ValueError("a value does not fit its tag") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(_told(error)) from None


def _refuse_many_aliased(root: yaml.Node) -> None:
    """Refuses a text whose aliases stand for too many values.

    Raises:
        ValueError: they do.
    """
    sizes: dict[int, int] = {}
    total = _size(root, sizes)
    if total - len(sizes) > MAX_ALIASED:
        raise ValueError(f"its aliases (*) stand for more than {MAX_ALIASED} values")


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """How many values a node is with all that its aliases stand for; 0 where it leads to itself.

    sizes: of the nodes that were looked at.
    """
    known = sizes.get(id(node))
    if known is not None:
        return known
    sizes[id(node)] = 0
    children: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        children = node.value
    elif isinstance(node, yaml.MappingNode):
        children = [part for pair in node.value for part in pair]
    sizes[id(node)] = size = 1 + sum(_size(child, sizes) for child in children)
    return size


def _doubles(node: yaml.Node, path: str, seen: set[int]) -> Iterator[str]:
    """seen: nodes that were looked at; an alias leads to one again, perhaps in a circle."""
    if id(node) in seen or isinstance(node, yaml.ScalarNode):
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for position, one in enumerate(node.value):
            yield from _doubles(one, f"{path}[{position}]", seen)
        return
    lines: dict[tuple[str, str], int] = {}
    for key, value in node.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else "?"
        where = f"{path}.{name}" if path else name
        kind, line = (key.tag, name), key.start_mark.line + 1
        if kind in lines:
            yield f"{where}: given in line {lines[kind]} and again in line {line}"
        elif isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
            lines[kind] = line
        yield from _doubles(value, where, seen)


def _told(error: Exception) -> str:
    """On one line, without the names that PyYAML has for texts."""
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, yaml.MarkedYAMLError) and mark is not None:
        why = ", ".join(part for part in (error.context, error.problem) if part)
        return f"line {mark.line + 1}, column {mark.column + 1}: {' '.join(why.split())}"
    said = " ".join(str(error).split())
    for name in ('in "<byte string>", ', 'in "<unicode string>", '):
        said = said.replace(name, "at ")
    return said
