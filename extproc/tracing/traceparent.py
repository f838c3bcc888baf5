"""The header that joins a request to a trace: W3C Trace Context, level 1, section 3.2."""

import re
from typing import NamedTuple

NAME = "traceparent"

# Section 3.2.2: lower-case hexadecimal digits; of a later version, what follows is not read.
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Parent(NamedTuple):
    """The span that a request comes from.

    is_sampled: whoever sent it may record it.
    """

    trace_id: int
    span_id: int
    is_sampled: bool


def parse(text: str) -> Parent | None:
    """The span that a header names; None if it is none, as if there were no header (4.3)."""
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    version, trace, span, flags, rest = found.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    is_known_form = version != "ff" and (version != "00" or rest is None)
    if not (is_known_form and trace_id and span_id):
        return None
    return Parent(trace_id, span_id, bool(int(flags, 16) & 1))
