"""The classes of requests, and a client's own priority, which counts for nothing."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import UnclearError
from extproc.config.sections import Classes, ClassSettings
from extproc.requests.edits import Duties, drafted
from extproc.requests.request_class import NAME, ClassTable

FIELD = NAME.decode()

TABLE = ClassTable(
    Classes(
        "X-Class",
        "people",
        (ClassSettings("batch", 10, 4), ClassSettings("people", -5), ClassSettings("free", 10)),
    )
)


@pytest.mark.parametrize(
    ("named", "name"),
    [
        ([], "people"),
        ([b"batch"], "batch"),
        ([b"batch", b"batch"], "batch"),
        ([b"batch", b"people"], "people"),
        ([b"other"], "people"),
        ([b"\xff"], "people"),
    ],
)
def test_class_is_the_one_that_is_named_or_the_default(named: list[bytes], name: str) -> None:
    assert TABLE.find(named).name == name


def test_levels_follow_the_priorities() -> None:
    levels = {name: TABLE.find([name.encode()]).level for name in TABLE.names}
    assert levels == {"people": 0, "batch": 1, "free": 1}
    assert TABLE.header == "x-class"


@given(
    st.dictionaries(st.sampled_from([FIELD, "a", "model"]), st.integers() | st.text(max_size=4)),
    st.lists(st.integers(), max_size=2),
)
def test_priority_is_taken_out_and_all_else_stays(
    body: dict[str, Any], priorities: list[int]
) -> None:
    own = "".join(f'"priority": {one}, ' for one in priorities)
    text = "{" + own + json.dumps({**body, "b": 1})[1:]
    found = json.loads(without_priority(text.encode()), object_pairs_hook=list)
    assert found == [(name, one) for name, one in [*body.items(), ("b", 1)] if name != FIELD]


def without_priority(body: bytes) -> bytes:
    return drafted(body, "/v1/completions", Duties(classes=True)).written()


def test_more_priorities_than_are_looked_at_are_not_passed() -> None:
    with pytest.raises(UnclearError, match="too_many_members"):
        without_priority(b'{%b"a":1}' % (b'"priority":-1000,' * 65))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_priority_is_taken_out_in_any_encoding(encoding: str) -> None:
    body = json.dumps({"priority": -1000, "a": 1}).encode(encoding)
    assert json.loads(without_priority(body)) == {"a": 1}


@pytest.mark.parametrize("body", [b'{"a": {"priority": 1}}', b"{}"])
def test_body_without_a_priority_of_its_own_is_the_same_object(body: bytes) -> None:
    assert without_priority(body) is body
