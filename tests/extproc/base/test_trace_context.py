import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.trace_context import ParentSpan, parse, trace_id_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(("flags", "is_sampled"), [("01", True), ("00", False), ("ff", True)])
def test_parse_reads_span_and_sampled_flag(flags: str, is_sampled: bool) -> None:
    assert parse(f"00-{TRACE}-{SPAN}-{flags}") == ParentSpan(
        int(TRACE, 16), int(SPAN, 16), is_sampled
    )


def test_parse_accepts_a_longer_header_of_a_later_version() -> None:
    assert parse(f"01-{TRACE}-{SPAN}-01-and-more") is not None
    assert parse(f"01-{TRACE}-{SPAN}-01.and-more") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f" 00-{TRACE}-{SPAN}-01",
    ],
)
def test_parse_refuses_malformed_headers(text: str) -> None:
    assert parse(text) is None


@given(st.text())
def test_parse_returns_a_parent_or_none_for_any_text(text: str) -> None:
    assert parse(text) is None


def test_trace_id_of_a_header_is_its_own_or_none() -> None:
    assert trace_id_of(f"00-{TRACE}-{SPAN}-01") == TRACE
    assert trace_id_of("") == trace_id_of(TRACE) == ""
