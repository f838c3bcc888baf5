import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.observing.course import Parent, parse

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(("flags", "is_sampled"), [("01", True), ("00", False), ("ff", True)])
def test_a_header_names_a_span_and_whether_it_is_recorded(flags: str, is_sampled: bool) -> None:  # noqa: FBT001
    assert parse(f"00-{TRACE}-{SPAN}-{flags}") == Parent(int(TRACE, 16), int(SPAN, 16), is_sampled)


def test_a_later_version_may_go_on() -> None:
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
def test_what_is_no_header_joins_no_trace(text: str) -> None:
    assert parse(text) is None


@given(st.text())
def test_any_text_is_a_parent_or_none(text: str) -> None:
    assert parse(text) is None
