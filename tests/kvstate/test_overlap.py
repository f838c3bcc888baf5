from kvstate.events import Tokens
from kvstate.overlap import Overlap, Prompt


def test_tokens_are_blocks_times_their_size() -> None:
    overlap = Overlap(16, (3, 2, 0, 1), uncertain=4)
    assert (overlap.certain_tokens, overlap.uncertain_tokens) == (96, 64)


def test_certain_tokens_come_first_then_uncertain_ones_then_nearness() -> None:
    worse_to_better = [
        Overlap(16),
        Overlap(16, uncertain=9),
        Overlap(16, (0, 2, 0, 0)),
        Overlap(16, (1, 1, 0, 0)),
        Overlap(16, (0, 2, 0, 0), uncertain=1),
        Overlap(32, (0, 2, 0, 0)),
    ]
    assert sorted(worse_to_better, key=lambda overlap: overlap.rank_order) == worse_to_better


def test_salt_is_what_the_first_block_carries() -> None:
    tokens = Tokens("I", [1])
    assert Prompt("m", tokens).namespace == ()
    assert Prompt("m", tokens, salt="tenant").namespace == ("tenant",)
