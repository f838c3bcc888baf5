"""How requests name their priority to each engine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.engine import Engine, Release
from extproc.config.sections import MAX_NUMBER
from extproc.routing.priorities import (
    EPOCH_SECONDS,
    apis_without_priority,
    priority_pin,
    priority_within,
)

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("engine", "path", "in_body", "sign"),
    [
        (Engine("vllm", Release(0, 32)), CHAT, False, 1),
        (Engine("vllm", Release(0, 32)), "/v1/messages", False, 1),
        (Engine("vllm", Release(0, 27)), CHAT, True, 1),
        (Engine("vllm", Release(0, 32)), "/inference/v1/generate", True, 1),
        (Engine("sglang", Release(0, 5, 23)), CHAT, True, -1),
    ],
)
def test_priority_is_named_as_the_release_reads_it(
    engine: Engine, path: str, in_body: bool, sign: int
) -> None:
    pin = priority_pin(engine, path)
    assert pin is not None
    assert (pin.in_body, pin.sign) == (in_body, sign)


@pytest.mark.parametrize(
    ("engine", "path"),
    [
        (Engine("vllm", Release(0, 27)), "/v1/messages"),
        (Engine("vllm", Release(0, 9)), CHAT),
        (Engine("sglang", Release(0, 5, 23)), "/v1/responses"),
        (Engine("trtllm", Release(1, 0)), CHAT),
    ],
)
def test_priority_is_not_named_where_it_is_not_read(engine: Engine, path: str) -> None:
    assert priority_pin(engine, path) is None


@pytest.mark.parametrize(
    ("engine", "paths"),
    [
        (Engine("vllm", Release(0, 32)), []),
        (Engine("vllm", Release(0, 20)), ["/v1/messages"]),
        (Engine("sglang", Release(0, 5, 23)), ["/v1/responses", "/v1/messages"]),
    ],
)
def test_apis_without_priority_are_those_on_which_it_is_not_read(
    engine: Engine, paths: list[str]
) -> None:
    assert apis_without_priority(engine) == paths


ARRIVALS = st.tuples(st.floats(EPOCH_SECONDS, 2**31), st.floats(0.0, 1e4))


@given(st.integers(0, MAX_NUMBER - 1), ARRIVALS, ARRIVALS)
def test_class_that_goes_first_is_never_overtaken(
    priority: int, one: tuple[float, float], other: tuple[float, float]
) -> None:
    assert priority_within(priority, *one) < priority_within(priority + 1, *other) < 2**63


def test_within_a_class_a_hit_overtakes_and_nobody_for_long() -> None:
    now = EPOCH_SECONDS + 1e6
    computed, hit, later = (
        priority_within(3, now, 4.0),
        priority_within(3, now + 5.0, 0.1),
        priority_within(3, now + 40.5, 0.1),
    )
    assert hit < computed < later
