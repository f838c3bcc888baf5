"""The one rule: what a client may not say is taken out of its body, or the request is refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import UnclearError
from extproc.requests.draft import MAX_WIDE_BYTES, Draft, Unclear, read
from extproc.requests.edits import Duties, drafted, must_refuse

ALL = Duties(tenants=True, classes=True, transfers=True)
EVERY = [Duties(*(bool(n & bit) for bit in (1, 2, 4))) for n in range(8)]
NAMES = (b"a", b"b")
OBJECTS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 9)), max_size=6)
ENCODINGS = st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "utf-32-be"])


def pairs_of(body: bytes) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = json.loads(body, object_pairs_hook=list)
    return found


def written(pairs: list[tuple[str, Any]], space: str) -> str:
    members = [f'{space}"{name}"{space}:{value}{space}' for name, value in pairs]
    return f"{space}{{{','.join(members) or space}}}{space}"


@given(OBJECTS, st.sampled_from(["", " ", "\r\n\t"]), ENCODINGS, st.booleans(), st.data())
def test_changed_body_has_all_members_but_those_cut_and_those_added(
    pairs: list[tuple[str, Any]], space: str, encoding: str, adds: bool, data: st.DataObject
) -> None:
    body = written(pairs, space).encode(encoding)
    draft = read(body, NAMES)
    cut = [member for member in draft.each if data.draw(st.booleans())]
    for member in data.draw(st.permutations(cut)):
        draft.cut(member)
    kept = [pair for pair in pairs if pair[0] not in "ab"]
    left = [one for one in draft.each if one not in cut]
    if adds:
        draft.add(b'"x":1')
        draft.add(b'"y":2')
    new = draft.written()
    if not cut and not adds:
        assert new is body
        return
    found = pairs_of(new)
    assert found[len(found) - 2 * adds :] == [("x", 1), ("y", 2)][: 2 * adds]
    found = found[: len(found) - 2 * adds]
    assert [pair for pair in found if pair[0] not in "ab"] == kept
    assert [name.encode() for name, _ in found if name in "ab"] == [one.name for one in left]


@given(st.binary(max_size=40) | OBJECTS.map(lambda pairs: written(pairs, " ").encode()[:-2]))
def test_what_is_certainly_no_object_is_none_for_pythons_json(body: bytes) -> None:
    try:
        read(body, NAMES)
    except UnclearError as error:
        if error.reason is not Unclear.NO_OBJECT:
            return
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            return
        assert not isinstance(found, dict)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"[]", Unclear.NO_OBJECT),
        (b"\x1f\x8b\x08", Unclear.COMPRESSED),
        (b"\x28\xb5\x2f\xfd\x04", Unclear.COMPRESSED),
        (b"\x5f\x2a\x4d\x18\x04", Unclear.COMPRESSED),
        (b"\xff\xfe{", Unclear.NO_OBJECT),
        (b"{%b}" % b",".join([b'"priority":1'] * 65), Unclear.TOO_MANY),
        (b"\xff\xfe" + bytes(MAX_WIDE_BYTES), Unclear.TOO_LARGE),
    ],
)
def test_reason_says_why_a_body_is_not_read(body: bytes, why: Unclear) -> None:
    with pytest.raises(UnclearError) as caught:
        drafted(body, "/v1/completions", ALL)
    assert caught.value.reason is why


@pytest.mark.parametrize("duties", EVERY, ids=str)
@pytest.mark.parametrize("why", Unclear)
@pytest.mark.parametrize("body", [None, b"harmless", b"kv_transfer_params"])
def test_each_feature_refuses_what_it_cannot_be_certain_of(
    duties: Duties, why: Unclear, body: bytes | None
) -> None:
    may_transfer = body != b"harmless" or why is Unclear.COMPRESSED
    may_prefer = why is not Unclear.NO_OBJECT
    expected = (
        duties.tenants or (duties.transfers and may_transfer) or (duties.classes and may_prefer)
    )
    assert must_refuse(why, body, duties) is expected


def test_value_that_is_too_long_is_not_given_out() -> None:
    draft = read(b'{"a": "123"}', NAMES)
    (member,) = draft.each
    assert draft.value(member, 5) == b'"123"'
    assert draft.value(member, 4) is None
    assert bytes(draft.view(member)) == b'"123"'


def inside(draft: Draft) -> list[bytes]:
    return [one.name for one in draft.inside(draft.each[0], NAMES)]


def test_members_of_an_object_inside_are_found_and_of_other_values_there_are_none() -> None:
    assert inside(read(b'{"a": {"b": 1, "c": 2}}', NAMES)) == [b"b"]
    assert inside(read(b'{"a": ["b"]}', NAMES)) == []
