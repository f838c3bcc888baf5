import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.requests.added_fields import LONG_BYTES, ExtendedBody, with_fields

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.text(" \t\r\n"), st.integers(0, 9))
def test_with_fields_adds_to_any_object_and_overrides_a_field_of_that_name(
    body: dict[str, object], space: str, value: int
) -> None:
    written = f"{space}{json.dumps(body, indent=value)}{space}".encode()
    added = with_fields(written, {"rank": value})
    assert isinstance(added, bytes)
    assert json.loads(added) == {**body, "rank": value}


@pytest.mark.parametrize("body", [b"", b"[]", b'"x"', b"7", b"{", b"}", b" { "])
def test_with_fields_changes_nothing_but_objects(body: bytes) -> None:
    assert with_fields(body, {"rank": 1}) is None


@pytest.mark.parametrize("begin", ['{"a":"', '{"rank":0,"a":"'])
def test_long_body_gets_fields_without_a_copy(begin: str) -> None:
    body = f'{begin}{"x" * LONG_BYTES}"}} \n'.encode()
    once = with_fields(body, {"rank": 1})
    assert once is not None
    twice = with_fields(once, {"priority": 2})
    assert isinstance(twice, ExtendedBody)
    assert twice.body is body
    written = bytes(twice)
    assert len(twice) == len(written)
    assert json.loads(written) == {**json.loads(body), "rank": 1, "priority": 2}
