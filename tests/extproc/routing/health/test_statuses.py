import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.health.statuses import is_uncomputed, is_workers_failure


@pytest.mark.parametrize(
    ("status", "expected"), [(200, False), (400, False), (404, True), (429, True), (500, True)]
)
def test_status_tells_whether_the_prompt_was_computed(status: int, *, expected: bool) -> None:
    assert is_uncomputed(status) is expected


@given(st.integers(100, 999))
def test_worker_fails_by_too_many_requests_and_by_server_errors(status: int) -> None:
    assert is_workers_failure(status) is (status == 429 or status >= 500)
