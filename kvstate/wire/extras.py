"""Extra keys of blocks (salts, image hashes) in the engines' formats, and attention groups.

vLLM (0.17 and later) sends `extra_keys`, a list or nil for each block: the adapter's name, then
[image hash, offset] pairs, then, in a prompt's first block, the cache salt. SGLang (0.5.18 and
later) sends the salt of a whole chain as `cache_salt`. TensorRT-LLM sends `mm_keys`, for each block
a list of {"hash", "start_offset"}: how many of the item's tokens are before the block, so 0 in the
block in which it begins, wherever that is (generateBlockHashExtraKeys in its batch_manager/
blockKey.cpp). Where it begins there is known from the next block.

`Groups` tracks one publisher's attention groups, and decides which of their blocks to index.

A model with several kinds of attention stores every prompt once for each group of its layers. Only
groups that hold the whole prefix are indexed. Stores name their group's kind since vLLM 0.22;
events that do not name it (removals, copies) follow the last kind named for their group. vLLM 0.20
has groups without kinds: a single such group is the only one; with two, it is not known which one
holds the prefix, so the blocks of neither count.
"""

from collections.abc import Collection, Mapping
from enum import Enum, IntEnum

from kvstate.overlap import DEFAULT_MEDIUM, Extra, tier_of

# More groups than any model has; further ones are not indexed.
MAX_GROUPS = 64


class Admission(IntEnum):
    """How blocks of a group are treated."""

    INDEXED = 0
    OTHER_GROUP = 1
    DOUBTFUL = 2


# The names under which blocks rejected because of their group are counted.
DOUBTFUL_GROUP = "group_without_kind"
ADMISSION_FAULTS: dict[int, str] = {
    Admission.OTHER_GROUP: "other_attention_group",
    Admission.DOUBTFUL: DOUBTFUL_GROUP,
}
# Names of events skipped because they would take too much memory.
_HUGE = frozenset({"huge_hash", "huge_extra_keys"})


def missed_of(faults: Collection[str], *, removal_lost: bool) -> str:
    """Returns why a part of a batch is not known, from the skipped events; "" if all is known.

    removal_lost: a skipped event may have been a removal.
    """
    if DOUBTFUL_GROUP in faults:
        return "its attention groups cannot be distinguished"
    if not _HUGE.isdisjoint(faults):
        return "it stored blocks with longer hashes or extra keys than engines have"
    return "an event that may have been a removal could not be read" if removal_lost else ""


class _State(Enum):
    UNNAMED = 0
    PREFIX = 1
    OTHER = 2
    CONTRADICTED = 3  # first assumed to hold the prefix, then named as a kind that does not


class Groups:
    """The attention groups of one publisher."""

    def __init__(self) -> None:
        self._states: dict[int, _State] = {}

    def stored(self, group: int | None, *, holds_prefix: bool | None) -> Admission:
        """Notes a store; returns how its blocks are treated. holds_prefix: None if not named."""
        if group is None:
            return Admission.OTHER_GROUP if holds_prefix is False else Admission.INDEXED
        state = self._states.get(group)
        if state is None and len(self._states) == MAX_GROUPS:
            return Admission.OTHER_GROUP
        self._states[group] = _next(state, holds_prefix=holds_prefix)
        return self.admission(group)

    def admission(self, group: int | None) -> Admission:
        """Returns how blocks of a group are treated, from the stores so far."""
        state = None if group is None else self._states.get(group)
        if state is _State.OTHER:
            return Admission.OTHER_GROUP
        unnamed = sum(other is _State.UNNAMED for other in self._states.values())
        if state is _State.CONTRADICTED or (state is _State.UNNAMED and unnamed > 1):
            return Admission.DOUBTFUL
        return Admission.INDEXED

    def forget(self) -> None:
        """Forgets everything: the publisher may be another one."""
        self._states.clear()

    def saved(self) -> dict[int, int]:
        """Returns what is known of each group, as a number."""
        return {group: state.value for group, state in self._states.items()}

    def put(self, saved: dict[int, int]) -> bool:
        """Replaces what is known by what was saved; returns False if that is damaged."""
        try:
            self._states = {group: _State(number) for group, number in saved.items()}
        except ValueError:
            return False
        return True


