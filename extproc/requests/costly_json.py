"""Refuses JSON that is short to send but costly to decode, by counting its marks first.

The decoder blocks every thread until it has made all objects of a body. Counting brackets, quotes
and commas costs almost nothing. Those inside texts are harmless: they are left out if all marks
together are too many.
"""

from extproc.base.errors import RequestError
from kvstate.scan import marks, marks_outside

# Limits of a body's content, since the decoder blocks every thread until it has made all of it.
# Objects and lists: eight for each message of the longest keyed conversation. Texts, including
# names of fields: sixteen for each. Commas: for conversations, and for prompts that may be token
# ids.
MAX_PARTS = 65_536
MAX_TEXTS = 131_072
MAX_COMMAS = 131_072
MAX_ID_COMMAS = 1_048_576

# A body of this many bytes is parsed within a millisecond or two, whatever it contains; a longer
# one, up to the second limit, if it has at most this many brackets.
_SMALL_BYTES = 8_192
INLINE_BYTES = 65_536
_INLINE_PARTS = 1_024


def is_light(body: bytes) -> bool:
    """Returns whether a body is parsed within a millisecond or two, whatever it holds."""
    if len(body) <= _SMALL_BYTES:
        return True
    return len(body) <= INLINE_BYTES and marks(body).brackets <= _INLINE_PARTS


def refuse_costly(body: bytes, max_commas: int = MAX_COMMAS) -> None:
    """Refuses JSON that would make too many objects, before it is decoded.

    Raises:
        RequestError: too_many_parts.
    """
    if len(body) <= MAX_PARTS:
        return
    most = (MAX_PARTS, 2 * MAX_TEXTS, max_commas)
    # this also counts marks inside texts, which are most of a body, so it may count too many
    if _is_within(marks(body), most):
        return
    if not _is_within(marks_outside(body, 2 * MAX_TEXTS), most):
        raise RequestError("too_many_parts")


def _is_within(found: tuple[int, int, int], most: tuple[int, int, int]) -> bool:
    return all(count <= limit for count, limit in zip(found, most, strict=True))
