"""The texts around the contents of conversations, so that a template need not run for each one.

Where a template only writes contents (`content_flow`), what it writes around them depends on the
roles of the messages alone. That is found once for each sequence of roles, by rendering marks
instead of contents, and kept: a next turn then takes one join. The first conversation with a
sequence is rendered as well, and must be the same.
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from extproc.base.errors import RequestError
from extproc.templates.bounds import MAX_CHARACTERS

# Longer conversations are rendered, and as many sequences of roles are kept: at most some megabytes
# for a template.
MOST_MESSAGES = 128
MOST_SEQUENCES = 1_024

# White space around a mark, which `trim` removes, and no template or client writes; the number of
# the message is between two characters for private use.
_SPACE, _OPEN, _CLOSE = "\x1d", "\ue004", "\ue005"
_MARK = re.compile(f"({_SPACE}?){_OPEN}([0-9]+){_CLOSE}({_SPACE}?)")
_LEFT = re.compile(f"[{_SPACE}{_OPEN}{_CLOSE}]")

_content = itemgetter("content")

Messages = Sequence[dict[str, Any]]
Render = Callable[[Messages], str]


class Skeleton:
    """What a template writes around the contents of messages with certain roles.

    text: what it writes around marks. count: of the messages.

    Raises:
        ValueError: a mark is not whole, or of no message.
    """

    def __init__(self, text: str, count: int) -> None:
        found = list(_MARK.finditer(text))
        edges = [0, *[edge for one in found for edge in one.span()], len(text)]
        self._around = [text[start:end] for start, end in list(pairwise(edges))[::2]]
        self._are_bare = is_bare = [not one[1] for one in found]
        self._numbers, self._count = [int(one[2]) for one in found], count
        if is_bare != [not one[3] for one in found] or any(map(_LEFT.search, self._around)):
            raise ValueError("a mark is not whole")
        self._has_bare = any(is_bare)
        first = len(self._around)
        places = [
            first + at + count * bare for at, bare in zip(self._numbers, is_bare, strict=True)
        ]
        self._pick = itemgetter(*_alternate(first, places))

    def cut(self, find: Callable[[str], int]) -> "Turns | None":
        """Returns what is around each content from one cut to the next.

        Returns None if there is no cut between two contents, or not each is there once, in order.

        find: returns the index of a cut in a text, -1 if there is none.
        """
        if self._numbers != list(range(self._count)) or not self._numbers:
            return None
        if self._has_bare and not all(self._are_bare):
            return None
        first, *between = self._around
        cuts = [find(text) for text in between]
        if min(cuts) < 0:
            return None
        parts = [(text[:at], text[at:]) for text, at in zip(between, cuts, strict=True)]
        before = (first, *[behind for _, behind in parts])
        return Turns(before[:-1], tuple([until for until, _ in parts]), before[-1], self._has_bare)

    def fill(self, contents: list[str]) -> str:
        """Returns the text of a conversation with these contents."""
        parts = self._around + contents
        if self._has_bare:
            parts.extend(map(str.strip, contents))
        return "".join(self._pick(parts))


class Turns(NamedTuple):
    """What a template writes around each content, from a place where texts can be cut to the next.

    before, behind: around each. last: behind the last cut. strips: whether contents are stripped.
    """

    before: tuple[str, ...]
    behind: tuple[str, ...]
    last: str
    strips: bool


def _alternate(count: int, places: Sequence[int]) -> list[int]:
    """Returns the numbers of all parts: those around contents, with the contents between them."""
    return [0, *[one for at in range(1, count) for one in (places[at - 1], at)]]


class Skeletons:
    """The skeletons of a template that only writes contents, by the roles of messages.

    Safe to use from several threads. most_sequences: of roles, that are known at most.
    most_messages: of a conversation whose skeleton is found. max_characters: of a text.
    is_refuted: whether a text differed from the template's, so that no skeleton may be used.
    """

    def __init__(
        self,
        *,
        most_sequences: int = MOST_SEQUENCES,
        most_messages: int = MOST_MESSAGES,
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        self._sequences, self._messages = most_sequences, most_messages
        self._characters = max_characters
        self._by_roles: dict[tuple[str, ...], Skeleton] = {}
        self.is_refuted = False

    def known(self, roles: tuple[str, ...]) -> Skeleton | None:
        """Returns the skeleton of conversations with these roles, None if it is not known."""
        return self._by_roles.get(roles)

    def text(self, roles: tuple[str, ...], messages: Messages) -> str | None:
        """Returns the text of a conversation, None if its skeleton is not known.

        Raises:
            RequestError: it is too long (too_many_characters).
        """
        known = self._by_roles.get(roles)
        if known is None:
            return None
        text = known.fill(list(map(_content, messages)))
        if len(text) > self._characters:
            raise RequestError("too_many_characters")
        return text

    def learn(self, roles: tuple[str, ...], messages: Messages, text: str, render: Render) -> None:
        """Finds the skeleton of a conversation that was rendered to a text.

        render: renders messages. If the skeleton makes another text of the conversation, no
        skeleton is used any more.

        Raises:
            RequestError: rendering fails.
        """
        if self.is_refuted or len(roles) > self._messages:
            return
        marks = [
            {"role": role, "content": f"{_SPACE}{_OPEN}{at}{_CLOSE}{_SPACE}"}
            for at, role in enumerate(roles)
        ]
        contents = list(map(_content, messages))
        try:
            skeleton = Skeleton(render(marks), len(roles))
            self.is_refuted = skeleton.fill(contents) != text
        except (ValueError, IndexError):
            self.is_refuted = True
        if self.is_refuted:
            self._by_roles = {}
            return
        if len(self._by_roles) >= self._sequences:
            self._by_roles = {}
        self._by_roles[roles] = skeleton
