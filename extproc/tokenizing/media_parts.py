"""Cuts the ids of a prompt at what its template writes for media, which engines replace."""

from array import array
from collections.abc import Sequence

import msgspec

from kvstate.overlap import Tokens


class MediaParts(msgspec.Struct, frozen=True, gc=False):
    """A prompt with media.

    texts: the ids before, between and behind its items. written: what the template writes for each.
    """

    texts: tuple[Tokens, ...]
    written: tuple[Tokens, ...]


def parts_of(ids: Tokens, added: Sequence[Tokens]) -> MediaParts | None:
    """Returns the parts of a prompt, None if what is written for its items is not found.

    added: for each item, the ids of the added tokens that are written for it, at least one.
    """
    tokens = {token for one in added for token in one}
    places = sorted([at for token in tokens for at in _all(ids, token)])
    expected = [token for one in added for token in one]
    if [ids[at] for at in places] != expected:
        return None
    texts, written, end, first = [], [], 0, 0
    for one in added:
        begin, before, end = places[first], end, places[first + len(one) - 1] + 1
        texts.append(ids[before:begin])
        written.append(ids[begin:end])
        first += len(one)
    return MediaParts((*texts, ids[end:]), tuple(written))


def before_added(ids: Tokens, added: Sequence[Tokens]) -> Tokens:
    """Returns the ids before any that may be written for items."""
    tokens = {token for one in added for token in one}
    return ids[: min([at for token in tokens for at in (*_all(ids, token)[:1], len(ids))])]


def _all(ids: Tokens, token: int) -> Sequence[int]:
    """Returns where an id stands."""
    found = array("I")
    at = -1
    while True:
        try:
            at = ids.index(token, at + 1)
        except ValueError:
            return found
        found.append(at)
