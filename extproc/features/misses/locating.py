"""Which part of a request stands at a place of its prompt.

Templates write what parts say as it is, one after the other, so each part is found in the prompt's
text behind the one before it. Some write the tools before the system and some behind it; these are
looked for up to the first turn.
"""

from collections.abc import Iterator, Sequence

import msgspec

from extproc.requests.parts import Part, Place

# By so many first characters a text of a part is found.
KEY_CHARACTERS = 48

# After so many parts in a row that are not found, the others are not looked for: they stand behind
# the text that is known, or the template writes them otherwise.
MOST_MISSING = 8


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


def locate(parts: Sequence[Part], text: str, start: int, end: int) -> Spot:
    """Returns which part of a request stands at a place of its prompt.

    text: of the prompt, up to the end of that place at least. start, end: of the place, in
    characters. A part that begins within the place is preferred to one that began before.
    """
    said = list(_in_order([one for one in parts if one.place is not Place.TOOLS], text, 0))
    first_turn = next((one.start for one in said if one.part.place is Place.TURN), len(text))
    tools = [one for one in parts if one.place is Place.TOOLS]
    found = [*said, *_in_order(tools, text[:first_turn], 0)]
    begins = _beginnings(found)
    within = [one for one in begins if start <= one.start < end]
    before = [one for one in begins if one.start <= start]
    spot = min(within, key=_start) if within else max(before, key=_start, default=None)
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


def _in_order(parts: Sequence[Part], text: str, at: int) -> Iterator[_Found]:
    """Yields where the texts of parts stand, each behind the one before it."""
    missing = 0
    for part in parts:
        is_missing = True
        for said in part.texts:
            key = said.strip()[:KEY_CHARACTERS]
            place = text.find(key, at) if key else -1
            if place < 0:
                continue
            is_missing = False
            yield _Found(place, place + len(said.strip()), part)
            at = place + len(key)
        missing = missing + 1 if is_missing else 0
        if missing == MOST_MISSING:
            return
