"""The salts that keep tenants apart, and how a body gets them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import UnclearError
from extproc.requests.draft import Draft, read
from extproc.requests.tenant_salt import (
    FIELD,
    MAX_MODEL_BYTES,
    MAX_OWN_BYTES,
    SaltMaker,
    salting_of,
    write_salt,
    written_salt,
)
from extproc.requests.tenant_salt import (
    NAMES as LOOKED_AT,
)

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


def drafted(body: bytes) -> Draft:
    return read(body, LOOKED_AT)


def salted(body: bytes, tenant: bytes | None = b"a") -> bytes:
    draft = drafted(body)
    write_salt(draft, MAKER.salt(tenant, salting_of(draft).own))
    return draft.written()


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


@pytest.mark.parametrize("body", [b"", b"[]", b'{"a":1', b'"cache_salt"', b"{} {}"])
def test_body_that_is_no_object_is_not_salted(body: bytes) -> None:
    with pytest.raises(UnclearError, match="no_object"):
        salted(body)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32", "utf-32-le"])
def test_body_in_another_encoding_is_written_anew_with_its_salt(encoding: str) -> None:
    body = {"cache_salt": "x", "model": "m", "prompt": "ü"}
    written = salted(json.dumps(body, ensure_ascii=False).encode(encoding))
    found = json.loads(written.decode())
    assert found == {"model": "m", "prompt": "ü", "cache_salt": written_salt(written)}


def test_long_salt_of_a_client_divides_its_tenant_as_a_short_one() -> None:
    salts = [
        written_salt(salted(b'{"cache_salt":"%b"}' % text))
        for text in (b"a" * MAX_OWN_BYTES, b"a" * MAX_OWN_BYTES, b"b" * MAX_OWN_BYTES)
    ]
    assert salts[0] == salts[1] != salts[2]


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"model": "m"}', "m"),
        (rb'{"\u006dodel": "\u006d"}', "m"),
        (b'{"model": "m", "model": "n"}', "n"),
        (b'{"model": 1}', "1"),
        (b'{"model": "\xff"}', '"\ufffd"'),
        (b'{"model": "%b"}' % (b"m" * MAX_MODEL_BYTES), "\0"),
        (b'{"a": {"model": "m"}}', None),
    ],
)
def test_model_is_the_last_that_the_outermost_object_names(body: bytes, model: str | None) -> None:
    assert salting_of(drafted(body)).model == model


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
