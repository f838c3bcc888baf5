"""Which of a publisher's events can be indexed at all, whatever their encoding."""

from kvstate.tiers import DEFAULT_MEDIUM, tier_of

# Kinds of attention groups (vLLM's kv_cache_spec_kind) whose blocks hold the whole prefix; the
# others keep a window or a state of it.
PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})

# Skipped events that cannot have removed anything that we hold: their blocks are never stored.
HARMLESS = frozenset({"unknown_event", "unknown_medium", "other_locality", "foreign_ownership"})

# Blocks under this ownership (vLLM 0.30) are managed by a residency agent beside the engine, who
# stores and removes them on its own account.
_RESIDENCY_AGENT = "kvcr"

# The largest number of an attention group, and what an integer may be elsewhere: more is held
# neither by msgpack nor by the core.
MAX_GROUP = 0xFFFF_FFFF
INTEGERS = range(-(2**63), 2**64)


class Skipped(Exception):  # noqa: N818 - control flow of the decoders, not an error
    """An event that is left out, under the name it is counted by."""


def holds_prefix(kind: object) -> bool:
    """Whether an attention group of this kind holds the whole prefix."""
    return isinstance(kind, str) and kind in PREFIX_KINDS


def reject_foreign(locality: object, ownership: object) -> None:
    """Leaves out what is not this worker's to credit.

    locality: LOCAL or REMOTE to the publisher (vLLM 0.26); None where it is not said.
    ownership: who manages the blocks (vLLM 0.30); None for the engine.

    Raises:
        Skipped: other_locality or foreign_ownership.
    """
    if locality is not None and locality != "LOCAL":
        raise Skipped("other_locality")
    if isinstance(ownership, str) and ownership.lower() == _RESIDENCY_AGENT:
        raise Skipped("foreign_ownership")


def checked_medium(medium: object) -> str:
    """A medium as the index wants it: one of known tier, in capitals.

    Raises:
        Skipped: bad_medium or unknown_medium.
    """
    if medium is None:
        return DEFAULT_MEDIUM
    if not isinstance(medium, str):
        raise Skipped("bad_medium")
    if tier_of(medium) is None:
        raise Skipped("unknown_medium")
    return medium.upper()


def checked_group(group: object) -> int | None:
    """The number of an attention group; None where there is only one.

    Raises:
        Skipped: bad_group.
    """
    if group is None:
        return None
    if type(group) is not int or not 0 <= group <= MAX_GROUP:
        raise Skipped("bad_group")
    return group
