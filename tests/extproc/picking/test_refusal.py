import json

import pytest

from extproc.picking.decision import Verdict, refusal_of


@pytest.mark.parametrize("verdict", [Verdict.STEER, Verdict.NO_OVERRIDE])
def test_request_that_goes_on_is_not_answered(verdict: Verdict) -> None:
    assert refusal_of(verdict) is None


def test_busy_workers_are_told_as_429_with_a_time_to_come_again() -> None:
    refusal = refusal_of(Verdict.SHED)
    assert refusal is not None
    assert refusal.status == 429
    assert dict(refusal.headers) == {"content-type": "application/json", "retry-after": "1"}
    assert json.loads(refusal.body)["error"]["type"] == "RateLimitError"


def test_no_worker_is_told_as_503() -> None:
    refusal = refusal_of(Verdict.UNAVAILABLE)
    assert refusal is not None
    assert (refusal.status, json.loads(refusal.body)["error"]["code"]) == (503, 503)
