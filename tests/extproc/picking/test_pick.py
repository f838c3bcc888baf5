import pytest

from extproc.config.schema import Cost
from extproc.picking.policies import affinity_of
from kvstate.overlap import Overlap, worth_tokens


def test_what_is_on_the_device_saves_all_of_it() -> None:
    assert worth_tokens(Overlap(16, (4, 0, 0, 0))) == 64


def test_lower_tiers_save_less() -> None:
    saved = [
        worth_tokens(Overlap(10, tiers)) for tiers in ((0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1))
    ]
    assert saved == [8, 4, 2]


def test_uncertain_blocks_save_half() -> None:
    assert worth_tokens(Overlap(10, (1, 0, 0, 0), uncertain=2)) == 20


def test_what_uncertain_blocks_save_can_be_told() -> None:
    assert worth_tokens(Overlap(10, (1, 0, 0, 0), uncertain=2), 0.25) == 15


@pytest.mark.parametrize(
    ("utilization", "affinity"),
    [
        (0.0, 1.5),
        (0.2, 1.9),
        (0.25, 2.0 / 3.0 + 1.5),
        (0.4, 2.0 * 2 / 3 + 1.5),
        (0.5, 3.5),
        (7.0, 3.5),
    ],
)
def test_an_uncached_token_costs_more_the_busier_the_fleet_is(
    utilization: float, affinity: float
) -> None:
    cost = Cost(affinity_percent=150, busy_affinity_percent=200)
    assert affinity_of(cost, utilization) == pytest.approx(affinity)
