"""A body that names another model, and is the same otherwise."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import UnclearError
from extproc.requests.other_model import named_for

VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5)


@given(st.dictionaries(st.text(), VALUES), st.text(), st.booleans())
def test_body_names_the_model_and_nothing_else_changes(
    fields: dict[str, Any], model: str, is_named: bool
) -> None:
    sent = {**fields, **({"model": "other"} if is_named else {})}
    found = json.loads(named_for(json.dumps(sent).encode(), model))
    assert found == {**sent, "model": model}


def test_body_that_names_several_models_names_one_afterwards() -> None:
    body = named_for(b'{"model": "a", "prompt": [1], "model": "b"}', "c")
    assert body == b'{ "prompt": [1],"model":"c"}'


@pytest.mark.parametrize("body", [b"", b"[]", b"\x1f\x8b", b"no object"])
def test_what_is_no_object_is_unclear(body: bytes) -> None:
    with pytest.raises(UnclearError):
        named_for(body, "m")
