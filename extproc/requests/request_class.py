"""The classes of requests, such as interactive and batch: what goes before what.

A header that a trusted filter sets names the class. A client's own `priority` is taken out of the
body: of several members with one name the last one counts, so all are.
"""

from collections.abc import Sequence
from typing import NamedTuple

from extproc.config.sections import Classes
from extproc.requests.draft import Draft

NAME = b"priority"


class RequestClass(NamedTuple):
    """A class of requests.

    level: its place among the classes' priorities, 0 for the one that goes first. priority: the
    lower goes first. max_in_flight: most of its requests on a worker, None for any number.
    """

    name: str
    level: int
    priority: int
    max_in_flight: int | None


class ClassTable:
    """The configured classes. header: the name of the one that names a class, in lower case."""

    def __init__(self, rules: Classes) -> None:
        self.header = rules.header.lower()
        levels = sorted({one.priority for one in rules.of})
        made = [
            RequestClass(one.name, levels.index(one.priority), one.priority, one.max_in_flight)
            for one in rules.of
        ]
        self._classes = {one.name.encode(): one for one in made}
        self._default = self._classes[rules.default.encode()]

    @property
    def names(self) -> list[str]:
        """The names of the classes, as they are configured."""
        return [one.name for one in self._classes.values()]

    def find(self, named: Sequence[bytes]) -> RequestClass:
        """Returns the class of a request.

        named: the values of the header; without exactly one known class, the default.
        """
        if len(set(named)) != 1:
            return self._default
        return self._classes.get(named[0], self._default)


def take_out(draft: Draft) -> None:
    """Takes a client's own priority out of a body."""
    for member in draft.named(NAME):
        draft.cut(member)
