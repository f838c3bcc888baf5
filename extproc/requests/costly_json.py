"""JSON that is short to send and costly to decode: told by its marks, before it is decoded.

The decoder stops every thread until it has made all objects of a body. To count brackets, quotes
and commas costs next to nothing. Those in texts do not count; which these are, is looked at only
where there are too many otherwise.
"""

from extproc.errors import RequestError
from kvstate.scan import marks, marks_outside

# What a body may hold, since the decoder stops every thread until it has made all of it. Objects
# and lists: eight for each of as many messages as are keyed. Texts, names of fields among them: a
# dozen and a half for each. Commas: of conversations, and where prompts may be token ids.
MAX_PARTS = 65_536
MAX_TEXTS = 131_072
MAX_COMMAS = 131_072
MAX_ID_COMMAS = 1_048_576

# A body of so many bytes is parsed within a millisecond or two, whatever it holds; a longer one, up
# to so many, if there are only so many brackets in it.
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
    # what stands in texts counts here, which are mostly the whole of a body; so it may be too much
    if _is_within(marks(body), most):
        return
    if not _is_within(marks_outside(body, 2 * MAX_TEXTS), most):
        raise RequestError("too_many_parts")


def _is_within(found: tuple[int, int, int], most: tuple[int, int, int]) -> bool:
    return all(count <= limit for count, limit in zip(found, most, strict=True))
