from array import array

import pytest

from extproc.requests.prompt import InferenceRequest


@pytest.mark.parametrize(
    ("keep", "kept"), [(None, [1, 2, 3]), (2, [2, 3]), (1, [3]), (3, [1, 2, 3]), (9, [1, 2, 3])]
)
def test_keep_last_tokens_cuts_as_an_engine_does(keep: int | None, kept: list[int]) -> None:
    request = InferenceRequest(None, [], keep_last_tokens=keep)
    assert request.truncate(array("I", [1, 2, 3])).tolist() == kept
