import pytest

from kvstate.overlap import DEFAULT_MEDIUM, RESTORE_WEIGHT, Tier, tier_of
from tests.oracles.media import ORDER_OF_MEDIUM


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        ("GPU", Tier.DEVICE),
        ("device", Tier.DEVICE),
        ("CPU", Tier.HOST),
        ("cpu", Tier.HOST),
        ("CPU_PINNED", Tier.HOST),
        ("CPU_TIER1", Tier.HOST),
        ("CPU_TIER2", Tier.DISK),
        ("STORAGE", Tier.DISK),
        ("EXTERNAL", Tier.REMOTE),
        ("TAPE", None),
    ],
)
def test_tier_of_classifies_media(medium: str, tier: Tier | None) -> None:
    assert tier_of(medium) is tier


def test_default_medium_is_the_device() -> None:
    assert tier_of(DEFAULT_MEDIUM) is Tier.DEVICE


def test_order_of_media_follows_their_tiers() -> None:
    assert sorted(ORDER_OF_MEDIUM.values()) == list(range(len(ORDER_OF_MEDIUM)))
    tiers = [tier_of(medium) for medium in sorted(ORDER_OF_MEDIUM, key=ORDER_OF_MEDIUM.__getitem__)]
    assert tiers == sorted(tier for tier in tiers if tier is not None)


def test_restore_weights_fall_with_the_tier() -> None:
    weights = [RESTORE_WEIGHT[tier] for tier in Tier]
    assert weights == [1.0, 0.8, 0.4, 0.2]
