"""Where a block lies: media as engines write them, and our classes of them."""

from enum import IntEnum


class Tier(IntEnum):
    """A class of media that cost about the same to restore from, nearest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3


# What a block on this tier is worth, as a share of one on the device.
RESTORE_WEIGHT = {Tier.DEVICE: 1.0, Tier.HOST: 0.8, Tier.DISK: 0.4, Tier.REMOTE: 0.2}

# vLLM 0.32: GPU, CPU, STORAGE (Mooncake's connector writes lower case). SGLang: CPU_TIER1 is pinned
# host memory, CPU_TIER2 its remote storage back end (0.5.9), later CPU_PINNED, DISK, EXTERNAL.
# SMG's relay also writes DEVICE. kvstate/native/wire.c has the same in the same order.
_TIER_OF_MEDIUM = {
    "GPU": Tier.DEVICE,
    "DEVICE": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "DISK": Tier.DISK,
    "NVME": Tier.DISK,
    "STORAGE": Tier.DISK,
    "CPU_TIER2": Tier.DISK,
    "EXTERNAL": Tier.REMOTE,
    "REMOTE": Tier.REMOTE,
    "NETWORK": Tier.REMOTE,
    "SHARED": Tier.REMOTE,
}

DEFAULT_MEDIUM = "GPU"

# Media whose every known source announces removals as well: engines' own caches, SGLang's HiCache.
# All others are doubted, since vLLM's MooncakeStoreConnector and LMCache announce stores on "cpu"
# and "CPU" and never a removal. The doubt ends with the first removal from the medium, or the first
# block that is announced on a host medium by its hash alone, as only vLLM's OffloadingConnector and
# TensorRT-LLM do, which announce removals. On a doubted medium nothing is certain, and blocks are
# forgotten some time after they were stored last. docs/feeds.md has the sources.
# kvstate/native/index.h has the same as bits.
REMOVING_MEDIA = frozenset({"GPU", "DEVICE", "CPU_PINNED"})


def tier_of(medium: str) -> Tier | None:
    """The tier of a medium as on the wire; None where the medium is unknown."""
    return _TIER_OF_MEDIUM.get(medium.upper())


# Media in one order for both cores, nearest first.
ORDER_OF_MEDIUM = {medium: number for number, medium in enumerate(_TIER_OF_MEDIUM)}
