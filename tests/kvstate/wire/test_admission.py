import pytest

from kvstate.wire.extras import (
    HARMLESS,
    Skipped,
    checked_group,
    checked_medium,
    holds_prefix,
    reject_foreign,
)


@pytest.mark.parametrize(
    ("kind", "indexed"),
    [
        ("full_attention", True),
        ("mla_attention", True),
        ("sink_full_attention", True),
        ("sliding_window", False),
        ("mamba", False),
        ("unknown", False),
        (["full_attention"], False),
    ],
)
def test_holds_prefix_excludes_groups_of_a_window_or_a_state(
    kind: object,
    indexed: bool,
) -> None:
    assert holds_prefix(kind) is indexed


@pytest.mark.parametrize(
    ("locality", "ownership", "fault"),
    [
        ("REMOTE", None, "other_locality"),
        (7, None, "other_locality"),
        (None, "kvcr", "foreign_ownership"),
        ("LOCAL", "KvCR", "foreign_ownership"),
        ("REMOTE", "kvcr", "other_locality"),
    ],
)
def test_reject_foreign_skips_blocks_of_others(
    locality: object, ownership: object, fault: str
) -> None:
    with pytest.raises(Skipped, match=f"^{fault}$"):
        reject_foreign(locality, ownership)
    assert fault in HARMLESS


@pytest.mark.parametrize(
    ("locality", "ownership"), [(None, None), ("LOCAL", None), (None, "tier-2"), ("LOCAL", 7)]
)
def test_reject_foreign_accepts_blocks_of_the_engine(locality: object, ownership: object) -> None:
    reject_foreign(locality, ownership)


def test_medium_is_written_in_capitals_and_defaults_to_the_device() -> None:
    assert [checked_medium(medium) for medium in ("cpu", None, "DEVICE")] == [
        "CPU",
        "GPU",
        "DEVICE",
    ]


@pytest.mark.parametrize(("medium", "fault"), [(7, "bad_medium"), ("TAPE", "unknown_medium")])
def test_medium_that_cannot_be_credited_is_refused(medium: object, fault: str) -> None:
    with pytest.raises(Skipped, match=fault):
        checked_medium(medium)


def test_group_is_a_number_or_absent() -> None:
    assert [checked_group(group) for group in (0, 2**32 - 1, None)] == [0, 2**32 - 1, None]


@pytest.mark.parametrize("group", [-1, 2**32, True, "0", 1.0])
def test_invalid_group_is_refused(group: object) -> None:
    with pytest.raises(Skipped, match="bad_group"):
        checked_group(group)