def _next(state: _State | None, *, holds_prefix: bool | None) -> _State:
    if holds_prefix is None:
        return state or _State.UNNAMED
    if holds_prefix:
        return _State.PREFIX
    return _State.OTHER if state in {None, _State.OTHER} else _State.CONTRADICTED


# Kinds of attention groups (vLLM's kv_cache_spec_kind) whose blocks hold the whole prefix; other
# kinds hold only a window or a state.
PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})

# Kinds of groups that hold the last tokens before a prefix ends, or its state at the end.
WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
STATE_KINDS = frozenset({"mamba"})
MAX_WINDOW = 0xFF_FFFF

# Skipped events that are taken not to have removed an indexed block: their blocks are not stored,
# and an event of an unknown kind is assumed to be an addition of a later release.
HARMLESS = frozenset({"unknown_event", "unknown_medium", "other_locality", "foreign_ownership"})

# The locality of blocks that are not the publisher's alone, and the name under which their events
# are counted.
REMOTE, OTHER_LOCALITY = "REMOTE", "other_locality"

# Blocks under this ownership (vLLM 0.30) are managed by a residency agent beside the engine, which
# stores and removes them itself.
_RESIDENCY_AGENT = "kvcr"

# The largest number of an attention group, and of other integers, that msgpack and the core can
# hold.
MAX_GROUP = 0xFFFF_FFFF
INTEGERS = range(-(2**63), 2**64)


class Skipped(Exception):
    """A skipped event, with the name under which it is counted."""


def holds_prefix(kind: object) -> bool:
    """Whether an attention group of this kind holds the whole prefix."""
    return isinstance(kind, str) and kind in PREFIX_KINDS


def reach_of(kind: object, window: object) -> int:
    """Returns how many tokens before its end a prefix needs in a group that holds not all of it.

    kind, window: vLLM's kv_cache_spec_kind and kv_cache_spec_sliding_window (0.22). A window of n
    tokens contains the token that is computed next, so that n - 1 of the prefix are needed. Returns
    0 if the kind is another one.

    Raises:
        Skipped: bad_window.
    """
    if window is not None and (type(window) is not int or not 0 <= window <= MAX_WINDOW):
        raise Skipped("bad_window")
    if kind in STATE_KINDS:
        return 1
    return max(window - 1, 1) if kind in WINDOW_KINDS and window else 0


def reject_foreign(locality: object, ownership: object) -> None:
    """Rejects blocks that this worker must not be credited with.

    locality: LOCAL or REMOTE to the publisher (vLLM 0.26); None if not given. ownership: who
    manages the blocks (vLLM 0.30); None for the engine.

    Raises:
        Skipped: other_locality or foreign_ownership.
    """
    if locality is not None and locality != "LOCAL":
        raise Skipped(OTHER_LOCALITY)
    if isinstance(ownership, str) and ownership.lower() == _RESIDENCY_AGENT:
        raise Skipped("foreign_ownership")


def checked_medium(medium: object) -> str:
    """Returns a medium in the form of the index: of a known tier, in capitals.

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
    """Returns the number of an attention group; None if there is only one.

    Raises:
        Skipped: bad_group.
    """
    if group is None:
        return None
    if type(group) is not int or not 0 <= group <= MAX_GROUP:
        raise Skipped("bad_group")
    return group


# The most bytes of one block's extras; engines have names, hashes and salts of some 100 bytes.
MAX_EXTRA_BYTES = 4_096

_SCALARS = str | bytes | int | float | None


def extras_of(
    extra_keys: object, mm_keys: object, lora: str | int | None, blocks: int, block_size: int
) -> list[Extra] | None:
    """Returns the extras of each block; None if only tokens count.

    The adapter's name is left out: the root key contains it already. Items are in vLLM's form; one
    of which it is not known where it begins has its name alone.

    Raises:
        Skipped: bad_extra_keys, bad_mm_keys or huge_extra_keys.
    """
    if extra_keys is None and mm_keys is None:
        return None
    extras = _per_block(extra_keys, blocks, "bad_extra_keys")
    images = _placed(list(map(_images, _per_block(mm_keys, blocks, "bad_mm_keys"))), block_size)
    made = [_extra(keys, lora) + items for keys, items in zip(extras, images, strict=True)]
    if any(map(is_huge, made)):
        raise Skipped("huge_extra_keys")
    return made if any(made) else None


def is_huge(extra: Extra) -> bool:
    """Whether a block's extra keys are larger than those of any engine."""
    left = MAX_EXTRA_BYTES
    for item in extra:
        for scalar in item if isinstance(item, list) else (item,):
            left -= 8 + (len(scalar) if isinstance(scalar, str | bytes) else 0)
            if left < 0:
                return True
    return False


