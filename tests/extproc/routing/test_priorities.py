"""How requests name their priority to each engine."""

import pytest

from extproc.base.engine import Engine, Release
from extproc.routing.priorities import apis_without_priority, priority_pin

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
