"""Sections of which some keys are wrong, and what the rules can say of them nevertheless.

A wrong key has no value, not even its default, and a rule ends where it reads one. So what the
rules find besides a wrong key is so, whatever the key was meant to be.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


def section_without(kind: type[T], wrong: Collection[str], values: Mapping[str, object]) -> T:
    """Returns a section, a dataclass, in which wrong keys have no value.

    values: by key; a key that is neither here nor wrong has its default.
    """
    made = object.__new__(kind)
    for item in fields(kind):  # type: ignore[arg-type]
        if item.name in wrong:
            continue
        value = values.get(item.name, MISSING)
        if value is MISSING:
            value = item.default if item.default_factory is MISSING else item.default_factory()
        object.__setattr__(made, item.name, value)
    return made


def section_with(section: T, key: str, value: object) -> T:
    """Returns a section in which one key has another value, and wrong keys have still none."""
    names = [item.name for item in fields(section)]  # type: ignore[arg-type]
    values = {name: getattr(section, name) for name in names if hasattr(section, name)}
    values[key] = value
    return section_without(type(section), set(names) - values.keys(), values)


def until_wrong(
    rule: Callable[P, Iterable[T]], *arguments: P.args, **named: P.kwargs
) -> Iterator[T]:
    """Yields what a rule finds until it reads a key that is wrong, or else to its end."""
    try:
        yield from rule(*arguments, **named)
    except AttributeError as error:
        section = error.obj
        if not is_dataclass(section) or all(one.name != error.name for one in fields(section)):
            raise
