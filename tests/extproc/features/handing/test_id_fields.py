"""The members with which engines get the ids of a prompt."""

import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.features.handing.id_fields import FIELDS, member_of
from extproc.requests.added_fields import with_members
from kvstate.overlap import FIRST_WIDE_TOKEN

IDS = st.lists(st.integers(0, FIRST_WIDE_TOKEN - 1), max_size=50)


@given(IDS)
def test_ids_are_read_as_they_are_written(ids: list[int]) -> None:
    for path in FIELDS:
        body = with_members(b'{"model":"m","prompt":"a text"}', member_of(path, array("I", ids)))
        assert body is not None
        read = json.loads(bytes(body))
        given_ids = read.get("kv_transfer_params", {}).get("prompt_token_ids", read["prompt"])
        assert given_ids == ids


def test_id_that_stands_for_a_longer_one_is_refused() -> None:
    with pytest.raises(ValueError, match="an id stands for a longer one"):
        member_of("/v1/completions", array("I", [1, FIRST_WIDE_TOKEN]))
