from collections.abc import Callable

import pytest

from extproc.config.schema import Cost
from extproc.routing.claims.claim_table import Expected
from extproc.routing.inputs.snapshot import one_token
from extproc.routing.savings.claims import Claims, claims_of
from kvstate.overlap import Overlap

WEIGHTS = Cost(uncertain_percent=50, speculative_percent=90, approximate_percent=40)


def state_of(state: str) -> Callable[[str], str]:
    return lambda _: state


def claims(
    overlap: Overlap | None, expected: Expected | None, state: str = "live", block_size: int = 1
) -> Claims:
    held = {"a": overlap} if overlap else {}
    sent = {"a": expected} if expected else {}
    return claims_of([held], [sent], state_of(state), WEIGHTS, lambda _: block_size).get(
        "a", Claims()
    )


def test_certain_overlap_saves_its_full_length() -> None:
    assert claims(Overlap(10, (4, 0, 0, 0)), None) == Claims(40)


def test_sent_prompt_is_speculative_on_a_live_worker() -> None:
    assert claims(None, (100, 200)) == Claims(90, 100, 0)


@pytest.mark.parametrize(
    "state", ["stale", "degraded", "replaying", "unsupported", "connecting", "differs"]
)
def test_sent_prompt_is_approximate_on_a_worker_without_a_live_feed(state: str) -> None:
    assert claims(None, (100, 200), state) == Claims(80, 0, 200)


def test_expectation_counts_only_blocks_behind_the_certain_ones() -> None:
    assert claims(Overlap(10, (4, 0, 0, 0)), (100, 100)) == Claims(40 + 54, 60)
    assert claims(Overlap(10, (10, 0, 0, 0)), (100, 100)) == Claims(100)
    assert claims(Overlap(10, (4, 0, 0, 0)), (40, 100)) == Claims(40)


def test_claims_keep_the_better_of_two_for_the_same_tokens() -> None:
    assert claims(Overlap(10, uncertain=10), (100, 100)) == Claims(90, 100)
    assert claims(Overlap(10, uncertain=10), (50, 50)) == Claims(50, 50)
    assert claims(Overlap(10, uncertain=10), (0, 100), "stale") == Claims(50, 0, 100)


def test_claims_of_adds_up_the_prompts_of_one_request() -> None:
    held = [{"a": Overlap(10, (1, 0, 0, 0))}, {"a": Overlap(10, (2, 0, 0, 0))}]
    expected = [{"a": (20, 20)}, {"b": (100, 100)}]
    assert claims_of(held, expected, state_of("live"), WEIGHTS, one_token) == {
        "a": Claims(39, 10),
        "b": Claims(90, 100),
    }
    assert claims_of(held, [], state_of("live"), WEIGHTS, one_token) == {"a": Claims(30)}


def test_claims_of_a_text_hold_expectations_only() -> None:
    for state in ("unsupported", "live"):  # no feed can report anything about a text
        found = claims_of([], [{"a": (0, 64)}], state_of(state), WEIGHTS, one_token)
        assert found == {"a": Claims(0.4 * 64, 0, 64)}


@pytest.mark.parametrize(
    ("block_size", "expected"), [(16, 192), (64, 192), (128, 128), (192, 192), (1056, 0)]
)
@pytest.mark.parametrize("state", ["live", "unsupported"])
def test_expectation_counts_whole_blocks(block_size: int, expected: int, state: str) -> None:
    found = claims(None, (192, 192), state, block_size)
    assert found.speculative + found.approximate == expected
    certain = claims(Overlap(64, (2, 0, 0, 0)), (192, 192), state, block_size)
    assert certain.speculative + certain.approximate == max(0, expected - 128)
