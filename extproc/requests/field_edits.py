"""Changes of a JSON object's members in place: all other bytes stay."""

from collections.abc import Sequence
from typing import NamedTuple


class FieldEdit(NamedTuple):
    """A change of a part of an object: new replaces it, None cuts out the member that it is."""

    start: int
    end: int
    new: bytes | None


def apply_edits(text: bytes, edits: Sequence[FieldEdit]) -> bytes:
    """Returns an object with these changes, and without the commas that it needs no more.

    edits: one at least, in order of their places.
    """
    kept, at = [], 0
    for start, end, new in edits:
        kept.append(text[at:start])
        at = end
        if new is not None:
            kept.append(new)
        elif text[end : end + 1] == b",":
            at += 1
    before, behind = b"".join(kept), text[at:]
    is_last_cut = edits[-1].new is None and text[at - 1 : at] != b","
    return (before.removesuffix(b",") if is_last_cut else before) + behind
