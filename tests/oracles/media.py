"""What the core knows of media (kvstate/native/index.h), in Python."""

from kvstate.overlap import _TIER_OF_MEDIUM

# Media whose removals all known sources announce.
REMOVING_MEDIA = frozenset({"GPU", "DEVICE", "CPU_PINNED"})

# Media, nearest first.
ORDER_OF_MEDIUM = {medium: number for number, medium in enumerate(_TIER_OF_MEDIUM)}
