"""Which part of a request stands at a place of its prompt.

Templates write what parts say as it is, one after the other, so each part is found in the prompt's
text behind the one before it. Some write the tools before the system and some behind it; these are
looked for up to the first turn, and not in the system, which may speak of them. What templates make
of a tool begins with its name, and goes on up to the next tool.
"""

from collections.abc import Iterator, Sequence

import msgspec

from extproc.requests.parts import Part, Place

# By so many first characters a text of a part is found.
KEY_CHARACTERS = 48

# A shorter text may stand anywhere, as a tool's name does: it is looked for only behind the part
# before it.
LEAST_CHARACTERS = 16

# After so many parts in a row that are not found, the others are not looked for: they stand behind
# the text that is known, or the template writes them otherwise.
MOST_MISSING = 8

# After so many characters that were looked through in vain, nothing more is looked for: about a
# tenth of a second, if they and what is looked for are made to take long (measured).
MOST_IN_VAIN = 1 << 25


class Spot(msgspec.Struct, frozen=True, gc=False):
    """A place in a request.

    part: the one that stands there, or the last one before it; None if none does. is_written:
    whether the client wrote what is there; otherwise its template did.
    """

    part: Part | None
    is_written: bool


class _Found(msgspec.Struct, frozen=True, gc=False):
    """Where a text of a part stands, in characters."""

    start: int
    end: int
    part: Part


class _Search:
    """Looks for texts in that of a prompt, until it has looked in vain for too long."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._left = MOST_IN_VAIN

    def find(self, said: str, start: int, end: int) -> int:
        """Returns where a text stands, -1 if it does not or is no longer looked for."""
        if self._left <= 0:
            return -1
        at = self._text.find(said, start, end)
        if at < 0:
            self._left -= max(0, end - start)
        return at


def locate(parts: Sequence[Part], text: str, start: int, end: int) -> Spot:
    """Returns which part of a request stands at a place of its prompt.

    text: of the prompt, up to the end of that place at least. start, end: of the place, in
    characters. What stands in a text is of its part; else a part that begins within the place is
    preferred to one that began before.
    """
    search = _Search(text)
    others = [one for one in parts if one.place is not Place.TOOLS]
    said = list(_in_order(others, search, len(text)))
    first_turn = next((one.start for one in said if one.part.place is Place.TURN), len(text))
    system = [one for one in said if one.part.place is Place.SYSTEM]
    tools = [one for one in parts if one.place is Place.TOOLS]
    behind = _tools_in(tools, search, system[-1].end if system else 0, first_turn)
    found = [*said, *(behind or _tools_in(tools, search, 0, system[0].start if system else 0))]
    begins = _beginnings(found)
    within = [one for one in begins if start <= one.start < end]
    before = [one for one in begins if one.start <= start]
    inside = [one for one in said if one.start < start < one.end]
    spot = next(iter(inside), None) or (
        min(within, key=_start) if within else max(before, key=_start, default=None)
    )
    is_written = any(one.start < max(end, start + 1) and start < one.end for one in found)
    return Spot(None if spot is None else spot.part, is_written)


def _start(found: _Found) -> int:
    return found.start


def _beginnings(found: Sequence[_Found]) -> list[_Found]:
    """Returns the first text of each part."""
    firsts: dict[int, _Found] = {}
    for one in found:
        firsts.setdefault(id(one.part), one)
    return list(firsts.values())


def _tools_in(tools: Sequence[Part], search: _Search, start: int, end: int) -> list[_Found]:
    """Returns where tools stand within a part of a text."""
    places: list[tuple[int, Part]] = []
    at = start
    for tool in tools:
        name = tool.texts[0] if tool.texts else ""
        place = _place_of(name, search, at, end)
        if place >= 0:
            places.append((place, tool))
            at = place + len(name)
    ends = [place for place, _ in places[1:]]
    return [
        _Found(place, behind, tool)
        for (place, tool), behind in zip(places, [*ends, _end_of(places, end)], strict=False)
    ]


def _place_of(name: str, search: _Search, start: int, end: int) -> int:
    """Returns where a tool of a name begins, -1 if it does not.

    Most templates write names in quotes; other tools' descriptions have these behind backslashes.
    """
    if not name:
        return -1
    quoted = search.find(f'"{name}"', start, end)
    return quoted + 1 if quoted >= 0 else search.find(name, start, end)


def _end_of(places: Sequence[tuple[int, Part]], end: int) -> int:
    """Returns where the last one of some tools ends."""
    if not places:
        return end
    place, tool = places[-1]
    return min(end, place + sum(map(len, tool.texts)))


def _in_order(parts: Sequence[Part], search: _Search, end: int) -> Iterator[_Found]:
    """Yields where the texts of parts stand before an end, each behind the one before it."""
    missing = at = 0
    for part in parts:
        is_missing = True
        for said in part.texts:
            key = said.strip()[:KEY_CHARACTERS]
            is_sure = not missing or len(key) >= LEAST_CHARACTERS
            place = search.find(key, at, end) if key and is_sure else -1
            if place < 0:
                continue
            is_missing = False
            yield _Found(place, place + len(said.strip()), part)
            at = place + len(key)
        missing = missing + 1 if is_missing else 0
        if missing == MOST_MISSING:
            return
