"""The ids that tell whose a kept response is."""

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import UnclearError
from extproc.requests.draft import read
from extproc.requests.response_ids import (
    FIELD,
    RESPONSES_PATH,
    ResponseIds,
    names_on,
    responses_in,
)

IDS = ResponseIds(b"s" * 16, Random(0).randbytes)
TENANTS = st.none() | st.binary(max_size=6)
VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
BODIES = st.dictionaries(st.sampled_from([FIELD, "model", "input", "ü"]), VALUES, max_size=4)


def name(body: bytes, tenant: bytes | None) -> bytes | None:
    """A body with an id of its tenant, None if it continues a response of somebody else."""
    draft = read(body, names_on(RESPONSES_PATH))
    return draft.written() if IDS.name(draft, tenant) else None


def continuing(previous: object, tenant: bytes | None = b"a") -> bytes | None:
    return name(json.dumps({"previous_response_id": previous}).encode(), tenant)


@given(TENANTS, TENANTS)
def test_id_is_own_only_for_the_tenant_for_which_it_was_made(
    one: bytes | None, other: bytes | None
) -> None:
    made = IDS.new(one)
    assert IDS.is_own(other, made) is (one == other)
    assert (continuing(made, other) is not None) is (one == other)
    assert not ResponseIds(b"t" * 16, Random(0).randbytes).is_own(one, made)


@given(TENANTS, st.data())
def test_changed_id_is_nobodys(tenant: bytes | None, data: st.DataObject) -> None:
    made = IDS.new(tenant)
    at = data.draw(st.integers(0, len(made) - 1))
    letter = data.draw(st.characters(codec="utf-8").filter(lambda one: one != made[at]))
    for changed in (made[:at] + letter + made[at + 1 :], made + letter, made[:at]):
        assert not IDS.is_own(tenant, changed)


@given(BODIES, st.lists(VALUES, max_size=3))
def test_named_body_differs_only_in_its_one_id(body: dict[str, Any], written: list[Any]) -> None:
    own = b"".join(b'"request_id": %b, ' % json.dumps(one).encode() for one in written)
    named = name(b"{" + own + json.dumps({"a": 1, **body}).encode()[1:], b"a")
    assert named is not None
    pairs = json.loads(named, object_pairs_hook=list)
    assert [each for each, _ in pairs].count(FIELD) == 1
    assert IDS.is_own(b"a", pairs[-1][1])
    kept = {each: value for each, value in body.items() if each != FIELD}
    assert dict(pairs[:-1]) == {"a": 1, **kept}


@pytest.mark.parametrize("previous", ["", "resp_1", 7, ["resp_1"], {"a": "resp_1"}, True])
def test_previous_response_that_is_no_id_of_ours_is_refused(previous: object) -> None:
    assert continuing(previous) is None


def test_null_continues_nothing_and_what_is_no_id_is_nobodys() -> None:
    assert continuing(None) is not None
    assert continuing("x" * 2_000) is None
    assert name(b'{"previous_response_id":"\xff"}', b"a") is None


@pytest.mark.parametrize("own", [b'"request_id":"resp_chosen",', b'"previous_response_id":1,'])
def test_body_with_more_ids_than_are_looked_at_is_not_passed(own: bytes) -> None:
    with pytest.raises(UnclearError, match="too_many_members"):
        name(b'{%b"model":"m"}' % (own * 65), b"a")


def test_ids_are_looked_for_only_where_they_are_read() -> None:
    assert names_on("/v1/completions") == ()


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/v1/responses", []),
        ("/v1/responses/", []),
        ("/v1/responses/resp_1", ["resp_1"]),
        ("/v1/responses/1/cancel", ["1"]),
        ("/x/v1/responses/resp_1", ["resp_1"]),
        ("/v1/responses/1/responses/resp_2", ["1", "resp_2"]),
        ("/x/v1/responses/1", []),
        ("/v1/chat/completions", []),
    ],
)
def test_responses_in_a_path(path: str, named: list[str]) -> None:
    assert responses_in(path) == named
