"""The members with which engines get the ids of a prompt."""

import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.engine import RUST, SGLANG, TRTLLM, VLLM, Engine, Release
from extproc.features.handing.id_fields import FIELDS, PATHS, field_of, member_of
from extproc.requests.added_fields import with_members
from extproc.requests.request import CHAT_PATH
from kvstate.overlap import FIRST_WIDE_TOKEN

IDS = st.lists(st.integers(0, FIRST_WIDE_TOKEN - 1), max_size=50)


@given(IDS)
def test_ids_are_read_as_they_are_written(ids: list[int]) -> None:
    for field in (one for fields in FIELDS.values() for one in fields.values()):
        body = with_members(b'{"model":"m","prompt":"a text"}', member_of(field, array("I", ids)))
        assert body is not None
        read = json.loads(bytes(body))
        of_chat = read.get("kv_transfer_params", {}).get("prompt_token_ids", read.get("input_ids"))
        assert (read["prompt"] if of_chat is None else of_chat) == ids


def test_field_is_that_of_the_engine() -> None:
    vllm, sglang = (Engine(name, Release(0, 33)) for name in (VLLM, SGLANG))
    for path in PATHS:
        assert field_of(vllm, path) is not None
        assert field_of(vllm._replace(front_end=RUST), path) is None
        assert field_of(None, path) is field_of(Engine(TRTLLM, Release(1, 0)), path) is None
    assert field_of(sglang, "/v1/messages") is None
    (chat,) = (one for one in (field_of(sglang, CHAT_PATH),) if one is not None)
    assert member_of(chat, array("I", [1, 20])) == b'"input_ids":[1,20]'


def test_id_that_stands_for_a_longer_one_is_refused() -> None:
    with pytest.raises(ValueError, match="an id stands for a longer one"):
        member_of(FIELDS[VLLM][CHAT_PATH], array("I", [1, FIRST_WIDE_TOKEN]))
