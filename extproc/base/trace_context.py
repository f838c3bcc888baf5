"""W3C's Trace Context, version 1: the header `traceparent`."""

import re
from typing import NamedTuple

# Trace Context, section 3.2.2: lower-case hexadecimal digits; later versions may append fields,
# which are ignored.
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class ParentSpan(NamedTuple):
    """The span that a request comes from.

    is_sampled: whether its sender may have recorded it.
    """

    trace_id: int
    span_id: int
    is_sampled: bool


def parse(text: str) -> ParentSpan | None:
    """Returns the span that a header names; None if the header is missing or invalid (4.3)."""
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    version, trace, span, flags, rest = found.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    is_known_form = version != "ff" and (version != "00" or rest is None)
    if not (is_known_form and trace_id and span_id):
        return None
    return ParentSpan(trace_id, span_id, bool(int(flags, 16) & 1))


def trace_id_of(text: str) -> str:
    """Returns the id of the trace that a header names; "" if it names none."""
    parent = parse(text)
    return "" if parent is None else f"{parent.trace_id:032x}"
