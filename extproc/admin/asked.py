"""The headers of a request that somebody asks about, as a stream would read them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from extproc.requests.request import Head, path_of
from extproc.requests.trusted_headers import TrustedHeaders

# Names and values, in any case and order.
HeaderFields = Sequence[tuple[str, str]]


class HeaderNames(NamedTuple):
    """The headers that count, in lower case.

    policy: may name a policy, None if none may. sessions: may name a session. conversations: by
    which requests are steered together. trusted: a filter before the router sets them.
    """

    policy: str | None
    sessions: Sequence[str]
    conversations: Sequence[str]
    trusted: Sequence[str]


def asked(
    path: str, fields: HeaderFields, names: HeaderNames, length: int | None = None
) -> tuple[Head, TrustedHeaders]:
    """Returns the head of a POST to a path, and the values of the trusted headers.

    length: the body's, in bytes; None if it is not looked at.
    """
    head = Head(
        "POST",
        path_of(path),
        length,
        None if names.policy is None else next(iter(_values(fields, names.policy)), None),
        session=_first_of(fields, names.sessions),
        conversation=_first_of(fields, names.conversations),
    )
    trusted = {
        name: [one.encode(errors="surrogateescape") for one in _values(fields, name) if one]
        for name in names.trusted
    }
    return head, trusted


def _values(fields: HeaderFields, name: str) -> Iterable[str]:
    return (value for key, value in fields if key.lower() == name)


def _first_of(fields: HeaderFields, names: Sequence[str]) -> str:
    """Returns the value of the first of these headers that has one, "" if none does."""
    first_values = (next(iter(_values(fields, name)), "") for name in names)
    return next(filter(None, first_values), "")
