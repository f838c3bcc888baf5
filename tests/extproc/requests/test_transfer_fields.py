import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.requests.transfer_fields import (
    MAX_EDITED_BYTES,
    Transfer,
    edited,
    may_hide,
    may_split,
    pulled,
    transfer,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = b'{ "model": "m",\n "messages": [{"role": "user", "content": "a\\u00e4"}], "n": 1 }\n'
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
NAMES = st.sampled_from(["bootstrap_room", "bootstrap_host", "kv_transfer_params", "model", "n"])


def members(part: bytes) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(b"{" + part + b"}")
    return read


def sent(body: bytes, fields: Transfer) -> tuple[dict[str, Any], dict[str, Any]]:
    """What both workers read, as Envoy's filter makes the second body of the first."""
    change = edited(body, fields)
    assert change is not None
    decode = json.loads(change.body)
    if not change.tail:
        return decode, decode
    cut, _, tail = change.tail.partition(":")
    return decode, json.loads(change.body[: len(change.body) - int(cut)] + tail.encode())


def test_both_of_sglangs_workers_read_the_same_room() -> None:
    fields = transfer("sglang", "10.0.0.1:8000", 8998, CHAT, [77])
    decode, prefill = sent(BODY, fields)
    assert decode == prefill == json.loads(BODY) | {
        "bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 77,
    }  # fmt: skip


def test_each_of_sglangs_prompts_has_a_room() -> None:
    fields = members(transfer("sglang", "[::1]:8000", 8998, COMPLETIONS, [7, 8]).decode)
    assert fields == {
        "bootstrap_host": ["::1", "::1"],
        "bootstrap_port": [8998, 8998],
        "bootstrap_room": [7, 8],
    }


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_vllms_prefill_worker_is_asked_for_one_token(path: str) -> None:
    decode, prefill = sent(BODY, transfer("offloading", "10.0.0.1:8000", 7777, path, [255]))
    number = f"{255:016x}"
    assert decode == json.loads(BODY) | {
        "kv_transfer_params": {
            "remote_prefiller": {
                "kv_request_id": number, "remote_host": "10.0.0.1", "remote_port": 7777,
            },
        },
    }  # fmt: skip
    assert prefill["kv_transfer_params"] == {"remote_decoder": {"kv_request_id": number}}
    assert (prefill["max_tokens"], prefill["stream"], prefill["stream_options"]) == (1, False, None)
    assert ("max_completion_tokens" in prefill) is (path == CHAT)
    assert prefill["messages"] == decode["messages"]


def test_mooncakes_workers_name_the_engine_and_its_bootstrap_server() -> None:
    fields = transfer("mooncake", "[::1]:8000", 8998, COMPLETIONS, [1])
    here = members(fields.decode)["kv_transfer_params"]
    there = members(fields.prefill)["kv_transfer_params"]
    assert here["remote_bootstrap_addr"] == "http://[::1]:8998"
    assert here["remote_engine_id"] == "[::1]:8000"
    assert (here["do_remote_prefill"], there["do_remote_decode"]) == (True, True)
    assert here["transfer_id"] == there["transfer_id"]


FIELDS = transfer("sglang", "10.0.0.1:8000", 8998, CHAT, [77])


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=5), st.sampled_from(["", " ", "\n\t"]))
def test_all_else_stays_as_it_is_byte_for_byte(members: dict[str, Any], space: str) -> None:
    body = (json.dumps(members) + space).encode()
    change = edited(body, FIELDS)
    assert change is not None
    before = body.rstrip()[:-1]
    assert change.body.startswith(before)
    assert change.body.removeprefix(before).lstrip(b",") == FIELDS.decode + b"}"


@given(st.lists(st.tuples(NAMES, VALUES), max_size=6), st.booleans())
def test_no_field_of_a_clients_is_left_whatever_is_written_twice(
    pairs: list[tuple[str, Any]],
    splits: bool,  # noqa: FBT001
) -> None:
    written = ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in pairs)
    change = edited(f"{{{written}}}".encode(), FIELDS if splits else None)
    assert change is not None
    ours = members(FIELDS.decode) if splits else {}
    kept = {name: value for name, value in pairs if name in ("model", "n")}
    assert json.loads(change.body) == kept | ours


def test_a_name_that_is_written_with_escapes_is_taken_out_too() -> None:
    change = edited(b'{"bootstrap\\u005froom": 7, "n": 1e400}', None)
    assert change is not None
    assert change.body == b'{"n":1e400}'


def test_a_body_without_fields_is_the_same_object() -> None:
    change = edited(BODY, None)
    assert change is not None
    assert change.body is BODY


@pytest.mark.parametrize("body", [b"", b"[]", b'{"a": NaN}', b"\xff", b"[" * 100_000, b"{}x"])
def test_what_is_no_object_is_not_changed(body: bytes) -> None:
    assert edited(body, FIELDS) is None


def test_what_pythons_json_would_read_may_hide_fields() -> None:
    assert may_hide(b'{"x": NaN, "kv_transfer_params": {}}')
    assert may_hide('{"bootstrap_room": 7}'.encode("utf-16"))
    assert may_hide(b'{"x": NaN, "bootstrap\\u005froom": 7}')
    assert not may_hide(b'{"model": "m", "messages": [')


def test_a_body_can_be_split_where_engines_read_the_fields() -> None:
    assert may_split("sglang", "/generate", b"{}")
    assert not may_split("offloading", "/generate", b"{}")
    assert not may_split("sglang", CHAT, None)
    assert not may_split("sglang", CHAT, b" " * (MAX_EDITED_BYTES + 1))
    assert not may_split("sglang", "/v1/embeddings", b"{}")


def test_a_body_names_whom_to_pull_from_in_the_place_of_whom_the_client_names() -> None:
    own = b'{"model": "m", "kv_transfer_params": {"remote_kv_source": {"remote_host": "evil"}}}'
    made = edited(own, pulled("[fd00::1]:8000", 5710, 10))
    assert made is not None
    place = {"kv_request_id": f"{10:016x}", "remote_host": "fd00::1", "remote_port": 5710}
    assert json.loads(made.body) == {
        "model": "m",
        "kv_transfer_params": {"remote_kv_source": place},
    }
    assert made.tail == ""
