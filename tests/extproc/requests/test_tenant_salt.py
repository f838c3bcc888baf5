"""The salts that keep tenants apart, and how a body gets them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.requests.tenant_salt import FIELD, SaltMaker, salting_of, with_salt, written_salt

MAKER = SaltMaker(b"s" * 16)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([FIELD, "model", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from([FIELD, "model", "prompt", "ü"]), VALUES, max_size=4)
NAMES = st.none() | st.binary(max_size=6)


def salted(body: bytes, tenant: bytes | None = b"a") -> bytes:
    said = salting_of(body)
    assert said is not None
    written = with_salt(body, said, MAKER.salt(tenant, said.own))
    assert written is not None
    return written


@given(BODIES, st.sampled_from([None, 1]))
def test_salted_body_differs_only_in_its_salt(body: dict[str, Any], indent: int | None) -> None:
    written = salted(json.dumps(body, indent=indent).encode())
    found = json.loads(written)
    assert found.pop(FIELD) == written_salt(written)
    assert found == {name: value for name, value in body.items() if name != FIELD}


@given(BODIES, st.lists(VALUES, max_size=3))
def test_salted_body_has_one_salt_whatever_the_client_wrote(
    body: dict[str, Any], salts: list[Any]
) -> None:
    own = b"".join(b'"cache_salt": %b, ' % json.dumps(one).encode() for one in salts)
    written = salted(b"{" + own + json.dumps({"a": 1, **body}).encode()[1:])
    pairs = json.loads(written, object_pairs_hook=list)
    assert [name for name, _ in pairs].count(FIELD) == 1
    assert pairs[-1] == (FIELD, written_salt(written))


@given(NAMES, NAMES, NAMES, NAMES)
def test_salts_are_equal_only_for_equal_tenants_and_equal_salts_of_clients(
    one: bytes | None, its: bytes | None, other: bytes | None, others: bytes | None
) -> None:
    are_same = (one, its or b"") == (other, others or b"")
    assert (MAKER.salt(one, its) == MAKER.salt(other, others)) is are_same


@given(st.binary(min_size=16, max_size=20), st.binary(max_size=300))
def test_salt_is_one_that_vllm_accepts(secret: bytes, tenant: bytes) -> None:
    salt = SaltMaker(secret).salt(tenant, None)
    assert 0 < len(salt) <= 128
    assert not set(salt) & set("@/\\\0")


def test_salt_depends_on_the_secret() -> None:
    assert MAKER.salt(b"a", None) != SaltMaker(b"t" * 16).salt(b"a", None)


def test_salt_of_a_client_divides_its_tenant_and_null_is_none() -> None:
    plain, null, own = (
        written_salt(salted(body))
        for body in (b'{"a":1}', b'{"cache_salt":null}', b'{"cache_salt":"x"}')
    )
    assert plain == null != own


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"a":1', b'"cache_salt"', '{"a":1}'.encode("utf-16"), b"{} {}"]
)
def test_body_that_is_no_object_is_not_salted(body: bytes) -> None:
    assert salting_of(body) is None


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"model": "m"}', "m"),
        (rb'{"\u006dodel": "\u006d"}', "m"),
        (b'{"model": "m", "model": "n"}', "n"),
        (b'{"model": 1}', "1"),
        (b'{"model": "\xff"}', '"\ufffd"'),
        (b'{"a": {"model": "m"}}', None),
    ],
)
def test_model_is_the_last_that_the_outermost_object_names(body: bytes, model: str | None) -> None:
    said = salting_of(body)
    assert said is not None
    assert said.model == model


@pytest.mark.parametrize(
    "body",
    [
        b'{"cache_salt":"x"}',
        b'{"a":{"cache_salt":"%b"}}' % (b"0" * 32),
        b'{"cache_salt":"%b","b":1}' % (b"0" * 32),
        b"",
    ],
)
def test_written_salt_is_read_only_from_the_end_of_the_outermost_object(body: bytes) -> None:
    assert written_salt(body) is None


def test_salt_is_not_added_to_what_is_no_object_any_more() -> None:
    said = salting_of(b'{"a":1}')
    assert said is not None
    assert with_salt(b"[]", said, "x") is None
