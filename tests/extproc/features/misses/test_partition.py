from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.features.misses.partition import (
    AGAIN,
    Cause,
    Held,
    computed_again,
    main_cause,
    partition,
)

TOKENS = st.integers(0, 5_000)


@given(
    prompt=st.integers(1, 5_000),
    reused=TOKENS,
    block=st.integers(1, 128),
    last=st.none() | TOKENS,
    kept=TOKENS,
    elsewhere=TOKENS,
    gone=st.sampled_from(AGAIN),
)
def test_every_token_of_a_prompt_has_one_cause(prompt: int, **known: Any) -> None:
    found = partition(Held(prompt, **known))
    assert sum(found.values()) == prompt
    assert all(count > 0 for count in found.values())
    assert found.get(Cause.REUSED, 0) == min(prompt, known["reused"])


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        (Held(100, 32, 16), {"reused": 32, "first": 68}),
        (Held(100, 0, 16, beginning=Cause.UNKNOWN), {"unknown": 100}),
        (Held(100, 48, 16, last=50, kept=50), {"reused": 48, "block": 2, "new": 50}),
        (Held(100, 16, 16, last=80, kept=20), {"reused": 16, "block": 4, "changed": 60, "new": 20}),
        (
            Held(100, 16, 16, last=80, kept=80, elsewhere=48, gone=Cause.EVICTED),
            {"reused": 16, "elsewhere": 32, "evicted": 32, "new": 20},
        ),
        (Held(64, 48, 16, last=64, kept=64), {"reused": 48, "block": 16}),
        (
            Held(60, 0, 16, last=500, kept=20, gone=Cause.CLEARED),
            {"cleared": 16, "block": 4, "changed": 40},
        ),
        (Held(50, 48, 16, last=200, kept=16), {"reused": 48, "changed": 2}),
    ],
)
def test_tokens_are_counted_by_what_became_of_them(held: Held, expected: dict[str, int]) -> None:
    assert {cause.value: count for cause, count in partition(held).items()} == expected


def test_main_cause_is_that_of_most_tokens_that_could_have_been_reused() -> None:
    tokens = {Cause.REUSED: 900, Cause.NEW: 500, Cause.EVICTED: 30, Cause.CHANGED: 20}
    assert main_cause(tokens) is Cause.EVICTED
    assert computed_again(tokens) == 50
    assert main_cause({Cause.REUSED: 5, Cause.FIRST: 5, Cause.BLOCK: 2}) is None
