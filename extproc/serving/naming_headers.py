"""The headers with which clients name their sessions and conversations."""

from collections.abc import Sequence
from typing import NamedTuple


class NamingHeaders(NamedTuple):
    """Headers with names that a client gives, in lower case; the first that it sends counts.

    session: those that may name its session. conversation: those by which requests are steered
    together. all: both.
    """

    session: Sequence[str]
    conversation: Sequence[str]
    all: frozenset[str]

    @classmethod
    def of(cls, session: Sequence[str], conversation: Sequence[str]) -> "NamingHeaders":
        """Returns these headers."""
        return cls(session, conversation, frozenset((*session, *conversation)))


NO_NAMES = NamingHeaders.of((), ())
