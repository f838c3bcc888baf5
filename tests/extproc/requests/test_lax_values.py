"""Values of JSON as pydantic's lax mode reads them."""

import math

import pytest

from extproc.base.errors import RequestError
from extproc.requests.lax_values import flag, integer, text


@pytest.mark.parametrize(
    ("value", "read"),
    [(None, None), (True, True), (0, False), (1.0, True), ("On", True), ("n", False)],
)
def test_flag_is_a_boolean_a_number_or_a_word(value: object, read: bool | None) -> None:
    assert flag(value) is read


@pytest.mark.parametrize(("value", "read"), [(None, None), (3, 3), (3.0, 3), ("-3", -3), (True, 1)])
def test_integer_is_a_number_or_its_digits(value: object, read: int | None) -> None:
    assert integer(value) == read


@pytest.mark.parametrize("value", [2, "maybe", [], math.nan])
def test_flag_refuses_what_the_engine_refuses(value: object) -> None:
    with pytest.raises(RequestError, match="bad_request"):
        flag(value)


@pytest.mark.parametrize("value", [1.5, math.inf, math.nan, "1.0", "x", {}])
def test_integer_refuses_what_the_engine_refuses(value: object) -> None:
    with pytest.raises(RequestError, match="bad_request"):
        integer(value)


def test_text_is_taken_as_it_is() -> None:
    assert (text("a"), text(None)) == ("a", None)
    with pytest.raises(RequestError, match="bad_request"):
        text(1)
