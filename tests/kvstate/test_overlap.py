from typing import Any

import pytest

from kvstate.overlap import (
    FIRST_WIDE_TOKEN,
    Overlap,
    Prompt,
    Tokens,
    of_any_rank,
    tokens_of,
    worth_tokens,
)


def test_tokens_are_blocks_times_their_size() -> None:
    overlap = Overlap(16, (3, 2, 0, 1), uncertain=4)
    assert (overlap.certain_tokens, overlap.uncertain_tokens) == (96, 64)


def test_rank_order_compares_certain_tokens_then_uncertain_ones_then_tiers() -> None:
    worse_to_better = [
        Overlap(16),
        Overlap(16, uncertain=9),
        Overlap(16, (0, 2, 0, 0)),
        Overlap(16, (1, 1, 0, 0)),
        Overlap(16, (0, 2, 0, 0), uncertain=1),
        Overlap(32, (0, 2, 0, 0)),
    ]
    assert sorted(worse_to_better, key=lambda overlap: overlap.rank_order) == worse_to_better


def test_namespace_of_a_prompt_is_its_salt() -> None:
    tokens = Tokens("I", [1])
    assert Prompt("m", tokens).namespace == ()
    assert Prompt("m", tokens, salt="tenant").namespace == ("tenant",)


def test_of_any_rank_is_certain_for_common_blocks_only() -> None:
    best = Overlap(16, (3, 1, 0, 0), uncertain=1, rank=2)
    assert of_any_rank(best) == Overlap(16, uncertain=5, rank=2)
    assert of_any_rank(best, Overlap(16, (1, 1, 0, 0), 9)) == Overlap(16, (1, 1, 0, 0), 3, rank=2)
    assert of_any_rank(best, Overlap(32, (1, 0, 0, 0))) == Overlap(16, uncertain=5, rank=2)


def test_worth_of_device_blocks_is_their_full_length() -> None:
    assert worth_tokens(Overlap(16, (4, 0, 0, 0))) == 64


def test_worth_of_lower_tiers_is_less() -> None:
    tiers = [(0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    assert [worth_tokens(Overlap(10, one)) for one in tiers] == [8, 4, 2]


def test_worth_of_uncertain_blocks_is_half_or_the_given_share() -> None:
    overlap = Overlap(10, (1, 0, 0, 0), uncertain=2)
    assert (worth_tokens(overlap), worth_tokens(overlap, 0.25)) == (20, 15)


@pytest.mark.parametrize("ids", [[-1], [2**63], ["5"], [2**32, None]])
def test_ids_are_integers_of_63_bits(ids: list[Any]) -> None:
    with pytest.raises((TypeError, OverflowError)):
        tokens_of(ids)


def test_long_ids_have_their_last_bits() -> None:
    assert tokens_of([5, 2**32 - 1, 2**32 + 5, 2**63 - 1]).tolist() == [
        5, 2**32 - 1, FIRST_WIDE_TOKEN + 5, 2**32 - 1,
    ]  # fmt: skip
