"""A client's own fields that only the router may write are cut out, in any spelling."""

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.base.errors import UnclearError
from extproc.requests.draft import MAX_WIDE_BYTES, Unclear
from extproc.requests.edits import Duties, drafted, must_refuse
from extproc.requests.reserved_fields import NAMES
from tests.kvstate.test_members import SPACES

NAMED = st.sampled_from(sorted(name.decode() for name in NAMES))
OTHERS = st.sampled_from(
    ["model", "n", "bootstrap", "kv_transfer_param", "Bootstrap_room", "ä", "kv_cache_report_mode"]
)
HOLDERS = st.sampled_from(["vllm_xargs", "sampling_params", "extra_args"])
VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(max_size=5) | NAMED,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(NAMED | OTHERS | HOLDERS, inner, max_size=3)
        | st.dictionaries(HOLDERS, st.dictionaries(NAMED | OTHERS, inner, max_size=3), max_size=2)
    ),
    max_leaves=8,
)
SPELLINGS = st.lists(st.sampled_from(["{}", "\\u{:04x}", "\\u{:04X}"]), min_size=1, max_size=5)


TRANSFERS = Duties(transfers=True)


def without_reserved(body: bytes) -> bytes | None:
    """A body as an engine gets it if only these fields are taken out, None if it is refused."""
    try:
        return drafted(body, "/v1/completions", TRANSFERS).written()
    except UnclearError as error:
        return None if must_refuse(Unclear(error.reason), body, TRANSFERS) else body


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, bool]:
    """An object whose names occur in any spelling, and whether a decoder of JSON reads it, too."""
    parts, is_json = [], True
    for name in draw(st.lists(NAMED | OTHERS | HOLDERS, max_size=6)):
        ways = draw(SPELLINGS)
        spelled = "".join(
            letter if way == "{}" else way.format(ord(letter))
            for letter, way in zip(name, ways * len(name), strict=False)
        )
        value = draw(VALUES | st.just(float("nan")))
        is_json &= not (isinstance(value, float) and math.isnan(value))
        space, text = draw(SPACES), json.dumps(value, ensure_ascii=draw(st.booleans()))
        parts.append(f'{space}"{spelled}"{space}:{space}{text}{space}')
    return f"{{{','.join(parts)}}}{draw(SPACES)}".encode(), is_json


def kept(members: dict[str, Any]) -> dict[str, Any]:
    """What an engine may be told: its own arguments are in two places."""
    left = {name: value for name, value in members.items() if name.encode() not in NAMES}
    sampling = left.get("sampling_params")
    holders = [(left, "vllm_xargs")]
    if isinstance(sampling, dict):
        left["sampling_params"] = sampling = dict(sampling)
        holders.append((sampling, "extra_args"))
    for holder, name in holders:
        arguments = holder.get(name)
        if isinstance(arguments, dict):
            holder[name] = {
                key: value
                for key, value in arguments.items()
                if key not in ("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode")
            }
    return left


def read(body: bytes) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(body, parse_constant=str)
    return decoded


@given(bodies())
def test_without_reserved_equals_removal_from_the_decoded_object(
    made: tuple[bytes, bool],
) -> None:
    body, is_json = made
    cut = without_reserved(body)
    assert cut is not None
    assert read(cut) == kept(read(body))
    if is_json:
        assert msgspec.json.decode(cut) == kept(msgspec.json.decode(body))
    assert without_reserved(cut) is cut


@given(st.lists(st.sampled_from([b"{", b"}", b'"', b",", b":", b"1", b"n", b"\\u006e"])), bodies())
@example([b"\xef\xbb\xbf"], (b'{"bootstrap_room": 1}', True))
def test_without_reserved_leaves_no_reserved_field_to_a_decoder(
    around: list[bytes], made: tuple[bytes, bool]
) -> None:
    body = b"".join([*around, made[0]])
    cut = without_reserved(body)
    try:
        decoded = read(b"" if cut is None else cut)
    except ValueError:
        return
    assert decoded == kept(read(body))


@given(bodies(), st.sampled_from(["utf-16", "utf-16-be", "utf-16-le", "utf-32", "utf-32-le"]))
def test_without_reserved_finds_fields_in_any_encoding(
    made: tuple[bytes, bool], encoding: str
) -> None:
    body = made[0].decode().encode(encoding)
    cut = without_reserved(body)
    assert cut is not None
    assert read(cut) == kept(read(body))


@pytest.mark.parametrize(
    "body",
    [
        b'{ "model": "m",\n "messages": [{"role": "user", "content": "a\\u00e4"}], "n": 1 }\n',
        b'{"prompt": "what is bootstrap_room, and \\u006e?", "n": NaN}',
        b'{"a": {"kv_transfer_params": 1}}',
        b'{"sampling_params": {"extra_args": {"a": 1}}, "vllm_xargs": "kv_transfer_params"}',
        b'{"model": "m", "messages": [',
    ],
)
def test_without_reserved_returns_a_clean_body_itself(body: bytes) -> None:
    assert without_reserved(body) is body


def test_fields_are_cut_out_of_a_long_body() -> None:
    text = b'"x": "%b"' % (b"a" * MAX_WIDE_BYTES)
    assert without_reserved(b'{"kv_transfer_params": 1,%b}' % text) == b"{%b}" % text
    near = b'{%b, "y": ["kv_transfer_params"]}' % text  # a text, which the scan tells from a name
    assert without_reserved(near) is near


@pytest.mark.parametrize(
    ("body", "cut"),
    [
        (
            b'{"sampling_params": {"n": 1, "extra_args": {"kv_transfer_params": {}}}, "x": 1}',
            b'{"sampling_params": {"n": 1, "extra_args": {}}, "x": 1}',
        ),
        (
            b'{"ec_transfer_params": {"h": 1}, "vllm_xargs": {"ec_transfer_params": {}}, "n": 1}',
            b'{ "vllm_xargs": {}, "n": 1}',
        ),
        (
            b'{"vllm_xargs": {"a": 1, "kv_cache_report_mode": "full"}, "bootstrap_room": 1}',
            b'{"vllm_xargs": {"a": 1}}',
        ),
        (
            b'{"bootstrap_room": 1, "vllm\\u005fxargs": {"kv\\u005ftransfer_params": 1, "a": 1 } }',
            b'{ "vllm\\u005fxargs": { "a": 1 } }',
        ),
    ],
)
def test_fields_within_an_engines_own_arguments_are_cut_out(body: bytes, cut: bytes) -> None:
    assert without_reserved(body) == cut


def test_arguments_with_too_many_such_fields_are_refused() -> None:
    inner = b",".join([b'"kv_transfer_params":1'] * 65)
    assert without_reserved(b'{"vllm_xargs": {%b}}' % inner) is None


def test_arguments_that_are_no_object_are_refused_if_they_may_name_a_field() -> None:
    assert without_reserved(b'{"vllm_xargs": {"kv_transfer_params"}}') is None
    harmless = b'{"vllm_xargs": {1}}'
    assert without_reserved(harmless) is harmless


def test_without_reserved_refuses_a_body_with_too_many_reserved_fields() -> None:
    assert without_reserved(b"{%b}" % b",".join([b'"bootstrap_room":1'] * 65)) is None


def test_large_bodies_of_another_encoding_are_refused() -> None:
    assert without_reserved(b"\xff\xfe" + bytes(MAX_WIDE_BYTES)) is None
