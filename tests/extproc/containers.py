"""What an object graph holds: the lengths of all containers, by owner."""

import functools
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

_OURS = ("extproc.", "kvstate.")
_SEQUENCES = (list, tuple, set, frozenset, deque, WeakSet)


def lengths(**roots: object) -> Counter[str]:
    """Returns the total length of the containers of each owner and attribute."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    waiting = list(roots.items())
    while waiting:
        label, one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, (Mapping, WeakKeyDictionary)):
            found[label] += len(one)
            waiting += [(f"{label}[]", each) for pair in list(one.items()) for each in pair]
        elif isinstance(one, _SEQUENCES):
            found[label] += len(one)
            waiting += [(f"{label}[]", each) for each in one]
        else:
            waiting += _parts(one, label)
    return found


def _parts(one: object, label: str) -> Iterator[tuple[str, Any]]:
    """Yields an object's attributes if its class is ours, or what is bound to a callable."""
    if isinstance(one, MethodType):
        yield label, one.__self__
    elif isinstance(one, functools.partial):
        yield from ((label, each) for each in (one.func, *one.args))
    elif closure := getattr(one, "__closure__", None):
        yield from ((label, cell.cell_contents) for cell in closure)
    elif type(one).__module__.startswith(_OURS):
        owner = type(one).__name__
        for name in _names(one):
            yield f"{owner}.{name}", getattr(one, name, None)


def _names(one: object) -> set[str]:
    slots = [getattr(each, "__slots__", ()) for each in type(one).__mro__]
    names = {name for each in slots for name in ((each,) if isinstance(each, str) else each)}
    return {*names, *getattr(one, "__dict__", {}), *getattr(one, "__struct_fields__", ())}