def with_root(
    extras: list[Extra] | None, first_token: int | None, salt: object, blocks: int
) -> list[Extra] | None:
    """Returns the extras of a chain that begins a prompt, with those of the root block added.

    first_token: of bigrams, whose pages hold only the second tokens. salt: of the store; None
    if it has none.

    Raises:
        Skipped: bad_cache_salt.
    """
    if salt is not None and not (isinstance(salt, str) and len(salt) <= MAX_EXTRA_BYTES):
        raise Skipped("bad_cache_salt")
    rest = extras[0] if extras else ()
    root: Extra = () if first_token is None else (first_token,)
    if salt is not None and salt not in rest:
        root = (*root, salt)
    if not root:
        return extras
    return [(*root, *rest), *(extras[1:] if extras else [()] * (blocks - 1))]


def _per_block(raw: object, blocks: int, fault: str) -> list[object]:
    if raw is None:
        return [None] * blocks
    if not isinstance(raw, list) or len(raw) != blocks:
        raise Skipped(fault)
    return raw


def _extra(raw: object, lora: str | int | None) -> Extra:
    items = raw if isinstance(raw, list) else [] if raw is None else [raw]
    if items and lora is not None and items[0] == lora:
        items = items[1:]
    if not all(_is_plain(item) for item in items):
        raise Skipped("bad_extra_keys")
    return tuple(items)


def _is_plain(item: object) -> bool:
    """Whether it is a scalar or a list of scalars, such as vLLM's [image hash, offset].

    No engine nests deeper.
    """
    scalars = item if isinstance(item, list) else [item]
    return all(
        isinstance(scalar, _SCALARS) and (type(scalar) is not int or scalar in INTEGERS)
        for scalar in scalars
    )


# An item in a block of TensorRT-LLM: its name, and how many of its tokens are before the block.
_Image = tuple[object, int | None]


def _images(raw: object) -> list[_Image]:
    """Returns the items of one block."""
    if raw is None:
        return []
    if not isinstance(raw, list):
        raise Skipped("bad_mm_keys")
    return [_image(item) for item in raw]


def _image(raw: object) -> _Image:
    if not isinstance(raw, Mapping):
        raise Skipped("bad_mm_keys")
    name, offset = raw.get("hash"), raw.get("start_offset")
    is_named = name is not None and not isinstance(name, list) and _is_plain(name)
    if not is_named or not (offset is None or (type(offset) is int and offset in INTEGERS)):
        raise Skipped("bad_mm_keys")
    return name, offset


def _placed(blocks: list[list[_Image]], block_size: int) -> list[Extra]:
    """Returns the items of each block with where they begin, relative to the block."""
    following = [dict(images) for images in blocks[1:]] + [{}]
    return [
        tuple([_start(image, after, block_size) for image in images])
        for images, after in zip(blocks, following, strict=True)
    ]


def _start(image: _Image, following: Mapping[object, int | None], block_size: int) -> list[object]:
    name, before = image
    if before:
        return [name, -before]
    in_block = following.get(name) or 0
    is_known = before is not None and 0 < in_block <= block_size
    return [name, block_size - in_block] if is_known else [name]
